"""`IoThreads`: a few threads that do the most urgent thing first."""
from __future__ import annotations

import enum
import itertools
import queue
import threading
import weakref
from collections.abc import Callable

from lohan_ds.work import Work


class Urgency(enum.IntEnum):
    """Of a request, the most urgent first; equal ones in the order in which they came."""
    FETCH = 0    # compute waits for it, or soon will
    UPDATE = 1   # of optimizer state
    AHEAD = 2    # in case it is needed


class IoThreads:
    """Any thread. Its threads end with it, closed or not."""

    def __init__(self, num_threads: int, name: str = "lohan-ssd-io"):
        self._queue: queue.PriorityQueue = queue.PriorityQueue()
        self._count = itertools.count()
        self._threads = [threading.Thread(target=_run, args=(self._queue,), name=f"{name}_{place}", daemon=True)
                         for place in range(num_threads)]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _end_each, self._queue, num_threads)
        self._end.atexit = False   # whoever still needs them then comes later

    def submit(self, urgency: Urgency, fn: Callable[..., None], *args: object, holds: object = None) -> Work:
        """Work that ends when `fn(*args)` has returned, or fails with what it raised. Never blocks."""
        work = Work(holds)
        self._queue.put((urgency, next(self._count), work, fn, args))
        return work

    def close(self) -> None:
        """Waits for all that was submitted, ends the threads. Idempotent."""
        self._end()
        for thread in self._threads:
            thread.join()


def _end_each(requests: queue.PriorityQueue, num_threads: int) -> None:
    for place in range(num_threads):   # after everything else
        requests.put((len(Urgency), place, None, None, ()))


def _run(requests: queue.PriorityQueue) -> None:
    while True:
        _, _, work, fn, args = requests.get()
        if work is None:
            return
        try:
            fn(*args)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            work.fail(error)
        else:
            work.finish()
        del work, fn, args   # else an idle thread would keep the buffers
