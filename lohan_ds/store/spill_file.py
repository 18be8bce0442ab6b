"""`SpillFile`: scratch space on the SSDs for one run, gone with it. Never synced: nobody reads it after a crash.

    <dir>/spill/act-0.bin      one file per directory, as large from the start as it may ever be

It knows extents, not what is in them. An extent lies in one directory; successive ones go to the directory that is
least full, so that all drives work, each for its share of the stripe.
"""
from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lohan_ds.block import round_up
from lohan_ds.errors import StoreError
from lohan_ds.memory.extents import Extents
from lohan_ds.memory.pinned_pool import PAGE_BYTES
from lohan_ds.store.file_io import FileIo, SsdFile
from lohan_ds.store.io_threads import Urgency
from lohan_ds.stripe import Stripe, bytes_by_directory, even_stripe
from lohan_ds.work import Work

SPILL_DIR = "spill"


def spill_file_name(index: int) -> str:
    """Of the file of one directory."""
    return f"act-{index}.bin"


class SpillExtent(NamedTuple):
    directory: int     # index of its directory
    offset: int        # bytes, a multiple of 4096
    nbytes: int        # a multiple of 4096


class SpillFile:
    """Any thread. Fixed after construction: files and spaces, which have locks of their own."""

    def __init__(self, io: FileIo, dirs: Sequence[str], nbytes: int, stripe: Stripe = ()):
        """Takes `nbytes` of disk space, rounded up to a page for each of `dirs`; wipes what lay there before. Empty
        `stripe`: of all alike.

        StoreError, and no file left, if the space cannot be had.
        """
        self._io = io
        self._paths: list[str] = []
        self._files: list[SsdFile] = []
        self._spaces = [Extents(round_up(each_bytes, PAGE_BYTES))
                        for each_bytes in bytes_by_directory(nbytes, stripe or even_stripe(len(dirs)), len(dirs))]
        self.nbytes = sum(space.nbytes for space in self._spaces)
        try:
            for index, directory in enumerate(dirs):
                folder = os.path.join(directory, SPILL_DIR)
                _make_empty(folder)
                self._paths.append(os.path.join(folder, spill_file_name(index)))
                self._files.append(io.open(self._paths[-1], self._spaces[index].nbytes))
        except BaseException:
            self.close()
            raise

    def take(self, nbytes: int) -> SpillExtent | None:
        """Space for `nbytes`, rounded up to a page; None if no directory has it in one piece. Does not block."""
        spaces = [(index, space) for index, space in enumerate(self._spaces) if space.nbytes]
        for index, _ in sorted(spaces, key=lambda place: -place[1].free_bytes / place[1].nbytes):
            offset = self._spaces[index].take(nbytes)
            if offset is not None:
                return SpillExtent(index, offset, max(PAGE_BYTES, round_up(nbytes, PAGE_BYTES)))
        return None

    def give(self, extent: SpillExtent) -> None:
        """Frees an extent on which nothing is in flight."""
        self._spaces[extent.directory].give(extent.offset, extent.nbytes)

    def write(self, extent: SpillExtent, buffer: torch.Tensor) -> Work:
        """Writes `buffer` (extent.nbytes,) uint8, host, 4096-aligned; as FileIo.write."""
        assert buffer.numel() == extent.nbytes, (buffer.numel(), extent)
        return self._io.write(self._files[extent.directory], extent.offset, buffer)

    def read(self, extent: SpillExtent, buffer: torch.Tensor) -> Work:
        """Fills `buffer`, as `write`, ahead of updates: backward waits for it. The extent's write must be over."""
        assert buffer.numel() == extent.nbytes, (buffer.numel(), extent)
        return self._io.read(self._files[extent.directory], extent.offset, buffer, urgency=Urgency.FETCH)

    def close(self) -> None:
        """Waits for all requests, then removes the files. Idempotent."""
        for file in self._files:
            self._io.close_file(file)
        for path in self._paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            with contextlib.suppress(OSError):
                os.rmdir(os.path.dirname(path))
        self._files, self._paths = [], []

    @property
    def used_bytes(self) -> int:
        return sum(space.used_bytes for space in self._spaces)

    @property
    def peak_bytes(self) -> int:
        """At most: the sum of what each directory held at its fullest."""
        return sum(space.peak_bytes for space in self._spaces)


def _make_empty(folder: str) -> None:
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        for entry in list(os.scandir(folder)):
            if re.fullmatch(r"act-\d+\.bin", entry.name):
                os.unlink(entry.path)
    except OSError as error:
        raise StoreError(error.errno, f"cannot prepare the spill folder: {error.strerror}", folder) from error
