"""`Work`: the one shape of "in flight".

Whatever runs in the background (a read, a write, a copy, an update) is handed back as a `Work`. Whoever holds
a `Work` also holds, through it, the buffers the operation touches.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any


class Work:
    """A result that may not be there yet.

    `wait()` may be called from any thread and any number of times. `then()` callbacks run in the thread that
    finishes the work, so they must be short and must not block.
    """

    def __init__(self, future: Future | None = None, holds: Any = None):
        self._future: Future = Future() if future is None else future
        self._holds = holds  # buffers kept alive for as long as this Work is

    @classmethod
    def completed(cls, value: Any = None) -> Work:
        work = cls()
        work.finish(value)
        return work

    @classmethod
    def all_of(cls, works: Iterable[Work], value: Any = None) -> Work:
        """A Work that is done, with `value`, once all `works` are; it fails with the first failure (by position)."""
        works = list(works)
        joint = cls(holds=works)
        remaining = len(works)
        if remaining == 0:
            joint.finish(value)
            return joint
        lock = threading.Lock()

        def one_done(_: Future) -> None:
            nonlocal remaining
            with lock:
                remaining -= 1
                last = remaining == 0
            if not last:
                return
            failed = next((w.exception() for w in works if w.exception() is not None), None)
            if failed is not None:
                joint.fail(failed)
            else:
                joint.finish(value)

        for work in works:
            work._future.add_done_callback(one_done)
        return joint

    def then(self, fn: Callable[[Any], Any]) -> Work:
        """A Work for `fn(result)`; `fn` may itself return a Work, which is then awaited. Failures pass through."""
        follow = Work(holds=self)

        def run(future: Future) -> None:
            error = future.exception()
            if error is not None:
                follow.fail(error)
                return
            try:
                value = fn(future.result())
            except BaseException as raised:  # noqa: BLE001 - handed to whoever waits
                follow.fail(raised)
                return
            if isinstance(value, Work):
                value._future.add_done_callback(
                    lambda f: follow.fail(f.exception()) if f.exception() else follow.finish(f.result()))
                follow._holds = (self, value)
            else:
                follow.finish(value)

        self._future.add_done_callback(run)
        return follow

    def on_done(self, fn: Callable[[], Any]) -> None:
        """Calls `fn()` once the work has ended, well or not; at once if it has already."""
        self._future.add_done_callback(lambda _: fn())

    def finish(self, value: Any = None) -> None:
        self._future.set_result(value)

    def fail(self, error: BaseException) -> None:
        self._future.set_exception(error)

    def exception(self) -> BaseException | None:
        """The failure of a *finished* work, None if it succeeded."""
        return self._future.exception()

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> Any:
        """Blocks until done; returns the value or raises what the work failed with."""
        return self._future.result()
