// Packs gradients into one flat buffer, scaled, with the sums of squares of what is written there in the same pass.
//
// [Note: the same bits on a GPU]
// A segment is one block of threads, a row of it one warp: lane l has the row's elements l, l + 32, l + 64 ... So the
// first five foldings of a row are between numbers of one thread, the other five between the lanes, and the last four
// between the warps. That is the order of segments.h, addition by addition. Products are exact, so nothing changes if a
// compiler fuses one with the addition after it. What a thread does stands here as functions of its number: kernel.cu
// runs them on a GPU, tests/grad_pack_host.cpp one thread after the other on the CPU.
#pragma once

#include <cstdint>

#include "../common/dtypes.h"
#include "../common/inline.h"
#include "../common/segments.h"

namespace lohan {

constexpr int kLanes = 32;
constexpr int kPackThreads = kLanes * static_cast<int>(kRowsPerSegment);
constexpr int kPerLane = static_cast<int>(kRowNumel) / kLanes;   // elements of one thread
constexpr int kLaneStride = kLanes + 1;                          // keeps the rows' numbers in different banks
constexpr int kSharedSums = kLaneStride * static_cast<int>(kRowsPerSegment);
constexpr int kMaxPackedGrads = 128;

// What one launch packs; an argument of the kernel, so it must be smaller than 4 KiB.
struct PackTable {
    const void* grads[kMaxPackedGrads];             // (numel,) of `dtype`, at any address
    int64_t numels[kMaxPackedGrads];                // elements, at least 1
    int64_t offsets[kMaxPackedGrads];               // of each in `out`, elements
    int32_t first_segments[kMaxPackedGrads + 1];    // of each in `sums`; the last entry in use is the number of all
    void* out;                                      // of the gradients' dtype, or null: only the sums are wanted
    double* sums;                                   // (all segments,)
    int32_t num_grads;
    float scale;                                    // 1.0 leaves every bit as it is
};
static_assert(sizeof(PackTable) < 4096, "more than a kernel's arguments may have");

template <Dtype kDtype>
struct Element {
    using Raw = uint16_t;
    static LOHAN_INLINE float value(Raw raw) { return kDtype == Dtype::kBf16 ? from_bf16(raw) : from_fp16(raw); }
    static LOHAN_INLINE Raw rounded(float value) { return kDtype == Dtype::kBf16 ? to_bf16(value) : to_fp16(value); }
};

template <>
struct Element<Dtype::kFp32> {
    using Raw = float;
    static LOHAN_INLINE float value(Raw raw) { return raw; }
    static LOHAN_INLINE Raw rounded(float value) { return value; }
};

// Which gradient a segment is of: the last one whose first segment is not behind it.
LOHAN_INLINE int grad_of(const PackTable& table, int64_t segment) {
    int low = 0, high = table.num_grads;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (table.first_segments[middle] <= segment) low = middle;
        else high = middle;
    }
    return low;
}

// First: each of kPackThreads threads packs its elements of the segment. shared: (kSharedSums,). All loads come first,
// so that they are under way together.
template <Dtype kDtype>
LOHAN_INLINE void pack_lane(const PackTable& table, int64_t segment, int thread, double* shared) {
    using Raw = typename Element<kDtype>::Raw;
    const int which = grad_of(table, segment), row = thread / kLanes, lane = thread % kLanes;
    const int64_t start = (segment - table.first_segments[which]) * kSegmentNumel + row * kRowNumel + lane;
    const int64_t left = table.numels[which] - start;   // may be negative
    const Raw* grad = static_cast<const Raw*>(table.grads[which]) + start;
    Raw raws[kPerLane];
    LOHAN_UNROLL
    for (int i = 0; i < kPerLane; ++i) raws[i] = i * kLanes < left ? grad[i * kLanes] : Raw{};
    if (table.scale != 1.0f) {
        LOHAN_UNROLL
        for (int i = 0; i < kPerLane; ++i) {
            raws[i] = Element<kDtype>::rounded(Element<kDtype>::value(raws[i]) * table.scale);
        }
    }
    if (table.out != nullptr) {
        Raw* out = static_cast<Raw*>(table.out) + table.offsets[which] + start;
        LOHAN_UNROLL
        for (int i = 0; i < kPerLane; ++i) {
            if (i * kLanes < left) out[i * kLanes] = raws[i];
        }
    }
    double sums[kPerLane / 2];
    LOHAN_UNROLL
    for (int i = 0; i < kPerLane / 2; ++i) {
        const double low = static_cast<double>(Element<kDtype>::value(raws[i]));
        const double high = static_cast<double>(Element<kDtype>::value(raws[i + kPerLane / 2]));
        sums[i] = low * low + high * high;
    }
    shared[row * kLaneStride + lane] = fold<kPerLane / 2>(sums);
}

// Then, when all have: one thread for each of kRowsPerSegment rows.
LOHAN_INLINE void fold_lanes(int row, double* shared) { fold<kLanes>(shared + row * kLaneStride); }

// Last, when they have: one thread. Returns the sum of the segment.
LOHAN_INLINE double fold_rows(const double* shared) {
    double rows[kRowsPerSegment];
    LOHAN_UNROLL
    for (int row = 0; row < kRowsPerSegment; ++row) rows[row] = shared[row * kLaneStride];
    return fold<kRowsPerSegment>(rows);
}

}  // namespace lohan
