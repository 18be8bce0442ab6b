"""`DelayedStreams`: a device made of CPU tensors on which every forgotten wait gives a wrong number.

Copies run on a worker thread per direction, in the order of submission like a CUDA stream, each after a random delay.
The destination is filled with 0xFF bytes (nan in every float type) at submission and stays so until the copy. The
source is read only when the copy happens: overwriting it too early is a bug that shows, so it is not protected.
"""
from __future__ import annotations

import queue
import random
import threading
import time
from typing import Any

import torch
from torch import Tensor

from lohan_ds.runtime.streams import Event, Streams

KINDS = ("h2d", "d2h")


class _DelayedEvent(Event):
    """One copy. Fixed after construction: all but `error` and `tensors`, which the worker sets before `finished`."""

    def __init__(self, lane: _Lane, dst: Tensor, src: Tensor, delay_s: float, is_held: bool):
        self.tensors: tuple[Tensor, Tensor] | None = (dst, src)
        self.delay_s = delay_s
        self.is_held = is_held              # waits for a wait: see DelayedStreams.drop_one_wait_at
        self.finished = threading.Event()
        self.error: BaseException | None = None
        self.nbytes = dst.nbytes
        self._lane = lane

    def compute_wait(self) -> None:
        self.host_wait()

    def host_wait(self) -> None:
        if self._lane.drops_wait_of(self):
            return
        self.finished.wait()
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        return self.finished.is_set()


class _Lane:
    """The stream of one direction.

    Fixed after construction: kind, delays, queue, thread. Under `_lock`: `_rng`, `_serials`, `_num_submitted`,
    `num_waits`, `drop_at`, `dropped`, `_demanded` (the serial number up to which copies have been waited for).
    Of the worker: `first_error`.
    """

    def __init__(self, kind: str, seed: int, max_delay_s: float, held_delay_s: float):
        self.kind = kind
        self.on_copy = None
        self.num_waits = 0
        self.drop_at: int | None = None
        self.dropped = False
        self.first_error: BaseException | None = None
        self._rng = random.Random(f"{seed}/{kind}")
        self._max_delay_s = max_delay_s
        self._held_delay_s = held_delay_s
        self._lock = threading.Condition()
        self._serials: dict[_DelayedEvent, int] = {}   # not yet waited for
        self._num_submitted = 0
        self._demanded = -1
        self._queue: queue.SimpleQueue[tuple[int, _DelayedEvent] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"delayed-{kind}", daemon=True)
        self._thread.start()

    def submit(self, dst: Tensor, src: Tensor) -> _DelayedEvent:
        assert dst.shape == src.shape, (dst.shape, src.shape)
        dst, src = dst.detach(), src.detach()
        _poison(dst)
        with self._lock:
            event = _DelayedEvent(self, dst, src, self._rng.uniform(0, self._max_delay_s), self.drop_at is not None)
            self._serials[event] = self._num_submitted
            self._queue.put((self._num_submitted, event))
            self._num_submitted += 1
        return event

    def drops_wait_of(self, event: _DelayedEvent) -> bool:
        """Counts the first wait for each copy; True if this is the one to skip. Else lets the copy go ahead."""
        with self._lock:
            serial = self._serials.pop(event, None)
            if serial is None:
                return False                # waited for before
            self.num_waits += 1
            if self.drop_at is not None and not self.dropped and self.num_waits == self.drop_at:
                self.dropped = True
                self._serials[event] = serial
                return True
            self._demanded = max(self._demanded, serial)
            self._lock.notify_all()
            return False

    def close(self) -> None:
        with self._lock:
            self._demanded = self._num_submitted
            self._lock.notify_all()
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            serial, event = item
            start = time.perf_counter()
            if event.is_held:
                with self._lock:
                    self._lock.wait_for(lambda: self._demanded >= serial, timeout=self._held_delay_s)
            time.sleep(event.delay_s)
            dst, src = event.tensors
            try:
                _check_alive(dst)
                _check_alive(src)
                dst.copy_(src)
            except BaseException as raised:  # noqa: BLE001 - handed to whoever waits
                event.error = raised
                self.first_error = self.first_error or raised
            event.tensors = None
            del dst, src   # not held while waiting for the next
            if self.on_copy is not None:
                self.on_copy(self.kind, start, time.perf_counter(), event.nbytes)
            event.finished.set()


class DelayedStreams(Streams):
    """See the file's docstring. `close()` raises the first copy that failed."""

    unified = False

    def __init__(self, seed: int, max_delay_s: float = 0.005, held_delay_s: float = 0.5):
        """held_delay_s: how long after its turn an unwaited copy still comes once `drop_one_wait_at` was called."""
        self._lanes = {kind: _Lane(kind, seed, max_delay_s, held_delay_s) for kind in KINDS}

    @property
    def on_copy(self):
        return self._lanes["h2d"].on_copy

    @on_copy.setter
    def on_copy(self, on_copy) -> None:
        for lane in self._lanes.values():
            lane.on_copy = on_copy

    def compute_mark(self) -> None:
        return None                          # compute on a CPU is over when the call returns

    def h2d(self, dst: Tensor, src: Tensor, after: Any = None) -> Event:
        return self._lanes["h2d"].submit(dst, src)

    def d2h(self, dst: Tensor, src: Tensor, after: Any = None) -> Event:
        return self._lanes["d2h"].submit(dst, src)

    def drop_one_wait_at(self, n: int, kind: str) -> None:
        """Skips the n-th wait (1 is the next) for a copy of that kind, to prove that a test can fail.

        Only the first wait for a copy counts; later ones are not needed. From here on copies of the kind start only
        when they, or later ones, are waited for, or `held_delay_s` after their turn. So the skipped wait always
        matters, however slow the caller is.
        """
        assert kind in KINDS and n >= 1, (n, kind)
        lane = self._lanes[kind]
        with lane._lock:
            assert lane.drop_at is None, "only one wait can be dropped"
            lane.drop_at = lane.num_waits + n

    def num_waits(self, kind: str) -> int:
        """Copies of that kind that were waited for so far: the range of `n` in `drop_one_wait_at`."""
        return self._lanes[kind].num_waits

    def dropped(self) -> bool:
        """Whether the wait to skip was reached."""
        return any(lane.dropped for lane in self._lanes.values())

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        for lane in self._lanes.values():
            if lane.first_error is not None:
                raise lane.first_error


def _poison(dst: Tensor) -> None:
    if dst.is_contiguous():
        dst.reshape(-1).view(torch.uint8).fill_(0xFF)
    else:
        dst.fill_(float("nan"))


def _check_alive(tensor: Tensor) -> None:
    """A released tensor has an empty storage; copying it would read or write memory that is not ours."""
    last = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    needed_bytes = (last + 1) * tensor.element_size() if tensor.numel() else 0
    got_bytes = tensor.untyped_storage().nbytes()
    assert got_bytes >= needed_bytes, f"a copy's tensor was freed: {needed_bytes} bytes needed, {got_bytes} there"
