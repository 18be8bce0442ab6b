"""The buffers that fetched blocks lie in, and the pinned ones they pass through on their way to a device.

[Note: buffers]
A buffer is used again only when nothing else refers to its storage, so a view that somebody kept (a value of an old
`state_dict()`, a recomputed tensor) stays valid and keeps its values. On a device it may be written to once the
compute work is over that was queued when it was given back. Memory that the allocator gives has no known past: it may
be written to only after all work queued by now, and since the device lags behind the training thread, such a copy comes
too late to hide under the unit before.
"""
from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lohan_ds.block import Block
from lohan_ds.work import Work

logger = logging.getLogger(__name__)
_PAGE_BYTES = 4096


class FetchBuffers:
    """Idle ones are kept, within `planned_bytes` with those in use. Called under the streamer's lock."""

    def __init__(self, planned_bytes: int, device: torch.device, compute_mark: Callable[[], Any]):
        """`compute_mark()`: as `Streams` has it."""
        self._planned_bytes, self._device, self._compute_mark = planned_bytes, device, compute_mark
        self._idle: deque[tuple[Tensor, Any]] = deque()   # uint8, and the mark since when; oldest first
        self._in_use_bytes = 0

    @property
    def nbytes(self) -> int:
        """Of all buffers, in use and idle."""
        return self._in_use_bytes + sum(raw.nbytes for raw, _ in self._idle)

    def take(self, block: Block) -> tuple[Tensor, Any]:
        """(block.numel,) of the block's dtype, on the device, in host memory 4096-aligned; and the mark after which it
        may be written to."""
        self._in_use_bytes += block.param_bytes
        dtype = getattr(torch, block.dtype)
        for i, (raw, mark) in enumerate(self._idle):
            # two uses: ours and the one made to ask; more, and somebody keeps a view of it
            if raw.nbytes == block.param_bytes and torch._C._storage_Use_Count(raw.untyped_storage()._cdata) <= 2:
                del self._idle[i]
                return raw.view(dtype), mark
        self._trim()
        if self._device.type != "cpu":
            return torch.empty(block.numel, dtype=dtype, device=self._device), self._compute_mark()
        raw = torch.empty(block.param_bytes + _PAGE_BYTES, dtype=torch.uint8)
        start = -raw.data_ptr() % _PAGE_BYTES
        return raw[start:start + block.param_bytes].view(dtype), self._compute_mark()

    def give(self, buffer: Tensor) -> None:
        """The buffer is not needed any more by what is queued from now on. Training or autograd thread."""
        self._in_use_bytes -= buffer.nbytes
        self._idle.append((buffer.view(torch.uint8), self._compute_mark()))
        self._trim()

    def lose(self, buffer: Tensor) -> None:
        """Its fetch failed, and may still be writing to it: not used again."""
        self._in_use_bytes -= buffer.nbytes

    def clear(self) -> None:
        """Lets go of what is idle."""
        self._idle.clear()

    def _trim(self) -> None:
        while self._idle and self.nbytes > self._planned_bytes:
            self._idle.popleft()


class StagingRing:
    """Pinned host buffers between store and device. A buffer is free again once its copy to the device has passed."""

    def __init__(self, take: Callable[[int], Tensor], count: int, nbytes: int):
        self._free = [take(nbytes) for _ in range(count)]   # (nbytes,) uint8, pinned host
        self._in_use: deque[tuple[Tensor, Work]] = deque()  # oldest first; the Work's result is the copy's Event

    def has_free(self) -> bool:
        self._reclaim()
        return bool(self._free)

    def take(self) -> Tensor:
        """A free buffer; waits for the oldest transfer when all are in use."""
        self._reclaim()
        while not self._free:
            self._reclaim(wait=True)
        return self._free.pop()

    def in_use(self, buffer: Tensor, work: Work) -> None:
        """`work` ends with the Event of the copy out of `buffer`, which is then free again."""
        self._in_use.append((buffer, work))

    def drain(self) -> None:
        while self._in_use:
            self._reclaim(wait=True)

    def _reclaim(self, wait: bool = False) -> None:
        while self._in_use:
            raw, work = self._in_use[0]
            if not wait and not (work.done() and (work.exception() is not None or work.wait().done())):
                return
            try:
                work.wait().host_wait()
            except Exception:  # noqa: BLE001 - whoever wanted the block is told
                logger.debug("a fetch failed", exc_info=True)
            self._in_use.popleft()
            self._free.append(raw)
            wait = False
