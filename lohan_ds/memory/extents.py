"""`Extents`: which byte ranges of one flat space are taken. First fit, in whole pages of 4096 bytes.

Between forward and backward a space fills and empties in opposite orders, so it hardly breaks up into pieces.
"""
from __future__ import annotations

import bisect
import threading

from lohan_ds.block import round_up
from lohan_ds.memory.pinned_pool import PAGE_BYTES


class Extents:
    """Any thread. `nbytes` is fixed after construction, the rest is under `_lock`."""

    def __init__(self, nbytes: int):
        """`nbytes`: of the space; what is left over of a whole page is not used."""
        self.nbytes = nbytes // PAGE_BYTES * PAGE_BYTES
        self._lock = threading.Lock()
        self._free: list[tuple[int, int]] = [(0, self.nbytes)] if self.nbytes else []   # (offset, bytes), by offset
        self._used_bytes = 0
        self._peak_bytes = 0

    def take(self, nbytes: int) -> int | None:
        """Offset of a free range of `nbytes` rounded up to pages, a multiple of 4096; None if there is none."""
        nbytes = max(PAGE_BYTES, round_up(nbytes, PAGE_BYTES))
        with self._lock:
            for place, (offset, free_bytes) in enumerate(self._free):
                if free_bytes < nbytes:
                    continue
                self._free[place:place + 1] = [(offset + nbytes, free_bytes - nbytes)] if free_bytes > nbytes else []
                self._used_bytes += nbytes
                self._peak_bytes = max(self._peak_bytes, self._used_bytes)
                return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Frees what `take(nbytes)` returned. Nothing may be in flight on it."""
        nbytes = max(PAGE_BYTES, round_up(nbytes, PAGE_BYTES))
        end = offset + nbytes
        with self._lock:
            place = bisect.bisect(self._free, (offset,))
            before = self._free[place - 1] if place else (0, 0)
            after = self._free[place] if place < len(self._free) else (self.nbytes, 0)
            if sum(before) > offset or end > after[0]:
                raise AssertionError(f"bytes {offset} to {end} of {self.nbytes} are free already")
            self._used_bytes -= nbytes
            if before[1] and sum(before) == offset:
                place, offset = place - 1, before[0]
            if after[1] and after[0] == end:
                end = sum(after)
            stop = bisect.bisect(self._free, (end,)) if after[1] else len(self._free)
            self._free[place:stop] = [(offset, end - offset)]

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes

    @property
    def free_bytes(self) -> int:
        return self.nbytes - self._used_bytes
