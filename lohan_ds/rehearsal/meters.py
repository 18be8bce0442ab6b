"""What a rehearsal measures beside the recorder: bytes over the links, seconds of the device, updates at their pace."""
from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable

SHORTEST_WAIT_S = 5e-4
STATE_BYTES = 12   # of a parameter that Adam works on, as `Updater.on_span` counts

Interval = tuple[float, float]   # of time.perf_counter


class DeviceMeter:
    """Listens to `PacedStreams`. Under `_lock`: everything."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.nbytes: Counter[str] = Counter()   # by direction
        self.computing: list[Interval] = []
        self.waiting: list[Interval] = []       # the device had work, but not what it needs for it

    def on_compute(self, name: str | None, start_s: float, end_s: float) -> None:
        with self._lock:
            (self.waiting if name is None else self.computing).append((start_s, end_s))

    def on_copy(self, then: Callable[[str, float, float, int], None]) -> Callable[[str, float, float, int], None]:
        """A listener that counts, and tells `then`."""
        def count(direction: str, start_s: float, end_s: float, nbytes: int) -> None:
            with self._lock:
                self.nbytes[direction] += nbytes
            then(direction, start_s, end_s, nbytes)
        return count


class PacedUpdate:
    """Instead of `Updater.on_span`: makes each chunk's Adam take at least as long as `params_per_s` allow."""

    def __init__(self, params_per_s: float, then: Callable[[str, float, float, int, int | None], None]):
        self._params_per_s, self._then = params_per_s, then
        self.busy_s = 0.0
        self.num_params = 0
        self._over_s = self._awake_s = 0.0      # the last one: by the pace, and when its thread was told

    def __call__(self, name: str, start_s: float, end_s: float, nbytes: int, for_step: int | None) -> None:
        seconds = nbytes / STATE_BYTES / self._params_per_s
        if start_s - self._awake_s < SHORTEST_WAIT_S:   # its data was there: only this thread woke up late
            start_s = self._over_s
        self._over_s = max(end_s, start_s + seconds)
        time.sleep(max(0.0, self._over_s - time.perf_counter()))
        self._awake_s = time.perf_counter()
        self.busy_s += seconds
        self.num_params += nbytes // STATE_BYTES
        self._then(name, start_s, self._over_s, nbytes, for_step)


def covered_s(intervals: Iterable[Interval], begin_s: float, end_s: float) -> float:
    """Seconds of [begin, end) in at least one interval."""
    total, reached = 0.0, begin_s
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, end_s)
        if end > start:
            total += end - start
            reached = end
    return total
