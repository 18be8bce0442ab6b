"""`BlockOrder`: in which order the operations on one block may touch its bytes. No bytes here, no I/O.

[Note: order of a block] A block is PUBLISHED, UPDATING or FAILED.

    announce: PUBLISHED or FAILED -> UPDATING      publish: UPDATING -> PUBLISHED      fail: UPDATING -> FAILED

A read issued while UPDATING starts at `publish` (read after write). An update's writes start when the reads issued
*before* its `announce` have ended (write after read): the ones issued later wait for the update and must not be
waited for. So each read is entered into `_reads` the moment it is issued, and `announce` takes a picture of them.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lohan_ds.errors import StepError
from lohan_ds.work import Work


class BlockOrder:
    """Any thread. All fields but `_what` are under `_lock`; no Work is finished and nothing waits under it."""

    def __init__(self, what: str):
        self._what = what  # for messages: "block 7"
        self._lock = threading.Lock()
        self._updating = False
        self._published = Work.completed()  # finishes when the update under way is published, fails when it fails
        self._drained = Work.completed()    # finishes when the reads issued before the announcement have ended
        self._reads: set[Work] = set()      # one for each read that has not ended; none of them ever fails

    def announce(self) -> None:
        """From now on reads wait for `publish`. Does not block."""
        with self._lock:
            if self._updating:
                raise AssertionError(f"{self._what}: update announced twice")
            self._announce()

    def publish(self) -> None:
        """The update is complete. Starts waiting reads, in this thread."""
        self._end_update().finish()

    def fail(self, error: BaseException) -> None:
        """The update failed: waiting and later reads get a StepError with `error` as its cause, until `announce`."""
        failure = StepError(f"{self._what}: its update failed: {error}")
        failure.__cause__ = error
        self._end_update().fail(failure)

    def abandon(self, error: BaseException) -> None:
        """Wakes whoever waits for an update under way, with `error`; nothing if there is none."""
        with self._lock:
            if not self._updating:
                return
            self._updating = False
            published = self._published
        published.fail(error)

    def drained(self) -> Work:
        """Of the update under way: done once its writes may start. StepError if no update is announced."""
        with self._lock:
            if not self._updating:
                raise StepError(f"{self._what}: chunk of an update asked for, but no update is announced")
            return self._drained

    def wait_published(self) -> None:
        """Blocks while an update is under way; StepError if the last one failed."""
        with self._lock:
            published = self._published
        published.wait()

    def read(self, start: Callable[[], Work]) -> Work:
        """Calls `start` when reads may start (here, or in the publishing thread); the work of what it returns."""
        published, token = self._enter_read()
        work = published.then(lambda _: start())
        work.on_done(lambda: self._leave_read(token))  # on failure too, so not by `then`
        return work

    @contextmanager
    def reading(self) -> Iterator[None]:
        """For a synchronous read in the body: blocks for the publication; updates announced later wait for it."""
        published, token = self._enter_read()
        try:
            published.wait()
            yield
        finally:
            self._leave_read(token)

    @contextmanager
    def editing(self, replaces_all: bool = False) -> Iterator[None]:
        """For a synchronous write in the body, which is alone with the block; blocks until it is.

        An exception in the body leaves the block FAILED. A block that already is raises StepError unless the body
        `replaces_all` of it.
        """
        while True:
            with self._lock:
                published = self._published
            try:
                published.wait()
            except StepError:
                if not replaces_all:
                    raise
            with self._lock:
                if not self._updating:
                    self._announce()
                    drained = self._drained
                    break
        try:
            drained.wait()
            yield
        except BaseException as error:
            self.fail(error)
            raise
        self.publish()

    def _announce(self) -> None:
        self._updating = True
        self._published = Work()
        self._drained = Work.all_of(self._reads)

    def _end_update(self) -> Work:
        with self._lock:
            if not self._updating:
                raise AssertionError(f"{self._what}: end of an update that was not announced")
            self._updating = False
            return self._published

    def _enter_read(self) -> tuple[Work, Work]:
        token = Work()
        with self._lock:
            self._reads.add(token)
            return self._published, token

    def _leave_read(self, token: Work) -> None:
        with self._lock:
            self._reads.discard(token)
        token.finish()
