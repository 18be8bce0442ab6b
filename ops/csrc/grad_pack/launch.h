// What kernel.cu, compiled by nvcc, offers to bindings.cpp, which is not.
#pragma once

#include "op.h"

namespace lohan {

// One launch on `stream` (a cudaStream_t of the current device). Does not wait. Throws std::runtime_error.
void launch_pack(Dtype dtype, const PackTable& table, void* stream);

}  // namespace lohan
