"""`BlockFiles`: where on disk the chunks of one block lie.

[Note: striping] Chunk c of block b lies in directory (b + c) % n of n, so that the chunks of a block, and the first
chunks of all blocks, use all drives alike. In each directory a block has one file per kind, dense: chunk c is record
c // n of its file. All chunks but a block's last have the same size, so a record starts at (c // n) * record bytes.
A record holds `num_arrays` arrays of the chunk, one after the other.
"""
from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from lohan_ds.block import DTYPE_BYTES, Block, Chunk
from lohan_ds.plan import OffloadPlan
from lohan_ds.store.checksums import Checksums, Records
from lohan_ds.store.filenames import block_file_name

if TYPE_CHECKING:
    from lohan_ds.store.file_io import FileIo, SsdFile


class BlockFiles:
    """The files of one kind ("params" or "state") of one slot of a block. Fixed after `open`; any thread."""

    def __init__(self, block: Block, kind: str, num_dirs: int, slot: int | None = None):
        """`slot`: None if the block has only one."""
        self.block = block
        self.kind = kind
        self.slot = slot
        self.num_dirs = num_dirs
        if kind == "params":
            self.num_arrays, self.itemsize = 1, DTYPE_BYTES[block.dtype]
        else:
            self.num_arrays, self.itemsize = len(block.state_kinds), 4
        self._files: list[SsdFile | None] = [None] * num_dirs
        self.checksums = Checksums(len(block.chunks), self.record_bytes(block.chunks[0]))

    @property
    def file_name(self) -> str:
        """The same in all directories."""
        return block_file_name(self.block.index, self.kind, self.slot)

    def record_bytes(self, chunk: Chunk) -> int:
        return chunk.numel * self.num_arrays * self.itemsize

    def nbytes_in(self, directory: int) -> int:
        """Bytes of the file in the directory of that index."""
        first = (directory - self.block.index) % self.num_dirs
        numel = sum(chunk.numel for chunk in self.block.chunks[first::self.num_dirs])
        return numel * self.num_arrays * self.itemsize

    def open(self, io: FileIo, run_dirs: Sequence[str], reopen: bool = False) -> None:
        """Creates the files or opens those that are there, none where a directory gets no chunk. StoreError from `io`;
        then call `close`."""
        for index, run_dir in enumerate(run_dirs):
            if nbytes := self.nbytes_in(index):
                path = os.path.join(run_dir, self.file_name)
                self._files[index] = io.reopen(path, nbytes) if reopen else io.open(path, nbytes)

    def close(self, io: FileIo) -> None:
        for file in self.files:
            io.close_file(file)

    @property
    def files(self) -> list[SsdFile]:
        return [file for file in self._files if file is not None]

    def record(self, chunk: Chunk) -> tuple[SsdFile, int]:
        """The file of a chunk's record and the byte offset where it starts."""
        directory, offset = self.place(chunk)
        return self._files[directory], offset

    def place(self, chunk: Chunk) -> tuple[int, int]:
        """The index of the directory of a chunk's record, and the byte offset where it starts in the file there."""
        record_bytes = self.block.chunk_numel * self.num_arrays * self.itemsize  # of every chunk before this one
        return (self.block.index + chunk.index) % self.num_dirs, chunk.index // self.num_dirs * record_bytes

    def records(self, chunk: Chunk, count: int = 1) -> Records:
        """The record of a chunk and its next neighbours in the file, `count` in all, for one request."""
        return Records(self.checksums, chunk.index, count, self.num_dirs, self.record_bytes(chunk), self._where)

    def runs(self, without: Collection[int] = ()) -> Iterator[tuple[Chunk, Chunk, int]]:
        """(first chunk, last chunk, count) of all neighbours in a file, but for chunks of an index in `without`."""
        chunks = self.block.chunks
        for column in range(min(self.num_dirs, len(chunks))):
            run: list[Chunk] = []
            for chunk in chunks[column::self.num_dirs]:
                if chunk.index not in without:
                    run.append(chunk)
                elif run:
                    yield run[0], run[-1], len(run)
                    run = []
            if run:
                yield run[0], run[-1], len(run)

    def _where(self, chunk_index: int) -> str:
        file, offset = self.record(self.block.chunks[chunk_index])
        return (f"{self.kind} of block {self.block.index} ({self.block.name}), chunk {chunk_index}, in {file.path} at "
                f"offset {offset}")

    def covered(self, array: int, start: int, numel: int) -> Iterator[tuple[Chunk, int, int, int]]:
        """(chunk, first byte in its record, first byte in the elements, bytes) of the elements [start, start + numel)
        of one array, in order."""
        end, done = start + numel, 0
        for chunk in self.block.chunks[start // self.block.chunk_numel:]:
            if chunk.start >= end:
                return
            first, last = max(start, chunk.start), min(end, chunk.start + chunk.numel)
            nbytes = (last - first) * self.itemsize
            yield chunk, (array * chunk.numel + first - chunk.start) * self.itemsize, done, nbytes
            done += nbytes


def num_slots(block: Block, plan: OffloadPlan) -> int:
    """How many times a store holds the arrays of a block: see [Note: slots] in block_order.py."""
    return 2 if plan.shadow and block.trainable else 1


def required_ssd_bytes(blocks: Sequence[Block], plan: OffloadPlan) -> int:
    """Bytes that a store of these blocks takes on all its SSD directories together."""
    return sum(num_slots(block, plan) * ((block.param_bytes if plan.param_tier[block.index] == "ssd" else 0)
                                         + (block.state_bytes if plan.state_tier[block.index] == "ssd" else 0))
               for block in blocks)
