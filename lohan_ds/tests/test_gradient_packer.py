"""Packed gradients arrive as they were, with the norm's sums; every wait is needed; few are on the device at once."""
from __future__ import annotations

import contextlib
import random

import pytest
import torch

from lohan_ds import plan as plans
from lohan_ds.block import make_block
from lohan_ds.grad_norm import SEGMENT_NUMEL, sum_of_squares
from lohan_ds.memory.budget import MemoryBudget
from lohan_ds.memory.pinned_pool import PinnedPool
from lohan_ds.plan import OffloadPlan
from lohan_ds.planner.memory_model import NORM_SEGMENT_NUMEL, needs
from lohan_ds.profile import ModelSize
from lohan_ds.runtime import gradient_pipeline
from lohan_ds.runtime.gradient_packer import DirectCopies, GradientPacker
from lohan_ds.runtime.streams import Event, InlineStreams
from lohan_ds.testing import durable_training as training
from lohan_ds.testing.delayed_streams import DelayedStreams
from lohan_ds.testing.durable_training import durable_training, same

CPU = torch.device("cpu")


def a_block(index: int, numels: list[int], dtype: str = "bfloat16"):
    return make_block(index, f"layer {index}", dtype, [(f"p{i}", (n,), 0) for i, n in enumerate(numels)], 2048)


@contextlib.contextmanager
def packer_of(blocks, streams):
    pool = PinnedPool(MemoryBudget("host", 1 << 28), pin=False)
    packer = GradientPacker(blocks, streams, pool, CPU, DirectCopies(streams))
    yield packer
    packer.close()
    assert pool.budget.used_bytes == 0
    with contextlib.suppress(AssertionError):   # a copy that a test wanted to fail
        streams.close()


def gradient(block, slot: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + 10 * block.index + slot)
    return torch.randn(block.slots[slot].numel, generator=generator).to(getattr(torch, block.dtype))


def take(packed_list, sums: dict) -> None:
    """As the collecting thread does."""
    for packed in packed_list:
        packed.event.host_wait()
        for slot, squares in zip(packed.slots, packed.sums_by_slot(), strict=True):
            sums[packed.block.index, slot] = squares
        packed.release()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("seed", range(6))
def test_any_order_any_gaps_any_staging(monkeypatch, dtype, seed):
    """Blocks that interleave, slots that get no gradient, gradients larger than the buffer, empty ones."""
    draw = random.Random(seed)
    monkeypatch.setattr(plans, "_MAX_GRADIENT_STAGING_BYTES", draw.choice([4096, 40_000, 1 << 20]))
    blocks = [a_block(i, [draw.choice([0, 1, 31, 700, SEGMENT_NUMEL, SEGMENT_NUMEL + 3, 40_001])
                          for _ in range(draw.randint(1, 7))], dtype) for i in range(5)]
    arrivals = [(block, slot) for block in reversed(blocks) for slot in reversed(range(len(block.slots)))
                if draw.random() < 0.8]
    if seed % 2:
        draw.shuffle(arrivals)
    held = [torch.full((block.numel,), 5.0, dtype=getattr(torch, dtype)) for block in blocks]
    sums, seen, num_left = {}, {block.index: 0 for block in blocks}, 0
    with packer_of(blocks, DelayedStreams(seed, 0.0005)) as packer:
        for block, slot in arrivals:
            seen[block.index] += 1
            left = packer.add(block, slot, gradient(block, slot), held[block.index],
                              seen[block.index] == len(block.slots))
            num_left += sum(len(packed.slots) for packed in left)
            take(left, sums)
        take(packer.flush(), sums)
        assert packer.flush() == []
    assert sums == {(block.index, slot): sum_of_squares(gradient(block, slot)) for block, slot in arrivals}
    for block, slot in arrivals:
        info = block.slots[slot]
        assert torch.equal(held[block.index][info.offset:info.offset + info.numel], gradient(block, slot))
    for block in blocks:   # a slot that got none is as it was
        for slot in set(range(len(block.slots))) - {s for b, s in arrivals if b is block}:
            info = block.slots[slot]
            assert held[block.index][info.offset:info.offset + info.numel].eq(5).all()


def test_a_block_is_one_launch_and_two_copies(monkeypatch):
    launches, copies = [], []
    pack = gradient_pipeline.GradientPacker.__init__.__globals__["pack"]
    monkeypatch.setitem(gradient_pipeline.GradientPacker.__init__.__globals__, "pack",
                        lambda grads, *more: launches.append(len(grads)) or pack(grads, *more))
    streams, block = InlineStreams(), a_block(0, [100, 2000, 7, 33, 4096])
    streams.on_copy = lambda direction, start, end, nbytes: copies.append(nbytes)
    with packer_of([block], streams) as packer:
        values = torch.zeros(block.numel, dtype=torch.bfloat16)
        for slot in reversed(range(5)):
            take(packer.add(block, slot, gradient(block, slot), values, is_last=slot == 0), {})
    last = block.slots[-1]
    assert launches == [5] and copies == [5 * 8, 2 * (last.offset + last.numel)]


def three_blocks(streams) -> tuple[list[torch.Tensor], dict]:
    """Through two staging buffers, and nobody waits before all three have left."""
    blocks = [a_block(i, [3000, 500]) for i in range(3)]
    held, sums, left = [torch.zeros(block.numel, dtype=torch.bfloat16) for block in blocks], {}, []
    with packer_of(blocks, streams) as packer:
        for block, values in zip(blocks, held):
            for slot in (1, 0):
                left += packer.add(block, slot, gradient(block, slot), values, is_last=slot == 0)
        take(left, sums)
    return [values[:3500].clone() for values in held], sums


@pytest.mark.parametrize("n", [None, 1, 2, 3])
def test_every_wait_is_needed(n):
    """The first is compute's, before it writes to a staging buffer again; the others are the host's."""
    streams = DelayedStreams(0, 0.0005, held_delay_s=0.3)
    if n is not None:
        streams.drop_one_wait_at(n, "d2h")
    (want, want_sums), (got, sums) = three_blocks(InlineStreams()), three_blocks(streams)
    assert streams.dropped() == (n is not None)
    assert (all(map(torch.equal, got, want)) and sums == want_sums) == (n is None)


class _Unfinished(Event):
    waited = 0

    def compute_wait(self) -> None:
        pass

    def host_wait(self) -> None:
        _Unfinished.waited += 1

    def done(self) -> bool:
        return False


class _SlowLink(InlineStreams):
    def d2h(self, dst, src):
        super().d2h(dst, src)
        return _Unfinished()


def test_few_gradients_are_on_their_way_however_slow_the_link(monkeypatch):
    """The plan counts two of the largest; without a limit all of a model's would pile up on the device."""
    direct = DirectCopies(_SlowLink())
    monkeypatch.setattr(_Unfinished, "waited", 0)
    for num_sent in range(1, 8):
        direct.d2h(torch.zeros(4), torch.ones(4))
        assert num_sent - _Unfinished.waited <= 2


# -- the pipeline -------------------------------------------------------------------------------------------------


def trained(tmp_path, monkeypatch, streams, update: str = "deferred", num_steps: int = 4):
    monkeypatch.setattr(training, "make_streams", lambda device: streams)
    with durable_training([str(tmp_path)], update) as run:
        run.run(num_steps)
        packs = run.pipeline._packer is not None
        return run.state(), packs


@pytest.mark.parametrize("update", ["serial", "deferred", "eager"])
def test_training_has_the_same_bits(tmp_path, monkeypatch, update):
    want, packs = trained(tmp_path / "inline", monkeypatch, InlineStreams(), update)
    assert not packs
    got, packs = trained(tmp_path / "packed", monkeypatch, DelayedStreams(1, 0.001), update)
    assert packs and same(got, want)
    monkeypatch.setattr(gradient_pipeline, "can_pack", lambda device: False)
    got, packs = trained(tmp_path / "one_by_one", monkeypatch, DelayedStreams(1, 0.001), update)
    assert not packs and same(got, want)


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_training_needs_every_wait(tmp_path, monkeypatch, n):
    want, _ = trained(tmp_path / "inline", monkeypatch, InlineStreams(), num_steps=2)
    streams = DelayedStreams(1, 0.0005, held_delay_s=0.5)
    streams.drop_one_wait_at(n, "d2h")
    got, packs = trained(tmp_path / "packed", monkeypatch, streams, num_steps=2)
    assert packs and streams.dropped() and not same(got, want)


def test_a_second_gradient_is_added_to_one_that_waits(tmp_path, monkeypatch):
    streams = DelayedStreams(2, 0.001)
    monkeypatch.setattr(training, "make_streams", lambda device: streams)
    with durable_training([str(tmp_path)], "deferred") as run:
        pipeline, block = run.pipeline, run.blocks[1]
        pipeline.open_step(None, float("inf"))
        first, second = gradient(block, 0, 1), gradient(block, 0, 2)
        pipeline.arrive(1, 0, first, True)
        pipeline.arrive(1, 0, second, True)
        assert torch.equal(pipeline.gradient(1, 0), first.float() + second.float())
        want = torch.cat([first.float() + second.float()]).double().norm().item()
        assert pipeline.norm() == pytest.approx(want, rel=1e-12)
        pipeline.drop()


def test_what_waits_is_forgotten_with_the_step(tmp_path, monkeypatch):
    streams = DelayedStreams(2, 0.001)
    monkeypatch.setattr(training, "make_streams", lambda device: streams)
    with durable_training([str(tmp_path)], "deferred") as run:
        run.pipeline.open_step(None, float("inf"))
        run.pipeline.arrive(1, 0, torch.full((2048,), float("nan"), dtype=torch.bfloat16), True)
        run.pipeline.drop()
        assert run.pipeline.norm() == 0.0 and run.pipeline.gradient(1, 0) is None
        run.pipeline.open_step(None, float("inf"))
        run.pipeline.arrive(1, 0, torch.ones(2048, dtype=torch.bfloat16), True)   # its neighbour gets none
        assert run.pipeline.gradient(1, 0).eq(1).all() and run.pipeline.norm() == 2048 ** 0.5
        run.pipeline.drop()


def test_the_plan_counts_what_packing_takes():
    assert NORM_SEGMENT_NUMEL == SEGMENT_NUMEL
    blocks = (a_block(0, [100_000, 17]), a_block(1, [40_000] * 3))
    model = ModelSize(blocks, ((0,), (1,)), 100_000)
    pool = PinnedPool(MemoryBudget("host", 1 << 28), pin=False)
    streams = InlineStreams()
    packer = GradientPacker(blocks, streams, pool, CPU, DirectCopies(streams))
    for accumulate_fp32 in (False, True):
        plan = OffloadPlan(("host",) * 2, ("host",) * 2, "serial", 1, 2048, 3, accumulate_fp32)
        counted = {(item.tier, item.what): item.nbytes for item in needs(model, plan, unified=False)}
        sums_bytes = counted.get(("host", "sums of squares of packed gradients"), 0)
        assert sums_bytes == (0 if accumulate_fp32 else pool.budget.used_bytes)
        packing_bytes = counted.get(("device", "gradients being packed (3 buffers)"), 0)
        assert packing_bytes == (0 if accumulate_fp32 else 3 * plans.gradient_staging_bytes(blocks))
        assert not any("pack" in item.what for item in needs(model, plan, unified=True))
    packer.close()
