"""`SsdTier`: swapped activations in the spill file, through a few host buffers in both directions.

A tensor larger than a buffer passes in pieces, so any tensor gets through the smallest pool, one buffer of one page.
Pieces that wait for a buffer on their way back queue up in the order in which backward will need them.
"""
from __future__ import annotations

import functools
import threading
from collections import deque
from typing import Any

from torch import Tensor

from lohan_ds.block import round_up
from lohan_ds.errors import StepError
from lohan_ds.memory.pinned_pool import PAGE_BYTES, BufferRing
from lohan_ds.runtime.streams import Event, Streams
from lohan_ds.runtime.swap_tiers import EventWatcher, SwapCopy, SwapTier
from lohan_ds.store.spill_file import SpillExtent, SpillFile
from lohan_ds.work import Work


class _Piece:
    """A stretch of a tensor that passes through one buffer. `left`, `written`: as of SwapCopy."""
    __slots__ = ("start", "nbytes", "extent", "left", "written")

    def __init__(self, start: int, nbytes: int, extent: SpillExtent):
        self.start, self.nbytes, self.extent = start, nbytes, extent


class _Read:
    """A piece on its way back, waiting for a buffer or under way."""
    __slots__ = ("copy", "piece", "dst", "mark", "work", "event")

    def __init__(self, copy: _SsdCopy, piece: _Piece, dst: Tensor, mark: Any):
        self.copy, self.piece, self.mark = copy, piece, mark
        self.dst: Tensor | None = dst[piece.start:piece.start + piece.nbytes]   # uint8, device
        self.event: Event | None = None
        self.work = Work()


class SsdTier(SwapTier):
    """The spill file. `ring`'s buffers are used in both directions: [Note: nobody waits for backward].

    Fixed after construction: file, ring, streams, watcher. Under `_lock`: `_reads`, `_num_lent`.
    """

    def __init__(self, spill: SpillFile, ring: BufferRing, streams: Streams, watcher: EventWatcher):
        super().__init__()
        self.spill, self._ring, self._streams, self._watcher = spill, ring, streams, watcher
        self._lock = threading.Condition()   # notified when a buffer comes back
        self._reads: deque[_Read] = deque()   # not begun, next one first
        self._num_lent = 0                    # buffers in use or asked for

    def _try_put(self, flat: Tensor) -> SwapCopy | None:
        pieces = self._make_pieces(flat.numel())
        if pieces is None:
            return None
        for number, piece in enumerate(pieces):
            try:
                self._write(piece, flat)
            except BaseException:
                begun = Work.all_of([other.written for other in pieces[:number]])
                self.free_after(begun, functools.partial(self.give, pieces))
                raise
        return _SsdCopy(self, pieces, flat.numel())

    @property
    def used_bytes(self) -> int:
        return self.spill.used_bytes

    @property
    def peak_bytes(self) -> int:
        return self.spill.peak_bytes

    def _make_pieces(self, nbytes: int) -> list[_Piece] | None:
        """As large as a buffer; smaller where no drive has that much left in one place. None if there is too little."""
        pieces: list[_Piece] = []
        start, largest_bytes = 0, self._ring.nbytes
        while start < nbytes:
            piece_bytes = min(largest_bytes, nbytes - start)
            extent = self.spill.take(piece_bytes)
            if extent is not None:
                pieces.append(_Piece(start, piece_bytes, extent))
                start += piece_bytes
            elif piece_bytes > PAGE_BYTES:
                largest_bytes = round_up(piece_bytes // 2, PAGE_BYTES)
            else:
                self.give(pieces)
                return None
        return pieces

    def _write(self, piece: _Piece, flat: Tensor) -> None:
        with self._lock:
            self._num_lent += 1
        buffer = None
        try:
            buffer = self._ring.acquire()
            event = self._streams.d2h(buffer[:piece.nbytes], flat[piece.start:piece.start + piece.nbytes])
            left = self._watcher.watch(event)
        except BaseException:
            self._give_back(buffer)
            raise
        piece.left = left
        piece.written = left.then(lambda _: self.spill.write(piece.extent, buffer[:piece.extent.nbytes]))
        piece.written.on_done(functools.partial(self._give_back, buffer))

    def fetch(self, copy: _SsdCopy, pieces: list[_Piece], dst: Tensor, mark: Any) -> Work:
        reads = [_Read(copy, piece, dst, mark) for piece in pieces]
        with self._lock:
            self._reads.extend(reads)
        self._pump()
        return Work.all_of([read.work for read in reads]).then(lambda _: [read.event for read in reads])

    def hurry(self, copy: _SsdCopy) -> None:
        """What of this copy's way back has not begun goes first."""
        with self._lock:
            mine = [read for read in self._reads if read.copy is copy]
            if mine and self._reads[0].copy is not copy:
                self._reads = deque(mine + [read for read in self._reads if read.copy is not copy])

    def _pump(self) -> None:
        """Begins reads while there are free buffers. Any thread."""
        while True:
            with self._lock:
                while self._reads and self._reads[0].copy.dropped:
                    self._reads.popleft().work.finish()
                if not self._reads or self._num_lent >= self._ring.count:
                    return
                read = self._reads.popleft()
                self._num_lent += 1
            buffer = self._ring.acquire()   # there is a free one
            piece = read.piece
            arrived = piece.written.then(functools.partial(self._read, piece, buffer)).then(
                functools.partial(self._to_device, read, buffer))
            arrived.on_done(functools.partial(self._end_read, read, buffer, arrived))

    def _read(self, piece: _Piece, buffer: Tensor, _) -> Work:
        return self.spill.read(piece.extent, buffer[:piece.extent.nbytes])

    def _to_device(self, read: _Read, buffer: Tensor, _) -> None:
        read.event = self._streams.h2d(read.dst, buffer[:read.piece.nbytes], after=read.mark)
        self._watcher.watch(read.event).on_done(functools.partial(self._give_back, buffer))

    def _end_read(self, read: _Read, buffer: Tensor, arrived: Work) -> None:
        error, read.dst = arrived.exception(), None
        if error is None:
            read.work.finish()
            return
        if read.event is None:
            self._give_back(buffer)
        read.work.fail(error)

    def _give_back(self, buffer: Tensor | None) -> None:
        if buffer is not None:
            self._ring.release(buffer)
        with self._lock:
            self._num_lent -= 1
            self._lock.notify_all()
        self._pump()

    def give(self, pieces: list[_Piece]) -> None:
        for piece in pieces:
            self.spill.give(piece.extent)

    def drain(self) -> None:
        with self._lock:
            waiting, self._reads = self._reads, deque()
        for read in waiting:
            read.work.fail(StepError("the space for swapped activations is closed"))
        with self._lock:
            self._lock.wait_for(lambda: self._num_lent == 0)

    def close(self) -> None:
        self._ring.close()
        self.spill.close()


class _SsdCopy(SwapCopy):
    def __init__(self, tier: SsdTier, pieces: list[_Piece], nbytes: int):
        self._tier, self._pieces = tier, pieces
        self.dropped = False
        self.left = Work.all_of([piece.left for piece in pieces])
        self.written = self._last = Work.all_of([piece.written for piece in pieces])

    def fetch(self, dst: Tensor, mark: Any) -> Work:
        incoming = self._tier.fetch(self, self._pieces, dst, mark)
        self._last = Work.all_of([self.written, incoming])
        return incoming

    def hurry(self) -> None:
        self._tier.hurry(self)

    def drop(self) -> None:
        self.dropped = True
        self._tier.free_after(self._last, functools.partial(self._tier.give, self._pieces))
