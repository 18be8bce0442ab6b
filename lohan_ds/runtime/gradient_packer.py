"""`GradientPacker`: a block's gradients leave the device packed, in one copy, and their sums of squares with them.

[Note: on their way out]
Gradients wait on the device until their block is complete, until one of another block comes, or until a staging buffer
would be full; then one launch packs them into it (ops/grad_pack.py) and a d2h copy takes them to where they are held.
After the launch their own memory is free. There are two staging buffers: before one is written to again, compute waits
for the copy out of it. So a link that is slower than backward holds up the device, not the host, and the device never
has more than two buffers on their way. A gradient that is alone, or too large for a buffer, is copied from where
autograd put it, at most two at a time: before a third the host waits, for only it can know that their memory is free.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lohan_ds.block import ALIGN_NUMEL, Block, round_up
from lohan_ds.memory.pinned_pool import BufferRing, PinnedPool
from lohan_ds.ops.grad_pack import num_segments, pack
from lohan_ds.plan import NUM_GRADIENT_SUM_BUFFERS, gradient_staging_bytes
from lohan_ds.runtime.recorder import Recorder, stalling
from lohan_ds.runtime.streams import Event, Streams

_MAX_LEAVING = 2   # gradients on their way from where autograd put them


class DirectCopies:
    """Copies of gradients from where autograd put them. Training or autograd thread."""

    def __init__(self, streams: Streams, recorder: Recorder | None = None):
        self._streams, self._recorder = streams, recorder
        self._leaving: deque[Event] = deque()

    def d2h(self, target: Tensor, grad: Tensor) -> Event:
        """Starts the copy, whose memory is free when it is over. Blocks while `_MAX_LEAVING` others are under way."""
        while len(self._leaving) >= _MAX_LEAVING:
            with stalling(self._recorder, "gradient"):
                self._leaving.popleft().host_wait()
        event = self._streams.d2h(target, grad)
        self._leaving.append(event)
        return event


class Packed(NamedTuple):
    """Gradients on their way. After `event.host_wait()` they are held, and `sums` can be read; then call `release`."""
    block: Block
    slots: list[int]
    event: Event
    sums: Tensor                      # (segments of all slots,) fp64, pinned host
    release: Callable[[], None]

    def sums_by_slot(self) -> list[list[float]]:
        """Of each of `slots`, as `grad_norm.sum_of_squares` gives them."""
        counts = [num_segments(self.block.slots[slot].numel) for slot in self.slots]
        return [part.tolist() for part in self.sums.split(counts)]


class GradientPacker:
    """See [Note: on their way out]. Training or autograd thread, but for `Packed.release`: any."""

    def __init__(self, blocks: Sequence[Block], streams: Streams, pool: PinnedPool, device: torch.device,
                 direct: DirectCopies, recorder: Recorder | None = None):
        """Takes the host memory of the sums now, the device's at first use."""
        self._streams, self._device, self._direct, self._recorder = streams, device, direct, recorder
        self._staging_bytes = gradient_staging_bytes(blocks)
        self._staging: list[Tensor] = []                       # two of (staging_bytes,) uint8, device
        self._copied: list[Event | None] = [None, None]        # the last copy out of each
        self._turn = 0
        self._block: Block | None = None                       # whose gradients are waiting
        self._values: Tensor | None = None                     # (numel,) where they go, pinned host
        self._waiting: dict[int, Tensor] = {}                  # by slot: (numel,), device
        most = max((sum(num_segments(slot.numel) for slot in block.slots) for block in blocks if block.trainable),
                   default=0)
        self._sums = BufferRing(pool, NUM_GRADIENT_SUM_BUFFERS, max(most, 1) * 8, "sums of squares of packed gradients")

    def add(self, block: Block, slot: int, grad: Tensor, values: Tensor, is_last: bool) -> list[Packed]:
        """Takes one gradient, (numel,) in the dtype of `values`; `is_last`: of its block. Returns what leaves now."""
        left = []
        if self._waiting and (block is not self._block or not self._fits(grad)):
            left += self.flush()
        self._block, self._values = block, values
        self._waiting[slot] = grad
        if is_last or not self._fits():
            left += self.flush()
        return left

    def _fits(self, *more: Tensor) -> bool:
        grads = [*self._waiting.values(), *more]
        return sum(round_up(grad.numel(), ALIGN_NUMEL) * grad.itemsize for grad in grads) <= self._staging_bytes

    def flush(self) -> list[Packed]:
        """Whatever waits leaves now."""
        if not self._waiting:
            return []
        slots = sorted(self._waiting)
        grads, self._waiting = [self._waiting[slot] for slot in slots], {}
        send = self._send_alone if len(slots) == 1 else self._send_together
        with stalling(self._recorder, "gradient"):
            buffer = self._sums.acquire()
        try:
            sums = buffer[:8 * sum(num_segments(grad.numel()) for grad in grads)].view(torch.float64)
            event = send(slots, grads, sums)
        except BaseException:
            self._sums.release(buffer)
            raise
        return [Packed(self._block, slots, event, sums, lambda: self._sums.release(buffer))]

    def drop(self) -> None:
        """Forgets what waits."""
        self._waiting = {}

    def close(self) -> None:
        """All that was returned must have been released."""
        self.drop()
        self._staging, self._copied = [], [None, None]
        self._sums.close()

    def _send_alone(self, slots: list[int], grads: list[Tensor], sums: Tensor) -> Event:
        """The sums go first: copies of one direction end in the order of submission."""
        info = self._block.slots[slots[0]]
        self._streams.d2h(sums, pack(grads, [0], None))
        return self._direct.d2h(self._values[info.offset:info.offset + info.numel], grads[0])

    def _send_together(self, slots: list[int], grads: list[Tensor], sums: Tensor) -> Event:
        flat, index = self._next_staging()
        flat = flat.view(grads[0].dtype)
        offsets, copies, end = [], [], 0
        for slot in slots:
            info = self._block.slots[slot]
            if slot - 1 in slots:   # its neighbour goes too, and so does the gap between them
                end = copies[-1][1] + info.offset - copies[-1][0]
            else:
                end = round_up(end, ALIGN_NUMEL)
                copies.append([info.offset, end, 0])
            offsets.append(end)
            end += info.numel
            copies[-1][2] = end - copies[-1][1]
        self._streams.d2h(sums, pack(grads, offsets, flat))
        for held_at, staged_at, numel in copies:
            event = self._streams.d2h(self._values[held_at:held_at + numel], flat[staged_at:staged_at + numel])
        self._copied[index] = event
        return event

    def _next_staging(self) -> tuple[Tensor, int]:
        """The buffer that was used longer ago; compute may write to it."""
        if not self._staging:
            self._staging = [torch.zeros(self._staging_bytes, dtype=torch.uint8, device=self._device) for _ in "01"]
        index, self._turn = self._turn, 1 - self._turn
        if self._copied[index] is not None:
            self._copied[index].compute_wait()
        return self._staging[index], index
