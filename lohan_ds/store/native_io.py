"""`NativeSsdIo`: reads and writes of files by the operator ssd_io: system calls and checksums on threads of C++.

Python only submits requests and is told, many at a time, which have ended: see ops/csrc/ssd_io/op.h. `make_ssd_io`
gives it, or the threads of ssd_io.py where the operator is missing.
"""
from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from types import ModuleType
from typing import NamedTuple

import torch

from lohan_ds.errors import StoreError
from lohan_ds.ops.loader import native
from lohan_ds.store import pieces
from lohan_ds.store.file_io import FileIo, Request, SsdFile, sync_failure, transfer_failure, transfer_name
from lohan_ds.store.io_threads import Urgency
from lohan_ds.store.ssd_io import ThreadSsdIo
from lohan_ds.work import Work

_VERBS = {"read": 0, "write": 1, "sync": 2}   # as Verb in op.h
_SYSTEM, _SHORT, _DAMAGED = 1, 2, 3           # as Reason in op.h

logger = logging.getLogger(__name__)


def make_ssd_io(num_threads: int) -> FileIo:
    """By the operator, or by threads of Python. The same files and the same errors."""
    module = native("ssd_io")
    return ThreadSsdIo(num_threads) if module is None else NativeSsdIo(module, num_threads)


class _Flight(NamedTuple):
    """What is in flight; keeps its memory alive."""
    request: Request
    work: Work


class NativeSsdIo(FileIo):
    """On `num_threads` threads of C++. One thread of Python, which waits in a read, ends the works and calls `on_span`.

    Fixed after construction: `_pool`, `_nothing`. `_flights` is put into by whoever submits, taken from by that thread.
    """

    def __init__(self, module: ModuleType, num_threads: int):
        event_fd = os.eventfd(0, os.EFD_CLOEXEC)
        try:
            self._pool = module.IoPool(num_threads, pieces.PIECE_BYTES, event_fd)
        except BaseException:
            os.close(event_fd)
            raise
        self._flights: dict[int, _Flight] = {}
        super().__init__()
        self._count = itertools.count()
        self._nothing = torch.empty(0, dtype=torch.uint8)   # what a sync moves
        self._thread = threading.Thread(target=_end_works,
                                        args=(self._pool, event_fd, self._flights, weakref.ref(self)),
                                        name="lohan-ssd-done", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._pool.end).atexit = False   # closed or not

    def _start(self, request: Request) -> Work:
        return self._fly(request, _VERBS[request.verb])

    def _start_sync(self, file: SsdFile) -> Work:
        return self._fly(Request("sync", file, 0, 0, self._nothing, None, None, Urgency.UPDATE), _VERBS["sync"])

    def cancel(self) -> None:
        self._pool.cancel()

    def _end_threads(self) -> None:
        self._pool.end()
        self._thread.join()

    def _fly(self, request: Request, verb: int) -> Work:
        file, records = request.file, request.records
        record_bytes = stride_bytes = request.nbytes
        address = row_numel = 0
        if records is not None:
            checksums = records.checksums
            address = checksums.address + 8 * records.first * checksums.row_numel
            record_bytes, stride_bytes = records.record_bytes, records.stride_bytes
            row_numel = records.step * checksums.row_numel
        number, work = next(self._count), Work()
        self._flights[number] = _Flight(request, work)
        file.num_in_flight += 1
        if not self._pool.submit(number, verb, file.fd, file.direct, request.urgency, request.offset, request.nbytes,
                                 request.buffer.data_ptr(), record_bytes, stride_bytes, address, row_numel):
            file.num_in_flight -= 1
            del self._flights[number]
            raise StoreError("the I/O threads are of another process, from which this one was forked")
        return work

    def _land(self, flight: _Flight, moved_bytes: int, spans: tuple) -> None:
        request = flight.request
        self._leave(request.file, request.verb, moved_bytes)
        if self.on_span is not None and request.verb != "sync":
            for start_s, end_s, nbytes in spans:
                self.on_span(request.verb, request.file.path, start_s, end_s, nbytes, request.for_step)

    def _waiting(self) -> list[tuple[str, float]]:
        found = super()._waiting()
        for number, offset, nbytes, since in self._pool.waiting():
            flight = self._flights.get(number)
            if flight is not None:
                verb, path = flight.request.verb, flight.request.file.path
                what = f"sync of {path}" if verb == "sync" else transfer_name(verb, nbytes, offset, path)
                found.append((what, since))
        return found


def _end_works(pool, event_fd: int, flights: dict[int, _Flight], io_ref: weakref.ref[NativeSsdIo]) -> None:
    """Until the pool's threads have ended. Does not keep the I/O alive: what is in flight ends all the same.

    The wait is a plain read: a thread that C++ has put to sleep cannot be ended when the interpreter goes.
    """
    while not pool.has_ended():
        os.read(event_fd, 8)
        for number, failure, moved_bytes, spans in pool.take_done():
            flight, io = flights.pop(number), io_ref()
            error = None if failure is None else _error_of(flight.request, *failure)
            try:
                if io is not None:
                    io._land(flight, moved_bytes, spans)
            except Exception as raised:  # noqa: BLE001 - of `on_span`: raised where the request is waited for
                error = error or raised
            del io
            try:
                flight.work.finish(flight.request.buffer) if error is None else flight.work.fail(error)
            except Exception:  # noqa: BLE001 - of what was to follow; the other works must end
                logger.exception("after a %s of %s", flight.request.verb, flight.request.file.path)
            del flight   # else an idle thread would keep the buffer
    os.close(event_fd)


def _error_of(request: Request, reason: int, number: int, offset: int, got_bytes: int, needed_bytes: int, record: int,
              piece: int, got_checksum: int, needed_checksum: int) -> StoreError:
    verb, path = request.verb, request.file.path
    if reason == _DAMAGED:
        return request.records.damaged(record, piece, needed_bytes, got_checksum, needed_checksum)
    if verb == "sync":
        return sync_failure(path, number)
    said = f"short {verb}" if reason == _SHORT else os.strerror(number)
    return transfer_failure(verb, path, offset, got_bytes, needed_bytes, number, said)
