"""Update mode `eager`: blocks are updated during backward, and what must not stand is dropped.

Each entry of the list of drops (architecture.md, section 6) with the twin's bits afterwards; that the updates to drop
were there is waited for, not hoped for. Then: random delays, failing disks, and that work really overlaps.
"""
from __future__ import annotations

import contextlib
import errno
import functools
import math
import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from test_failures import assert_nothing_left
from test_timing import SleepyModel, update_bytes, use_plan
from test_training_patterns import TIERS, Pair, batches_for, lohan_section, pair_of
from test_visible_parameters import edit_twin
from torch import nn
from torch.utils.checkpoint import checkpoint

from integration_tests.doubles import LR, SlowWrites, engine_config, make_batches, one_drive, use_doubles
from lohan_ds.errors import StepError, StoreError
from lohan_ds.grad_norm import global_norm, sum_of_squares
from lohan_ds.runtime.gradient_pipeline import GradientPipeline
from lohan_ds.step_protocol import Stage
from lohan_ds.store.block_order import BlockOrder
from lohan_ds.store.block_store import BlockStore
from lohan_ds.store.ssd_io import ThreadSsdIo
from lohan_ds.testing.delayed_streams import DelayedStreams
from lohan_ds.testing.faulty_io import FaultyIo
from lohan_ds.testing.harness import DTYPES, ds_config, engine_for, engine_state, finish_speculation
from lohan_ds.testing.models import AlbertLike, OddModel, lm_batch, loss_of, tiny_llama
from lohan_ds.testing.parity import norm_before_last
from lohan_ds.testing.twin import Twin, assert_same_bits, diff_bits
from lohan_ds.work import Work

DTYPE = pytest.mark.parametrize("dtype", ["fp32", "bf16"])
NUM_BLOCKS = 7                 # of OddModel: its own parameter, embed, three layers, norm, head
MIDDLE = "layers.1.up.weight"  # a parameter of a block that is updated early


@contextlib.contextmanager
def eager_pair(tmp_path, make_model=OddModel, tier="ssd", dtype="bf16", num_steps=1, **more):
    """An engine and its twin that have trained `num_steps`, so that no state is zero."""
    with pair_of(make_model, lohan_section(tmp_path, tier, "eager"), dtype=dtype, **more) as pair:
        for batch in batches_for(131, num_steps):
            micro_step_with_limit(pair, batch, lambda twin: 0.0)
            pair.step()
        pair.engine.offload.gradients.updater.drain()
        yield pair


def updates(pair: Pair) -> tuple[int, int]:
    """Block updates made in backward so far: (kept, dropped)."""
    stats = pair.engine.lohan_stats()
    return stats["updates_speculated"], stats["updates_dropped"]


@contextlib.contextmanager
def expect(pair: Pair, kept: int, dropped: int):
    """So many block updates made in backward are kept and dropped in the body."""
    before = updates(pair)
    yield
    pair.engine.offload.gradients.updater.drain()
    assert updates(pair) == (before[0] + kept, before[1] + dropped)


def speculate(pair: Pair, num_blocks: int | None = NUM_BLOCKS) -> list[Stage]:
    """Waits until as many blocks as may be are updated, and checks that so many are."""
    stages = finish_speculation(pair.engine)
    assert num_blocks is None or stages.count(Stage.SPECULATED) == num_blocks, stages
    return stages


def micro_step_with_limit(pair: Pair, batch, limit_of) -> None:
    """`limit_of(twin)`: the limit on the norm for this step, from the gradients that the twin holds by then."""
    loss = pair.twin.micro_step(batch)
    pair.twin.clip = pair.engine.optimizer.clip_grad = limit_of(pair.twin)
    ours = loss_of(pair.engine, batch)
    pair.engine.backward(ours)
    assert ours.item() == loss


def norm_of(twin: Twin) -> float:
    return global_norm(part for grad in twin.main_grads.values() for part in sum_of_squares(grad.flatten()))


def before_last_gradient(pair: Pair, do) -> None:
    """`do()` in the next backward, ahead of the gradient of the embedding, which is the last to come."""
    def once(grad):
        handle.remove()
        do()

    handle = pair.engine.module.embed.weight.register_hook(once)


def go_on(pair: Pair) -> None:
    """What comes after reads what was left: a forward, then another step, whose updates are kept."""
    batch, other = batches_for(131, 21)[19:]
    with torch.no_grad():
        assert loss_of(pair.engine, other).item() == loss_of(pair.twin.model, other).item()
    micro_step_with_limit(pair, batch, lambda twin: 0.0)
    pair.step()
    pair.check()


BATCH = lm_batch(131, seq=12, seed=11)
OTHER = lm_batch(131, seq=12, seed=12)


# -- the limit ---------------------------------------------------------------------------------------------------------


@TIERS
@DTYPE
def test_updates_stand_when_nothing_is_clipped(tmp_path, tier, dtype):
    with eager_pair(tmp_path, tier=tier, dtype=dtype) as pair:
        for limit in (0.0, 1e6):
            with expect(pair, NUM_BLOCKS, 0):
                micro_step_with_limit(pair, BATCH, lambda twin: limit)
                speculate(pair)
                pair.step()
            pair.check()
        go_on(pair)


@TIERS
@DTYPE
def test_limit_crossed_early(tmp_path, tier, dtype):
    with eager_pair(tmp_path, tier=tier, dtype=dtype) as pair:
        before = updates(pair)
        micro_step_with_limit(pair, BATCH, lambda twin: 1e-3 * norm_of(twin))
        speculate(pair, 0)
        pair.step()
        pair.check()
        assert updates(pair)[0] == before[0]
        go_on(pair)


@TIERS
@DTYPE
def test_limit_crossed_by_the_last_block(tmp_path, tier, dtype):
    with eager_pair(tmp_path, tier=tier, dtype=dtype) as pair, expect(pair, NUM_BLOCKS, NUM_BLOCKS - 1):
        before_last_gradient(pair, lambda: speculate(pair, NUM_BLOCKS - 1))
        micro_step_with_limit(pair, BATCH, lambda twin: (norm_before_last(twin) + norm_of(twin)) / 2)
        speculate(pair, NUM_BLOCKS - 1)
        pair.step()
        pair.check()
        speculated_after(pair)


def speculated_after(pair: Pair) -> None:
    """`go_on` where all blocks are updated before step()."""
    micro_step_with_limit(pair, OTHER, lambda twin: 0.0)
    speculate(pair)
    pair.step()
    pair.check()


@TIERS
def test_coefficient_of_exactly_one_and_just_not(tmp_path, tier):
    with eager_pair(tmp_path, tier=tier) as pair:
        with expect(pair, NUM_BLOCKS, 0):
            micro_step_with_limit(pair, BATCH, lambda twin: norm_of(twin) + 1e-6)
            speculate(pair)
            pair.step()
        pair.check()
        with expect(pair, 0, NUM_BLOCKS):   # the norm does not pass the limit, yet the coefficient is not 1
            micro_step_with_limit(pair, OTHER, lambda twin: math.nextafter(norm_of(twin) + 1e-6, 0))
            speculate(pair)
            pair.step()
        pair.check()
        go_on(pair)


@TIERS
@DTYPE
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("clip", [0.0, 1e6])
def test_value_that_is_not_finite_in_the_last_gradient(tmp_path, tier, dtype, bad, clip):
    with eager_pair(tmp_path, tier=tier, dtype=dtype) as pair:
        before = engine_state(pair.engine)
        with expect(pair, 0, NUM_BLOCKS - 1):
            hooks = [model.embed.weight.register_hook(lambda grad: grad + bad)
                     for model in (pair.engine.module, pair.twin.model)]
            before_last_gradient(pair, lambda: speculate(pair, NUM_BLOCKS - 1))
            micro_step_with_limit(pair, BATCH, lambda twin: clip)
            for hook in hooks:
                hook.remove()
            speculate(pair, NUM_BLOCKS - 1)
            pair.step()
        assert pair.engine.optimizer.overflow and pair.engine.skipped_steps == 1
        assert_same_bits(engine_state(pair.engine), before)
        assert set(pair.engine.optimizer.steps.values()) == {1}
        go_on(pair)


# -- no step, or more gradients ----------------------------------------------------------------------------------------


@TIERS
@DTYPE
def test_second_backward_before_step(tmp_path, tier, dtype):
    with eager_pair(tmp_path, tier=tier, dtype=dtype) as pair, expect(pair, 0, NUM_BLOCKS):
        for batch in (BATCH, OTHER, BATCH):   # the user never came to step() after the first two
            pair.micro_step(batch)
            speculate(pair, None)
        pair.step()
        pair.check()
    with eager_pair(tmp_path, tier=tier, dtype=dtype) as pair:
        pair.micro_step(BATCH)   # while updates are under way
        pair.micro_step(OTHER)
        pair.step()
        pair.check()
        go_on(pair)


@DTYPE
def test_second_backward_of_one_block_drops_that_one_only(tmp_path, dtype):
    def penalty(model, _):
        return (model.module if hasattr(model, "module") else model).layers[1].up.weight.float().square().mean()

    with eager_pair(tmp_path, dtype=dtype) as pair, expect(pair, NUM_BLOCKS - 1, 1):
        pair.micro_step(BATCH)
        speculate(pair)
        pair.micro_step(None, penalty)
        speculate(pair, NUM_BLOCKS - 1)
        pair.step()
        pair.check()


@TIERS
@pytest.mark.parametrize("drop", ["reset_step", "zero_grad"])
def test_step_that_is_reset(tmp_path, tier, drop):
    with eager_pair(tmp_path, tier=tier) as pair:
        before = engine_state(pair.engine)
        with expect(pair, 0, NUM_BLOCKS):
            pair.engine.backward(loss_of(pair.engine, BATCH))
            speculate(pair)
            getattr(pair.engine.optimizer, drop)()
        assert_same_bits(engine_state(pair.engine), before)
        go_on(pair)


class _CallBackward(torch.autograd.Function):
    """Identity; calls `do()` in backward."""

    @staticmethod
    def forward(ctx, x, do):
        ctx.do = do
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.do()
        return grad.clone(), None


@TIERS
@pytest.mark.parametrize("accumulation", [1, 3])
def test_exception_in_the_middle_of_backward(tmp_path, tier, accumulation):
    class Model(OddModel):
        do = None

        def __init__(self):
            super().__init__()
            self.layers[1].register_forward_hook(
                lambda layer, args, output: _CallBackward.apply(output, self.do) if self.do else None)

    def fail():
        speculate(pair, 4)   # its own parameter, head, norm, layers.2
        raise RuntimeError("bad backward")

    section = lohan_section(tmp_path, tier, "eager")
    batches = batches_for(131, 2 * accumulation)
    with pair_of(Model, section, dtype="bf16", accumulation=accumulation, twin_model=OddModel) as pair:
        pair.train(batches[:accumulation])
        before = engine_state(pair.engine)
        with expect(pair, 0, 4):
            for micro in range(accumulation):
                pair.engine.module.do = fail if micro == accumulation - 1 else None
                loss = loss_of(pair.engine, batches[micro])
                if micro < accumulation - 1:
                    pair.engine.backward(loss)
                    pair.engine.step()
            with pytest.raises(RuntimeError, match="bad backward"):
                pair.engine.backward(loss)
        pair.engine.module.do = None
        assert_same_bits(engine_state(pair.engine), before)
        pair.train(batches[accumulation:])
        pair.check()


# -- edits between backward and step -----------------------------------------------------------------------------------


def groups_of(model):
    params = list(model.parameters())
    return [{"params": params[0::2]}, {"params": params[1::2], "weight_decay": 0.3}]


HYPERS = [{"lr": 3e-3}, {"betas": (0.5, 0.9)}, {"weight_decay": 0.2}, {"eps": 1e-3}]


@pytest.mark.parametrize("change", HYPERS, ids=lambda change: next(iter(change)))
@TIERS
def test_hyper_parameters_of_one_group_changed(tmp_path, change, tier):
    with eager_pair(tmp_path, tier=tier, groups=groups_of) as pair:
        groups = (pair.engine.optimizer.param_groups[1], pair.twin.groups[1])
        pair.micro_step(BATCH)
        speculate(pair)
        with expect(pair, 0, NUM_BLOCKS):
            for group in groups:
                group.update(change)
            pair.step()
        pair.check()
        old = {name: groups[0][name] for name in change}
        pair.micro_step(OTHER)
        speculate(pair)
        with expect(pair, NUM_BLOCKS, 0):   # changed and changed back
            groups[0].update({"lr": 1.0, "betas": (0.1, 0.1), "weight_decay": 0.9, "eps": 1.0})
            groups[0].update({name: groups[1][name] for name in ("lr", "betas", "weight_decay", "eps")} | old)
            pair.step()
        pair.check()
        go_on(pair)


@TIERS
@DTYPE
def test_edited_gradient(tmp_path, tier, dtype):
    with eager_pair(tmp_path, tier=tier, dtype=dtype) as pair, expect(pair, NUM_BLOCKS - 1, 1):
        pair.micro_step(BATCH)
        speculate(pair)
        param = dict(pair.engine.module.named_parameters())[MIDDLE]
        grad = safe_get_full_grad(param)   # a look changes nothing
        speculate(pair)
        safe_set_full_grad(param, grad * 3)
        pair.twin._main_grad[MIDDLE] *= 3
        if dtype == "bf16":
            pair.twin._main_grad[MIDDLE].copy_(pair.twin._main_grad[MIDDLE].bfloat16())
        speculate(pair, NUM_BLOCKS - 1)
        pair.step()
        pair.check()


def test_edited_gradient_that_makes_the_step_clip(tmp_path):
    with eager_pair(tmp_path) as pair:
        with expect(pair, 0, NUM_BLOCKS):
            micro_step_with_limit(pair, BATCH, lambda twin: 2 * norm_of(twin))
            speculate(pair)
            param = dict(pair.engine.module.named_parameters())[MIDDLE]
            safe_set_full_grad(param, torch.full(param.shape, 100.0))
            pair.twin._main_grad[MIDDLE].fill_(100.0)
            assert pair.step() > pair.twin.clip
        pair.check()
        go_on(pair)


def gathered(model):
    with GatheredParameters(list(model.layers[1].parameters()), modifier_rank=0):
        nn.init.constant_(model.layers[1].up.weight, 0.5)


def multiply(model):
    with torch.no_grad():
        model.layers[1].up.weight.mul_(1.5)


def set_data(model):
    model.layers[1].up.weight.data.fill_(0.25)


@TIERS
@DTYPE
@pytest.mark.parametrize("edit", [gathered, multiply, set_data], ids=lambda edit: edit.__name__)
def test_edited_parameter(tmp_path, tier, dtype, edit):
    with eager_pair(tmp_path, tier=tier, dtype=dtype) as pair, expect(pair, NUM_BLOCKS - 1, 1):
        pair.micro_step(BATCH)
        speculate(pair)
        edit(pair.engine.module)
        edit_twin(pair, edit)
        pair.step()
        pair.check()


@TIERS
@DTYPE
@pytest.mark.parametrize("kind", ["master", "exp_avg", "exp_avg_sq"])
def test_edited_state(tmp_path, tier, dtype, kind):
    with eager_pair(tmp_path, tier=tier, dtype=dtype) as pair, expect(pair, NUM_BLOCKS - 1, 1):
        pair.micro_step(BATCH)
        speculate(pair)
        param, twin = dict(pair.engine.module.named_parameters())[MIDDLE], pair.twin
        value = torch.full(param.shape, 0.3)
        if kind == "master":
            safe_set_full_fp32_param(param, value)
            twin._master[MIDDLE].copy_(value)
            dict(twin.model.named_parameters())[MIDDLE].data.copy_(value)
        else:
            safe_set_full_optimizer_state(param, value, kind)
            getattr(twin, f"_{kind}")[MIDDLE].copy_(value)
        speculate(pair, NUM_BLOCKS - 1)
        pair.step()
        pair.check()


def test_edit_during_backward(tmp_path):
    """Of a block that is updated already, while others are not."""
    with eager_pair(tmp_path) as pair, expect(pair, NUM_BLOCKS - 1, 1):
        def edit():
            speculate(pair, NUM_BLOCKS - 1)
            gathered(pair.engine.module)

        before_last_gradient(pair, edit)
        pair.micro_step(BATCH)
        edit_twin(pair, gathered)
        speculate(pair, NUM_BLOCKS - 1)
        pair.step()
        pair.check()


@TIERS
@DTYPE
def test_checkpoint_saved_and_loaded_between_backward_and_step(tmp_path, tier, dtype):
    folder = tmp_path / "checkpoint"
    with eager_pair(tmp_path, tier=tier, dtype=dtype) as pair:
        pair.micro_step(BATCH)
        speculate(pair)
        with expect(pair, NUM_BLOCKS, 0):
            pair.engine.save_checkpoint(str(folder))   # of what was before
            speculate(pair)
            saved = pair.twin.state()
            pair.step()
        pair.check()
        pair.micro_step(OTHER)
        speculate(pair)
        with expect(pair, 0, NUM_BLOCKS):
            pair.engine.load_checkpoint(str(folder))   # the gradients are dropped too
            restore_twin(pair.twin, saved)
            pair.check()
        go_on(pair)


def restore_twin(twin: Twin, state) -> None:
    twin._main_grad.clear()
    for name, param in twin.model.named_parameters():
        param.data.copy_(state[name]["param"])
        twin._steps[name] = state[name]["step"]
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            getattr(twin, f"_{kind}")[name].copy_(state[name][kind])


@TIERS
@DTYPE
def test_evaluation_between_backward_and_step(tmp_path, tier, dtype):
    with eager_pair(tmp_path, tier=tier, dtype=dtype) as pair:
        seen = []
        for batch in batches_for(131, 3):
            micro_step_with_limit(pair, batch, lambda twin: 0.0)
            speculate(pair)
            with expect(pair, NUM_BLOCKS, 0):
                for moment in ("before step()", "after step()"):   # the old values, then the new ones
                    with torch.no_grad():
                        losses = [loss_of(model, OTHER).item() for model in (pair.engine, pair.twin.model)]
                    assert losses[0] == losses[1], moment
                    norms = [model.layers[1].up.weight.norm().item() for model in (pair.engine.module, pair.twin.model)]
                    assert norms[0] == norms[1], moment
                    seen.append(losses[0])
                    if moment == "before step()":
                        pair.step()
        assert len(set(seen)) == 4
        pair.check()


# -- which blocks ------------------------------------------------------------------------------------------------------


class PartialModel(OddModel):
    """A parameter of layer 1 has a gradient only when the batch says so."""

    def __init__(self):
        super().__init__()
        self.layers[1].spare = nn.Parameter(torch.ones(33))

    def forward(self, input_ids, labels, use_spare=False):
        x_BTH = self.embed(input_ids)
        for i, layer in enumerate(self.layers):
            x_BTH = layer(x_BTH)
            if use_spare and i == 1:
                x_BTH = x_BTH * layer.spare
        logits = self.head(self.norm(x_BTH)) * self.temperature
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


@TIERS
@DTYPE
def test_partly_complete_block_is_not_updated_early(tmp_path, tier, dtype):
    with pair_of(PartialModel, lohan_section(tmp_path, tier, "eager"), dtype=dtype, weight_decay=0.1) as pair:
        block = pair.engine.module.layers[1].spare.lohan_block
        for step, batch in enumerate(batches_for(131, 5)):
            use_spare = step % 2 == 0
            with expect(pair, NUM_BLOCKS if use_spare else NUM_BLOCKS - 1, 0):
                pair.micro_step(batch | {"use_spare": use_spare})
                stages = speculate(pair, None)
                assert (stages[block] is Stage.SPECULATED) == use_spare
                pair.step()
            pair.check()
        assert engine_state(pair.engine)["layers.1.spare"]["step"] == 3


@TIERS
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_shared_layer_and_tied_head(tmp_path, tier, clip):
    section = lohan_section(tmp_path, tier, "eager")
    with pair_of(AlbertLike, section, clip=clip, accumulation=2) as pair:
        pair.train(batches_for(128, 6))
        pair.check()
        assert clip or updates(pair)[0] > 0


class ReentrantAlbert(AlbertLike):
    """The gradients of its layer come six times in one backward."""

    def forward(self, input_ids, labels):
        x_BTH = self.embed(input_ids)
        for _ in range(self.num_uses):
            x_BTH = checkpoint(self.layer, x_BTH, use_reentrant=True)
        logits = self.head(self.norm(x_BTH))
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


@TIERS
@DTYPE
def test_gradient_that_comes_several_times(tmp_path, tier, dtype):
    with pair_of(ReentrantAlbert, lohan_section(tmp_path, tier, "eager"), dtype=dtype) as pair:
        weight, seen = pair.engine.module.layer.norm1.weight, []

        def look(grad):
            stages = finish_speculation(pair.engine)
            seen.extend(stages[block] for block in layer_blocks)

        layer_blocks = {param.lohan_block for param in pair.engine.module.layer.parameters()}
        # the last parameter of the layer to get its gradient; all the others have theirs, the second time too
        hook = pair.engine.module.layer.down.weight.register_hook(look)
        for batch in batches_for(128, 3):
            pair.micro_step(batch)
            stages = speculate(pair, None)
            assert all(stages[block] is Stage.IDLE for block in layer_blocks)
            pair.step()
        hook.remove()
        assert Stage.SPECULATED in seen, "an update was made before the last of them"
        assert updates(pair)[1] > 0 and weight.shape == (32,)
        pair.check()


@DTYPE
@TIERS
def test_accumulation(tmp_path, dtype, tier):
    with pair_of(OddModel, lohan_section(tmp_path, tier, "eager"), dtype=dtype, accumulation=3) as pair:
        for step in range(3):
            for micro in range(3):
                pair.micro_step(lm_batch(131, seq=12, seed=3 * step + micro))
                speculate(pair, NUM_BLOCKS if micro == 2 else 0)
                if micro < 2:
                    pair.engine.step()
            with expect(pair, NUM_BLOCKS, 0):
                pair.step()
            pair.check()


@contextlib.contextmanager
def fp16_pair(tmp_path, monkeypatch, clip, **fp16):
    from deepspeed.accelerator import get_accelerator
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    twin, model = Twin(OddModel(), dtype=torch.float16, clip=clip, lr=1e-3), OddModel()
    config = ds_config(lohan_section(tmp_path, "ssd", "eager"), clip=clip) | {"fp16": {"enabled": True, **fp16}}
    with engine_for(model, config, torch.optim.AdamW(model.parameters(), lr=1e-3)) as engine:
        yield Pair(engine, twin)


@pytest.mark.parametrize("clip", [0.0, 1e3, 1e-3])
def test_fp16_with_a_static_loss_scale(tmp_path, monkeypatch, clip):
    with fp16_pair(tmp_path, monkeypatch, clip, loss_scale=1000) as pair:
        pair.twin.loss_scale = pair.engine.optimizer.loss_scale
        assert pair.twin.loss_scale == 1000
        num_kept = 0 if clip == 1e-3 else NUM_BLOCKS
        for batch in batches_for(131, 3):
            with expect(pair, num_kept, 0):
                pair.micro_step(batch)
                speculate(pair, num_kept)
                pair.step()
        pair.check()


def test_fp16_with_a_dynamic_loss_scale(tmp_path, monkeypatch):
    """The scale changes from step to step, and a step that overflows is skipped."""
    with fp16_pair(tmp_path, monkeypatch, 1e3, initial_scale_power=20, hysteresis=1, loss_scale_window=3) as pair:
        skipped, scales = 0, set()
        for batch in batches_for(131, 12):
            pair.twin.loss_scale = pair.engine.optimizer.loss_scale
            scales.add(pair.twin.loss_scale)
            pair.micro_step(batch)
            speculate(pair, None)
            pair.step()
            skipped += pair.engine.optimizer.overflow
        assert 0 < skipped < 12 and len(scales) > 2
        assert updates(pair)[0] == NUM_BLOCKS * (12 - skipped)
        pair.check()


def current_bytes(pair: Pair) -> dict[str, bytes]:
    """What lies on the SSD of the slots that hold the blocks."""
    store = pair.engine.offload.store
    files = [file for slots, order in zip(store._slots, store._orders)
             for block_files in slots[order.current_slot()].all_files for file in block_files.files]
    return {file.path: Path(file.path).read_bytes() for file in files}


def test_fp16_overflow_in_the_last_gradient_to_come(tmp_path, monkeypatch):
    """By then every other block is updated. Nothing moves, the scale halves, and training goes on (user case D36)."""
    fp16 = {"initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 1000}
    with fp16_pair(tmp_path, monkeypatch, 0.0, **fp16) as pair:
        scheduler = torch.optim.lr_scheduler.LambdaLR(pair.engine.optimizer, lambda step: 1 / (step + 1))
        pair.engine.lr_scheduler = scheduler
        pair.twin.scheduler = torch.optim.lr_scheduler.LambdaLR(pair.twin.optimizer, lambda step: 1 / (step + 1))
        for number, batch in enumerate(batches_for(131, 23)):
            pair.twin.loss_scale = scale = pair.engine.optimizer.loss_scale
            overflows = number == 2
            if overflows:
                pair.engine.offload.gradients.updater.drain()
                before, on_ssd, rate = engine_state(pair.engine), current_bytes(pair), pair.engine.get_lr()
                hooks = [model.embed.weight.register_hook(lambda grad: grad.index_fill(0, torch.tensor([3]), math.inf))
                         for model in (pair.engine.module, pair.twin.model)]
                before_last_gradient(pair, lambda: speculate(pair, NUM_BLOCKS - 1))
            pair.micro_step(batch)
            pair.step()
            assert pair.engine.optimizer.overflow == overflows
            if overflows:
                for hook in hooks:
                    hook.remove()
                assert_same_bits(engine_state(pair.engine), before)
                assert current_bytes(pair) == on_ssd and len(on_ssd) == 2 * NUM_BLOCKS
                assert pair.engine.get_lr() == rate and pair.engine.skipped_steps == 1
                assert pair.engine.optimizer.loss_scale == scale / 2
                assert updates(pair)[1] == NUM_BLOCKS - 1
            else:
                pair.twin.scheduler.step()
        assert set(pair.engine.optimizer.steps.values()) == {22} and pair.engine.skipped_steps == 1
        pair.check()


# -- automatic ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{"update": "auto"}, {}])
def test_automatic_speculates_while_no_recent_step_clipped(tmp_path, given):
    section = lohan_section(tmp_path, "ssd") | {"update": None} | given
    with pair_of(OddModel, section, dtype="bf16") as pair:
        assert pair.engine.offload.plan.update == "auto"
        kept = []
        for step, batch in enumerate(batches_for(131, 28)):
            micro_step_with_limit(pair, batch, lambda twin: norm_of(twin) * (0.5 if step == 3 else 2.0))
            speculate(pair, None)
            before = sum(updates(pair))
            pair.step()
            pair.engine.offload.gradients.updater.drain()
            kept.append((sum(updates(pair)) - before) // NUM_BLOCKS)
        assert kept == [1] * 3 + [0] * 21 + [1] * 4
        pair.check()


# -- whatever the timing -----------------------------------------------------------------------------------------------


def limits_of(clip: str, twin: Twin, step: int) -> float:
    norm = norm_of(twin)
    return {"never": 2 * norm, "alternating": norm * (0.5 if step % 2 else 2),
            "last": (norm_before_last(twin) + norm) / 2}[clip]


@pytest.mark.parametrize("seed", range(20))
def test_same_bits_with_random_delays(seed, tmp_path, monkeypatch):
    draw = random.Random(seed)
    make_model = draw.choice([OddModel, functools.partial(tiny_llama, tied=bool(seed % 2))])
    dtype, clip = ("bf16", "fp32")[seed % 2], ("never", "alternating", "last")[seed % 3]
    accumulation = (1, 3)[seed // 6 % 2]
    batches = make_batches(make_model(seed=seed), 4, accumulation, seed)
    twin, limits = Twin(make_model(seed=seed), None, DTYPES[dtype], 0.0, accumulation, **LR), []
    for step, micro_batches in enumerate(batches):
        for batch in micro_batches:
            twin.micro_step(batch)
        twin.clip = limits_of(clip, twin, step)
        limits.append(twin.clip)
        twin.step()
    use_doubles(monkeypatch, DelayedStreams(seed, max_delay_s=0.001),
                functools.partial(FaultyIo, seed=seed, max_delay_s=0.002, short_transfers=bool(seed % 3)))
    config = engine_config(tmp_path, dtype, limits[0], accumulation, update="eager",
                           prefetch_depth=draw.choice([0, 1, 2, 4]), ssd_threads=draw.choice([1, 2, 4]),
                           chunk_bytes=draw.choice(["24KiB", "100KB", "1MiB"]))
    with engine_for(make_model(seed=seed), config) as engine:
        for limit, micro_batches in zip(limits, batches):
            engine.optimizer.clip_grad = limit
            for batch in micro_batches:
                engine.backward(loss_of(engine, batch))
                time.sleep(draw.choice([0, 0, 0.003, 0.03]))
                engine.step()
        state, stats = engine_state(engine), engine.lohan_stats()
    assert_same_bits(state, twin.state())
    assert clip == "last" or stats["updates_speculated"] > 0
    assert clip != "last" or stats["updates_speculated"] == 0


def never_waits_for_saves(monkeypatch):
    save_chunk = BlockStore.save_chunk

    def save(*args, **kwargs):
        save_chunk(*args, **kwargs)
        return Work.completed()

    monkeypatch.setattr(BlockStore, "save_chunk", save)


def never_flips(monkeypatch):
    monkeypatch.setattr(BlockOrder, "publish", lambda self: self._publish(flip=False))


def never_waits_for_the_publication(monkeypatch):
    enter_read = BlockOrder._enter_read
    monkeypatch.setattr(BlockOrder, "_enter_read",
                        lambda self: (Work.completed(self.current_slot()), enter_read(self)[1]))


def keeps_everything(monkeypatch):
    decide = GradientPipeline.decide

    def decide_always(pipeline, terms):
        pipeline._terms = terms
        return decide(pipeline, terms)

    monkeypatch.setattr(GradientPipeline, "decide", decide_always)


SABOTAGES = [None, never_waits_for_saves, never_flips, never_waits_for_the_publication, keeps_everything]


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda sabotage: getattr(sabotage, "__name__", "none"))
@DTYPE
def test_one_forgotten_rule_gives_other_bits(sabotage, dtype, tmp_path, monkeypatch):
    """Or bytes read while they are written, which the checksums find."""
    if sabotage is not None:
        sabotage(monkeypatch)
        monkeypatch.setattr(SlowWrites, "seconds", 0.02)
    use_doubles(monkeypatch, make_io=SlowWrites)
    use_plan(monkeypatch, num_chunk_buffers=1, num_read_ahead_chunks=0)   # so that buffers are used again at once
    twin = Twin(OddModel(), None, DTYPES[dtype], **LR)
    state = None
    with contextlib.suppress(StoreError) if sabotage is not None else contextlib.nullcontext():
        with engine_for(OddModel(), engine_config(tmp_path, dtype, update="eager", chunk_bytes="24KiB")) as engine:
            pair = Pair(engine, twin)
            for step in range(4):
                if sabotage is keeps_everything:
                    before_last_gradient(pair, lambda: finish_speculation(engine))
                batch = lm_batch(131, seed=step)
                loss = twin.micro_step(batch)
                twin.clip = engine.optimizer.clip_grad = limits_of("last" if step % 2 else "never", twin, step)
                ours = loss_of(engine, batch)
                engine.backward(ours)
                engine.step()
                twin.step()
                del loss
            state = engine_state(engine)
    assert (state is None or bool(diff_bits(state, twin.state()))) == (sabotage is not None)


class HeldRead(ThreadSsdIo):
    """Holds up the first read of a file, once `hold` was called, until `go_on` is set."""

    def __init__(self, num_threads):
        super().__init__(num_threads)
        self._lock_held = threading.Lock()
        self._path = None
        self.begun, self.go_on = threading.Event(), threading.Event()

    def hold(self, path):
        with self._lock_held:
            self._path = path

    def _pread(self, fd, view, offset):
        with self._lock_held:
            mine = self._path is not None and os.readlink(f"/proc/self/fd/{fd}").endswith(self._path)
            if mine:
                self._path = None
        if mine:
            self.begun.set()
            assert self.go_on.wait(60)
        return super()._pread(fd, view, offset)


@pytest.mark.parametrize("readers_are_waited_for", [True, False])
@DTYPE
def test_slot_is_not_written_while_it_is_read(readers_are_waited_for, dtype, tmp_path, monkeypatch):
    """A read that lasts over a whole step: the slot it reads is the one that the next step's update writes."""
    if not readers_are_waited_for:
        update_slots = BlockOrder.update_slots
        monkeypatch.setattr(BlockOrder, "update_slots", lambda self, *args: update_slots(
            self, *args)._replace(drained=Work.completed()))
    use_doubles(monkeypatch, make_io=HeldRead)
    twin = Twin(OddModel(), None, DTYPES[dtype], **LR)
    with engine_for(OddModel(), engine_config(tmp_path, dtype, update="eager")) as engine:
        store, io = engine.offload.store, engine.offload.io
        block = next(b for b in engine.offload.blocks if b.name == "layers.1")
        expected = torch.empty(block.numel, dtype=DTYPES[dtype])
        store.read_array(block.index, "param", 0, expected)
        raw = torch.empty(block.param_bytes + 4096, dtype=torch.uint8)
        seen = raw[-raw.data_ptr() % 4096:][:block.param_bytes].view(DTYPES[dtype])
        io.hold(f"block-{block.index:04d}.params.0")
        reading = store.read_params(block.index, seen)
        assert io.begun.wait(60)
        for step in range(2):
            batch = lm_batch(131, seed=step)
            engine.backward(loss_of(engine, batch))
            twin.micro_step(batch)
            if step == 0:
                finish_speculation(engine)
                engine.step()
                twin.step()
        deadline = time.monotonic() + (0.3 if readers_are_waited_for else 30)
        while time.monotonic() < deadline and stage_of(engine, block) is not Stage.SPECULATED:
            time.sleep(0.01)
        assert stage_of(engine, block) is (Stage.SPECULATING if readers_are_waited_for else Stage.SPECULATED)
        io.go_on.set()
        reading.wait()
        engine.step()
        twin.step()
        assert torch.equal(seen, expected) == readers_are_waited_for
        assert_same_bits(engine_state(engine), twin.state())


def stage_of(engine, block) -> Stage:
    return engine.offload.gradients.updater.stages()[block.index]


# -- failing disks -----------------------------------------------------------------------------------------------------


CALLS = {"step": lambda engine: engine.step(), "forward": lambda engine: loss_of(engine, OTHER),
         "optimizer": lambda engine: engine.optimizer.step(), "state": lambda engine: engine_state(engine)}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("operation,number", [("write", errno.EIO), ("read", errno.EIO), ("write", errno.ENOSPC)])
def test_disk_that_fails_during_speculation(operation, number, call, tmp_path, monkeypatch):
    use_doubles(monkeypatch, make_io=FaultyIo)
    use_plan(monkeypatch, num_read_ahead_chunks=0)
    twin = Twin(OddModel(), None, **LR)
    with engine_for(OddModel(), engine_config(tmp_path, update="eager")) as engine:
        pair = Pair(engine, twin)
        pair.micro_step(BATCH)
        pair.step()
        pair.check()
        # after all parameters of this backward have been read
        before_last_gradient(pair, lambda: (finish_speculation(engine), engine.offload.io.inject(
            operation, number, at_call=0, times=10**6)))
        pair.micro_step(OTHER)
        wait_for_failure(engine)
        with pytest.raises(StepError) as raised:
            CALLS[call](engine)
        assert str(tmp_path) in str(raised.value) and os.strerror(number) in str(raised.value)
        if number == errno.ENOSPC:
            assert "needed" in str(raised.value) and "free" in str(raised.value)
        causes, cause = [], raised.value
        while cause is not None:
            causes.append(type(cause))
            cause = cause.__cause__
        assert StoreError in causes and OSError in causes
        for again in CALLS.values():
            with pytest.raises(StepError):
                again(engine)
    assert_nothing_left(tmp_path)


def wait_for_failure(engine) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            engine.offload.gradients.updater.check()
        except StepError:
            return
        time.sleep(0.005)
    raise TimeoutError("nothing failed")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("update", ["eager", "deferred"])
def test_failure_while_step_decides(update, tmp_path):
    """After step() has looked for failures: the blocks it goes on to announce fail too, and nobody waits for ever."""
    with engine_for(OddModel(), engine_config(tmp_path, update=update)) as engine:
        engine.backward(loss_of(engine, BATCH))
        gradients = engine.offload.gradients
        present_slots = gradients.present_slots
        gradients.present_slots = lambda: (gradients.updater.fail(OSError(errno.EIO, "late")), present_slots())[1]
        with contextlib.suppress(StepError):
            engine.step()
        looks = (lambda: safe_get_full_fp32_param(engine.module.head.weight), lambda: engine.module.norm.weight.sum(),
                 lambda: loss_of(engine, OTHER), lambda: engine_state(engine))
        for look in looks:
            with pytest.raises(StepError, match="late"):
                look()
    assert os.listdir(tmp_path) == []


@pytest.mark.timeout(60)
def test_destroy_during_speculation(tmp_path, monkeypatch):
    use_doubles(monkeypatch, make_io=SlowWrites)
    config = engine_config(tmp_path, update="eager", chunk_bytes="24KiB")
    for delay_s in (0, 0.005, 0.02):
        with engine_for(OddModel(num_layers=12), config) as engine:
            engine.backward(loss_of(engine, BATCH))
            time.sleep(delay_s)
        assert_nothing_left(tmp_path)


# -- overlap -----------------------------------------------------------------------------------------------------------


class SleepyBothWays(SleepyModel):
    """Its backward takes as long as its forward: 0.4 s each. 16 layers of 65,536 parameters."""

    def __init__(self):
        super().__init__(num_layers=16, inner=1024, sleep_s=0.025)

    def forward(self, x):
        for layer in self.layers:
            x = _CallBackward.apply(layer(x), functools.partial(time.sleep, layer.sleep_s))
        return x.float().square().mean()


def timed_steps(update, ssd, monkeypatch, num_steps=3):
    """(seconds of the fastest step, shares of update bytes moved in forward, in backward, in step())."""
    # 26 bytes a parameter and step: 27 MB, as long as forward and backward together.
    use_doubles(monkeypatch, make_io=one_drive(34e6))
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    step_s, moved = [], {"forward": 0, "backward": 0, "step": 0}
    config = engine_config(ssd, "bf16", 1e6, update=update, chunk_bytes="512KiB")
    with engine_for(SleepyBothWays(), config) as engine:
        first = update_bytes(engine)
        for step in range(num_steps + 1):   # the last one only forward
            start, before = time.monotonic(), update_bytes(engine)

            def count(phase):
                nonlocal before
                now = update_bytes(engine)
                moved[phase] += now - before
                before = now

            loss = engine(x)
            count("forward")
            if step == num_steps:
                break
            engine.backward(loss)
            count("backward")
            engine.step()
            count("step")
            step_s.append(time.monotonic() - start)
        engine.offload.gradients.updater.drain()
        total = update_bytes(engine) - first
    assert total == num_steps * 26 * sum(p.numel() for p in SleepyBothWays().parameters())
    return min(step_s[1:]), *(moved[phase] / total for phase in ("forward", "backward", "step"))


def test_eager_updates_move_during_forward_and_backward(tmp_path, monkeypatch):
    figures = {update: timed_steps(update, tmp_path, monkeypatch) for update in ("serial", "deferred", "eager")}
    for update, (seconds, *shares) in figures.items():
        print(f"{update}: {seconds:.2f} s per step; share of update bytes in forward, backward, step(): "
              + ", ".join(f"{share:.3f}" for share in shares))
    assert figures["serial"][1:] == (0.0, 0.0, 1.0), "what this would show if eager ran serially"
    _, in_forward, in_backward, in_step = figures["eager"]
    assert in_forward + in_backward >= 0.8 and in_backward >= 0.25
    assert 0.25 < figures["deferred"][2] <= 12 / 26   # state read ahead; nothing is written before step()
    assert max(figures["eager"][0], figures["deferred"][0]) < 0.8 * figures["serial"][0]
