// Python's way into op.h: addresses and numbers, checked by cpu_adam.py, the only caller. Runs without the GIL.
#include <pybind11/pybind11.h>

#include "op.h"

namespace {

template <typename T>
T* pointer(uintptr_t address) { return reinterpret_cast<T*>(address); }

void update(uintptr_t master, uintptr_t grad, int grad_dtype, uintptr_t exp_avg, uintptr_t exp_avg_sq, uintptr_t out,
            int out_dtype, int64_t numel, float coefficient, float decay, float l2, float avg_weight, float sq_decay,
            float sq_weight, float sq_correction, float eps, float step_size, int num_threads, int isa) {
    const lohan::AdamScalars scalars{coefficient, decay,         l2,  avg_weight, sq_decay,
                                     sq_weight,   sq_correction, eps, step_size};
    const lohan::AdamArrays arrays{pointer<float>(master),
                                   pointer<const void>(grad),
                                   pointer<float>(exp_avg),
                                   pointer<float>(exp_avg_sq),
                                   pointer<void>(out),
                                   static_cast<lohan::Dtype>(grad_dtype),
                                   static_cast<lohan::Dtype>(out_dtype),
                                   numel};
    lohan::adam_update(scalars, arrays, num_threads, static_cast<lohan::Isa>(isa));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.def("update", &update, pybind11::call_guard<pybind11::gil_scoped_release>());
    module.def("is_present", [](int isa) { return lohan::is_present(static_cast<lohan::Isa>(isa)); });
}
