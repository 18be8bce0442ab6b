"""Ways to train that have broken offloaders (user_cases.md), each compared with the twin bit for bit.

D30, D31, D34, D35, D37-D40, D46, D55, and: Adam and AdamW, schedulers, skipped steps, unusual orders of forward and
backward, evaluation between steps, fp16, gradient checkpointing, memory of saved weights.
"""
from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import lr_scheduler as schedulers
from torch.utils.checkpoint import checkpoint

from lohan_ds.errors import StepError
from lohan_ds.testing.harness import DTYPES, ds_config, engine_for, engine_state
from lohan_ds.testing.models import AlbertLike, BranchModel, OddModel, lm_batch, loss_of, tiny_gpt2, tiny_llama
from lohan_ds.testing.twin import Twin, assert_same_bits

LR = 1e-2
TIERS = pytest.mark.parametrize("tier", ["host", "ssd"])
UPDATES = pytest.mark.parametrize("update", ["serial", "deferred", "eager"])


def lohan_section(tmp_path, tier: str = "host", update: str = "deferred", **more: Any) -> dict[str, Any]:
    """Everything on one tier, in chunks of one page, so that blocks have several."""
    section = {"update": update, "param_tier": tier, "optimizer_tier": tier, "chunk_bytes": 24 * 1024, **more}
    if tier == "ssd":
        section["ssd_paths"] = [str(tmp_path)]
    return section


class Pair:
    """An engine and its twin, fed alike."""

    def __init__(self, engine: Any, twin: Twin):
        self.engine, self.twin = engine, twin

    def micro_step(self, batch: Any, loss_fn=loss_of) -> float:
        loss = loss_fn(self.engine, batch)
        self.engine.backward(loss)
        assert loss.item() == self.twin.micro_step(batch, loss_fn)
        return loss.item()

    def step(self) -> float:
        """Returns the norm before clipping."""
        self.engine.step()
        norm, skipped = self.twin.step()
        assert self.engine.optimizer.overflow == skipped
        if not skipped:
            assert self.engine.get_global_grad_norm() == norm / self.twin.loss_scale
        return norm

    def train(self, batches: list, loss_fn=loss_of) -> None:
        """A whole step for each batch; with accumulation, for each `accumulation` of them."""
        for i, batch in enumerate(batches):
            self.micro_step(batch, loss_fn)
            if (i + 1) % self.twin.accumulation:
                self.engine.step()
            else:
                self.step()

    def check(self) -> None:
        assert_same_bits(engine_state(self.engine), self.twin.state())


@contextlib.contextmanager
def pair_of(make_model, section: dict, *, dtype: str = "fp32", clip: float = 0.0, accumulation: int = 1, groups=None,
            decoupled: bool = True, make_scheduler=None, config: dict | None = None, twin_model=None, **defaults: Any):
    """`groups(model)`: the client optimizer's groups. `make_scheduler(optimizer)`: given to both sides; the engine
    steps its own. `twin_model()`: when it is not made like the engine's."""
    defaults = {"lr": LR, **defaults}
    model = make_model()
    twin = Twin((twin_model or make_model)(), groups, DTYPES[dtype], clip, accumulation, decoupled, **defaults)
    twin.scheduler = make_scheduler(twin.optimizer) if make_scheduler else None
    carrier = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = carrier(groups(model) if groups else [p for p in model.parameters() if p.requires_grad], **defaults)
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    full_config = ds_config(section, dtype=dtype, clip=clip, accumulation=accumulation, **(config or {}))
    with engine_for(model, full_config, optimizer, scheduler) as engine:
        yield Pair(engine, twin)
    twin.close()


def batches_for(vocab: int, count: int, batch: int = 2, seq: int = 12) -> list[dict[str, Tensor]]:
    return [lm_batch(vocab, batch, seq, seed) for seed in range(count)]


def square_loss(model, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


class ManySizes(nn.Module):
    """Parameters from one element to 20 pages, none a round number, all used in one scalar."""
    SIZES = (1, 2, 7, 31, 33, 63, 129, 1000, 2047, 2049, 4097, 16385, 20 * 2048 + 5)

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.parts = nn.ModuleList()
        for size in self.SIZES:
            part = nn.Module()
            part.weight = nn.Parameter(torch.randn(size, generator=generator) * 0.1)
            part.bias = nn.Parameter(torch.zeros(1))
            part.forward = lambda x, part=part: (part.weight * x[:, :1] + part.bias).tanh().mean(dim=1)
            self.parts.append(part)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x[:, i:i + 1]) for i, part in enumerate(self.parts)], dim=1)


def many_sizes_batch(seed: int) -> Tensor:
    return torch.randn(4, len(ManySizes.SIZES), generator=torch.Generator().manual_seed(seed))


def many_sizes_loss(model, x: Tensor) -> Tensor:
    return (model(x) - 1.0).square().mean()


# -- D30, D31: sizes ---------------------------------------------------------------------------------------------------


@UPDATES
def test_one_small_layer_on_ssd_with_clipping(tmp_path, update):  # D30
    def make_model():
        torch.manual_seed(0)
        return nn.Linear(8, 8)

    with pair_of(make_model, lohan_section(tmp_path, "ssd", update), clip=1.0) as pair:
        for seed in range(4):
            x = 10 * torch.randn(3, 8, generator=torch.Generator().manual_seed(seed))
            pair.micro_step(x, square_loss)
            assert pair.step() > 1.0, "clipping is at work"
        pair.check()
        assert pair.engine.lohan_stats()["ssd_bytes"] > 0


@UPDATES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_tiny_and_large_parameters_together_on_ssd_with_clipping(tmp_path, update, dtype):  # D30
    with pair_of(ManySizes, lohan_section(tmp_path, "ssd", update), clip=0.01, dtype=dtype) as pair:
        for seed in range(3):
            pair.micro_step(many_sizes_batch(seed).to(DTYPES[dtype]), many_sizes_loss)
            assert pair.step() > 0.01
        pair.check()


def test_fifty_steps_learn_alike_on_host_on_ssd_and_in_torch(tmp_path):  # D31
    steps, states, losses = 50, {}, {}
    for tier in ("host", "ssd"):
        section = lohan_section(tmp_path, tier, chunk_bytes=96 * 1024)
        with pair_of(ManySizes, section, weight_decay=0.1) as pair:
            losses[tier] = []
            for seed in range(steps):
                losses[tier].append(pair.micro_step(many_sizes_batch(seed % 5), many_sizes_loss))
                pair.step()
            states[tier] = engine_state(pair.engine)
    assert losses["host"] == losses["ssd"]
    assert_same_bits(states["host"], states["ssd"])
    model = ManySizes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1)
    for seed in range(steps):
        optimizer.zero_grad()
        loss = many_sizes_loss(model, many_sizes_batch(seed % 5))
        loss.backward()
        optimizer.step()
    assert losses["ssd"][-1] < 0.7 * losses["ssd"][0], "it learns"
    assert losses["ssd"][-1] == pytest.approx(loss.item(), rel=1e-4)
    start = dict(ManySizes().named_parameters())
    for name, param in model.named_parameters():
        moved = states["ssd"][name]["param"]
        torch.testing.assert_close(moved, param.detach(), rtol=1e-3, atol=1e-4)
        assert (moved - start[name]).abs().max() > 1e-3, f"{name} did not move"


# -- D34, D46: accumulation --------------------------------------------------------------------------------------------


def split_batch(batch: dict[str, Tensor], parts: int) -> list[dict[str, Tensor]]:
    pieces = [value.chunk(parts) for value in batch.values()]
    return [dict(zip(batch, values)) for values in zip(*pieces)]


def test_every_way_to_accumulate_gives_the_update_of_one_big_batch(tmp_path):  # D34
    big = [lm_batch(131, batch=8, seq=12, seed=seed) for seed in range(2)]
    results = {}
    for accumulation in (1, 2, 4, 8):
        with pair_of(OddModel, lohan_section(tmp_path, "ssd"), accumulation=accumulation, clip=0.5, eps=1e-4,
                     config={"batch": 8 // accumulation}) as pair:
            norms = []
            for batch in big:
                pieces = split_batch(batch, accumulation)
                for i, piece in enumerate(pieces):
                    pair.micro_step(piece)
                    if i + 1 < len(pieces):
                        pair.engine.step()
                norms.append(pair.step())
            pair.check()
            results[accumulation] = norms, engine_state(pair.engine)
    norms, state = results[1]
    for accumulation in (2, 4, 8):
        assert results[accumulation][0] == pytest.approx(norms, rel=1e-5)
        for name, entry in results[accumulation][1].items():
            torch.testing.assert_close(entry["param"], state[name]["param"], rtol=1e-4, atol=2e-5)


@UPDATES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_short_last_window(tmp_path, update, dtype):  # D34
    section = lohan_section(tmp_path, "ssd", update)
    with pair_of(OddModel, section, accumulation=4, clip=1.0, dtype=dtype) as pair:
        batches = batches_for(131, 9)
        pair.train(batches[:4])
        for i, batch in enumerate(batches[4:6]):   # the epoch ends after two of four micro-steps
            pair.engine.set_gradient_accumulation_boundary(i == 1)
            pair.micro_step(batch)
        pair.step()
        for i, batch in enumerate(batches[6:9]):
            pair.engine.set_gradient_accumulation_boundary(i == 2)
            pair.micro_step(batch)
        pair.step()
        assert set(pair.engine.optimizer.steps.values()) == {3}
        pair.check()


@UPDATES
def test_zero_grad_of_the_optimizer_drops_what_was_accumulated(tmp_path, update):
    """As in torch; the engine's own sets what is on parameters to None, which is nothing, as under ZeRO-3."""
    with pair_of(OddModel, lohan_section(tmp_path, "ssd", update), accumulation=2, clip=1.0) as pair:
        batches = batches_for(131, 7)
        pair.train(batches[:2])
        pair.micro_step(batches[2])
        pair.engine.step()
        pair.micro_step(batches[3])
        pair.engine.optimizer.zero_grad()
        pair.twin._main_grad.clear()
        pair.micro_step(batches[4])
        pair.step()
        for batch in batches[5:]:
            pair.micro_step(batch)
            pair.engine.zero_grad()
            (pair.engine if batch is batches[5] else pair).step()
        pair.check()


def test_the_logged_loss_does_not_depend_on_accumulation(tmp_path):  # D46
    batches = batches_for(131, 4)
    logged = {}
    for accumulation in (1, 4):
        with pair_of(OddModel, lohan_section(tmp_path), accumulation=accumulation, lr=0.0, weight_decay=0.0) as pair:
            losses, returned = [], 0.0
            for batch in batches:
                loss = loss_of(pair.engine, batch)
                losses.append(loss.item())
                returned += pair.engine.backward(loss).item()
                pair.engine.step()
            logged[accumulation] = losses
            assert returned == pytest.approx(sum(losses) / accumulation, rel=1e-6)
            assert pair.engine.global_steps == 4 // accumulation
    assert logged[1] == logged[4]


# -- D35: clipping -----------------------------------------------------------------------------------------------------


@UPDATES
@pytest.mark.parametrize("clip", [0.1, 0.0])
def test_clipping_of_huge_gradients_as_in_torch(tmp_path, update, clip):  # D35
    def huge_loss(model, batch):
        return loss_of(model, batch) * 1000

    batches = batches_for(131, 3)
    reference = OddModel()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=LR, eps=1e-2)  # a large eps: updates feel the scale
    norms = []
    for batch in batches:
        optimizer.zero_grad()
        huge_loss(reference, batch).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(reference.parameters(), clip or float("inf")).item())
        optimizer.step()
    with pair_of(OddModel, lohan_section(tmp_path, "ssd", update), clip=clip, eps=1e-2) as pair:
        for batch, norm in zip(batches, norms):
            pair.micro_step(batch, huge_loss)
            pair.step()
            assert norm > 100
            assert pair.engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-4), "the norm before clipping"
        pair.check()
        start = dict(OddModel().named_parameters())
        after = engine_state(pair.engine)
        for name, param in reference.named_parameters():
            delta = after[name]["param"] - start[name].detach()
            torch.testing.assert_close(delta, (param - start[name]).detach(), rtol=2e-3, atol=2e-5)


# -- D37: no gradient --------------------------------------------------------------------------------------------------


@TIERS
@UPDATES
def test_parameters_without_a_gradient_are_untouched(tmp_path, tier, update):  # D37
    with pair_of(BranchModel, lohan_section(tmp_path, tier, update), clip=0.5, weight_decay=0.1) as pair:
        before = engine_state(pair.engine)
        for step in range(5):
            batch = {**lm_batch(128, seq=12, seed=step), "use_branch": step % 2 == 0}
            if step % 2:
                branch = {n: e for n, e in engine_state(pair.engine).items() if n.startswith("branch")}
            pair.micro_step(batch)
            pair.step()
            if step % 2:
                after = engine_state(pair.engine)
                assert_same_bits(branch, {name: after[name] for name in branch})
        pair.check()
        after = engine_state(pair.engine)
        assert_same_bits({"unused": before["unused"]}, {"unused": after["unused"]})
        assert after["unused"]["step"] == 0 and not after["unused"]["exp_avg_sq"].any()
        assert after["branch.qkv.weight"]["step"] == 3 and after["head.weight"]["step"] == 5


# -- D38, D39: groups --------------------------------------------------------------------------------------------------


def hugging_face_groups(model: nn.Module) -> list[dict]:
    from transformers import Trainer
    decay = set(Trainer.get_decay_parameter_names(None, model))
    named = list(model.named_parameters())
    return [{"params": [p for n, p in named if n in decay], "weight_decay": 0.3},
            {"params": [p for n, p in named if n not in decay], "weight_decay": 0.0}]


def three_groups(model: nn.Module) -> list[dict]:
    """By thirds, an empty group among them; the first stands still."""
    params = list(model.parameters())
    return [{"params": params[0::3], "lr": 0.0, "weight_decay": 0.0},
            {"params": []},
            {"params": params[1::3], "lr": 1e-3, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.2},
            {"params": params[2::3], "lr": 1e-2, "betas": (0.95, 0.9), "eps": 1e-3}]


@TIERS
@UPDATES
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_hugging_face_decay_groups(tmp_path, tier, update, dtype):  # D38
    section = lohan_section(tmp_path, tier, update)
    with pair_of(tiny_gpt2, section, groups=hugging_face_groups, clip=1.0, dtype=dtype) as pair:
        assert all(group["params"] for group in pair.engine.optimizer.param_groups)
        pair.train(batches_for(129, 3))
        pair.check()


@UPDATES
def test_three_groups_of_their_own_and_an_empty_one(tmp_path, update):  # D38
    with pair_of(OddModel, lohan_section(tmp_path, "ssd", update), groups=three_groups, clip=1.0) as pair:
        still = {name for i, (name, _) in enumerate(OddModel().named_parameters()) if i % 3 == 0}
        before = engine_state(pair.engine)
        pair.train(batches_for(131, 4))
        pair.check()
        for name, entry in engine_state(pair.engine).items():
            assert torch.equal(entry["param"], before[name]["param"]) == (name in still), name
            assert entry["step"] == 4 and entry["exp_avg_sq"].any()


def test_a_rate_changed_after_step_is_for_the_next_step(tmp_path):  # D38
    """While the update of the step before has not even begun."""
    with pair_of(OddModel, lohan_section(tmp_path, "ssd"), groups=three_groups) as pair:
        gate = Gate(pair.engine)
        for step, batch in enumerate(batches_for(131, 4)):
            pair.micro_step(batch)
            gate.shut()
            pair.step()
            for groups in (pair.engine.optimizer.param_groups, pair.twin.groups):
                for i, group in enumerate(g for g in groups if g["params"]):   # DeepSpeed takes empty ones out
                    group["lr"] = 1e-2 / (step + i + 1)
                    group["betas"] = (0.5 + 0.1 * step, 0.9)
            gate.open()
        pair.check()


class Gate:
    """Holds up the update thread of an engine ahead of every chunk of the blocks that `blocked` says."""

    def __init__(self, engine: Any, blocked=lambda block_index: True):
        updater = engine.offload.gradients.updater
        process = updater._process
        self._event = threading.Event()
        self._event.set()

        def waiting(piece):
            if blocked(piece.job.update.block.index):
                assert self._event.wait(60), "the test never opened the gate"
            return process(piece)

        updater._process = waiting
        self.shut, self.open = self._event.clear, self._event.set


@TIERS
def test_interleaved_groups_by_name(tmp_path, tier):  # D39
    def every_second(model):
        params = list(model.parameters())
        return [{"params": params[1::2], "lr": 1e-3}, {"params": params[0::2][::-1], "lr": 1e-2, "weight_decay": 0.3}]

    for dtype in ("fp32", "bf16"):
        with pair_of(tiny_gpt2, lohan_section(tmp_path, tier), groups=every_second, clip=1.0, dtype=dtype) as pair:
            for batch in batches_for(129, 4):
                pair.train([batch])
                pair.engine.offload.streamer.release_all()   # forces every block out and in again
            pair.check()
            for (name, param), value in zip(pair.engine.module.named_parameters(), pair.twin.model.parameters()):
                assert torch.equal(param, value), name


# -- D40: a torch optimizer --------------------------------------------------------------------------------------------


def hugging_face_linear(optimizer):
    from transformers import get_linear_schedule_with_warmup
    return get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=6)


SCHEDULERS = {
    "lambda": lambda opt: schedulers.LambdaLR(opt, lambda step: 1 / (step + 1)),
    "cosine": lambda opt: schedulers.CosineAnnealingLR(opt, T_max=4),
    "one_cycle": lambda opt: schedulers.OneCycleLR(opt, max_lr=0.02, total_steps=6),   # moves the betas too
    "hugging_face": hugging_face_linear,
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_on_the_client_optimizer(tmp_path, name):  # D40
    with pair_of(OddModel, lohan_section(tmp_path), make_scheduler=SCHEDULERS[name]) as pair:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)   # "lr_scheduler.step() before optimizer.step()"
            for batch in batches_for(131, 4):
                pair.train([batch])
                pair.twin.scheduler.step()
                assert pair.engine.get_lr() == [group["lr"] for group in pair.twin.groups]
        assert len({round(lr, 9) for lr in (LR, *pair.engine.get_lr())}) == 2, "the rate moved"
        pair.check()


@pytest.mark.parametrize("name", [*SCHEDULERS, "plateau"])
def test_schedulers_on_the_engines_optimizer(tmp_path, name):  # D40
    def plateau(optimizer):
        return schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    make = SCHEDULERS.get(name, plateau)
    with pair_of(OddModel, lohan_section(tmp_path)) as pair:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            ours, theirs = make(pair.engine.optimizer), make(pair.twin.optimizer)
            for step, batch in enumerate(batches_for(131, 4)):
                pair.train([batch])
                for scheduler in (ours, theirs):
                    scheduler.step(float(step)) if name == "plateau" else scheduler.step()
                assert pair.engine.optimizer.param_groups[0]["lr"] == pair.twin.groups[0]["lr"]
        assert pair.twin.groups[0]["lr"] != LR
        pair.check()


def test_a_callable_scheduler(tmp_path):  # D40
    model = OddModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    with engine_for(model, ds_config(lohan_section(tmp_path)), optimizer, SCHEDULERS["cosine"]) as engine:
        for batch in batches_for(131, 2):
            engine.backward(loss_of(engine, batch))
            engine.step()
        assert engine.get_lr() == [pytest.approx(LR / 2)]


@pytest.mark.parametrize("source", ["client", "json"])
def test_the_optimizer_is_a_torch_optimizer_and_takes_frozen_parameters(tmp_path, source):  # D40
    def make_model():
        model = OddModel()
        model.embed.weight.requires_grad_(False)
        model.layers[1].requires_grad_(False)
        return model

    model, twin = make_model(), Twin(make_model(), lr=LR, weight_decay=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01) if source == "client" else None
    config = ds_config(lohan_section(tmp_path, "ssd"))
    if source == "json":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.01}}
    frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    with engine_for(model, config, optimizer) as engine:
        ours = engine.optimizer
        assert isinstance(ours, torch.optim.Optimizer)
        assert ours.defaults["betas"] == (0.9, 0.999) and ours.defaults["lr"] == LR
        (group,) = ours.param_groups
        assert group["lr"] == LR and {id(p) for p in group["params"]} <= {id(p) for p in model.parameters()}
        for batch in batches_for(131, 2):
            ours.zero_grad()
            loss = loss_of(engine, batch)
            engine.backward(loss)
            engine.step()
            twin.micro_step(batch)
            twin.step()
        assert_same_bits(engine_state(engine), twin.state())
        assert isinstance(ours.state_dict(), dict)
        for name, param in model.named_parameters():
            assert param.requires_grad == (name not in frozen) and param.grad is None
        with pytest.raises(StepError, match="before"):
            ours.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


# -- Adam, AdamW, schedulers from the JSON -----------------------------------------------------------------------------


@pytest.mark.parametrize("spec, decoupled", [
    ({"type": "AdamW"}, True),
    ({"type": "Adam"}, True),                                      # as DeepSpeed: adam_w_mode is on by default
    ({"type": "Adam", "params": {"adam_w_mode": False}}, False),
    ({"type": "Adam", "params": {"adam_w_mode": True, "torch_adam": True, "set_grad_none": True}}, True),
    ("Adam", False), ("AdamW", True)])
def test_adam_and_adamw(tmp_path, spec, decoupled):
    hyper = {"lr": LR, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.3}
    model, twin = OddModel(), Twin(OddModel(), decoupled=decoupled, **hyper)
    optimizer, config = None, ds_config(lohan_section(tmp_path))
    if isinstance(spec, str):
        optimizer = getattr(torch.optim, spec)(model.parameters(), **{**hyper, "betas": tuple(hyper["betas"])})
    else:
        config["optimizer"] = {**spec, "params": {**hyper, **spec.get("params", {})}}
    with engine_for(model, config, optimizer) as engine:
        Pair(engine, twin).train(batches_for(131, 3))
        assert_same_bits(engine_state(engine), twin.state())


def test_what_the_json_leaves_out_is_deepspeeds_default(tmp_path):
    """DeepSpeed's Adams do not decay weights unless told; torch's AdamW does."""
    twin = Twin(OddModel(), lr=LR, weight_decay=0.0)
    config = ds_config(lohan_section(tmp_path), optimizer={"type": "AdamW", "params": {"lr": LR}})
    with engine_for(OddModel(), config) as engine:
        Pair(engine, twin).train(batches_for(131, 2))
        assert_same_bits(engine_state(engine), twin.state())


def test_a_scheduler_from_the_json(tmp_path):
    from deepspeed.runtime.lr_schedules import WarmupLR
    params = {"warmup_min_lr": 1e-3, "warmup_max_lr": LR, "warmup_num_steps": 4, "warmup_type": "linear"}
    twin = Twin(OddModel(), lr=LR, weight_decay=0.1)
    scheduler = WarmupLR(twin.optimizer, **params)
    config = ds_config(lohan_section(tmp_path), scheduler={"type": "WarmupLR", "params": params},
                       optimizer={"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}})
    with engine_for(OddModel(), config) as engine:
        rates = []
        for batch in batches_for(131, 5):
            assert engine.get_lr() == [twin.groups[0]["lr"]]
            rates += engine.get_lr()
            Pair(engine, twin).train([batch])
            scheduler.step()
        assert len(set(rates)) == 4   # DeepSpeed's first step is a warm-up of nothing
        assert_same_bits(engine_state(engine), twin.state())


# -- steps that are skipped --------------------------------------------------------------------------------------------


@TIERS
@UPDATES
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_skips_the_whole_step(tmp_path, tier, update, bad):
    section = lohan_section(tmp_path, tier, update)
    with pair_of(OddModel, section, clip=1.0, make_scheduler=SCHEDULERS["lambda"]) as pair:
        batches = batches_for(131, 5)
        for batch in batches[:2]:
            pair.train([batch])
            pair.twin.scheduler.step()
        before, rate = engine_state(pair.engine), pair.engine.get_lr()
        hooks = [model.layers[1].up.weight.register_hook(lambda grad: grad + bad)
                 for model in (pair.engine.module, pair.twin.model)]
        pair.micro_step(batches[2])
        norm = pair.step()
        for hook in hooks:
            hook.remove()
        assert not norm < float("inf")
        assert pair.engine.skipped_steps == 1 and pair.engine.get_lr() == rate
        assert_same_bits(engine_state(pair.engine), before)
        for batch in batches[3:]:
            pair.train([batch])
            pair.twin.scheduler.step()
        assert pair.engine.skipped_steps == 1 and pair.engine.get_lr() != rate
        pair.check()


@UPDATES
def test_fp16_with_a_dynamic_loss_scale(tmp_path, monkeypatch, update):
    from deepspeed.accelerator import get_accelerator
    monkeypatch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
    config = {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 3}}
    twin = Twin(OddModel(), dtype=torch.float16, clip=0.5, lr=1e-3, loss_scale=2.0 ** 20)
    model = OddModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    full_config = {**ds_config(lohan_section(tmp_path, "ssd", update), clip=0.5), **config}
    with engine_for(model, full_config, optimizer) as engine:
        pair, scales, skipped = Pair(engine, twin), [], 0
        for batch in batches_for(131, 12):
            twin.loss_scale = engine.optimizer.loss_scale
            scales.append(twin.loss_scale)
            pair.micro_step(batch)
            pair.step()
            if engine.optimizer.overflow:
                skipped += 1
                assert engine.optimizer.loss_scale == scales[-1] / 2
        assert 0 < skipped < 12 and engine.skipped_steps == skipped
        assert any(later > earlier for earlier, later in zip(scales, scales[1:])), "the scale grows again"
        assert set(engine.optimizer.steps.values()) == {12 - skipped}
        pair.check()


# -- orders of forward and backward ------------------------------------------------------------------------------------


def sum_of_losses(model, batches: list) -> Tensor:
    return sum(loss_of(model, batch) for batch in batches)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_forwards_one_backward(tmp_path, dtype):
    with pair_of(tiny_llama, lohan_section(tmp_path, "ssd"), clip=1.0, dtype=dtype) as pair:
        batches = batches_for(257, 6)
        pair.train([batches[0:2], batches[2:4], batches[4:6]], sum_of_losses)
        pair.check()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_backwards_one_step(tmp_path, dtype):
    with pair_of(OddModel, lohan_section(tmp_path, "ssd"), clip=1.0, dtype=dtype) as pair:
        batches = batches_for(131, 7)
        for first, second in zip(batches[0:4:2], batches[1:4:2]):
            pair.micro_step(first)
            pair.micro_step(second)
            pair.step()
        losses = [loss_of(pair.engine, batch) for batch in batches[4:6]]   # both forwards first
        for loss, batch in zip(losses, batches[4:6]):
            pair.engine.backward(loss)
            pair.twin.micro_step(batch)
        pair.step()
        pair.train(batches[6:])
        pair.check()


def test_backward_twice_through_one_graph(tmp_path):
    with pair_of(tiny_llama, lohan_section(tmp_path, "ssd"), clip=1.0) as pair:
        for batch in batches_for(257, 3):
            loss = loss_of(pair.engine, batch)
            pair.engine.backward(loss, retain_graph=True)
            pair.engine.backward(loss)
            pair.twin.micro_step(batch)
            pair.twin.micro_step(batch)
            pair.step()
        pair.check()


@UPDATES
def test_a_forward_without_gradients_between_forward_and_backward(tmp_path, update):
    with pair_of(tiny_llama, lohan_section(tmp_path, "ssd", update), clip=1.0) as pair:
        other = lm_batch(257, 3, 9, seed=99)
        for batch in batches_for(257, 3):
            loss = loss_of(pair.engine, batch)
            with torch.no_grad():
                assert loss_of(pair.engine, other).item() == loss_of(pair.twin.model, other).item()
            pair.engine.backward(loss)
            with torch.no_grad():
                assert loss_of(pair.engine, other).item() == loss_of(pair.twin.model, other).item()
            pair.twin.micro_step(batch)
            pair.step()
        pair.check()


@pytest.mark.parametrize("make_model, vocab", [(tiny_llama, 257), (AlbertLike, 128)])
def test_forward_of_the_module_itself(tmp_path, make_model, vocab):
    """`engine.module(...)` with gradients, past the engine's own forward."""
    with pair_of(make_model, lohan_section(tmp_path, "ssd", prefetch_depth=0), clip=1.0) as pair:
        for batch in batches_for(vocab, 3):
            loss = loss_of(pair.engine.module, batch)
            pair.engine.backward(loss)
            assert loss.item() == pair.twin.micro_step(batch)
            pair.step()
        pair.check()


@TIERS
def test_backward_through_a_graph_from_before_the_step_is_refused(tmp_path, tier):
    with pair_of(OddModel, lohan_section(tmp_path, tier), clip=1.0) as pair:
        first, second, third = batches_for(131, 3)
        loss = loss_of(pair.engine, first)
        pair.engine.backward(loss, retain_graph=True)
        pair.twin.micro_step(first)
        pair.step()
        with pytest.raises(StepError, match="changed after its forward"):
            pair.engine.backward(loss)
        pair.train([second, third])   # nothing of it is left
        pair.check()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@TIERS
def test_evaluation_and_generation_between_steps(tmp_path, tier, dtype):
    with pair_of(tiny_llama, lohan_section(tmp_path, tier), clip=1.0, dtype=dtype) as pair:
        prompt, other = lm_batch(257, 2, 5, seed=50)["input_ids"], lm_batch(257, 3, 11, seed=51)
        seen = []
        for batch in batches_for(257, 3):
            pair.train([batch])
            pair.engine.eval(), pair.twin.model.eval()
            with torch.no_grad():
                evaluated = [loss_of(model, other).item() for model in (pair.engine, pair.twin.model)]
            generated = [model.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=True)
                         for model in (pair.engine.module, pair.twin.model)]
            pair.engine.train(), pair.twin.model.train()
            assert evaluated[0] == evaluated[1]
            assert torch.equal(*generated)
            seen.append(evaluated[0])
        assert len(set(seen)) == 3
        pair.check()


@pytest.mark.parametrize("update", ["deferred", "eager"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_evaluation_that_raises_keeps_the_step_under_way(tmp_path, update, accumulation):
    """Its gradients, and the graph of a forward whose backward is to come."""
    def evaluate_badly():
        handle = pair.engine.module.layers[1].register_forward_hook(lambda *_: 1 / 0)
        pair.engine.eval()
        with torch.no_grad(), pytest.raises(ZeroDivisionError):
            loss_of(pair.engine, lm_batch(131, seed=9))
        pair.engine.train()
        handle.remove()

    def loss_fn(model, batch):
        loss = loss_of(model, batch)
        if model is pair.engine:
            evaluate_badly()
        return loss

    with pair_of(OddModel, lohan_section(tmp_path, "ssd", update), accumulation=accumulation, clip=1.0) as pair:
        batches = batches_for(131, 3 * accumulation)
        for i, batch in enumerate(batches):
            pair.micro_step(batch, loss_fn)
            evaluate_badly()
            (pair.engine if (i + 1) % accumulation else pair).step()
        assert pair.engine.global_steps == 3
        pair.check()


def test_evaluation_waits_for_the_update_of_the_step_before(tmp_path):
    with pair_of(OddModel, lohan_section(tmp_path, "ssd")) as pair:
        gate = Gate(pair.engine)
        batch, other = batches_for(131, 2)
        pair.micro_step(batch)
        gate.shut()
        pair.step()
        timer = threading.Timer(0.3, gate.open)
        timer.start()
        with torch.no_grad():
            assert loss_of(pair.engine, other).item() == loss_of(pair.twin.model, other).item()
        timer.join()


# -- D55 and checkpointing ---------------------------------------------------------------------------------------------


@TIERS
@UPDATES
def test_a_layer_used_six_times_and_a_tied_head(tmp_path, tier, update):  # D55
    with pair_of(AlbertLike, lohan_section(tmp_path, tier, update), clip=0.5, accumulation=2) as pair:
        pair.train(batches_for(128, 6))
        pair.check()


class Checkpointed(nn.Module):
    """Layers in checkpoints of `per_checkpoint`, by hand; a gain of its own, used before and after them."""

    def __init__(self, per_checkpoint: int, use_reentrant: bool):
        super().__init__()
        base = BranchModel(num_layers=4)
        self.embed, self.layers, self.head = base.embed, base.layers, base.head
        self.gain = nn.Parameter(torch.full((32,), 1.1))
        self.per_checkpoint, self.use_reentrant = per_checkpoint, use_reentrant

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x_BTH = self.embed(input_ids)
        for start in range(0, len(self.layers), self.per_checkpoint or 1):
            if self.per_checkpoint:
                x_BTH = checkpoint(self.run, start, x_BTH, use_reentrant=self.use_reentrant)
            else:
                x_BTH = self.layers[start](x_BTH)
        logits = self.head(x_BTH * self.gain)
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())

    def run(self, start: int, x_BTH: Tensor) -> Tensor:
        for layer in self.layers[start:start + self.per_checkpoint]:
            x_BTH = layer(x_BTH)
        return x_BTH


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("per_checkpoint", [1, 2, 4])
@pytest.mark.parametrize("prefetch_depth", [0, 2])
def test_checkpoints_by_hand_change_nothing(tmp_path, use_reentrant, per_checkpoint, prefetch_depth):
    section = lohan_section(tmp_path, "ssd", prefetch_depth=prefetch_depth)
    with pair_of(lambda: Checkpointed(per_checkpoint, use_reentrant), section, clip=0.5, accumulation=2,
                 twin_model=lambda: Checkpointed(0, False)) as pair:
        pair.train(batches_for(128, 4))
        pair.check()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("direct", [False, True])
def test_checkpoints_with_backward_of_the_tensor(tmp_path, use_reentrant, direct):
    """`loss.backward()` instead of `engine.backward(loss)`."""
    with pair_of(lambda: Checkpointed(2, use_reentrant), lohan_section(tmp_path, "ssd", prefetch_depth=0),
                 twin_model=lambda: Checkpointed(0, False)) as pair:
        for batch in batches_for(128, 2):
            loss = loss_of(pair.engine, batch)
            loss.backward() if direct else pair.engine.backward(loss)
            pair.twin.micro_step(batch)
            pair.step()
        pair.check()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_hugging_face_gradient_checkpointing_changes_nothing(tmp_path, use_reentrant, dtype):
    def make_model():
        model = tiny_llama(tied=True)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
        return model

    with pair_of(make_model, lohan_section(tmp_path, "ssd"), clip=1.0, accumulation=2, dtype=dtype,
                 twin_model=lambda: tiny_llama(tied=True)) as pair:
        pair.train(batches_for(257, 4))
        pair.check()


# -- memory ------------------------------------------------------------------------------------------------------------


class LiveBuffers:
    """Watches every buffer that a streamer takes for a block of `nbytes`."""

    def __init__(self, engine: Any, nbytes: int):
        self._refs: dict[int, StorageWeakRef] = {}
        buffers = engine.offload.streamer.buffers
        take = buffers.take

        def watched(block):
            buffer, mark = take(block)
            if block.param_bytes == nbytes:
                ref = StorageWeakRef(buffer.untyped_storage())
                self._refs[ref.cdata] = ref
            return buffer, mark

        buffers.take = watched

    def count(self) -> int:
        self._refs = {key: ref for key, ref in self._refs.items() if not ref.expired()}
        return len(self._refs)


@pytest.fixture
def no_collector():
    """Python's collector of cycles is no help where buffers are large and objects few."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("kind", ["plain", "reentrant", "not reentrant"])
def test_no_released_block_is_kept_by_the_graph(tmp_path, no_collector, kind):
    num_layers, depth = 16, 1

    def make_model():
        model = BranchModel(num_layers=num_layers)
        if kind == "plain":
            return model
        checkpointed = Checkpointed(8, True) if kind == "reentrant" else Checkpointed(1, False)
        checkpointed.layers = model.layers
        return checkpointed

    with pair_of(make_model, lohan_section(tmp_path, "ssd", prefetch_depth=depth)) as pair:
        streamer = pair.engine.offload.streamer
        layer_bytes = pair.engine.offload.blocks[pair.engine.module.layers[3].up.weight.lohan_block].param_bytes
        live = LiveBuffers(pair.engine, layer_bytes)
        allowed = (depth + 3) + (depth + 2)   # waiting to be used again; in use
        counts: dict[str, list[int]] = {"forward": [], "backward": []}
        enter = streamer._enter

        def counted(index):
            enter(index)
            counts[moment].append(live.count())

        streamer._enter = counted
        for batch in batches_for(128, 2):
            moment = "forward"
            loss = loss_of(pair.engine, batch)
            counts[moment].append(live.count())
            moment = "backward"
            pair.engine.backward(loss)
            pair.engine.step()
        assert len(counts["forward"]) > 2 * num_layers and len(counts["backward"]) > 2 * num_layers
        assert max(counts["forward"]) <= allowed and max(counts["backward"]) <= allowed, counts


@TIERS
def test_evaluation_in_inference_mode_changes_nothing(tmp_path, tier):
    with pair_of(OddModel, lohan_section(tmp_path, tier), clip=1.0) as pair:
        for batch in batches_for(131, 3):
            with torch.inference_mode():
                ours, theirs = loss_of(pair.engine, batch), loss_of(pair.twin.model, batch)
            assert ours.item() == theirs.item()
            pair.train([batch])
        pair.check()


def test_parameters_in_no_group_are_never_touched(tmp_path):
    model = OddModel()
    client = torch.optim.AdamW(model.head.parameters(), lr=1e-2)
    with engine_for(model, ds_config(lohan_section(tmp_path, "ssd"), clip=1.0), optimizer=client) as engine:
        before = engine_state(engine)
        for batch in batches_for(131, 2):
            engine.backward(loss_of(engine, batch))
            assert all(p.grad is None for p in engine.module.parameters())
            engine.step()
        after = engine_state(engine)
    for name, entry in after.items():
        assert torch.equal(entry["param"], before[name]["param"]) == (not name.startswith("head")), name
