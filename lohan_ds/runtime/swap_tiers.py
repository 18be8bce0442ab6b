"""Where swapped activations go: `SwapTier`, here `HostTier` (pinned host memory); ssd_tier.py has the other one.

[Note: nobody waits for backward]
A copy on its way out or in ends by itself: it needs a buffer only once, and gives it back when the copy is over. So
whoever waits for a buffer waits for copies under way, never for a later event of its own. Space, on the other hand,
is only freed by backward: if there is none, `put` says so and the tensor stays where it is. Space whose last copy is
still running when it is given up is free once that copy has ended; `put` waits for that.
"""
from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from lohan_ds.memory.extents import Extents
from lohan_ds.memory.pinned_pool import PinnedPool
from lohan_ds.runtime.streams import Event, Streams
from lohan_ds.work import Work


class EventWatcher:
    """Turns the end of a copy into a `Work`: one thread that waits for events in the order given. Any thread."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="lohan-swap")

    def watch(self, event: Event) -> Work:
        """Ends when the copy is over; fails with what it failed with."""
        return Work.of_future(self._executor.submit(event.host_wait), holds=event)

    def close(self) -> None:
        """Waits for all events given so far."""
        self._executor.shutdown(wait=True)


class SwapCopy(ABC):
    """The bytes of one tensor, out of device memory. Made by a tier's `put`, used by the training and autograd thread.

    `left` ends when the source has been read, and may be freed or overwritten. `written` ends when the copy is where
    it will stay.
    """
    left: Work
    written: Work

    @abstractmethod
    def fetch(self, dst: Tensor, mark: Any) -> Work:
        """Starts the way back into `dst` ((nbytes,) uint8, device) after the compute work up to `mark`; waits for
        `left`. Work of the list of Events to wait for in compute."""

    @abstractmethod
    def hurry(self) -> None:
        """Somebody waits for its way back: it overtakes those that have not begun."""

    @abstractmethod
    def drop(self) -> None:
        """Gives up the copy. Does not block."""


class SwapTier(ABC):
    """Makes copies. `put` is called from the training thread only."""

    def __init__(self) -> None:
        self._ending: deque[Work] = deque()   # of what was dropped, oldest first: its space is free when this ends

    @abstractmethod
    def _try_put(self, flat: Tensor) -> SwapCopy | None:
        """As `put`, but None also when space is about to be free."""

    @abstractmethod
    def drain(self) -> None:
        """Ahead of `close`: lets copies that have begun end, and no others begin."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back. No copy may be under way."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Space taken now."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """The most that was ever taken."""

    def put(self, flat: Tensor) -> SwapCopy | None:
        """Starts copying `flat` ((nbytes,) uint8, device) out; None if the planned space is full. Blocks while all
        buffers are in use."""
        while True:
            copy = self._try_put(flat)
            if copy is not None:
                return copy
            try:
                self._ending.popleft().exception()   # waits
            except IndexError:
                return None

    def free_after(self, last: Work, free: Callable[[], None]) -> None:
        """Calls `free()` once the last copy to or from a piece of space has ended. Any thread; does not block."""
        freed = Work()
        self._ending.append(freed)

        def end() -> None:
            free()
            freed.finish()
            with contextlib.suppress(ValueError):   # `put` took it out
                self._ending.remove(freed)

        last.on_done(end)


class HostTier(SwapTier):
    """One pinned buffer, cut into extents. Not for a device whose memory is the host's."""

    def __init__(self, pool: PinnedPool, nbytes: int, streams: Streams, watcher: EventWatcher):
        super().__init__()
        self._pool, self._streams, self._watcher = pool, streams, watcher
        self._arena = pool.alloc(nbytes, "swapped activations")   # (nbytes,) uint8, pinned host
        self.space = Extents(self._arena.numel())

    def _try_put(self, flat: Tensor) -> SwapCopy | None:
        nbytes = flat.numel()
        offset = self.space.take(nbytes)
        if offset is None:
            return None
        place = self._arena[offset:offset + nbytes]
        return _HostCopy(self, offset, place, self._watcher.watch(self._streams.d2h(place, flat)))

    @property
    def used_bytes(self) -> int:
        return self.space.used_bytes

    @property
    def peak_bytes(self) -> int:
        return self.space.peak_bytes

    def fetch(self, place: Tensor, dst: Tensor, mark: Any) -> tuple[Event, Work]:
        event = self._streams.h2d(dst, place, after=mark)
        return event, self._watcher.watch(event)

    def drain(self) -> None:
        """The watcher's own end does it."""

    def close(self) -> None:
        if self._arena is not None:
            self._pool.free(self._arena)
            self._arena = None


class _HostCopy(SwapCopy):
    def __init__(self, tier: HostTier, offset: int, place: Tensor, left: Work):
        self._tier, self._offset, self._place = tier, offset, place   # place: (nbytes,) uint8, pinned host
        self.left = self.written = self._last = left

    def fetch(self, dst: Tensor, mark: Any) -> Work:
        self.left.wait()
        event, self._last = self._tier.fetch(self._place, dst, mark)
        return Work.completed([event])

    def hurry(self) -> None:
        """It has begun."""

    def drop(self) -> None:
        give = functools.partial(self._tier.space.give, self._offset, self._place.numel())
        self._tier.free_after(self._last, give)
