"""Blocks: how a model's parameters are cut for storage, transfer and update. Values only, no torch.

A `Unit` is a module that runs forward as a whole; its parameters form one or more `Block`s. All parameters of
a block share one dtype and are all trained or all frozen, so a block is one flat array per state kind. Each
parameter starts at a multiple of `ALIGN_NUMEL` elements: 64 bytes even in 16 bits, because fp32 GEMV gives
other bits on other alignments. A block is padded to `PAGE_NUMEL` elements so that every array of it is a whole
number of 4096-byte pages. `Chunk`s are the unit of I/O and of the CPU update.

Worked size: a Llama-7B layer (202,383,360 parameters, bf16) is 405 MB of param and 2.43 GB of optimizer
state; with 16 MiB chunks that is 145 chunks of 1,398,784 elements.
"""
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

ALIGN_NUMEL = 32     # elements; 64 bytes at 16 bits, 128 bytes at 32
PAGE_NUMEL = 2048    # elements; 4096 bytes at 16 bits, 8192 at 32

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
STATE_KINDS = ("master", "exp_avg", "exp_avg_sq")  # fp32; a float32 block's master is its param array


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class ParamSlot:
    """Where one parameter lies in its block."""
    name: str                 # qualified name in the model
    shape: tuple[int, ...]
    numel: int                # elements
    offset: int               # elements from the start of the block, a multiple of ALIGN_NUMEL
    group: int | None         # index of its optimizer group; None when frozen


@dataclass(frozen=True)
class Chunk:
    """A piece of a block."""
    index: int
    start: int                # elements from the start of the block
    numel: int                # elements, a multiple of PAGE_NUMEL


@dataclass(frozen=True)
class Block:
    """One flat array per state kind. `index` is its place in the list of blocks, which is forward order."""
    index: int
    name: str                 # of the unit, for messages
    dtype: str                # of the parameters: a key of DTYPE_BYTES
    trainable: bool
    slots: tuple[ParamSlot, ...]
    numel: int                # padded elements, a multiple of PAGE_NUMEL
    chunk_numel: int          # elements per chunk (the last one may be smaller)

    @property
    def has_separate_master(self) -> bool:
        """16-bit blocks keep an fp32 master beside the parameters; a float32 block is its own master."""
        return self.dtype != "float32"

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """The fp32 arrays that lie together in the state record of a chunk, in this order."""
        if not self.trainable:
            return ()
        return STATE_KINDS if self.has_separate_master else STATE_KINDS[1:]

    @property
    def param_bytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def state_bytes(self) -> int:
        return self.numel * 4 * len(self.state_kinds)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        starts = range(0, self.numel, self.chunk_numel)
        return tuple(Chunk(i, s, min(self.chunk_numel, self.numel - s)) for i, s in enumerate(starts))


def chunk_numel_for(chunk_bytes: int) -> int:
    """Elements per chunk so that the state record (three fp32 arrays) is at most `chunk_bytes`, at least one page."""
    return max(PAGE_NUMEL, chunk_bytes // 12 // PAGE_NUMEL * PAGE_NUMEL)


def make_block(index: int, name: str, dtype: str, params: list[tuple[str, tuple[int, ...], int | None]],
               chunk_numel: int) -> Block:
    """Lays `params` (name, shape, group) out one after the other. All groups None means a frozen block."""
    slots, offset = [], 0
    for param_name, shape, group in params:
        numel = 1
        for size in shape:
            numel *= size
        slots.append(ParamSlot(param_name, tuple(shape), numel, offset, group))
        offset = round_up(offset + numel, ALIGN_NUMEL)
    trainable = any(group is not None for _, _, group in params)
    assert not trainable or all(group is not None for _, _, group in params), name
    padded_numel = max(PAGE_NUMEL, round_up(offset, PAGE_NUMEL))
    return Block(index, name, dtype, trainable, tuple(slots), padded_numel, chunk_numel)
