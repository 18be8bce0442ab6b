"""Copies of memory that is not pinned pass through the pinned ring, in order, whole, and with every wait."""
from __future__ import annotations

import functools
import threading

import pytest
import torch

import lohan_ds.offload
from lohan_ds.errors import StepError
from lohan_ds.memory import pinned_pool
from lohan_ds.memory.budget import MemoryBudget
from lohan_ds.memory.pinned_pool import NUM_STAGING, BufferRing, PinnedPool
from lohan_ds.offload import Offload
from lohan_ds.runtime.staged_streams import StagedStreams
from lohan_ds.runtime.streams import InlineStreams
from lohan_ds.testing.delayed_streams import DelayedStreams
from lohan_ds.testing.harness import ds_config, engine_for, engine_state
from lohan_ds.testing.models import OddModel, lm_batch, loss_of
from lohan_ds.testing.twin import assert_same_bits

PIECE_BYTES = 4096
KINDS = ("h2d", "d2h")


class PoolThatFailed(PinnedPool):
    """Says that nothing but its ring is pinned."""

    def __init__(self, budget: MemoryBudget | None = None, pin: bool = False):
        super().__init__(budget or MemoryBudget("host", 1 << 26), pin=False)
        self.staging = BufferRing(self, NUM_STAGING, PIECE_BYTES, "pinned staging buffer")
        buffers = [self.staging.acquire() for _ in range(NUM_STAGING)]
        self._pinned = {buffer.data_ptr() for buffer in buffers}
        for buffer in buffers:
            self.staging.release(buffer)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned


@pytest.fixture
def pool():
    pool = PoolThatFailed()
    yield pool
    assert not pool.staging._lent
    pool.close()


def through(streams, num_items: int = 5) -> list[torch.Tensor]:
    """Values to the "device", doubled there, and back, two ways at once; sizes of less than a piece and of many."""
    outs, back = [], []
    for index in range(num_items):
        numel = (1, 900, 1024, 1025, 5000)[index % 5]
        source, there, out = torch.arange(numel) + 10_000.0 * index, torch.empty(numel), torch.empty(numel)
        streams.h2d(there, source, after=streams.compute_mark()).compute_wait()
        outs.append(out)
        back.append(streams.d2h(out, there * 2))
    for event in reversed(back):
        event.host_wait()
        assert event.done()
    return outs


def test_values_arrive_whole_and_every_byte_passes_the_ring(pool):
    copied = {kind: 0 for kind in KINDS}
    inner = DelayedStreams(0, 0.0005)
    streams = StagedStreams(inner, pool)
    streams.on_copy = lambda kind, start, end, nbytes: copied.update({kind: copied[kind] + nbytes})
    want = through(InlineStreams())
    assert all(map(torch.equal, through(streams), want))
    assert copied == {kind: 4 * sum(out.numel() for out in want) for kind in KINDS}
    streams.close()


@pytest.mark.parametrize(("kind", "n"), [("h2d", 1), ("h2d", 2), ("h2d", 3), ("h2d", 4),
                                         ("d2h", 1), ("d2h", 2), ("d2h", 3), ("d2h", 4), ("d2h", 5)])
def test_every_wait_is_needed(pool, kind, n):
    """Five pieces through two buffers: three are taken again; then the last is waited for, or two more are emptied."""
    inner = DelayedStreams(0, 0.0005, held_delay_s=0.3)
    streams = StagedStreams(inner, pool)
    inner.drop_one_wait_at(n, kind)
    src, dst = torch.arange(5 * PIECE_BYTES // 4) + 1.0, torch.zeros(5 * PIECE_BYTES // 4)
    if kind == "h2d":
        streams.h2d(dst, src).compute_wait()
    else:
        streams.d2h(dst, src).host_wait()
    got = dst.clone()
    streams.close()
    assert inner.dropped() and not torch.equal(got, src)


def test_as_long_as_all_is_pinned_nothing_is_staged():
    pool = PinnedPool(MemoryBudget("host", 1 << 26), pin=False)
    inner = DelayedStreams(0, 0.0005)
    streams, threads = StagedStreams(inner, pool), threading.active_count()
    assert all(map(torch.equal, through(streams), through(InlineStreams())))
    assert threading.active_count() == threads
    streams.close()


def test_a_pool_that_fails_in_the_middle(pool):
    staging, pool.staging = pool.staging, None
    streams = StagedStreams(DelayedStreams(0, 0.002), pool)
    before, after = torch.zeros(5000), torch.zeros(5000)
    events = [streams.h2d(before, torch.ones(5000))]
    pool.staging = staging
    events += [streams.h2d(after, torch.ones(5000)), streams.h2d(before, torch.full((5000,), 2.0))]
    events[-1].compute_wait()
    assert before.eq(2).all() and after.eq(1).all()   # in the order of submission
    streams.close()


def test_what_is_pinned_takes_its_turn_but_no_buffer(pool):
    pinned = pool.alloc(20_000, "x").view(torch.float32)
    pool._pinned.add(pinned.untyped_storage().data_ptr())
    sizes, inner = [], DelayedStreams(0, 0.0005)
    inner.on_copy = lambda kind, start, end, nbytes: sizes.append(nbytes)
    streams = StagedStreams(inner, pool)
    there = torch.empty(5000)
    streams.h2d(there, pinned.fill_(3)).compute_wait()
    streams.close()
    assert there.eq(3).all() and sizes == [20_000]


def test_a_failed_copy_fails_its_event_and_the_next_go_on(pool):
    streams = StagedStreams(DelayedStreams(0, 0.0005), pool)
    gone, there = torch.ones(5000), torch.zeros(5000)
    bad = streams.h2d(there, torch.ones(4))
    with pytest.raises(Exception, match="shorter|longer|match|size"):
        bad.host_wait()
    assert bad.done()
    streams.h2d(there, gone).compute_wait()
    assert there.eq(1).all()
    streams.close()


def test_closed_ring_is_an_error():
    pool = PoolThatFailed()
    pool.staging.close()
    streams = StagedStreams(DelayedStreams(0, 0.0), pool)
    with pytest.raises(StepError):
        streams.h2d(torch.zeros(3), torch.ones(3)).host_wait()
    streams.close()
    assert pinned_pool.NUM_STAGING == 4


def trained(tmp_path, make_offload=None) -> tuple[list[float], dict, int]:
    config = ds_config({"ssd_paths": [str(tmp_path)], "param_tier": "host", "optimizer_tier": "ssd"}, dtype="bf16",
                       clip=1.0, optimizer={"type": "AdamW", "params": {"lr": 1e-2}})
    losses = []
    with engine_for(OddModel(), config, make_offload=make_offload) as engine:
        for step in range(3):
            loss = loss_of(engine, lm_batch(131, seed=step))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses, engine_state(engine), len(getattr(engine.offload.streams, "_directions", ()))


def test_an_engine_whose_memory_cannot_be_pinned_has_the_same_bits(tmp_path, monkeypatch):
    losses, state, _ = trained(tmp_path)
    monkeypatch.setattr(lohan_ds.offload, "PinnedPool", PoolThatFailed)
    got_losses, got_state, num_directions = trained(
        tmp_path, functools.partial(Offload, streams=DelayedStreams(0, 0.0005)))
    assert num_directions == 2 and got_losses == losses
    assert_same_bits(got_state, state)
