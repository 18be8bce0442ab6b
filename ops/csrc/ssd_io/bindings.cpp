// Python's way into op.h: addresses and numbers, checked by native_io.py, the only caller. No call here waits for I/O,
// and the threads that do never take the GIL.
#include <pybind11/pybind11.h>

#include "op.h"

namespace py = pybind11;

namespace {

bool submit(lohan::IoPool& pool, int64_t id, int verb, int fd, bool direct, int urgency, int64_t offset, int64_t nbytes,
            uintptr_t memory, int64_t record_bytes, int64_t stride_bytes, uintptr_t checksums, int64_t row_numel) {
    return pool.submit({id, static_cast<lohan::Verb>(verb), fd, direct, urgency, offset, nbytes,
                        reinterpret_cast<char*>(memory), record_bytes, stride_bytes,
                        reinterpret_cast<uint64_t*>(checksums), row_numel});
}

// Of each request that has ended: (id, None or the failure, moved bytes, ((start_s, end_s, nbytes) of each piece)).
py::list take_done(lohan::IoPool& pool) {
    py::list found;
    for (const lohan::Done& done : pool.take_done()) {
        const lohan::Failure& f = done.failure;
        py::object failure = py::none();
        if (f.reason != lohan::Reason::kNone) {
            failure = py::make_tuple(static_cast<int>(f.reason), f.error_number, f.offset, f.got_bytes, f.needed_bytes,
                                     f.record, f.piece, f.got_checksum, f.needed_checksum);
        }
        py::tuple spans(done.spans.size());
        for (size_t i = 0; i < done.spans.size(); ++i) {
            spans[i] = py::make_tuple(done.spans[i].start_s, done.spans[i].end_s, done.spans[i].nbytes);
        }
        found.append(py::make_tuple(done.id, failure, done.moved_bytes, spans));
    }
    return found;
}

// (id, offset, bytes, since when) of each system call that has not returned.
py::list waiting(lohan::IoPool& pool) {
    py::list found;
    for (const lohan::Waiting& call : pool.waiting()) {
        found.append(py::make_tuple(call.id, call.offset, call.nbytes, call.since_s));
    }
    return found;
}

uint64_t checksum(uintptr_t memory, int64_t nbytes, int isa) {
    return lohan::xxh3_64(reinterpret_cast<const void*>(memory), nbytes, lohan::resolve(static_cast<lohan::Isa>(isa)));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    py::class_<lohan::IoPool, std::shared_ptr<lohan::IoPool>>(module, "IoPool")
        .def(py::init([](int num_threads, int64_t piece_bytes, int event_fd) {
            return lohan::IoPool::start(num_threads, piece_bytes, event_fd);
        }))
        .def("submit", &submit)
        .def("cancel", &lohan::IoPool::cancel)
        .def("end", &lohan::IoPool::end)
        .def("take_done", &take_done)
        .def("has_ended", &lohan::IoPool::has_ended)
        .def("waiting", &waiting);
    module.def("checksum", &checksum);
    module.def("is_present", [](int isa) { return lohan::is_present(static_cast<lohan::Isa>(isa)); });
}
