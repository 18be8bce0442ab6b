"""`Streams`: the one interface through which all device copies and event waits go. Knows no blocks and no modules.

Three implementations: `InlineStreams` (CPU), `CudaStreams`, and `testing.delayed_streams.DelayedStreams`, which turns
a forgotten wait into a wrong number. staged_streams.py has one around another, for host memory that cannot be pinned.

[Note: what orders what]
An h2d copy writes memory that the allocator may have taken from a tensor whose last kernel is still queued on the
compute stream, so it runs after the work queued up to `compute_mark()`, taken in the training thread when the
destination was allocated, or when it was given back last (fetch_buffers.py). A d2h copy reads what compute produced, so
it runs after all compute work queued when it was submitted. Copies of one direction run in the order of submission.
Nothing else is ordered: whoever reads a destination in compute calls `compute_wait()` first; whoever reads it on the
host, or reuses or overwrites the *source* of a copy, calls `host_wait()` first (for a device-side source
`compute_wait()` is enough).
"""
from __future__ import annotations

import functools
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lohan_ds.errors import ConfigError


class Event(ABC):
    """One submitted copy. Holds source and destination until the copy is known to be over."""

    @abstractmethod
    def compute_wait(self) -> None:
        """Makes the compute stream of the calling thread wait for the copy; on a CPU, waits itself.

        Called from the training or autograd thread before queueing work that touches the copy's tensors.
        """

    @abstractmethod
    def host_wait(self) -> None:
        """Blocks the calling thread until the copy is over; raises what it failed with. Any thread."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the copy is over, without blocking. Any thread."""


class Streams(ABC):
    """Copies between host and one device. `unified` is fixed after construction, `on_copy` before the first copy."""

    unified: bool  # device memory is host memory: read straight into the device tensor, no staging copy needed
    on_copy: Callable[[str, Any, Any, int], None] | None = None   # for a recorder: "h2d" or "d2h", moments, bytes

    def moment(self) -> float | Callable[[], float | None]:
        """When all compute work queued so far is over, in seconds of time.perf_counter; a function that gives them,
        None if it is not over yet, where that is not known at once. Training or autograd thread."""
        return time.perf_counter()

    @abstractmethod
    def compute_mark(self) -> Any:
        """An opaque mark after all compute work queued so far. Training or autograd thread."""

    @abstractmethod
    def h2d(self, dst: Tensor, src: Tensor, after: Any = None) -> Event:
        """Starts copying `src` (host, pinned) into `dst` (device, same shape), after the compute work up to `after`.

        Any thread if `after` is given; without it the copy comes after all compute work of the calling thread so far.
        """

    @abstractmethod
    def d2h(self, dst: Tensor, src: Tensor, after: Any = None) -> Event:
        """Starts copying `src` (device) into `dst` (host, pinned, same shape); `after` and threads as for `h2d`."""

    @abstractmethod
    def close(self) -> None:
        """Waits for all copies. No copies may be started afterwards."""


def make_streams(device: torch.device | str) -> Streams:
    """The streams of the device that the model computes on."""
    device = torch.device(device)
    if device.type == "cpu":
        return InlineStreams()
    if device.type == "cuda":
        return CudaStreams(device)
    raise ConfigError(f"device: got {str(device)!r}, supported are 'cpu' and 'cuda'")


class _DoneEvent(Event):
    def compute_wait(self) -> None:
        pass

    def host_wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


class InlineStreams(Streams):
    """CPU: copies at once, in the calling thread."""

    unified = True

    def compute_mark(self) -> None:
        return None

    def h2d(self, dst: Tensor, src: Tensor, after: Any = None) -> Event:
        return self._copy_now("h2d", dst, src)

    def d2h(self, dst: Tensor, src: Tensor, after: Any = None) -> Event:
        return self._copy_now("d2h", dst, src)

    def close(self) -> None:
        pass

    def _copy_now(self, direction: str, dst: Tensor, src: Tensor) -> Event:
        assert dst.shape == src.shape, (dst.shape, src.shape)
        start = time.perf_counter() if self.on_copy is not None else 0.0
        with torch.no_grad():
            dst.copy_(src)
        if self.on_copy is not None:
            self.on_copy(direction, start, time.perf_counter(), dst.nbytes)
        return _DoneEvent()


class _CudaEvent(Event):
    """`_tensors` is (dst, src) until the copy is known to be over, then None; a plain store, so no lock."""

    def __init__(self, event: torch.cuda.Event, dst: Tensor, src: Tensor):
        self._event = event
        self._device = dst.device if dst.is_cuda else src.device
        self._tensors: tuple[Tensor, Tensor] | None = (dst, src)

    def compute_wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def host_wait(self) -> None:
        self._event.synchronize()
        self._tensors = None

    def done(self) -> bool:
        if not self._event.query():
            return False
        self._tensors = None
        return True


class CudaStreams(Streams):
    """One side stream per direction.

    The device tensors of a copy belong to the allocator's pool of the compute stream. They stay alive in `_in_flight`
    until their copy is over, even if the caller drops the Event, so the allocator never hands their memory out under a
    running copy and `record_stream` is not needed. A caller may therefore free them at any time.

    Fixed after construction: `unified`, device, streams. Under `_lock`: `_in_flight`.
    """

    unified = False

    def __init__(self, device: torch.device | str):
        device = torch.device(device)
        if device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._h2d_stream = torch.cuda.Stream(device)
        self._d2h_stream = torch.cuda.Stream(device)
        self._clock: _DeviceClock | None = None
        self._lock = threading.Lock()
        self._in_flight: dict[torch.cuda.Stream, deque[_CudaEvent]] = {
            self._h2d_stream: deque(), self._d2h_stream: deque()}  # in the order of submission

    def compute_mark(self) -> torch.cuda.Event:
        mark = torch.cuda.Event()
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def h2d(self, dst: Tensor, src: Tensor, after: torch.cuda.Event | None = None) -> Event:
        assert dst.device == self._device and not src.is_cuda, (dst.device, src.device)
        return self._copy("h2d", self._h2d_stream, dst, src, after if after is not None else self.compute_mark())

    def d2h(self, dst: Tensor, src: Tensor, after: torch.cuda.Event | None = None) -> Event:
        assert src.device == self._device and not dst.is_cuda, (dst.device, src.device)
        return self._copy("d2h", self._d2h_stream, dst, src, after if after is not None else self.compute_mark())

    def close(self) -> None:
        self._h2d_stream.synchronize()
        self._d2h_stream.synchronize()
        with self._lock:
            for events in self._in_flight.values():
                _drop_done(events)

    def moment(self) -> Callable[[], float | None]:
        return self._moment_on(torch.cuda.current_stream(self._device))

    def _moment_on(self, stream: torch.cuda.Stream) -> Callable[[], float | None]:
        if self._clock is None:
            self._clock = _DeviceClock(self._device)
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return functools.partial(self._clock.seconds, event)

    def _copy(self, direction: str, stream: torch.cuda.Stream, dst: Tensor, src: Tensor,
              after: torch.cuda.Event) -> Event:
        assert dst.shape == src.shape and dst.dtype == src.dtype, (dst.shape, src.shape, dst.dtype, src.dtype)
        events = self._in_flight[stream]
        with self._lock:  # keeps `events` in stream order; queueing a pinned copy does not block
            _drop_done(events)
            stream.wait_event(after)
            start = self._moment_on(stream) if self.on_copy is not None else None
            with torch.cuda.stream(stream), torch.no_grad():
                dst.copy_(src, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(stream)
            if self.on_copy is not None:
                self.on_copy(direction, start, self._moment_on(stream), dst.nbytes)
            event = _CudaEvent(copied, dst, src)
            events.append(event)
        return event


class _DeviceClock:
    """Seconds of time.perf_counter for timing events of a device. Waits for the device once, when it is made.

    An elapsed time is a float32 of milliseconds: the origin moves on every minute to stay exact to microseconds.
    """

    def __init__(self, device: torch.device):
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(torch.cuda.current_stream(device))
        self._origin.synchronize()
        self._origin_s = time.perf_counter()

    def seconds(self, event: torch.cuda.Event) -> float | None:
        """When `event` passed; None if it has not."""
        if not event.query():
            return None
        elapsed_s = self._origin.elapsed_time(event) / 1e3
        seconds = self._origin_s + elapsed_s
        if elapsed_s > 60:
            self._origin, self._origin_s = event, seconds
        return seconds


def _drop_done(events: deque[_CudaEvent]) -> None:
    while events and events[0].done():
        events.popleft()
