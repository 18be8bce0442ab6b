"""`Commits`: how a run with a name becomes durable, one record at a time.

[Note: commits]
A commit says: the state of optimizer step t is in these slots. It is made durable in this order, each part synced
before the next: the data of all blocks, the details (checksums of the data, what the trainer gave), and `CURRENT`, by
a rename. So a crash at any instant leaves a `CURRENT` all of whose data is there.

What is written next must not touch what `CURRENT` names. Every block that is written to belongs to the commit that is
*open*: the next one to be made. Its old slot is free once that commit is durable (`Commits.open`, a Work), and no write
enters it before. With one slot (`in_place`, and frozen blocks that somebody edits) that cannot be: then `CURRENT` is
marked dirty before the first write, and a dirty run cannot be reopened.
"""
from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lohan_ds.errors import StoreError
from lohan_ds.store.checksums import checksum
from lohan_ds.store.filenames import CURRENT, MANIFEST, commit_file_name
from lohan_ds.store.io_threads import IoThreads, Urgency
from lohan_ds.store.manifest import (Commit, Damaged, Manifest, how_to_give_up, read_file, read_json, read_manifests,
                                     to_json)
from lohan_ds.work import Work

if TYPE_CHECKING:
    from lohan_ds.store.ssd_io import SsdFile, ThreadSsdIo


class Contents(NamedTuple):
    """What a commit is of, taken when all its blocks are published. Of slots that stay as they are until it is durable.
    """
    slots: tuple[int, ...]
    checksums: bytes
    files: Sequence[SsdFile]
    bytes_written: int        # by this process, to the run's files


class Commits:
    """Any thread, one caller of `commit` at a time. Records are written one after the other by a thread of its own.

    `last`, `details` and `_failure` belong to that thread; everything else is fixed or set by the caller of `commit`.
    """

    def __init__(self, io: ThreadSsdIo, run_dirs: Sequence[str], take_contents: Callable[[tuple[int, ...]], Contents]):
        self._io = io
        self._run_dirs = list(run_dirs)
        self._take_contents = take_contents
        self._thread = IoThreads(1, "lohan-commit")   # serves at the interpreter's exit too, as an executor would not
        self._dirty: Work | None = None   # the mark that is made, or being made; None: CURRENT is clean
        self._written_before = 0          # bytes, by earlier processes
        self._failure: BaseException | None = None   # the first one: nothing is written after it
        self.last: Commit | None = None   # durable
        self.details = b""                # what the trainer gave with it
        self.open = Work()                # ends when the next commit is durable

    def create(self, manifest: Manifest) -> None:
        """Writes the manifest into every directory. Blocks. The first commit must follow."""
        for place in range(len(self._run_dirs)):   # the first directory's first: see `is_unfinished` in manifest.py
            own = manifest.model_copy(update={"directory": place})
            self._io.replace_file(os.path.join(self._run_dirs[place], MANIFEST), to_json(own))
            self._io.sync_directory(os.path.dirname(self._run_dirs[place]))
        self._run_id = manifest.run_id

    def load(self) -> bytes:
        """Reads the last commit; the checksums in it. StoreError if it is damaged or dirty.

        The process before may have ended between a rename and its sync: what it retired is not free before that.
        """
        self._io.sync_directory(self._run_dirs[0])
        commit = read_json(os.path.join(self._run_dirs[0], CURRENT), Commit)
        self._run_id, self.last, self._written_before = commit.run_id, commit, commit.bytes_written
        if commit.dirty:
            raise DirtyStore(self._run_dirs, commit)
        checksums, self.details = read_details(self._run_dirs[0], commit)
        return checksums

    def commit(self, step: int, details: bytes, published: Work, last_checkpoint: str | None = None) -> Work:
        """Closes the open commit: once `published`, the Work of all slots, has ended it is made durable as `step`; its
        Work. Never blocks.

        Fails, and the commit before stays, if `published` does, if the drive does, or if a commit before it did.
        """
        durable, self.open = self.open, Work()
        self._dirty = None
        self._run(durable, lambda: self._make_durable(step, details, published, last_checkpoint))
        return durable

    def mark_dirty(self) -> Work:
        """Ends when `CURRENT` says that data is being changed in place. Never blocks."""
        if self._dirty is None:
            self._dirty = Work()
            self._run(self._dirty, self._write_dirty)
        return self._dirty

    def close(self) -> None:
        """Waits for the records under way. Idempotent."""
        self._thread.close()

    def _run(self, work: Work, job: Callable[[], None]) -> None:
        def run() -> None:
            try:
                if self._failure is not None:   # what was written before may be lost, whatever the drive says now
                    raise StoreError(f"not committed, because a commit before failed: {self._failure}")
                job()
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                self._failure = self._failure or error
                work.fail(error)
            else:
                work.finish()

        self._thread.submit(Urgency.UPDATE, run)

    def _make_durable(self, step: int, details: bytes, published: Work, last_checkpoint: str | None) -> None:
        contents = self._take_contents(published.wait())
        self._io.sync(contents.files).wait()
        number = self.last.number + 1 if self.last is not None else 0
        data = contents.checksums + details
        self._io.replace_file(os.path.join(self._run_dirs[0], commit_file_name(number)), data)
        if last_checkpoint is None and self.last is not None:
            last_checkpoint = self.last.last_checkpoint
        self._write_current(Commit(
            run_id=self._run_id, number=number, step=step, slots=contents.slots, last_checkpoint=last_checkpoint,
            bytes_written=self._written_before + contents.bytes_written, details_bytes=len(data),
            details_checksum=checksum(data), checksums_bytes=len(contents.checksums)))
        self.details = details

    def _write_dirty(self) -> None:
        if self.last is not None:   # before the first commit there is nothing to be found
            self._write_current(self.last.model_copy(update={"dirty": True}))

    def _write_current(self, commit: Commit) -> None:
        self._io.replace_file(os.path.join(self._run_dirs[0], CURRENT), to_json(commit))
        self.last = commit


class DirtyStore(StoreError):
    """A run that was cut off while its data was being changed in place: what lies there is of no step."""

    def __init__(self, run_dirs: Sequence[str], commit: Commit):
        from_here = (f"Its last checkpoint is {commit.last_checkpoint}" if commit.last_checkpoint
                     else "There is no checkpoint of it")
        super().__init__(errno.EIO, f"this run was cut off after step {commit.step}, while data was changed in place; "
                                    f"what lies there is of no single step. {from_here}. {how_to_give_up(run_dirs)}",
                         run_dirs[0])


def committed_step(run_dirs: Sequence[str]) -> int | None:
    """Of the run in these directories; None if there is none. StoreError as `read_manifests`, or if it is damaged."""
    if read_manifests(run_dirs) is None:
        return None
    return read_json(os.path.join(run_dirs[0], CURRENT), Commit).step


def read_details(run_dir: str, commit: Commit) -> tuple[bytes, bytes]:
    """(checksums, what the trainer gave) of a commit. StoreError if they are not whole."""
    path = os.path.join(run_dir, commit_file_name(commit.number))
    data = read_file(path)
    if len(data) != commit.details_bytes or checksum(data) != commit.details_checksum:
        raise Damaged(f"needed {commit.details_bytes} bytes with checksum {commit.details_checksum:016x}, got "
                      f"{len(data)} with {checksum(data):016x}", path)
    return data[:commit.checksums_bytes], data[commit.checksums_bytes:]
