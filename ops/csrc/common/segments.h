// The order in which squares are summed: [Note: the order of the sum] in grad_accumulate.py, beside the twin.
#pragma once

#include <cstdint>

#include "inline.h"

namespace lohan {

constexpr int64_t kRowNumel = 1024;       // elements folded at a time: 8 KiB of fp64
constexpr int64_t kRowsPerSegment = 16;
constexpr int64_t kSegmentNumel = kRowNumel * kRowsPerSegment;

// values: (kWidth,) overwritten; returns their sum, each half added to the other until one is left.
template <int64_t kWidth>
LOHAN_INLINE double fold(double* values) {
    if constexpr (kWidth == 1) {
        return values[0];
    } else {
        LOHAN_UNROLL
        for (int64_t i = 0; i < kWidth / 2; ++i) values[i] += values[i + kWidth / 2];
        return fold<kWidth / 2>(values);
    }
}

}  // namespace lohan
