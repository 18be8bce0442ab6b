"""`Work`: the one shape of "in flight".

Whatever runs in the background (a read, a write, a copy, an update) is handed back as a `Work`. Whoever holds
a `Work` also holds, through it, the buffers the operation touches.

[Note: no cycles] Once a work has ended it refers to nothing but its result: callbacks and held buffers are let go.
`concurrent.futures.Future` keeps its callbacks, and through them every buffer of a chain of works, until Python's
cyclic collector happens to run: a whole set of parameters per step.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any


class Work:
    """A result that may not be there yet.

    `wait()` may be called from any thread and any number of times. Callbacks run in the thread that ends the work
    (or at once, in the caller's, when it has ended), so they must be short and must not block or raise.
    """
    __slots__ = ("_ended", "_lock", "_callbacks", "_value", "_error", "_holds", "__weakref__")

    def __init__(self, holds: Any = None):
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], Any]] = []
        self._value: Any = None
        self._error: BaseException | None = None
        self._holds = holds  # buffers kept alive until the work has ended

    @classmethod
    def completed(cls, value: Any = None) -> Work:
        work = cls()
        work.finish(value)
        return work

    @classmethod
    def of_future(cls, future: Future, holds: Any = None) -> Work:
        """The work that an executor's future stands for. `holds`: the buffers it touches."""
        work = cls(holds)

        def settle(ended: Future) -> None:
            error = ended.exception()
            work.finish(ended.result()) if error is None else work.fail(error)

        future.add_done_callback(settle)
        return work

    @classmethod
    def all_of(cls, works: Iterable[Work], value: Any = None) -> Work:
        """A Work that ends, with `value`, once all `works` have; it fails with the first failure (by position)."""
        works = list(works)
        joint = cls(holds=works)
        remaining = len(works)
        if remaining == 0:
            joint.finish(value)
            return joint
        lock = threading.Lock()

        def one_done() -> None:
            nonlocal remaining
            with lock:
                remaining -= 1
                if remaining:
                    return
            failed = next((w._error for w in works if w._error is not None), None)
            joint.finish(value) if failed is None else joint.fail(failed)

        for work in works:
            work.on_done(one_done)
        return joint

    @classmethod
    def first_of(cls, works: Iterable[Work]) -> Work:
        """A Work that ends, without a failure, once one of `works` has ended, well or not."""
        first, lock, is_over = cls(), threading.Lock(), False

        def one_done() -> None:
            nonlocal is_over
            with lock:
                is_first, is_over = not is_over, True
            if is_first:
                first.finish()

        for work in works:
            work.on_done(one_done)
        return first

    def then(self, fn: Callable[[Any], Any]) -> Work:
        """A Work for `fn(result)`; `fn` may itself return a Work, which is then awaited. Failures pass through."""
        follow = Work(holds=self)

        def run() -> None:
            if self._error is not None:
                follow.fail(self._error)
                return
            try:
                value = fn(self._value)
            except BaseException as raised:  # noqa: BLE001 - handed to whoever waits
                follow.fail(raised)
                return
            if isinstance(value, Work):
                value.on_done(lambda: follow.finish(value._value) if value._error is None
                              else follow.fail(value._error))
            else:
                follow.finish(value)

        self.on_done(run)
        return follow

    def first_calling(self, fn: Callable[[], Any]) -> Work:
        """A Work that ends as this one does, once `fn()` has returned: whoever waits for it comes after that. A
        callback of this one would not do: who comes between its end and its callbacks is served at once."""
        follow = Work(holds=self)

        def end() -> None:
            fn()
            follow._end(self._value, self._error)

        self.on_done(end)
        return follow

    def on_done(self, fn: Callable[[], Any]) -> None:
        """Calls `fn()` once the work has ended, well or not; at once if it has already."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(fn)
                return
        fn()

    def finish(self, value: Any = None) -> None:
        self._end(value, None)

    def fail(self, error: BaseException) -> None:
        self._end(None, error)

    def _end(self, value: Any, error: BaseException | None) -> None:
        with self._lock:
            if self._ended.is_set():
                raise AssertionError("a work ends once")
            self._value, self._error = value, error
            callbacks, self._callbacks, self._holds = self._callbacks, [], None
            self._ended.set()
        for fn in callbacks:
            fn()

    def exception(self) -> BaseException | None:
        """Waits for the end; the failure, None if it succeeded."""
        self._ended.wait()
        return self._error

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> Any:
        """Blocks until the work has ended; returns the value or raises what it failed with."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._value
