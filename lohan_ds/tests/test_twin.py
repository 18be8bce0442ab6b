"""The twin against torch itself, and the bit comparison."""
from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch

from lohan_ds.errors import ConfigError
from lohan_ds.testing.models import (AlbertLike, BranchModel, OddModel, lm_batch, loss_of, tiny_gpt2, tiny_llama,
                                     vocab_of)
from lohan_ds.testing.twin import Twin, assert_same_bits, diff_bits

DEFAULTS = dict(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
MODELS = {"llama": tiny_llama, "llama-tied": lambda: tiny_llama(tied=True), "gpt2": tiny_gpt2, "odd": OddModel,
          "albert": AlbertLike, "branch": BranchModel}


def batches(model, num: int, batch: int = 2):
    return [lm_batch(vocab_of(model), batch, 12, seed) for seed in range(num)]


@pytest.mark.parametrize("name", MODELS)
def test_fp32_twin_tracks_torch_adamw(name):
    """With a large eps: attention's key biases have a true gradient of zero, whose rounding noise Adam blows up."""
    settings = {**DEFAULTS, "eps": 1e-5}
    twin = Twin(MODELS[name](), **settings)
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    for batch in batches(model, 5):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert twin.micro_step(batch) == pytest.approx(loss.item(), rel=1e-5)
        norm, skipped = twin.step()
        assert math.isfinite(norm) and not skipped
    state = twin.state()
    assert state.keys() == dict(model.named_parameters()).keys()
    for param_name, param in model.named_parameters():
        difference = (state[param_name]["param"] - param).norm()
        assert difference <= 2e-5 * param.norm(), (param_name, difference, param.norm())


@pytest.mark.parametrize("name", MODELS)
def test_models_and_twin_repeat_exactly(name):
    runs = []
    for _ in range(2):
        twin = Twin(MODELS[name](), dtype=torch.bfloat16, clip=1.0, **DEFAULTS)
        for batch in batches(twin.model, 2):
            assert math.isfinite(twin.micro_step(batch))
            twin.step()
        runs.append(twin.state())
    assert_same_bits(*runs)
    assert all(s["param"].dtype == torch.bfloat16 and s["master"].dtype == torch.float32 for s in runs[0].values())
    assert all(torch.equal(s["param"], s["master"].bfloat16()) for s in runs[0].values())


def test_buffers_keep_their_dtype():
    twin = Twin(tiny_llama(), dtype=torch.bfloat16)
    assert {b.dtype for b in twin.model.buffers() if b.is_floating_point()} == {torch.float32}


def test_accumulation_is_the_mean_in_fp32():
    """Two micro-steps of one sequence each are one micro-step of two, but for rounding."""
    model = OddModel()
    whole, halves = Twin(copy.deepcopy(model), **DEFAULTS), Twin(copy.deepcopy(model), accumulation=2, **DEFAULTS)
    for batch in batches(model, 4):
        whole.micro_step(batch)
        for row in range(2):
            halves.micro_step({key: ids[row:row + 1] for key, ids in batch.items()})
        norm, _ = whole.step()
        assert halves.step()[0] == pytest.approx(norm, rel=1e-4)
    for name, want in whole.state().items():
        got = halves.state()[name]
        assert got["step"] == want["step"] == 4
        assert (got["param"] - want["param"]).norm() <= 2e-3 * want["param"].norm()


def test_first_gradient_is_upcast_and_later_ones_are_added_in_fp32():
    twin, model = (Twin(OddModel(), dtype=torch.bfloat16, accumulation=3, **DEFAULTS) for _ in range(2))
    model.close()
    want: dict[str, torch.Tensor] = {}
    for batch in batches(model.model, 3):
        twin.micro_step(batch)
        (loss_of(model.model, batch) / 3).backward()
        for name, param in model.model.named_parameters():
            want[name] = want[name] + param.grad.float() if name in want else param.grad.float()
            param.grad = None
    for name, grad in want.items():
        assert torch.equal(twin._main_grad[name], grad), name
        assert grad.dtype == torch.float32


def test_clipping_scales_as_torch_does():
    model = tiny_gpt2()
    twin = Twin(copy.deepcopy(model), clip=0.05, lr=1e-3, betas=(0.0, 0.0), eps=1.0, weight_decay=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.0, 0.0), eps=1.0, weight_decay=0.0)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    batch = batches(model, 1)[0]
    loss_of(model, batch).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    twin.micro_step(batch)
    assert twin.step() == (pytest.approx(norm.item(), rel=1e-5), False) and norm > 0.05
    for name, param in model.named_parameters():  # eps = 1 keeps Adam's delta nearly linear in the gradient
        want = param.detach() - before[name]
        got = twin.state()[name]["param"] - before[name]
        assert (got - want).norm() <= 2e-3 * want.norm() + 1e-8, name


def test_loss_scale_changes_nothing_but_rounding():
    plain, scaled = Twin(OddModel(), clip=0.5, **DEFAULTS), Twin(OddModel(), clip=0.5, loss_scale=1024.0, **DEFAULTS)
    for batch in batches(plain.model, 3):
        assert plain.micro_step(batch) == scaled.micro_step(batch)
        assert scaled.step()[0] == pytest.approx(1024 * plain.step()[0], rel=1e-9)
    assert_same_bits(plain.state(), scaled.state())  # a power of two is exact here


def test_non_finite_norm_skips_the_whole_step():
    twin = Twin(OddModel(), dtype=torch.float16, loss_scale=2.0**15, clip=1.0, **DEFAULTS)
    batch = batches(twin.model, 1)[0]
    before = twin.state()
    twin.micro_step(batch, lambda model, b: loss_of(model, b) * 1e6)
    norm, skipped = twin.step()
    assert skipped and not math.isfinite(norm)
    assert_same_bits(twin.state(), before)
    twin.micro_step(batch)
    assert twin.step()[1] is False and twin.state()["temperature"]["step"] == 1


def test_parameters_without_gradient_and_frozen_ones_are_untouched():
    model = BranchModel()
    model.layers[0].requires_grad_(False)
    twin = Twin(model, **DEFAULTS)
    start = twin.state()
    for use_branch in (False, True, False):
        twin.micro_step({**batches(model, 1)[0], "use_branch": use_branch})
        twin.step()
    end = twin.state()
    assert end["unused"]["step"] == 0 and end["branch.up.weight"]["step"] == 1 and end["head.weight"]["step"] == 3
    assert_same_bits({"unused": start["unused"]}, {"unused": end["unused"]})
    assert end["layers.0.up.weight"].keys() == {"param"}
    assert torch.equal(end["layers.0.up.weight"]["param"], start["layers.0.up.weight"]["param"])


def test_groups_and_schedulers():
    def groups(model):
        return [{"params": [p for n, p in model.named_parameters() if "bias" in n], "weight_decay": 0.0, "lr": 0.0},
                {"params": [p for n, p in model.named_parameters() if "bias" not in n]}]
    twin = Twin(OddModel(), groups, **DEFAULTS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.LambdaLR(twin.optimizer, lambda step: 1.0 if step == 0 else 0.0)
        start = twin.state()
        twin.micro_step(batches(twin.model, 1)[0])
        twin.step()
        scheduler.step()
    after_one = twin.state()
    assert torch.equal(after_one["layers.0.up.bias"]["param"], start["layers.0.up.bias"]["param"])
    assert not torch.equal(after_one["head.weight"]["param"], start["head.weight"]["param"])
    assert [g["lr"] for g in twin.groups] == [0.0, 0.0]
    twin.micro_step(batches(twin.model, 1)[0])
    twin.step()
    assert torch.equal(twin.state()["head.weight"]["param"], after_one["head.weight"]["param"])
    twin.groups[0]["amsgrad"] = True
    twin.micro_step(batches(twin.model, 1)[0])
    with pytest.raises(ConfigError, match="amsgrad"):
        twin.step()


def test_l2_decay_is_adams():
    model = OddModel()
    twin = Twin(copy.deepcopy(model), decoupled=False, **DEFAULTS)
    optimizer = torch.optim.Adam(model.parameters(), **DEFAULTS)
    batch = batches(model, 1)[0]
    loss_of(model, batch).backward()
    optimizer.step()
    twin.micro_step(batch)
    twin.step()
    for name, param in model.named_parameters():
        assert (twin.state()[name]["param"] - param).norm() <= 1e-5 * param.norm(), name


def test_diff_bits_names_the_first_difference():
    a = {"w": {"param": torch.tensor([1.0, math.nan, 0.0]), "step": 3}, "v": {"param": torch.ones(2)}}
    b = copy.deepcopy(a)
    assert diff_bits(a, b) == []
    b["w"]["param"][2] = -0.0
    b["w"]["step"] = 4
    del b["v"]
    lines = diff_bits(a, b)
    assert len(lines) == 3 and "v: only in a" in lines[0]
    assert lines[1] == "w.param[2] of 3: 0.0 against -0.0 (1 elements differ)" and lines[2] == "w.step: 3 against 4"
    with pytest.raises(AssertionError, match=r"w\.param\[2\]"):
        assert_same_bits(a, b)
    assert diff_bits({"w": {"param": torch.ones(2, 2)}}, {"w": {"param": torch.ones(4)}}) == []
    assert "bfloat16" in diff_bits({"w": {"param": torch.ones(2)}}, {"w": {"param": torch.ones(2).bfloat16()}})[0]
