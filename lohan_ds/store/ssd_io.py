"""`ThreadSsdIo`: reads and writes of files by plain system calls on a few threads of Python.

Slower than native_io.py, which needs a compiler; the files are the same. Test doubles put faults into its system calls.
"""
from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable

from lohan_ds.memory.pinned_pool import PAGE_BYTES
from lohan_ds.store import pieces
from lohan_ds.store.file_io import FileIo, Request, SsdFile, sync_failure, transfer_failure, transfer_name
from lohan_ds.store.io_threads import IoThreads, Urgency
from lohan_ds.work import Work

MAX_IDLE_RETRIES = 1000  # of EAGAIN without progress, 1 ms apart


class ThreadSsdIo(FileIo):
    """On `num_threads` threads, which call `on_span`. Fixed after construction: the threads."""

    def __init__(self, num_threads: int):
        super().__init__()
        self._threads = IoThreads(num_threads)
        self._is_cancelled = False

    def _pread(self, fd: int, view: memoryview, offset: int) -> int:
        """The system call, alone so that a test double can put faults in its place."""
        return os.preadv(fd, [view], offset)

    def _pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        return os.pwritev(fd, [view], offset)

    def _fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def _start(self, request: Request) -> Work:
        record_bytes = request.nbytes if request.records is None else request.records.record_bytes
        works = []
        for start, nbytes in pieces.cut(request.nbytes, record_bytes):
            request.file.num_in_flight += 1
            works.append(self._threads.submit(request.urgency, self._run_piece, request, start, nbytes, holds=request))
        return works[0] if len(works) == 1 else Work.all_of(works, value=request.buffer)

    def _start_sync(self, file: SsdFile) -> Work:
        file.num_in_flight += 1
        return self._threads.submit(Urgency.UPDATE, self._sync_file, file)

    def cancel(self) -> None:
        self._is_cancelled = True

    def _end_threads(self) -> None:
        self._threads.close()

    def _run_piece(self, request: Request, start: int, nbytes: int):
        """The request's buffer."""
        start_s, moved_bytes = time.perf_counter(), 0
        try:
            if self._is_cancelled:
                raise transfer_failure(request.verb, request.file.path, request.offset + start, 0, nbytes,
                                       errno.ECANCELED, os.strerror(errno.ECANCELED))
            self._move_piece(request, start, nbytes)
            moved_bytes = nbytes
        finally:
            self._leave(request.file, request.verb, moved_bytes)
        if self.on_span is not None:
            self.on_span(request.verb, request.file.path, start_s, time.perf_counter(), nbytes, request.for_step)
        return request.buffer

    def _move_piece(self, request: Request, start: int, nbytes: int) -> None:
        view = memoryview(request.buffer.detach().numpy()).cast("B")
        records = request.records
        if records is None:
            self._transfer(request, view[start:start + nbytes], request.offset + start)
            return
        of_piece = list(pieces.parts(start, nbytes, records.record_bytes, records.stride_bytes))
        if request.verb == "write":
            for part in of_piece:
                records.note(part, view[part.in_memory:part.in_memory + part.nbytes])
        if records.step == 1:   # no gaps
            self._transfer(request, view[start:start + nbytes], request.offset + start)
        else:
            for part in of_piece:
                self._transfer(request, view[part.in_memory:part.in_memory + part.nbytes], request.offset + start)
                start += part.nbytes
        if request.verb == "read":
            for part in of_piece:
                records.verify(part, view[part.in_memory:part.in_memory + part.nbytes])

    def _sync_file(self, file: SsdFile) -> None:
        try:
            with self._watched(f"sync of {file.path}"):
                self._fdatasync(file.fd)
        except OSError as error:
            raise sync_failure(file.path, error.errno) from error
        finally:
            self._leave(file, "sync", 0)

    def _transfer(self, request: Request, view: memoryview, offset: int) -> None:
        """Repeats the system call until all of `view` is moved. StoreError if that cannot be."""
        file, verb, done, idle_retries = request.file, request.verb, 0, 0
        syscall: Callable = self._pread if verb == "read" else self._pwrite
        while done < len(view):
            try:
                with self._watched(transfer_name(verb, len(view) - done, offset + done, file.path)):
                    moved = syscall(file.fd, view[done:], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno == errno.EAGAIN and idle_retries < MAX_IDLE_RETRIES:
                    idle_retries += 1
                    time.sleep(0.001)
                    continue
                raise transfer_failure(verb, file.path, offset, done, len(view), error.errno, error.strerror) from error
            if file.direct:
                moved -= moved % PAGE_BYTES  # a tail off the alignment is moved again
            if moved == 0:
                raise transfer_failure(verb, file.path, offset, done, len(view), errno.EIO, f"short {verb}")
            done, idle_retries = done + moved, 0
