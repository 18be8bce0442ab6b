"""A small store of a run with a name, and shortest ways to update, edit and look at it, for tests of commits."""
from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lohan_ds.block import STATE_KINDS, Block, make_block
from lohan_ds.memory.budget import MemoryBudget
from lohan_ds.memory.pinned_pool import PinnedPool
from lohan_ds.plan import Durability, OffloadPlan
from lohan_ds.store.block_store import BlockStore
from lohan_ds.store.filenames import named_run_dirs
from lohan_ds.store.file_io import FileIo
from lohan_ds.store.native_io import make_ssd_io
from lohan_ds.stripe import Stripe

TRAINED, IDLE, FLOAT, FROZEN = range(4)
BLOCKS = tuple(
    make_block(index, name, dtype, [("p", (5000,), None if index == FROZEN else 0)], 2048)
    for index, (name, dtype) in enumerate([("trained", "bfloat16"), ("idle", "bfloat16"), ("float", "float32"),
                                           ("frozen", "bfloat16")]))


@contextlib.contextmanager
def open_store(folder: Path, io: FileIo | None = None, reopen: bool = False, durability: Durability = "shadow",
               blocks: Sequence[Block] = BLOCKS, names: Sequence[str] = ("a", "b"),
               stripe: Stripe = ()) -> Iterator[BlockStore]:
    """A store of the run "r", below SSD paths of these names; its `pool` is for the test too. At the end it is closed
    as it is, which is what a killed process leaves."""
    paths = [str(folder / name) for name in names]
    for path in paths:
        os.makedirs(path, exist_ok=True)
    io = io or make_ssd_io(2)
    pool = PinnedPool(MemoryBudget("host", 1 << 28), pin=False)
    plan = OffloadPlan(("ssd",) * len(blocks), ("ssd",) * len(blocks), "eager", 1, 2048, 3, False,
                       shadow=durability == "shadow", durability=durability, stripe=stripe)
    with contextlib.ExitStack() as stack:
        stack.callback(pool.close)
        stack.callback(io.close)
        store = BlockStore(blocks, plan, pool, io, named_run_dirs(paths, "r"), reopen)
        stack.callback(store.close)
        store.pool = pool
        yield store


def begin(store: BlockStore) -> None:
    """First values, which are the blocks' indexes, and the first commit."""
    for block in BLOCKS:
        store.write_initial(block.index, torch.full((block.numel,), float(block.index)).to(dtype_of(block)))
    store.commit(0, b"zero")


def dtype_of(block: Block) -> torch.dtype:
    return getattr(torch, block.dtype)


def update(store: BlockStore, index: int, value: float, publish: bool = True) -> None:
    """Sets all arrays of a block to `value`."""
    block = BLOCKS[index]
    store.announce_update(index)
    buffer = store.pool.alloc(store.chunk_buffer_bytes, "chunk buffer")
    for chunk in block.chunks:
        arrays = store.load_chunk(index, chunk, buffer).wait()
        for array in arrays:
            if array is not None:
                array.fill_(value)
        store.save_chunk(index, chunk, arrays).wait()
    store.pool.free(buffer)
    if publish:
        store.publish(index)


def edit(store: BlockStore, index: int, value: float, moments: bool = True) -> None:
    """As `update`, by what users' edits come to."""
    for kind in ("param", *(BLOCKS[index].state_kinds if moments else ())):
        dtype = dtype_of(BLOCKS[index]) if kind == "param" else torch.float32
        store.write_array(index, kind, 0, torch.full((BLOCKS[index].numel,), value, dtype=dtype))


def array(store: BlockStore, index: int, kind: str = "param") -> Tensor:
    """All of it."""
    block = BLOCKS[index]
    out = torch.empty(block.numel, dtype=dtype_of(block) if kind == "param" else torch.float32)
    store.read_array(index, kind, 0, out)
    return out


def values(store: BlockStore) -> dict[int, float | str]:
    """{block: the one value of all its params}, of moments too unless they are zero; "mixed" where there are several.
    """
    found = {}
    for block in BLOCKS:
        params = array(store, block.index).float().unique()
        moments = [array(store, block.index, kind).unique() for kind in STATE_KINDS[1:] if block.trainable]
        whole = len(params) == 1 and all(torch.equal(m, params) or m.tolist() == [0.0] for m in moments)
        found[block.index] = params.item() if whole else "mixed"
    return found
