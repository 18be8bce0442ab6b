"""What is read ahead is used once, dropped when the block is edited, and never read while the block changes."""
from __future__ import annotations

import contextlib

import pytest
import torch

from lohan_ds.adam import AdamHyper
from lohan_ds.block import make_block
from lohan_ds.memory.budget import MemoryBudget
from lohan_ds.memory.pinned_pool import PinnedPool
from lohan_ds.plan import OffloadPlan
from lohan_ds.read_ahead import ReadAhead
from lohan_ds.store.block_store import BlockStore
from lohan_ds.store.native_io import make_ssd_io
from lohan_ds.testing.faulty_io import FaultyIo
from lohan_ds.updater import BlockUpdate, Run, Updater

HYPER = AdamHyper(1e-2, 0.9, 0.99, 1e-8, 0.0, True)


@contextlib.contextmanager
def store_of(tmp_path, io=None, param_tier="ssd", shadow=False, dtype="bfloat16", state_tier=("ssd",) * 4,
             numel=4000):
    """Three trained blocks, of two chunks if nothing else is said, and a frozen one."""
    blocks = [make_block(i, f"b{i}", dtype, [("p", (numel,), None if i == 1 else 0)], 2048) for i in range(4)]
    plan = OffloadPlan((param_tier,) * 4, state_tier, "deferred", 1, 2048, 3, False, shadow=shadow)
    pool, io = PinnedPool(MemoryBudget("host", 1 << 28), pin=False), io or make_ssd_io(2)
    store = BlockStore(blocks, plan, pool, io, [str(tmp_path / "run")])
    try:
        for block in blocks:
            values = torch.randn(block.numel, generator=torch.Generator().manual_seed(block.index))
            store.write_initial(block.index, values.to(getattr(torch, dtype)))
        yield blocks, store, pool
    finally:
        store.close()
        io.close()
        pool.close()


def read_all(ahead, may_read=lambda block_index: True):
    """Until there is nothing to do, waiting for each read."""
    num_read = 0
    while ahead.advance(may_read, None):
        num_read += 1
        ahead._reading[-1].wait()
    return num_read


@pytest.mark.parametrize("num_chunks", [0, 1, 4, 9])
def test_in_forward_order_as_far_as_there_is_room(tmp_path, num_chunks):
    with store_of(tmp_path) as (blocks, store, pool):
        ahead = ReadAhead(blocks, store, pool, num_chunks)
        assert read_all(ahead) == 0   # not begun
        ahead.open_step()
        assert read_all(ahead) == min(num_chunks, 6)
        taken = [(block.index, chunk.index) for block in blocks for chunk in block.chunks
                 if (entry := ahead.take(block.index, chunk)) is not None and ahead.release(entry.buffer) is None]
        assert taken == [(0, 0), (0, 1), (2, 0), (2, 1), (3, 0), (3, 1)][:num_chunks]
        ahead.end()
        assert read_all(ahead) == 0
        ahead.close()


@pytest.mark.parametrize(("dtype", "expected"), [("bfloat16", [0]), ("float32", [0, 2, 3])])
def test_only_what_an_update_reads_from_ssd(tmp_path, dtype, expected):
    """Parameters on SSD are read by the update where they are the master."""
    with store_of(tmp_path, dtype=dtype, state_tier=("ssd", "host", "host", "host")) as (blocks, store, pool):
        ahead = ReadAhead(blocks, store, pool, 6)
        ahead.open_step()
        assert read_all(ahead) == 2 * len(expected)
        assert all(ahead.take(index, blocks[index].chunks[0]) is not None for index in expected)
        ahead.close()


def test_a_block_under_way_holds_up_and_an_edited_one_is_forgotten(tmp_path):
    with store_of(tmp_path) as (blocks, store, pool):
        ahead = ReadAhead(blocks, store, pool, 6)
        ahead.open_step()
        assert read_all(ahead, lambda block_index: block_index == 0) == 2
        ahead.drop(0)
        assert read_all(ahead) == 4   # what was dropped is not read again in this step
        assert ahead.take(0, blocks[0].chunks[0]) is None
        ahead.open_step()
        assert read_all(ahead) == 2
        ahead.close()


@pytest.mark.parametrize("param_tier", ["host", "ssd"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shadow, speculates", [(False, False), (True, False), (True, True)])
def test_updates_and_edits_have_the_same_bits_with_and_without(tmp_path, param_tier, dtype, shadow, speculates):
    """Steps, a skipped one, one whose speculation is dropped, edits between backward and step(), and after one."""
    results = []
    for num_chunks in (0, 2, 6):
        io = FaultyIo(3, seed=num_chunks, max_delay_s=0.002)
        with store_of(tmp_path / str(num_chunks), io, param_tier, shadow, dtype) as (blocks, store, pool):
            updater = Updater(blocks, store, pool, 3, num_chunks)
            reads_before = store.bytes_read
            for step in range(5):
                updater.open_step(speculates, 1e9)
                grads = {b.index: torch.randn(b.numel, generator=torch.Generator().manual_seed(10 * step + b.index)
                                              ).to(getattr(torch, dtype)) for b in blocks if b.trainable}
                updates = [BlockUpdate(b, (Run(0, 4000, HYPER, step + 1),), grads[b.index], 0.5)
                           for b in blocks if b.trainable]
                for update in reversed(updates):
                    updater.gradient_complete(update, 1.0)
                if step == 2:
                    updater.skip()
                    continue
                if step in (1, 3):
                    updater.spoil(2, wait=True)
                    store.write_array(2, "exp_avg", 5, torch.full((100,), 0.5 + step))
                outs = [pool.alloc(b.param_bytes, "out").view(getattr(torch, dtype)) for b in blocks]
                updater.decide(updates, speculates and step != 4)
                reads = [store.read_params(b.index, out) for b, out in zip(blocks, outs)]   # some of them are fed
                updater.drain()
                for block, read in zip(blocks, reads):
                    stored = torch.empty(block.numel, dtype=getattr(torch, dtype))
                    store.read_array(block.index, "param", 0, stored)
                    assert torch.equal(read.wait(), stored)
            got = []
            for block in blocks:
                for kind in ("param", *(("exp_avg", "exp_avg_sq") if block.trainable else ())):
                    out = torch.empty(block.numel, dtype=getattr(torch, dtype) if kind == "param" else torch.float32)
                    store.read_array(block.index, kind, 0, out)
                    got.append(out)
            results.append((got, store.bytes_read - reads_before))
            updater.close()
    for got, _ in results[1:]:
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, results[0][0]))


def test_a_read_that_fails_stops_the_update_that_needs_it(tmp_path):
    io = FaultyIo(2)
    with store_of(tmp_path, io) as (blocks, store, pool):
        updater = Updater(blocks, store, pool, 3, 6)
        io.inject("read", 5, at_call=0, times=10**6)
        updater.open_step(False, 1e9)
        grads = torch.zeros(blocks[0].numel, dtype=torch.bfloat16)
        updater.decide([BlockUpdate(blocks[0], (Run(0, 4000, HYPER, 1),), grads, 1.0)], False)
        with pytest.raises(Exception, match="Input/output error"):
            updater.drain()
        io.heal()
        updater.close()
