// The GPU's arithmetic on the CPU: op.h's phases, one thread after the other. test_grad_pack.py compares it with the
// twin, ops_test.cpp with the CPU's operator.
#include <vector>

#include "../grad_pack/op.h"

namespace {

template <lohan::Dtype kDtype>
void run(const lohan::PackTable& table) {
    for (int64_t segment = 0; segment < table.first_segments[table.num_grads]; ++segment) {
        std::vector<double> shared(lohan::kSharedSums);
        for (int thread = 0; thread < lohan::kPackThreads; ++thread) {
            lohan::pack_lane<kDtype>(table, segment, thread, shared.data());
        }
        for (int row = 0; row < lohan::kRowsPerSegment; ++row) lohan::fold_lanes(row, shared.data());
        table.sums[segment] = lohan::fold_rows(shared.data());
    }
}

}  // namespace

// As bindings.cpp's `pack`, of at most kMaxPackedGrads gradients. `dtype`: as Dtype.
extern "C" __attribute__((visibility("default"))) int lohan_pack_on_host(
    int num_grads, const void* const* grads, const int64_t* numels, const int64_t* offsets, void* out, double* sums,
    int dtype, float scale) {
    if (num_grads > lohan::kMaxPackedGrads) return 1;
    lohan::PackTable table{};
    for (int i = 0; i < num_grads; ++i) {
        table.grads[i] = grads[i];
        table.numels[i] = numels[i];
        table.offsets[i] = offsets[i];
        table.first_segments[i + 1] = table.first_segments[i] +
            static_cast<int32_t>((numels[i] + lohan::kSegmentNumel - 1) / lohan::kSegmentNumel);
    }
    table.out = out;
    table.sums = sums;
    table.num_grads = num_grads;
    table.scale = scale;
    if (dtype == static_cast<int>(lohan::Dtype::kFp32)) run<lohan::Dtype::kFp32>(table);
    else if (dtype == static_cast<int>(lohan::Dtype::kBf16)) run<lohan::Dtype::kBf16>(table);
    else run<lohan::Dtype::kFp16>(table);
    return 0;
}
