// Instruction sets: one loop is written once and compiled for each of them; which one runs is chosen at run time.
//
// [Note: the same bits on every instruction set]
// A loop is made of fp32 and fp64 additions, multiplications, divisions and square roots, all correctly rounded, and of
// integer operations. The compiler may do several elements at once, but not regroup a sum, nor fuse a product with a
// sum (-ffp-contract=off) except where the loop says so, and that is one rounding everywhere: by the processor's
// instruction, or worked out in fp64. So the instruction set decides how fast a result comes, never which result.
#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "inline.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#if defined(__FAST_MATH__)
#error "-ffast-math would change results: build without it"
#endif
static_assert(FLT_EVAL_METHOD == 0, "fp32 must be computed in fp32: on 32-bit x86 build with -msse2 -mfpmath=sse");

namespace lohan {

enum class Isa { kBest = -1, kScalar = 0, kAvx2 = 1, kAvx512 = 2 };  // the numbers are known to arrays.py

#if defined(__x86_64__)
inline bool has_f16c() {   // compilers differ in whether __builtin_cpu_supports knows it
    static const bool found = [] {   // once: in a virtual machine the question takes microseconds
        unsigned a, b, c, d;
        return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    }();
    return found;
}
#endif

// Whether this processor has it. kScalar, what every processor of the architecture can do, is always there.
inline bool is_present(Isa isa) {
    if (isa == Isa::kScalar || isa == Isa::kBest) return true;
#if defined(__x86_64__)
    if (isa == Isa::kAvx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    if (isa == Isa::kAvx512) return __builtin_cpu_supports("avx512f");
#endif
    return false;
}

// The best one present for kBest, else the one asked for. Throws std::invalid_argument if this processor lacks it.
inline Isa resolve(Isa wanted) {
    if (!is_present(wanted)) throw std::invalid_argument("this processor lacks the instruction set asked for");
    if (wanted != Isa::kBest) return wanted;
    return is_present(Isa::kAvx512) ? Isa::kAvx512 : is_present(Isa::kAvx2) ? Isa::kAvx2 : Isa::kScalar;
}

// factor * other + base, rounded once.
LOHAN_INLINE float multiply_add(float factor, float other, float base) {
#if defined(__FP_FAST_FMAF)
    return __builtin_fmaf(factor, other, base);
#else
    const double product = static_cast<double>(factor) * static_cast<double>(other);  // exact
    const double sum = product + static_cast<double>(base);
    const double back = sum - product;
    const double error = (product - (sum - back)) + (static_cast<double>(base) - back);  // sum + error is exact
    int64_t bits;
    std::memcpy(&bits, &sum, sizeof(bits));
    // Of the two fp64 values around the exact one take the odd one: rounding that to fp32 is rounding the exact one.
    const int64_t away = (error > 0) == (sum > 0) ? 1 : -1;
    const bool inexact = (error > 0) | (error < 0);
    bits += inexact && (bits & 1) == 0 ? away : 0;
    double odd;
    std::memcpy(&odd, &bits, sizeof(odd));
    return static_cast<float>(odd);
#endif
}

#if defined(__x86_64__)
template <typename Body>
__attribute__((target("avx2,f16c"))) void call_avx2(const Body& body) { body(); }

template <typename Body>
__attribute__((target("avx512f,prefer-vector-width=512"))) void call_avx512(const Body& body) { body(); }
#endif

// Runs body() as compiled for `isa` (resolved): the compiler finds the vectors. `body` and all it calls must be
// LOHAN_INLINE.
template <typename Body>
void call_with(Isa isa, const Body& body) {
#if defined(__x86_64__)
    if (isa == Isa::kAvx512) return call_avx512(body);
    if (isa == Isa::kAvx2) return call_avx2(body);
#endif
    (void)isa;
    body();
}

}  // namespace lohan
