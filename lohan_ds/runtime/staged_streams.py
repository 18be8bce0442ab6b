"""`StagedStreams`: other streams, also for host memory that is not pinned.

A copy from or to such memory would hold up the thread that starts it until all compute before it is over. Here it
passes piece by piece through a few pinned buffers (`PinnedPool.staging`) in a thread per direction: while one piece is
on the link, the CPU copies the next. As long as everything is pinned all calls go straight to the streams inside.
"""
from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lohan_ds.memory.pinned_pool import NUM_STAGING, BufferRing, PinnedPool
from lohan_ds.runtime.streams import Event, Streams
from lohan_ds.work import Work


class _StagedEvent(Event):
    """`queued` ends with the event of the last piece, `over` when nothing is left to do but to wait for that."""

    def __init__(self, holds: Any):
        self.queued, self.over = Work(holds), Work(holds)

    def compute_wait(self) -> None:
        """Blocks until the last piece is on the link."""
        self.queued.wait().compute_wait()

    def host_wait(self) -> None:
        self.over.wait()
        self.queued.wait().host_wait()

    def done(self) -> bool:
        return self.over.done() and (self.over.exception() is not None or self.queued.wait().done())


class _Direction:
    """Carries out the copies of one direction, in the order of submission. Everything but `submit` is of its thread."""

    def __init__(self, kind: str, inner: Streams, pool: PinnedPool):
        self._is_h2d = kind == "h2d"
        self._copy = getattr(inner, kind)
        self._pool = pool
        self._ring: BufferRing | None = None
        self._free: list[Tensor] = []                                # (nbytes,) uint8, pinned host
        self._in_flight: deque[tuple[Event, Tensor, Tensor]] = deque()   # its event, the buffer, where it goes to
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"lohan-{kind}", daemon=True)
        self._thread.start()

    def submit(self, dst: Tensor, src: Tensor, after: Any) -> Event:
        event = _StagedEvent((dst, src))
        self._jobs.put((event, dst, src, after))
        return event

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            event, dst, src, after = job
            try:
                last = self._carry_out(dst, src, after)
                event.queued.finish(last)
                while not self._is_h2d and self._in_flight:
                    self._land()
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                if not event.queued.done():
                    event.queued.fail(error)
                event.over.fail(error)
            else:
                event.over.finish()
            del job, event, dst, src   # not held while waiting for the next
        while self._in_flight:
            self._land()
        for buffer in self._free:
            self._ring.release(buffer)

    def _carry_out(self, dst: Tensor, src: Tensor, after: Any) -> Event:
        """Queues all of the copy; returns the event of its last piece."""
        host = src if self._is_h2d else dst
        if self._pool.is_pinned(host) or not host.numel():
            return self._copy(dst, src, after)
        if self._ring is None:
            self._ring = self._pool.staging
            self._free = [self._ring.acquire() for _ in range(NUM_STAGING // 2)]
        last = None
        for to, source in zip(_pieces(dst, self._ring.nbytes), _pieces(src, self._ring.nbytes), strict=True):
            buffer = self._take()
            try:
                piece = buffer[:to.numel()]
                last = self._copy(to, piece.copy_(source), after) if self._is_h2d else self._copy(piece, source, after)
            except BaseException:
                self._free.append(buffer)
                raise
            self._in_flight.append((last, buffer, to))
        return last

    def _take(self) -> Tensor:
        while not self._free:
            self._land()
        return self._free.pop()

    def _land(self) -> None:
        """The oldest piece under way has arrived, and its buffer is free."""
        event, buffer, to = self._in_flight.popleft()
        try:
            event.host_wait()
            if not self._is_h2d:
                to.copy_(buffer[:to.numel()])
        finally:
            self._free.append(buffer)


def _pieces(tensor: Tensor, nbytes: int) -> tuple[Tensor, ...]:
    """uint8 views of at most `nbytes`."""
    return tensor.detach().view(-1).view(torch.uint8).split(nbytes)


class StagedStreams(Streams):
    """See the file's docstring. Takes over `inner`, which must not be unified."""

    unified = False

    def __init__(self, inner: Streams, pool: PinnedPool):
        """Close it before the pool."""
        self._inner, self._pool = inner, pool
        self._lock = threading.Lock()
        self._directions: dict[str, _Direction] = {}   # under `_lock`; made when they are needed

    @property
    def on_copy(self) -> Callable[[str, Any, Any, int], None] | None:
        return self._inner.on_copy

    @on_copy.setter
    def on_copy(self, on_copy: Callable[[str, Any, Any, int], None] | None) -> None:
        self._inner.on_copy = on_copy

    def moment(self) -> float | Callable[[], float | None]:
        return self._inner.moment()

    def compute_mark(self) -> Any:
        return self._inner.compute_mark()

    def h2d(self, dst: Tensor, src: Tensor, after: Any = None) -> Event:
        return self._start("h2d", dst, src, after)

    def d2h(self, dst: Tensor, src: Tensor, after: Any = None) -> Event:
        return self._start("d2h", dst, src, after)

    def close(self) -> None:
        with self._lock:
            directions, self._directions = self._directions, {}
        for direction in directions.values():
            direction.close()
        self._inner.close()

    def _start(self, kind: str, dst: Tensor, src: Tensor, after: Any) -> Event:
        """Once there is staging every copy takes its turn in the thread, so that their order stays."""
        if self._pool.staging is None:
            return getattr(self._inner, kind)(dst, src, after)
        if after is None:
            after = self._inner.compute_mark()
        with self._lock:
            if kind not in self._directions:
                self._directions[kind] = _Direction(kind, self._inner, self._pool)
            return self._directions[kind].submit(dst, src, after)
