"""`CrashingIo`: the thread I/O of a machine that dies at a chosen moment, and forgets what was not synced."""
from __future__ import annotations

import collections
import errno
import json
import os
import random
import re
import threading
import time
from typing import NamedTuple

from lohan_ds.store.filenames import CURRENT, MANIFEST, NEW_SUFFIX
from lohan_ds.store.ssd_io import ThreadSsdIo

_SECTOR_BYTES = 512


class Died(OSError):
    """What every call gets from the moment of the crash on."""


class _Write(NamedTuple):
    path: str
    offset: int
    before: bytes
    after: bytes


class CrashingIo(ThreadSsdIo):
    """Everything that reaches the disk is an event of some kind. Any thread; all fields are under `_disk`.

    At event `at`, (kind, how many of that kind were before it), the machine dies: a write leaves a random part of
    itself, anything else nothing, and all later events fail. If `at` is a number it dies when so many bytes of blocks
    have been written. With `error_number` only that one event fails, with that error, and nothing else.

    Writes of a block are told apart by what the test says of the steps: the first one into a slot that held a step
    before is a "slot reuse", the others are of an update that its step has not decided yet, or of a trailing one.
    """

    def __init__(self, num_threads: int, at: tuple[str, int] | int | None = None, seed: int = 0,
                 error_number: int | None = None, sync_delay_s: float = 0.0):
        """`sync_delay_s`: a sync takes up to so long, as on a real drive."""
        super().__init__(num_threads)
        self._sync_delay_s = sync_delay_s
        self._disk = threading.RLock()
        self._random = random.Random(seed)
        self._at, self._error_number = at, error_number
        self._unsynced: dict[int, list[_Write]] = {}         # by file descriptor, in order
        self._renames: list[tuple[str, str, bytes | None]] = []   # not synced: source, target, what the target was
        self._step_of_update: dict[int, int] = {}            # by block, of what is written last
        self._step_in_slot: dict[tuple[int, str], int] = {}  # by block and slot
        self.events: list[str] = []                          # what each was
        self._num_events: collections.Counter = collections.Counter()
        self._num_bytes = 0                                  # of all writes of blocks begun
        self._backward_step = self._decided_step = 0         # the last ones begun and decided
        self.durable_step = -1                               # of the last record that is synced
        self.struck = False                                  # the event has come
        self.dead = False

    def die_at(self, kind: str, num_before: int) -> None:
        """At an event of that kind, so many of which come before it from now on."""
        with self._disk:
            self._at = kind, self._num_events[kind] + num_before

    def on_phase(self, phase: str, step: int) -> None:
        """As of `DurableTraining`."""
        with self._disk:
            if phase == "backward":
                self._backward_step = step
            else:
                self._decided_step = step

    def updates(self, block_index: int, decided: bool) -> None:
        """What is written of a block from now on is of the step that is decided, or of the one in backward."""
        with self._disk:
            self._step_of_update[block_index] = self._decided_step if decided else self._backward_step

    def happens(self, kind: str) -> None:
        """An event that does not reach the disk: if the machine dies of it, what comes next fails."""
        with self._disk:
            if not self.dead:
                self._event(kind)

    def lose_power(self) -> None:
        """After `close`: of what was not synced some is there, some is not, some in part. A run that was closed before
        its first commit is gone already."""
        keep = self._random.randint(0, len(self._renames))   # a directory's changes are durable in order
        for source, target, before in reversed(self._renames[keep:]):
            if not os.path.exists(target):
                continue
            os.rename(target, source)
            if before is not None:
                with open(target, "wb") as file:
                    file.write(before)
        for writes in self._unsynced.values():
            if not os.path.exists(writes[0].path):
                continue
            for write in reversed(writes):
                _put(write.path, write.offset, write.before)
            for write in writes:
                kind = self._random.choice(("kept", "lost", "torn"))
                if kind == "kept":
                    _put(write.path, write.offset, write.after)
                elif kind == "torn":
                    for start in range(0, len(write.after), _SECTOR_BYTES):
                        if self._random.random() < 0.5:
                            _put(write.path, write.offset + start, write.after[start:start + _SECTOR_BYTES])

    def _take_time(self) -> None:
        if self._sync_delay_s:
            with self._disk:
                delay_s = self._random.uniform(0, self._sync_delay_s)
            time.sleep(delay_s)

    def _event(self, what: str, nbytes: int = 0) -> bool:
        """Counts an event; whether the machine dies of it. Died if it is dead already, OSError if the event fails."""
        if self.dead:
            raise Died(errno.EIO, "the machine is dead")
        self.events.append(what)
        self._num_events[what] += 1
        before, self._num_bytes = self._num_bytes, self._num_bytes + nbytes
        if self._at != (what, self._num_events[what] - 1) and self._at not in range(before, self._num_bytes):
            return False
        self.struck = True
        if self._error_number is not None:
            raise OSError(self._error_number, f"{os.strerror(self._error_number)} (injected)")
        self.dead = True
        return True

    def _pread(self, fd: int, view: memoryview, offset: int) -> int:
        if self.dead:
            raise Died(errno.EIO, "the machine is dead")
        return super()._pread(fd, view, offset)

    def _pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        with self._disk:
            path = os.readlink(f"/proc/self/fd/{fd}")
            dies = self._event(self._kind_of_write(path), len(view))
            with open(path, "rb") as file:
                file.seek(offset)
                before = file.read(len(view))
            if dies and isinstance(self._at, int):
                view = view[:(self._at - self._num_bytes + len(view)) // _SECTOR_BYTES * _SECTOR_BYTES]
            elif dies:
                view = view[:self._random.randrange(len(view) // _SECTOR_BYTES + 1) * _SECTOR_BYTES]
            _put(path, offset, bytes(view))
            self._unsynced.setdefault(fd, []).append(_Write(path, offset, before, bytes(view)))
            if dies:
                raise Died(errno.EIO, "the machine dies")
            return len(view)

    def _kind_of_write(self, path: str) -> str:
        block, slot = re.fullmatch(r"block-(\d+)\.\w+\.?(\d?)", os.path.basename(path)).groups()
        step = self._step_of_update.get(int(block))
        if step is None:
            self._step_in_slot[int(block), slot] = 0
            return "write of first values"
        before = self._step_in_slot.get((int(block), slot), step)
        self._step_in_slot[int(block), slot] = step
        if before != step and slot:
            return "slot reuse"
        if step > self._decided_step:
            return "update in backward"
        return "trailing update" if step == self._backward_step else "trailing update under the next backward"

    def _fdatasync(self, fd: int) -> None:
        self._take_time()
        with self._disk:
            if self._event("data sync"):
                raise Died(errno.EIO, "the machine dies")
            self._unsynced.pop(fd, None)

    def _write_synced(self, path: str, data: bytes) -> None:
        self._take_time()
        with self._disk:
            if self._event(f"{_kind_of(path, data)} write"):
                with open(path, "wb") as file:
                    file.write(data[:self._random.randrange(len(data) + 1)])
                raise Died(errno.EIO, "the machine dies")
            super()._write_synced(path, data)

    def _rename(self, source: str, target: str) -> None:
        with self._disk:
            with open(source, "rb") as file:
                dies = self._event(f"{_kind_of(target, file.read())} rename")
            if dies and self._random.random() < 0.5:
                raise Died(errno.EIO, "the machine dies")
            before = None
            if os.path.exists(target):
                with open(target, "rb") as file:
                    before = file.read()
            super()._rename(source, target)
            self._renames.append((source, target, before))
            if dies:
                raise Died(errno.EIO, "the machine dies")

    def _fsync_directory(self, path: str) -> None:
        with self._disk:
            if self._event("directory sync"):
                raise Died(errno.EIO, "the machine dies")
            self._renames = [entry for entry in self._renames if os.path.dirname(entry[1]) != path]
            record = os.path.join(path, CURRENT)
            if os.path.exists(record):
                with open(record, "rb") as file:
                    self.durable_step = json.load(file)["value"]["step"]
        super()._fsync_directory(path)


def _kind_of(path: str, data: bytes) -> str:
    name = os.path.basename(path).removesuffix(NEW_SUFFIX)
    if name == CURRENT and json.loads(data)["value"]["dirty"]:
        return "dirty mark"
    return {CURRENT: "record", MANIFEST: "manifest"}.get(name, "details")


def _put(path: str, offset: int, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, data, offset)
    finally:
        os.close(fd)
