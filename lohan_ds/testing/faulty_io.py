"""`FaultyIo`: the thread I/O with what disks do to us, on purpose: delays, partial transfers, errors."""
from __future__ import annotations

import errno
import fcntl
import os
import random
import threading
import time
from collections.abc import Callable

from lohan_ds.store.ssd_io import ThreadSsdIo

_PAGE_BYTES = 4096


class FaultyIo(ThreadSsdIo):
    """Faults are put into the system calls, below everything that `ThreadSsdIo` does about them.

    Delays and short transfers are drawn from a seeded generator, in the order in which the threads come by. Any
    thread; the counters and the fault are under `_fault_lock`.
    """

    def __init__(self, num_threads: int, seed: int = 0, max_delay_s: float = 0.0, short_transfers: bool = False):
        """Each call sleeps up to `max_delay_s`; with `short_transfers` it may move only part, as is legal."""
        super().__init__(num_threads)
        self._fault_lock = threading.Lock()
        self._random = random.Random(seed)
        self._max_delay_s = max_delay_s
        self._short_transfers = short_transfers
        self._fault: tuple[str, int, int | None, int | None, int] | None = None
        self.num_calls = {"read": 0, "write": 0}    # since the last inject()
        self.moved_bytes = {"read": 0, "write": 0}  # since the last inject()

    def inject(self, operation: str, error_number: int, at_call: int | None = None, after_bytes: int | None = None,
               times: int = 1) -> None:
        """From now on `operation` ("read" or "write") fails with `error_number` (0: moves nothing).

        Either `times` calls from the `at_call`-th on (the next one is 0), or every call once `after_bytes` have been
        moved, as on a full disk. Replaces the fault before it.
        """
        if (at_call is None) == (after_bytes is None):
            raise ValueError("give one of at_call and after_bytes")
        with self._fault_lock:
            self._fault = (operation, error_number, at_call, after_bytes, times)
            self.num_calls = {"read": 0, "write": 0}
            self.moved_bytes = {"read": 0, "write": 0}

    def heal(self) -> None:
        """No more injected errors."""
        with self._fault_lock:
            self._fault = None

    def _pread(self, fd: int, view: memoryview, offset: int) -> int:
        return self._call("read", super()._pread, fd, view, offset)

    def _pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        return self._call("write", super()._pwrite, fd, view, offset)

    def _call(self, operation: str, syscall: Callable, fd: int, view: memoryview, offset: int) -> int:
        with self._fault_lock:
            delay_s = self._random.uniform(0, self._max_delay_s)
            nbytes = self._short_length(fd, len(view)) if self._short_transfers else len(view)
            error_number = self._error_for(operation)
            self.num_calls[operation] += 1
        time.sleep(delay_s)
        if error_number is not None:
            if error_number == 0:
                return 0
            raise OSError(error_number, f"{os.strerror(error_number)} (injected {errno.errorcode[error_number]})")
        moved = syscall(fd, view[:nbytes], offset)
        with self._fault_lock:
            self.moved_bytes[operation] += moved
        return moved

    def _short_length(self, fd: int, nbytes: int) -> int:
        direct = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT
        unit = _PAGE_BYTES if direct else 1
        return self._random.randint(1, nbytes // unit) * unit if nbytes > unit else nbytes

    def _error_for(self, operation: str) -> int | None:
        if self._fault is None or self._fault[0] != operation:
            return None
        _, error_number, at_call, after_bytes, times = self._fault
        if at_call is not None:
            return error_number if at_call <= self.num_calls[operation] < at_call + times else None
        return error_number if self.moved_bytes[operation] >= after_bytes else None
