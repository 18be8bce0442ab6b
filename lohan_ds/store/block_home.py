"""`BlockHome`: the bytes of one slot of a block, each kind in host tensors or in files. It orders no operations.

Used by BlockStore only, which sees to it that nobody reads what another writes.
"""
from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lohan_ds.block import Block, Chunk
from lohan_ds.memory.pinned_pool import PinnedPool
from lohan_ds.plan import OffloadPlan
from lohan_ds.store.block_files import BlockFiles
from lohan_ds.store.file_io import FileIo
from lohan_ds.store.io_threads import Urgency
from lohan_ds.stripe import Stripe
from lohan_ds.work import Work

TORCH_DTYPE = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class ChunkArrays(NamedTuple):
    """What an update reads and writes of one chunk of n elements, to be changed in place."""
    master: Tensor         # (n,) fp32, host
    exp_avg: Tensor        # (n,) fp32, host
    exp_avg_sq: Tensor     # (n,) fp32, host
    params: Tensor | None  # (n,) block dtype, host: write only; None for float32 blocks, whose master it is


class BlockHome:
    """All fields but the tensors are fixed after `open`; any thread. Owns its host tensors and its files."""

    def __init__(self, block: Block, plan: OffloadPlan, pool: PinnedPool, io: FileIo | None, stripe: Stripe,
                 slot: int | None = None):
        """`slot`: None if the block has only one."""
        self.block = block
        self.slot = slot
        self.dtype = TORCH_DTYPE[block.dtype]
        self._pool = pool
        self._io = io
        params_on_ssd = plan.param_tier[block.index] == "ssd"
        state_on_ssd = plan.state_tier[block.index] == "ssd" and block.trainable
        self.param_files = BlockFiles(block, "params", stripe, slot) if params_on_ssd else None
        self.state_files = BlockFiles(block, "state", stripe, slot) if state_on_ssd else None
        self.params: Tensor | None = None  # (numel,) block dtype, host; None on SSD
        self.state: list[Tensor] = []      # by state kind (numel,) fp32, host; empty on SSD

    @property
    def all_files(self) -> list[BlockFiles]:
        return [files for files in (self.param_files, self.state_files) if files is not None]

    @property
    def chunk_bytes(self) -> int:
        """Of the largest chunk's kinds that lie on SSD."""
        numel = min(self.block.chunk_numel, self.block.numel)
        return sum(numel * files.num_arrays * files.itemsize for files in self.all_files)

    @property
    def host_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._host_tensors())

    def open(self, run_dirs: Sequence[str], reopen: bool = False) -> None:
        """Takes memory and disk space; with `reopen` the files are there. CapacityError, StoreError: call `close` then,
        as always."""
        block = self.block
        where = f"of block {block.index}" + ("" if self.slot is None else f", slot {self.slot}")
        if self.param_files is None:
            self.params = self._pool.alloc(block.param_bytes, f"params {where}").view(self.dtype)
        if self.state_files is None:
            for kind in block.state_kinds:
                array = self._pool.alloc(block.numel * 4, f"{kind} {where}")
                self.state.append(array.view(torch.float32))
        for files in self.all_files:
            files.open(self._io, run_dirs, reopen)

    def close(self) -> None:
        """Waits for the files' requests and closes them; frees the host tensors."""
        for files in self.all_files:
            files.close(self._io)
        for tensor in self._host_tensors():
            self._pool.free(tensor)
        self.params, self.state = None, []

    def initialise(self, params: Tensor, buffer: Tensor | None) -> None:
        """As BlockStore.write_initial. `buffer`: uint8, of `chunk_bytes`, if anything lies on SSD. Blocks."""
        if self.params is not None:
            self.params.copy_(params)
        for kind, array in zip(self.block.state_kinds, self.state):
            array.copy_(params) if kind == "master" else array.zero_()
        if not self.all_files:
            return
        for chunk in self.block.chunks:
            values = params[chunk.start:chunk.start + chunk.numel]
            state_arrays, chunk_params = self._views(chunk, buffer)
            if self.state_files is not None:
                for kind, array in zip(self.block.state_kinds, state_arrays):
                    array.copy_(values) if kind == "master" else array.zero_()
            if self.param_files is not None:
                chunk_params.copy_(values)
            self._write(chunk, state_arrays, chunk_params).wait()

    def read_params(self, out: Tensor, without: Collection[int] = ()) -> Work:
        """From SSD into `out`, (numel,) block dtype, all chunks but those of an index in `without`. Does not block."""
        files, out_bytes = self.param_files, out.detach().view(torch.uint8)
        return Work.all_of([
            self._io.read(*files.record(run[0]),
                          out_bytes[run[0].start * files.itemsize:(run[-1].start + run[-1].numel) * files.itemsize],
                          None, files.records(*run), Urgency.FETCH)
            for run in files.runs(without)], value=out)

    def load(self, chunk: Chunk, buffer: Tensor | None, source: BlockHome,
             for_step: int | None = None,
             urgency: Urgency = Urgency.UPDATE) -> tuple[ChunkArrays, list[Work]]:
        """The arrays of a chunk, to be saved here, and the reads that fill those on SSD with the values in `source`.

        Read are state, and params where they are the master. Those in host RAM are this slot's own tensors: where
        `source` is another slot of the block they need `copy_host_arrays`.
        """
        state_arrays, params = self._views(chunk, buffer)
        reads = []
        if self.state_files is not None:
            reads.append(self._read(source.state_files, chunk, _record(state_arrays), for_step, urgency))
        if self.block.has_separate_master:
            return ChunkArrays(*state_arrays, params), reads
        if self.param_files is not None:
            reads.append(self._read(source.param_files, chunk, params.view(torch.uint8), for_step, urgency))
        return ChunkArrays(params, *state_arrays, None), reads

    @torch.no_grad()
    def copy_host_arrays(self, chunk: Chunk, source: BlockHome) -> None:
        """Copies what an update reads of a chunk and lies in host RAM: state, and params where they are the master."""
        piece = slice(chunk.start, chunk.start + chunk.numel)
        for ours, theirs in zip(self.state, source.state):
            ours[piece].copy_(theirs[piece])
        if self.params is not None and not self.block.has_separate_master:
            self.params[piece].copy_(source.params[piece])

    def save(self, chunk: Chunk, arrays: ChunkArrays, for_step: int | None = None) -> Work:
        """Writes the arrays on SSD to this slot; those in host RAM are in place already. Does not block."""
        if self.block.has_separate_master:
            return self._write(chunk, list(arrays[:3]), arrays.params, for_step)
        return self._write(chunk, list(arrays[1:3]), arrays.master, for_step)

    def read_range(self, kind: str, start: int, out: Tensor, buffer: Tensor | None) -> None:
        """As BlockStore.read_array. `buffer`: uint8, of `chunk_bytes`, if anything lies on SSD. Blocks.

        On SSD whole records are read, because only those can be checked.
        """
        tensor, files, array = self._array(kind)
        if files is None:
            out.copy_(tensor[start:start + out.numel()])
            return
        out_bytes = out.detach().view(torch.uint8)
        for chunk, in_record, in_out, nbytes in files.covered(array, start, out.numel()):
            record = buffer[:files.record_bytes(chunk)]
            self._read(files, chunk, record).wait()
            out_bytes[in_out:in_out + nbytes].copy_(record[in_record:in_record + nbytes])

    def write_range(self, kind: str, start: int, values: Tensor, buffer: Tensor | None) -> None:
        """As BlockStore.write_array: on SSD, records that are changed in part are read first. Blocks."""
        tensor, files, array = self._array(kind)
        if files is None:
            tensor[start:start + values.numel()].copy_(values)
            return
        value_bytes = values.detach().view(torch.uint8)
        for chunk, in_record, in_values, nbytes in files.covered(array, start, values.numel()):
            record = buffer[:files.record_bytes(chunk)]
            if nbytes < len(record):
                self._read(files, chunk, record).wait()
            record[in_record:in_record + nbytes].copy_(value_bytes[in_values:in_values + nbytes])
            self._write_record(files, chunk, record).wait()

    def copy_records(self, source: BlockHome, buffer: Tensor) -> None:
        """Makes this slot, all of it on SSD, equal to `source`. Blocks."""
        for ours, theirs in zip(self.all_files, source.all_files):
            for chunk in self.block.chunks:
                record = buffer[:ours.record_bytes(chunk)]
                self._read(theirs, chunk, record).wait()
                self._write_record(ours, chunk, record).wait()

    def array_dtype(self, kind: str) -> torch.dtype:
        """ValueError if the block has no such array."""
        self._array(kind)
        return self.dtype if kind == "param" else torch.float32

    def host_array(self, kind: str) -> Tensor | None:
        """(numel,) of `array_dtype`, the host tensor itself; None on SSD."""
        return self._array(kind)[0]

    def _array(self, kind: str) -> tuple[Tensor | None, BlockFiles | None, int]:
        """Where an array is: its host tensor, or its files and its place in their records."""
        block = self.block
        if kind == "param" or (kind == "master" and block.trainable and not block.has_separate_master):
            return self.params, self.param_files, 0
        if kind not in block.state_kinds:
            raise ValueError(f"block {block.index} ({block.name}, {block.dtype}, "
                             f"{'trained' if block.trainable else 'frozen'}) has no {kind!r}")
        place = block.state_kinds.index(kind)
        return self.state[place] if self.state else None, self.state_files, place

    def _views(self, chunk: Chunk, buffer: Tensor | None) -> tuple[list[Tensor], Tensor]:
        """The chunk's state arrays and params: parts of the host tensors or, state first, of `buffer`."""
        end, used = chunk.start + chunk.numel, 0
        state_arrays = [array[chunk.start:end] for array in self.state]
        if self.state_files is not None:
            used = chunk.numel * 4 * self.state_files.num_arrays
            state_arrays = list(buffer[:used].view(torch.float32).split(chunk.numel))
        if self.params is not None:
            return state_arrays, self.params[chunk.start:end]
        return state_arrays, buffer[used:used + chunk.numel * self.param_files.itemsize].view(self.dtype)

    def _write(self, chunk: Chunk, state_arrays: list[Tensor], params: Tensor, for_step: int | None = None) -> Work:
        writes = []
        if self.state_files is not None:
            writes.append(self._write_record(self.state_files, chunk, _record(state_arrays), for_step))
        if self.param_files is not None:
            writes.append(self._write_record(self.param_files, chunk, params.view(torch.uint8), for_step))
        return Work.all_of(writes)

    def _read(self, files: BlockFiles, chunk: Chunk, record: Tensor, for_step: int | None = None,
              urgency: Urgency = Urgency.UPDATE) -> Work:
        return self._io.read(*files.record(chunk), record, for_step, files.records(chunk), urgency)

    def _write_record(self, files: BlockFiles, chunk: Chunk, record: Tensor, for_step: int | None = None) -> Work:
        return self._io.write(*files.record(chunk), record, for_step, files.records(chunk))

    def _host_tensors(self) -> list[Tensor]:
        return self.state if self.params is None else [self.params, *self.state]


def _record(arrays: list[Tensor]) -> Tensor:
    """The bytes of arrays that lie one after the other, as `_views` cuts them from a buffer."""
    first, last = arrays[0], arrays[-1]
    assert last.data_ptr() - first.data_ptr() == (len(arrays) - 1) * first.nbytes, "not the arrays of load_chunk"
    return first.as_strided((len(arrays) * first.numel(),), (1,)).view(torch.uint8)
