"""`PacedStreams`: the streams of a device that is not there. Compute and copies take their time, and are queued.

[Note: a device of clocks]
As on an accelerator, the training thread runs ahead: compute and copies are submitted and take place later, each kind
in the order of submission, a copy after the compute that it depends on, compute after the copies that it waits for.
Only the *time* is late, though: the bytes move at once, in the calling thread, which is right because at submission
source and destination are as they will be when the copy's turn comes ([Note: what orders what] in runtime/streams.py).
So a missing wait shows as seconds here, never as a wrong number; those are testing.delayed_streams' business.

Every lane keeps a nominal time: what is submitted begins when the lane is free, it has been submitted and what it
waits for is over. Threads that wake up late do not add up.
"""
from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lohan_ds.runtime.streams import Event, Streams


class LaneEvent(Event):
    """Something submitted to a lane. Fixed after construction: all but `start_s` and `end_s` (time.perf_counter), which
    its lane's thread sets before `_over`."""

    def __init__(self, streams: PacedStreams, seconds: float, after: LaneEvent | None):
        self.start_s = self.end_s = 0.0
        self.seconds, self.submitted_s = seconds, time.perf_counter()
        self._streams, self._after = streams, after
        self._over = threading.Event()

    def compute_wait(self) -> None:
        if not self._over.is_set():
            self._streams.compute_waits_for(self)

    def host_wait(self) -> None:
        self._over.wait()

    def done(self) -> bool:
        return self._over.is_set()

    def run(self, free_s: float) -> float:
        """In the lane's thread, which was free at `free_s`; when it is free again."""
        ready_s = max(free_s, self.submitted_s)
        if self._after is not None:
            self._after.host_wait()
            ready_s = max(ready_s, self._after.end_s)
            self._after = None
        self.start_s, self.end_s = ready_s, ready_s + self.seconds
        time.sleep(max(0.0, self.end_s - time.perf_counter()))
        return self.end_s

    def finish(self) -> None:
        self._over.set()


class _Lane:
    """One thing after the other, on a thread of its own."""

    def __init__(self, name: str):
        self._queue: queue.SimpleQueue[tuple[LaneEvent, Callable[[LaneEvent], None] | None] | None] = \
            queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"lohan-paced-{name}", daemon=True)
        self._thread.start()

    def submit(self, event: LaneEvent, on_end: Callable[[LaneEvent], None] | None = None) -> LaneEvent:
        self._queue.put((event, on_end))
        return event

    def close(self) -> None:
        """Waits for all that was submitted."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        free_s = 0.0
        while (item := self._queue.get()) is not None:
            event, on_end = item
            free_s = event.run(free_s)
            if on_end is not None:
                on_end(event)
            event.finish()


class PacedStreams(Streams):
    """See the file's docstring. Tensors are on the CPU. Of the training thread (and autograd's): `_last_compute`.

    Fixed before the first submission: `on_copy`, and `on_compute(name, start, end)`, called in the lane's thread for
    all that computes and, as name None, for the time that compute waited for a copy.
    """

    unified = False
    on_compute: Callable[[str | None, float, float], None] | None = None

    def __init__(self, h2d_bytes_per_s: float, d2h_bytes_per_s: float):
        self._bytes_per_s = {"h2d": h2d_bytes_per_s, "d2h": d2h_bytes_per_s}
        self._lanes = {name: _Lane(name) for name in ("compute", "h2d", "d2h")}
        self._last_compute: LaneEvent | None = None
        self._compute_free_s = 0.0           # of the compute lane's thread

    def compute(self, name: str, seconds: float) -> None:
        """Queues `seconds` of compute. Training or autograd thread."""
        event = LaneEvent(self, seconds, None)
        self._last_compute = self._lanes["compute"].submit(event, lambda event: self._computed(name, event))

    def compute_waits_for(self, copy: LaneEvent) -> None:
        """What is queued from now on begins after the copy. Training or autograd thread."""
        event = LaneEvent(self, 0.0, copy)
        self._last_compute = self._lanes["compute"].submit(event, lambda event: self._computed(None, event))

    def _computed(self, name: str | None, event: LaneEvent) -> None:
        start = event.start_s if name is not None else max(self._compute_free_s, event.submitted_s)
        if self.on_compute is not None and event.end_s > start:
            self.on_compute(name, start, event.end_s)
        self._compute_free_s = event.end_s

    def compute_mark(self) -> LaneEvent | None:
        return self._last_compute

    def moment(self) -> float | Callable[[], float | None]:
        mark, now = self._last_compute, time.perf_counter()
        if mark is None or mark.done():
            return now
        return lambda: max(now, mark.end_s) if mark.done() else None

    def h2d(self, dst: Tensor, src: Tensor, after: LaneEvent | None = None) -> Event:
        return self._copy("h2d", dst, src, after)

    def d2h(self, dst: Tensor, src: Tensor, after: LaneEvent | None = None) -> Event:
        return self._copy("d2h", dst, src, after if after is not None else self.compute_mark())

    @torch.no_grad()
    def _copy(self, direction: str, dst: Tensor, src: Tensor, after: LaneEvent | None) -> LaneEvent:
        assert dst.shape == src.shape and dst.dtype == src.dtype, (dst.shape, src.shape, dst.dtype, src.dtype)
        nbytes = dst.nbytes
        dst.copy_(src)
        event = LaneEvent(self, nbytes / self._bytes_per_s[direction], after)
        return self._lanes[direction].submit(event, lambda event: self._copied(direction, event, nbytes))

    def _copied(self, direction: str, event: LaneEvent, nbytes: int) -> None:
        if self.on_copy is not None:
            self.on_copy(direction, event.start_s, event.end_s, nbytes)

    def close(self) -> None:
        for name in ("compute", "h2d", "d2h"):
            self._lanes[name].close()
