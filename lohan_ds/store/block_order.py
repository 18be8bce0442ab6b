"""`BlockOrder`: in which order the operations on one block may touch its bytes. No bytes here, no I/O.

[Note: order of a block] A block is PUBLISHED, UPDATING or FAILED.

    announce: PUBLISHED or FAILED -> UPDATING      publish: UPDATING -> PUBLISHED      fail: UPDATING -> FAILED

A read issued while UPDATING starts at `publish` (read after write). An update's writes start when the reads issued
*before* its `announce` have ended (write after read): the ones issued later wait for the update and must not be
waited for. So each read is entered into `_reads` the moment it is issued, and `announce` takes a picture of them.

[Note: slots] A block has one slot or two: places for all its bytes. With one, an update changes it in place. With
two, it reads the current one and writes all of the other, the *shadow*, which `publish` makes current. Then

* an update that is not published has changed nothing. It may be tried before it is known whether it shall happen (a
  *speculation*, while the block is PUBLISHED and read), and is dropped by doing nothing;
* the reads issued before `announce` are of the other slot than the update's writes, which need not wait for them. It
  is the *next* update's that must: it writes the slot they read. `_shadow_drained` stands for their end.

A read learns its slot from the publication it waited for, so it is of one slot as a whole, whatever is published
while it is under way. Edits change the current slot in place, alone with the block, and leave it current.

[Note: slots and commits] In a run with a name a slot may be what the last commit is of; see [Note: commits] in
commits.py. `commit` is then the Work of the open commit. A slot becomes current as part of it (`_since`), and the slot
that was current is free once it has ended: it counts as one more reader. An edit of a slot that became current under
another commit goes to a copy in the other slot.
"""
from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from lohan_ds.errors import StepError
from lohan_ds.work import Work


class UpdateSlots(NamedTuple):
    """Where an update finds and leaves the bytes of a block."""
    source: int    # the slot to read
    target: int    # the slot to write: the same one where the block has only one
    drained: Work  # done once nobody reads `target` any more


class EditSlots(NamedTuple):
    """Where an edit finds and leaves the bytes of a block."""
    source: int    # the slot with the values before
    target: int    # the slot to leave all values in: the same one, or to be made a copy of it


class BlockOrder:
    """Any thread. All fields but `_what` and `has_shadow` are under `_lock`; no Work is finished and nothing waits
    under it."""

    def __init__(self, what: str, num_slots: int = 1, current: int = 0, commit: Work | None = None):
        """`current`: the slot that holds the block; `commit`: the open one, if it is to be written as part of it."""
        self._what = what  # for messages: "block 7"
        self.has_shadow = num_slots == 2
        self._lock = threading.Lock()
        self._updating = False
        self._current = current              # the slot that is read; the other one, if any, is the shadow
        self._since = commit                 # the commit that `_current` became current with
        self._commit: Work | None = None     # of the update under way
        self._published = Work.completed(current)  # of the slot, when the update under way is published; or fails
        self._drained = Work.completed()     # finishes when the reads issued before the announcement have ended
        self._shadow_drained = Work.completed()  # finishes when the reads of the shadow have ended
        self._reads: set[Work] = set()       # one for each read that has not ended; none of them ever fails

    def announce(self, commit: Work | None = None, may_write: Work | None = None) -> None:
        """From now on reads wait for `publish`. Does not block. `may_write`: writes of a block without shadow wait for
        it too."""
        with self._lock:
            if self._updating:
                raise AssertionError(f"{self._what}: update announced twice")
            self._announce(commit, may_write)

    def publish(self) -> None:
        """The update is complete: its target is current from now on. Starts waiting reads, in this thread."""
        self._publish(flip=self.has_shadow)

    def fail(self, error: BaseException) -> None:
        """The update failed: waiting and later reads get a StepError with `error` as its cause, until `announce`."""
        failure = StepError(f"{self._what}: its update failed: {error}")
        failure.__cause__ = error
        with self._lock:
            published = self._end_update()
        published.fail(failure)

    def abandon(self, error: BaseException) -> None:
        """Wakes whoever waits for an update under way, with `error`; nothing if there is none."""
        with self._lock:
            if not self._updating:
                return
            self._updating = False
            published = self._published
        published.fail(error)

    def update_slots(self, speculative: bool = False, ahead: bool = False) -> UpdateSlots:
        """Of the update under way or, for a block with a shadow, of a speculation; `ahead`: of the next one, whichever
        it will be. Does not block.

        StepError if no update is announced, but for speculations; AssertionError for those if there is no shadow.
        """
        if speculative and not self.has_shadow:
            raise AssertionError(f"{self._what}: speculative update of a block without shadow slot")
        with self._lock:
            if not speculative and not ahead and not self._updating:
                raise StepError(f"{self._what}: chunk of an update asked for, but no update is announced")
            if self.has_shadow:
                return UpdateSlots(self._current, 1 - self._current, self._shadow_drained)
            return UpdateSlots(0, 0, self._drained)

    def current_slot(self) -> int:
        """As the last publication left it."""
        with self._lock:
            return self._current

    def published(self) -> Work:
        """Of the slot, done while no update is under way; fails with a StepError if the last one failed."""
        with self._lock:
            return self._published

    def wait_published(self) -> None:
        """Blocks while an update is under way; StepError if the last one failed."""
        self.published().wait()

    def read(self, start: Callable[[int], Work]) -> Work:
        """Calls `start` with the slot to read when reads may start (here, or in the publishing thread); the work of
        what it returns."""
        published, token = self._enter_read()
        work = published.then(start)
        work.on_done(lambda: self._leave_read(token))  # on failure too, so not by `then`
        return work

    @contextmanager
    def reading(self) -> Iterator[int]:
        """For a synchronous read, in the body, of the slot it gives: blocks for the publication; later writes of that
        slot wait for it."""
        published, token = self._enter_read()
        try:
            yield published.wait()
        finally:
            self._leave_read(token)

    @contextmanager
    def editing(self, replaces_all: bool = False, commit: Work | None = None,
                may_write: Work | None = None) -> Iterator[EditSlots]:
        """For a synchronous write, in the body, of the slot `target`; blocks until it is alone with that.

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
                    copies = self.has_shadow and commit is not self._since
                    self._announce(commit, None if self.has_shadow else may_write)
                    drained, slot = self._shadow_drained if copies else self._drained, self._current
                    break
        try:
            drained.wait()
            yield EditSlots(slot, 1 - slot if copies else slot)
        except BaseException as error:
            self.fail(error)
            raise
        self._publish(flip=copies)

    def _announce(self, commit: Work | None, may_write: Work | None) -> None:
        self._updating, self._commit = True, commit
        self._published = Work()
        self._drained = Work.all_of([*self._reads, *([] if may_write is None else [may_write])])

    def _publish(self, flip: bool) -> None:
        with self._lock:
            published = self._end_update()
            if flip:
                free = [self._drained] if self._commit is None else [self._drained, self._commit]
                self._current, self._shadow_drained = 1 - self._current, Work.all_of(free)
                self._since = self._commit
            self._commit = None
            slot = self._current
        published.finish(slot)

    def _end_update(self) -> Work:
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
