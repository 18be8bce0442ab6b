// The kernel: op.h's three phases with a barrier between them.
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "launch.h"

namespace lohan {
namespace {

template <Dtype kDtype>
__global__ void __launch_bounds__(kPackThreads, 2) pack_kernel(const __grid_constant__ PackTable table) {
    __shared__ double shared[kSharedSums];
    const int64_t segment = blockIdx.x;
    const int thread = static_cast<int>(threadIdx.x);
    pack_lane<kDtype>(table, segment, thread, shared);
    __syncthreads();
    if (thread < kRowsPerSegment) fold_lanes(thread, shared);
    __syncthreads();
    if (thread == 0) table.sums[segment] = fold_rows(shared);
}

}  // namespace

void launch_pack(Dtype dtype, const PackTable& table, void* stream) {
    const auto kernel = dtype == Dtype::kFp32 ? pack_kernel<Dtype::kFp32>
                      : dtype == Dtype::kBf16 ? pack_kernel<Dtype::kBf16> : pack_kernel<Dtype::kFp16>;
    const auto num_segments = static_cast<unsigned>(table.first_segments[table.num_grads]);
    kernel<<<num_segments, kPackThreads, 0, static_cast<cudaStream_t>(stream)>>>(table);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) {
        throw std::runtime_error(std::string("packing gradients: the kernel was not launched: ") +
                                 cudaGetErrorString(error));
    }
}

}  // namespace lohan
