// Takes a gradient into the buffer that holds it (copied or added), with its sums of squares in the same pass.
//
// [Note: the order of the sum] is in grad_accumulate.py, beside the twin that this must equal bit for bit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../common/dtypes.h"
#include "../common/isa.h"
#include "../common/parallel.h"
#include "../common/segments.h"

namespace lohan {

constexpr int64_t kGradPieceNumel = 4 * kSegmentNumel;  // elements a thread takes at a time: some 50 microseconds

struct GradArrays {         // target and grad: (numel,)
    void* target;           // of target_dtype, or null: only the sums are wanted
    const void* grad;       // of grad_dtype
    double* parts;          // (ceil(numel / kSegmentNumel),), or null: no sums are wanted
    Dtype target_dtype, grad_dtype;
    int64_t numel;
    bool add;               // target, which is fp32 then, += grad; else target = grad
};

// values: (kRowNumel,).
LOHAN_INLINE double fold_squares(const float* values) {
    constexpr int64_t kHalf = kRowNumel / 2;
    alignas(64) double sums[kHalf];
    for (int64_t i = 0; i < kHalf; ++i) {
        const double low = static_cast<double>(values[i]), high = static_cast<double>(values[i + kHalf]);
        sums[i] = low * low + high * high;   // both products are exact
    }
    return fold<kHalf>(sums);
}

// Elements i..i+numel, at most kRowNumel, of the arrays. Returns the result as fp32: in `buffer` or in place.
LOHAN_INLINE const float* take(const GradArrays& a, int64_t i, int64_t numel, float* __restrict buffer) {
    const void* grad = static_cast<const char*>(a.grad) + i * itemsize(a.grad_dtype);
    const float* values = as_fp32(a.grad_dtype, grad, numel, buffer);
    if (a.target == nullptr) return values;
    if (a.target_dtype != Dtype::kFp32) {    // as it is: a gradient of the same dtype
        std::memcpy(static_cast<char*>(a.target) + i * 2, grad, static_cast<size_t>(numel) * 2);
        return values;
    }
    float* __restrict target = static_cast<float*>(a.target) + i;
    if (a.add) {
        for (int64_t j = 0; j < numel; ++j) target[j] += values[j];
    } else {
        std::copy_n(values, numel, target);
    }
    return target;
}

LOHAN_INLINE void grad_range(const GradArrays& a, int64_t start, int64_t end) {
    alignas(64) float buffer[kRowNumel], padded[kRowNumel];
    for (int64_t segment = start; segment < end; segment += kSegmentNumel) {
        const int64_t segment_end = std::min(segment + kSegmentNumel, end);
        double sums[kRowsPerSegment] = {};
        for (int64_t i = segment; i < segment_end; i += kRowNumel) {
            const int64_t numel = std::min(kRowNumel, segment_end - i);
            const float* values = take(a, i, numel, buffer);
            if (a.parts == nullptr) continue;
            if (numel < kRowNumel) {
                std::fill(std::copy_n(values, numel, padded), padded + kRowNumel, 0.0f);
                values = padded;
            }
            sums[(i - segment) / kRowNumel] = fold_squares(values);
        }
        if (a.parts != nullptr) a.parts[segment / kSegmentNumel] = fold<kRowsPerSegment>(sums);
    }
}

// Throws std::invalid_argument if this processor lacks `wanted`.
inline void grad_accumulate(const GradArrays& a, int num_threads, Isa wanted) {
    const Isa isa = resolve(wanted);
    for_pieces(a.numel, kGradPieceNumel, num_threads, [&](int64_t start, int64_t end) {
        call_with(isa, [&]() __attribute__((always_inline)) { grad_range(a, start, end); });
    });
}

}  // namespace lohan
