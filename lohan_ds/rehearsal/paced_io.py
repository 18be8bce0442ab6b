"""`PacedIo`: the product's own I/O on drives that move so many bytes per second, whatever is under the files."""
from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from lohan_ds.store.ssd_io import SsdFile, ThreadSsdIo


class PacedDrive:
    """One drive, one request at a time: reads and writes share it. Any thread; under `_lock`: `_free_at`, `busy_s`."""

    def __init__(self, read_bytes_per_s: float, write_bytes_per_s: float):
        self.bytes_per_s = {"read": read_bytes_per_s, "write": write_bytes_per_s}
        self.busy_s = 0.0                # of all requests so far, by the pace
        self._lock = threading.Lock()
        self._free_at = 0.0              # of time.monotonic

    def reserve(self, verb: str, nbytes: int) -> float:
        """Queues a request behind those made before; the moment when it will be over."""
        seconds = nbytes / self.bytes_per_s[verb]
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + seconds
            self.busy_s += seconds
            return self._free_at


class PacedIo(ThreadSsdIo):
    """Every piece is moved for real, and takes at least as long as its drive would. `drives`: by directory; all that
    lies somewhere below it is on that drive, and what lies below none is not paced. Under the base's lock:
    `_drive_of_fd`."""

    def __init__(self, num_threads: int, drives: Sequence[tuple[str, PacedDrive]]):
        super().__init__(num_threads)
        self._drives = [(os.path.join(os.path.abspath(path), ""), drive) for path, drive in drives]
        self._drive_of_fd: dict[int, PacedDrive | None] = {}

    def open(self, path: str, nbytes: int) -> SsdFile:
        return self._placed(super().open(path, nbytes))

    def reopen(self, path: str, nbytes: int) -> SsdFile:
        return self._placed(super().reopen(path, nbytes))

    def _placed(self, file: SsdFile) -> SsdFile:
        where = os.path.abspath(file.path)
        with self._lock:
            self._drive_of_fd[file.fd] = next((drive for path, drive in self._drives if where.startswith(path)), None)
        return file

    def _pread(self, fd: int, view: memoryview, offset: int) -> int:
        return self._paced("read", fd, len(view), lambda: super(PacedIo, self)._pread(fd, view, offset))

    def _pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        return self._paced("write", fd, len(view), lambda: super(PacedIo, self)._pwrite(fd, view, offset))

    def _paced(self, verb: str, fd: int, nbytes: int, transfer: Callable[[], int]) -> int:
        drive = self._drive_of_fd[fd]
        if drive is None:
            return transfer()
        over_at = drive.reserve(verb, nbytes)
        moved = transfer()
        time.sleep(max(0.0, over_at - time.monotonic()))
        return moved
