// Python's way into op.h: addresses and numbers, checked by grad_accumulate.py, the only caller. Runs without the GIL.
#include <pybind11/pybind11.h>

#include "op.h"

namespace {

void accumulate(uintptr_t target, int target_dtype, uintptr_t grad, int grad_dtype, uintptr_t parts, int64_t numel,
                bool add, int num_threads, int isa) {
    const lohan::GradArrays arrays{reinterpret_cast<void*>(target),
                                   reinterpret_cast<const void*>(grad),
                                   reinterpret_cast<double*>(parts),
                                   static_cast<lohan::Dtype>(target_dtype),
                                   static_cast<lohan::Dtype>(grad_dtype),
                                   numel,
                                   add};
    lohan::grad_accumulate(arrays, num_threads, static_cast<lohan::Isa>(isa));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.def("accumulate", &accumulate, pybind11::call_guard<pybind11::gil_scoped_release>());
    module.def("is_present", [](int isa) { return lohan::is_present(static_cast<lohan::Isa>(isa)); });
}
