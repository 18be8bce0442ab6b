// Python's way into kernel.cu: addresses and numbers, checked by grad_pack.py, the only caller.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <vector>

#include "launch.h"

namespace {

// One launch; several only where there are more than kMaxPackedGrads gradients.
void pack(const std::vector<uintptr_t>& grads, const std::vector<int64_t>& numels, const std::vector<int64_t>& offsets,
          uintptr_t out, uintptr_t sums, int dtype, float scale, uintptr_t stream) {
    lohan::PackTable table{};
    table.out = reinterpret_cast<void*>(out);
    table.sums = reinterpret_cast<double*>(sums);
    table.scale = scale;
    for (size_t first = 0; first < grads.size(); first += lohan::kMaxPackedGrads) {
        const size_t num_grads = std::min<size_t>(grads.size() - first, lohan::kMaxPackedGrads);
        int32_t num_segments = 0;
        for (size_t i = 0; i < num_grads; ++i) {
            table.grads[i] = reinterpret_cast<const void*>(grads[first + i]);
            table.numels[i] = numels[first + i];
            table.offsets[i] = offsets[first + i];
            table.first_segments[i] = num_segments;
            num_segments += static_cast<int32_t>((numels[first + i] + lohan::kSegmentNumel - 1) / lohan::kSegmentNumel);
        }
        table.first_segments[num_grads] = num_segments;
        table.num_grads = static_cast<int32_t>(num_grads);
        lohan::launch_pack(static_cast<lohan::Dtype>(dtype), table, reinterpret_cast<void*>(stream));
        table.sums += num_segments;
    }
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.def("pack", &pack);
}
