"""`BlockFiles`: where on disk the chunks of one block lie.

[Note: striping] Chunk c of block b lies in directory stripe[(b + c) % L] of a stripe of L places (see stripe.py), so
that the chunks of a block, and the first chunks of all blocks, use all drives as much as they can bear. In each
directory a block has one file per kind, dense: a chunk's record has as many before it as chunks before it lie there.
All chunks but a block's last have the same size, so a record starts at that number times the record bytes.
A record holds `num_arrays` arrays of the chunk, one after the other. Neighbours in a file lie equally far
apart in memory where the stripe is even, so they are read as one; elsewhere as many of them as do.
"""
from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from lohan_ds.block import DTYPE_BYTES, Block, Chunk
from lohan_ds.plan import OffloadPlan
from lohan_ds.store.checksums import Checksums, Records
from lohan_ds.store.filenames import block_file_name
from lohan_ds.stripe import Stripe

if TYPE_CHECKING:
    from lohan_ds.store.file_io import FileIo, SsdFile


class BlockFiles:
    """The files of one kind ("params" or "state") of one slot of a block. Fixed after `open`; any thread."""

    def __init__(self, block: Block, kind: str, stripe: Stripe, slot: int | None = None):
        """`slot`: None if the block has only one."""
        self.block = block
        self.kind = kind
        self.slot = slot
        self.stripe = stripe
        if kind == "params":
            self.num_arrays, self.itemsize = 1, DTYPE_BYTES[block.dtype]
        else:
            self.num_arrays, self.itemsize = len(block.state_kinds), 4
        self._files: list[SsdFile | None] = [None] * (max(stripe) + 1)
        self.checksums = Checksums(len(block.chunks), self.record_bytes(block.chunks[0]))

    @property
    def file_name(self) -> str:
        """The same in all directories."""
        return block_file_name(self.block.index, self.kind, self.slot)

    def record_bytes(self, chunk: Chunk) -> int:
        return chunk.numel * self.num_arrays * self.itemsize

    def nbytes_in(self, directory: int) -> int:
        """Bytes of the file in the directory of that index."""
        return sum(self.record_bytes(chunk) for chunk in self.block.chunks if self._directory(chunk.index) == directory)

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
        length, directory = len(self.stripe), self._directory(chunk.index)
        cycles, left_over = divmod(chunk.index, length)
        before = cycles * self.stripe.count(directory) + sum(
            self._directory(index) == directory for index in range(left_over))
        return directory, before * record_bytes

    def _directory(self, chunk_index: int) -> int:
        return self.stripe[(self.block.index + chunk_index) % len(self.stripe)]

    def records(self, *chunks: Chunk) -> Records:
        """The records of one of `runs`, or of a single chunk, for one request."""
        step = chunks[1].index - chunks[0].index if len(chunks) > 1 else 1
        return Records(self.checksums, chunks[0].index, len(chunks), step, self.record_bytes(chunks[0]), self._where)

    def runs(self, without: Collection[int] = ()) -> list[list[Chunk]]:
        """Chunks that are neighbours in a file and as far apart in memory, all but those of an index in `without`. In
        the order of their first ones, so that all drives begin at once."""
        runs: list[list[Chunk]] = []
        run_of: dict[int, list[Chunk]] = {}   # by directory: what the next chunk there may go on with
        for chunk in self.block.chunks:
            directory = self._directory(chunk.index)
            if chunk.index in without:
                run_of.pop(directory, None)
                continue
            run = run_of.get(directory)
            if run is None or (len(run) > 1 and chunk.index - run[-1].index != run[1].index - run[0].index):
                run = run_of[directory] = []
                runs.append(run)
            run.append(chunk)
        return runs

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
