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

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from lohan_ds.errors import StoreError
from lohan_ds.store.checksums import checksum
from lohan_ds.store.filenames import CURRENT, MANIFEST, commit_file_name
from lohan_ds.store.manifest import Commit, Manifest, read_json, to_json
from lohan_ds.store.ssd_io import SsdFile, ThreadSsdIo
from lohan_ds.work import Work


class Contents(NamedTuple):
    """What a commit is of, taken when all its blocks are published."""
    slots: tuple[int, ...]
    checksums: bytes
    files: Sequence[SsdFile]
    bytes_written: int        # by this process, to the run's files


class Commits:
    """Any thread, one caller of `commit` at a time. Records are written one after the other by a thread of its own.

    `last` belongs to that thread; everything else is fixed or set by the caller of `commit`.
    """

    def __init__(self, io: ThreadSsdIo, run_dirs: Sequence[str], take_contents: Callable[[], Contents]):
        self._io = io
        self._run_dirs = list(run_dirs)
        self._take_contents = take_contents
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lohan-commit")
        self._dirty: Work | None = None   # the mark that is made, or being made; None: CURRENT is clean
        self._written_before = 0          # bytes, by earlier processes
        self.last: Commit | None = None   # durable
        self.details = b""                # what the trainer gave with it
        self.open = Work()                # ends when the next commit is durable

    def create(self, manifest: Manifest) -> None:
        """Writes the manifest into every directory. Blocks. The first commit must follow."""
        for place in reversed(range(len(self._run_dirs))):   # the first directory's last: with CURRENT it is the run
            own = manifest.model_copy(update={"directory": place})
            self._io.replace_file(os.path.join(self._run_dirs[place], MANIFEST), to_json(own))
            self._io.sync_directory(os.path.dirname(self._run_dirs[place]))
        self._run_id = manifest.run_id

    def load(self) -> bytes:
        """Reads the last commit; the checksums in it. StoreError if it is damaged or dirty."""
        commit = read_json(os.path.join(self._run_dirs[0], CURRENT), Commit)
        self._run_id, self.last, self._written_before = commit.run_id, commit, commit.bytes_written
        if commit.dirty:
            raise DirtyStore(self._run_dirs[0], commit)
        checksums, self.details = read_details(self._run_dirs[0], commit)
        return checksums

    def commit(self, step: int, details: bytes, published: Work, last_checkpoint: str | None = None) -> Work:
        """Closes the open commit: once `published` has ended it is made durable as `step`; its Work. Never blocks.

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
        self._thread.shutdown(wait=True)

    def _run(self, work: Work, job: Callable[[], None]) -> None:
        def run() -> None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits
                work.fail(error)
            else:
                work.finish()

        self._thread.submit(run)

    def _make_durable(self, step: int, details: bytes, published: Work, last_checkpoint: str | None) -> None:
        published.wait()
        contents = self._take_contents()
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

    def __init__(self, path: str, commit: Commit):
        from_here = (f"load the checkpoint {commit.last_checkpoint}" if commit.last_checkpoint
                     else "there is no checkpoint of it")
        super().__init__(5, f"this run was cut off after step {commit.step} while it changed its data in place; what "
                            f"lies there is of no single step. Remove it (lohan store clean) and {from_here}", path)


def read_details(run_dir: str, commit: Commit) -> tuple[bytes, bytes]:
    """(checksums, what the trainer gave) of a commit. StoreError if they are not whole."""
    path = os.path.join(run_dir, commit_file_name(commit.number))
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise StoreError(error.errno, f"cannot read: {error.strerror}", path) from error
    if len(data) != commit.details_bytes or checksum(data) != commit.details_checksum:
        raise StoreError(5, f"damaged: needed {commit.details_bytes} bytes with checksum "
                            f"{commit.details_checksum:016x}, got {len(data)} with {checksum(data):016x}", path)
    return data[:commit.checksums_bytes], data[commit.checksums_bytes:]
