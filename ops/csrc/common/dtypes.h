// bf16 and fp16 as their bits: exact to fp32; from fp32 to the nearest, ties to even, NaN stays NaN.
#pragma once

#include <cstdint>
#include <cstring>

#include "inline.h"

namespace lohan {

enum class Dtype { kFp32 = 0, kBf16 = 1, kFp16 = 2 };  // the numbers are known to arrays.py

LOHAN_INLINE int64_t itemsize(Dtype dtype) { return dtype == Dtype::kFp32 ? 4 : 2; }

LOHAN_INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    return bits;
}

LOHAN_INLINE float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
}

LOHAN_INLINE float from_bf16(uint16_t half) { return float_of(static_cast<uint32_t>(half) << 16); }

LOHAN_INLINE uint16_t to_bf16_unless_nan(float value) {
    const uint32_t bits = bits_of(value);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

LOHAN_INLINE uint16_t to_bf16(float value) {
    const uint16_t quiet_nan = static_cast<uint16_t>((bits_of(value) >> 16) | 0x40u);
    return value != value ? quiet_nan : to_bf16_unless_nan(value);
}

LOHAN_INLINE float from_fp16(uint16_t half) {
    const uint32_t magnitude = half & 0x7fffu, sign = (half & 0x8000u) << 16;
    const uint32_t subnormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    const uint32_t normal = (magnitude << 13) + (112u << 23);
    const uint32_t inf_or_nan = (magnitude << 13) | 0x7f800000u;
    return float_of(sign | (magnitude < 0x0400u ? subnormal : magnitude < 0x7c00u ? normal : inf_or_nan));
}

LOHAN_INLINE uint16_t to_fp16(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
    // 0.5f has 2^-24, the step of fp16's subnormals, as its last place, so this addition rounds to that step.
    const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    const uint32_t normal = ((magnitude + 0x0fffu + ((magnitude >> 13) & 1u)) >> 13) - (112u << 10);
    const uint32_t quiet_nan = 0x7e00u | ((magnitude >> 13) & 0x03ffu);
    const uint32_t finite = magnitude < 0x38800000u ? subnormal : magnitude < 0x477ff000u ? normal : 0x7c00u;
    return static_cast<uint16_t>(sign | (magnitude > 0x7f800000u ? quiet_nan : finite));
}

// `source`: (numel,) of `dtype`. Returns it as fp32: itself, or `buffer` (numel,) filled.
LOHAN_INLINE const float* as_fp32(Dtype dtype, const void* source, int64_t numel, float* __restrict buffer) {
    if (dtype == Dtype::kFp32) return static_cast<const float*>(source);
    const auto* __restrict halves = static_cast<const uint16_t*>(source);
    if (dtype == Dtype::kBf16) {
        for (int64_t i = 0; i < numel; ++i) buffer[i] = from_bf16(halves[i]);
    } else {
        for (int64_t i = 0; i < numel; ++i) buffer[i] = from_fp16(halves[i]);
    }
    return buffer;
}

}  // namespace lohan
