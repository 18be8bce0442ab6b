// One step of Adam or AdamW in one pass over memory. No Python and no torch here.
//
// [Note: the formula] is in cpu_adam_twin.py, beside the twin that this must equal bit for bit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../common/dtypes.h"
#include "../common/isa.h"
#include "../common/parallel.h"
#include "../common/simd.h"

namespace lohan {

constexpr int64_t kAdamPieceNumel = 64 * 1024;  // elements a thread takes at a time: some 50 microseconds

// As AdamScalars in cpu_adam.py, which says what they are.
struct AdamScalars {
    float coefficient, decay, l2, avg_weight, sq_decay, sq_weight, sq_correction, eps, step_size;
};

inline bool has_l2(const AdamScalars& s) { return s.l2 != 0.0f; }
inline bool moves_from_old(const AdamScalars& s) { return s.avg_weight < 0.5f; }

struct AdamArrays {         // each (numel,)
    float* master;
    const void* grad;       // of grad_dtype
    float* exp_avg;
    float* exp_avg_sq;
    void* out;              // of out_dtype, or null; overlaps nothing else
    Dtype grad_dtype, out_dtype;
    int64_t numel;
};

#define LOHAN_SIMD lohan::Scalar
#define LOHAN_TARGET
namespace scalar {
#include "loop.h"
}
#undef LOHAN_SIMD
#undef LOHAN_TARGET

#if defined(__x86_64__)
#define LOHAN_SIMD lohan::Avx2
#define LOHAN_TARGET LOHAN_TARGET_AVX2
namespace avx2 {
#include "loop.h"
}
#undef LOHAN_SIMD
#undef LOHAN_TARGET

#define LOHAN_SIMD lohan::Avx512
#define LOHAN_TARGET LOHAN_TARGET_AVX512
namespace avx512 {
#include "loop.h"
}
#undef LOHAN_SIMD
#undef LOHAN_TARGET
#endif

using AdamRange = void (*)(const AdamScalars&, const AdamArrays&, int64_t, int64_t);

template <Dtype kGrad, Dtype kOut, bool kUsual>
AdamRange adam_range_for(Isa isa) {
#if defined(__x86_64__)
    if (isa == Isa::kAvx512) return avx512::update_range<kGrad, kOut, kUsual>;
    if (isa == Isa::kAvx2) return avx2::update_range<kGrad, kOut, kUsual>;
#endif
    (void)isa;
    return scalar::update_range<kGrad, kOut, kUsual>;
}

template <Dtype kGrad, Dtype kOut>
AdamRange adam_range_for(const AdamScalars& s, Isa isa) {
    const bool usual = !has_l2(s) && moves_from_old(s);
    return usual ? adam_range_for<kGrad, kOut, true>(isa) : adam_range_for<kGrad, kOut, false>(isa);
}

template <Dtype kGrad>
AdamRange adam_range_for(Dtype out, const AdamScalars& s, Isa isa) {
    if (out == Dtype::kBf16) return adam_range_for<kGrad, Dtype::kBf16>(s, isa);
    if (out == Dtype::kFp16) return adam_range_for<kGrad, Dtype::kFp16>(s, isa);
    return adam_range_for<kGrad, Dtype::kFp32>(s, isa);
}

// In place on master, exp_avg and exp_avg_sq. Throws std::invalid_argument if this processor lacks `wanted`.
inline void adam_update(const AdamScalars& scalars, const AdamArrays& a, int num_threads, Isa wanted) {
    const Isa isa = resolve(wanted);
    const Dtype out = a.out == nullptr ? Dtype::kFp32 : a.out_dtype;
    const AdamRange range = a.grad_dtype == Dtype::kFp32   ? adam_range_for<Dtype::kFp32>(out, scalars, isa)
                            : a.grad_dtype == Dtype::kBf16 ? adam_range_for<Dtype::kBf16>(out, scalars, isa)
                                                           : adam_range_for<Dtype::kFp16>(out, scalars, isa);
    for_pieces(a.numel, kAdamPieceNumel, num_threads,
               [&](int64_t start, int64_t end) { range(scalars, a, start, end); });
}

}  // namespace lohan
