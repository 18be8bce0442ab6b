"""`CrashingIo`: the thread I/O of a machine that dies at a chosen moment, and forgets what was not synced."""
from __future__ import annotations

import errno
import os
import random
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
    """Everything that reaches the disk is an event, counted from 0. Any thread; all fields are under `_disk`.

    At event `at_event` the machine dies: a write leaves a random part of itself, anything else nothing, and all later
    events fail. With `error_number` only that one event fails, with that error, and nothing else.
    """

    def __init__(self, num_threads: int, at_event: int | None = None, seed: int = 0, error_number: int | None = None,
                 sync_delay_s: float = 0.0):
        """`sync_delay_s`: a sync takes up to so long, as on a real drive."""
        super().__init__(num_threads)
        self._sync_delay_s = sync_delay_s
        self._disk = threading.RLock()
        self._random = random.Random(seed)
        self._at_event, self._error_number = at_event, error_number
        self._unsynced: dict[int, list[_Write]] = {}         # by file descriptor, in order
        self._renames: list[tuple[str, str, bytes | None]] = []   # not synced: source, target, what the target was
        self.events: list[str] = []                          # what each was
        self._step_begins = False                            # nothing has been written in this step
        self.phase = ""                                      # set by the test, to tell writes apart
        self.dead = False

    def begin_step(self) -> None:
        """The next write is the first one into a slot that the step before has left."""
        with self._disk:
            self._step_begins = True

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

    def _event(self, what: str) -> bool:
        """Counts an event; whether the machine dies of it. Died if it is dead already, OSError if the event fails."""
        if self.dead:
            raise Died(errno.EIO, "the machine is dead")
        self.events.append(what)
        if self._at_event != len(self.events) - 1:
            return False
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
            what = "slot reuse" if self._step_begins else f"write {self.phase or 'of first values'}"
            self._step_begins = False
            dies = self._event(what)
            with open(path, "rb") as file:
                file.seek(offset)
                before = file.read(len(view))
            if dies:
                view = view[:self._random.randrange(len(view) // _SECTOR_BYTES + 1) * _SECTOR_BYTES]
            _put(path, offset, bytes(view))
            self._unsynced.setdefault(fd, []).append(_Write(path, offset, before, bytes(view)))
            if dies:
                raise Died(errno.EIO, "the machine dies")
            return len(view)

    def _fdatasync(self, fd: int) -> None:
        self._take_time()
        with self._disk:
            if self._event("data sync"):
                raise Died(errno.EIO, "the machine dies")
            self._unsynced.pop(fd, None)

    def _write_synced(self, path: str, data: bytes) -> None:
        self._take_time()
        with self._disk:
            if self._event(f"{_kind_of(path)} write"):
                with open(path, "wb") as file:
                    file.write(data[:self._random.randrange(len(data) + 1)])
                raise Died(errno.EIO, "the machine dies")
            super()._write_synced(path, data)

    def _rename(self, source: str, target: str) -> None:
        with self._disk:
            dies = self._event(f"{_kind_of(target)} rename")
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
        super()._fsync_directory(path)


def _kind_of(path: str) -> str:
    name = os.path.basename(path).removesuffix(NEW_SUFFIX)
    return {CURRENT: "record", MANIFEST: "manifest"}.get(name, "details")


def _put(path: str, offset: int, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, data, offset)
    finally:
        os.close(fd)
