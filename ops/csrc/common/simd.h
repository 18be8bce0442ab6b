// Vectors of fp32 for each instruction set, by one set of names: what a loop that must be scheduled by hand is made of.
//
// A loop over them lies in a file of its own, which is included once per instruction set with LOHAN_SIMD naming the
// struct and LOHAN_TARGET the compiler's attribute, because a template cannot have a different target per argument.
// All operations are correctly rounded: see [Note: the same bits on every instruction set] in isa.h.
#pragma once

#include <cmath>
#include <cstdint>

#include "dtypes.h"
#include "isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lohan {

struct Scalar {
    using Float = float;
    using Flag = bool;
    static constexpr int64_t kWidth = 1;

    static LOHAN_INLINE Flag no_flag() { return false; }
    static LOHAN_INLINE bool any(Flag flag) { return flag; }
    static LOHAN_INLINE Flag flag_nan(Flag flag, Float x, Float y) { return flag | (x != x) | (y != y); }
    static LOHAN_INLINE Float set(float x) { return x; }
    static LOHAN_INLINE Float load(const float* from) { return *from; }
    static LOHAN_INLINE Float load_bf16(const uint16_t* from) { return from_bf16(*from); }
    static LOHAN_INLINE Float load_fp16(const uint16_t* from) { return from_fp16(*from); }
    static LOHAN_INLINE void store(float* to, Float x) { *to = x; }
    // x, then y behind it. Wrong for NaN.
    static LOHAN_INLINE void store_bf16(uint16_t* to, Float x, Float y) {
        to[0] = to_bf16_unless_nan(x);
        to[1] = to_bf16_unless_nan(y);
    }
    static LOHAN_INLINE void store_fp16(uint16_t* to, Float x, Float y) {
        to[0] = to_fp16(x);
        to[1] = to_fp16(y);
    }
    static LOHAN_INLINE Float add(Float x, Float y) { return x + y; }
    static LOHAN_INLINE Float sub(Float x, Float y) { return x - y; }
    static LOHAN_INLINE Float mul(Float x, Float y) { return x * y; }
    static LOHAN_INLINE Float div(Float x, Float y) { return x / y; }
    static LOHAN_INLINE Float sqrt(Float x) { return std::sqrt(x); }
    static LOHAN_INLINE Float fma(Float x, Float y, Float z) { return multiply_add(x, y, z); }
};

#if defined(__x86_64__)

#define LOHAN_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define LOHAN_AVX2 LOHAN_TARGET_AVX2 LOHAN_INLINE

struct Avx2 {
    using Float = __m256;
    using Flag = __m256;
    static constexpr int64_t kWidth = 8;

    static LOHAN_AVX2 Flag no_flag() { return _mm256_setzero_ps(); }
    static LOHAN_AVX2 bool any(Flag flag) { return _mm256_movemask_ps(flag) != 0; }
    static LOHAN_AVX2 Flag flag_nan(Flag flag, Float x, Float y) {
        return _mm256_or_ps(flag, _mm256_cmp_ps(x, y, _CMP_UNORD_Q));
    }
    static LOHAN_AVX2 Float set(float x) { return _mm256_set1_ps(x); }
    static LOHAN_AVX2 Float load(const float* from) { return _mm256_loadu_ps(from); }
    static LOHAN_AVX2 __m128i load_16_bit(const uint16_t* from) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    }
    static LOHAN_AVX2 Float load_bf16(const uint16_t* from) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_16_bit(from)), 16));
    }
    static LOHAN_AVX2 Float load_fp16(const uint16_t* from) { return _mm256_cvtph_ps(load_16_bit(from)); }
    static LOHAN_AVX2 void store(float* to, Float x) { _mm256_storeu_ps(to, x); }
    static LOHAN_AVX2 __m256i rounded_to_bf16(Float x) {
        const __m256i bits = _mm256_castps_si256(x);
        const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), last), 16);
    }
    static LOHAN_AVX2 void store_bf16(uint16_t* to, Float x, Float y) {
        const __m256i mixed = _mm256_packus_epi32(rounded_to_bf16(x), rounded_to_bf16(y));   // x0 y0 x1 y1
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(mixed, 0xd8));
    }
    static LOHAN_AVX2 void store_fp16(uint16_t* to, Float x, Float y) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 8), _mm256_cvtps_ph(y, _MM_FROUND_TO_NEAREST_INT));
    }
    static LOHAN_AVX2 Float add(Float x, Float y) { return _mm256_add_ps(x, y); }
    static LOHAN_AVX2 Float sub(Float x, Float y) { return _mm256_sub_ps(x, y); }
    static LOHAN_AVX2 Float mul(Float x, Float y) { return _mm256_mul_ps(x, y); }
    static LOHAN_AVX2 Float div(Float x, Float y) { return _mm256_div_ps(x, y); }
    static LOHAN_AVX2 Float sqrt(Float x) { return _mm256_sqrt_ps(x); }
    static LOHAN_AVX2 Float fma(Float x, Float y, Float z) { return _mm256_fmadd_ps(x, y, z); }
};

#define LOHAN_TARGET_AVX512 __attribute__((target("avx512f")))
#define LOHAN_AVX512 LOHAN_TARGET_AVX512 LOHAN_INLINE

struct Avx512 {
    using Float = __m512;
    using Flag = __mmask16;
    static constexpr int64_t kWidth = 16;
    static constexpr __mmask16 kAll = 0xffff;   // with it an instruction is as without, but gcc warns of the latter

    static LOHAN_AVX512 Flag no_flag() { return 0; }
    static LOHAN_AVX512 bool any(Flag flag) { return flag != 0; }
    static LOHAN_AVX512 Flag flag_nan(Flag flag, Float x, Float y) {
        return static_cast<Flag>(flag | _mm512_cmp_ps_mask(x, y, _CMP_UNORD_Q));
    }
    static LOHAN_AVX512 Float set(float x) { return _mm512_set1_ps(x); }
    static LOHAN_AVX512 Float load(const float* from) { return _mm512_loadu_ps(from); }
    static LOHAN_AVX512 __m256i load_16_bit(const uint16_t* from) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    }
    static LOHAN_AVX512 Float load_bf16(const uint16_t* from) {
        const __m512i wide = _mm512_maskz_cvtepu16_epi32(kAll, load_16_bit(from));
        return _mm512_castsi512_ps(_mm512_maskz_slli_epi32(kAll, wide, 16));
    }
    static LOHAN_AVX512 Float load_fp16(const uint16_t* from) { return _mm512_maskz_cvtph_ps(kAll, load_16_bit(from)); }
    static LOHAN_AVX512 void store(float* to, Float x) { _mm512_storeu_ps(to, x); }
    static LOHAN_AVX512 __m256i rounded_to_bf16(Float x) {
        const __m512i bits = _mm512_castps_si512(x);
        const __m512i last = _mm512_and_epi32(_mm512_maskz_srli_epi32(kAll, bits, 16), _mm512_set1_epi32(1));
        const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), last);
        return _mm512_maskz_cvtepi32_epi16(kAll, _mm512_maskz_srli_epi32(kAll, sum, 16));
    }
    static LOHAN_AVX512 void store_16_bit(uint16_t* to, __m256i x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x);
    }
    static LOHAN_AVX512 void store_bf16(uint16_t* to, Float x, Float y) {
        store_16_bit(to, rounded_to_bf16(x));
        store_16_bit(to + 16, rounded_to_bf16(y));
    }
    static LOHAN_AVX512 void store_fp16(uint16_t* to, Float x, Float y) {
        store_16_bit(to, _mm512_maskz_cvtps_ph(kAll, x, _MM_FROUND_TO_NEAREST_INT));
        store_16_bit(to + 16, _mm512_maskz_cvtps_ph(kAll, y, _MM_FROUND_TO_NEAREST_INT));
    }
    static LOHAN_AVX512 Float add(Float x, Float y) { return _mm512_add_ps(x, y); }
    static LOHAN_AVX512 Float sub(Float x, Float y) { return _mm512_sub_ps(x, y); }
    static LOHAN_AVX512 Float mul(Float x, Float y) { return _mm512_mul_ps(x, y); }
    static LOHAN_AVX512 Float div(Float x, Float y) { return _mm512_div_ps(x, y); }
    static LOHAN_AVX512 Float sqrt(Float x) { return _mm512_maskz_sqrt_ps(kAll, x); }
    static LOHAN_AVX512 Float fma(Float x, Float y, Float z) { return _mm512_fmadd_ps(x, y, z); }
};

#endif  // __x86_64__

}  // namespace lohan
