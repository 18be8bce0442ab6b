"""D60: user code sees true shapes and true values of parameters whose values are elsewhere, and its edits count."""
from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_update_full_grad_vectorized,
)
from test_training_patterns import TIERS, Gate, Pair, batches_for, lohan_section, pair_of
from torch import nn

from lohan_ds.errors import StepError
from lohan_ds.testing.harness import DTYPES, engine_state
from lohan_ds.testing.models import OddModel, lm_batch, loss_of, tiny_llama

DTYPE = pytest.mark.parametrize("dtype", ["fp32", "bf16"])


def edit_twin(pair: Pair, edit) -> None:
    """The same edit of the twin's parameters; where bits changed, the master follows."""
    before = {name: param.detach().clone() for name, param in pair.twin.model.named_parameters()}
    edit(pair.twin.model)
    for name, param in pair.twin.model.named_parameters():
        master = pair.twin._master.get(name)
        if param.dtype == torch.float32:
            pair.twin._master[name] = param.data   # `param.data = ...` made it another
        else:
            changed = before[name].view(torch.int16) != param.detach().view(torch.int16)
            master.copy_(torch.where(changed, param.detach().float(), master))


# -- what is seen ------------------------------------------------------------------------------------------------------


@TIERS
@DTYPE
def test_shapes_counts_and_values(tmp_path, tier, dtype):
    with pair_of(lambda: tiny_llama(tied=True), lohan_section(tmp_path, tier), dtype=dtype) as pair:
        for batch in [None, *batches_for(257, 2)]:
            if batch is not None:
                pair.train([batch])
            ours, theirs = pair.engine.module, pair.twin.model
            fetched = pair.engine.lohan_stats()["param_bytes_fetched"]
            facts = [[(name, p.shape, p.dtype, p.device, p.numel(), p.requires_grad, p.ndim, p.is_leaf, len(p), p.grad)
                      for name, p in model.named_parameters(remove_duplicate=False)] for model in (ours, theirs)]
            assert facts[0] == facts[1]
            assert ours.num_parameters() == theirs.num_parameters() == sum(p.numel() for p in ours.parameters())
            assert pair.engine.lohan_stats()["param_bytes_fetched"] == fetched, "facts cost nothing"
            state = ours.state_dict()
            assert list(state) == list(theirs.state_dict())
            for name, value in theirs.state_dict().items():
                assert state[name].dtype == value.dtype and torch.equal(state[name], value), name


@DTYPE
def test_every_look_sees_the_updated_values(tmp_path, dtype):
    with pair_of(OddModel, lohan_section(tmp_path, "ssd"), dtype=dtype) as pair:
        ours, theirs = pair.engine.module, pair.twin.model
        looks = {
            "norm": lambda m: m.layers[1].up.weight.norm(),
            "state_dict": lambda m: m.state_dict()["layers.2.down.bias"],
            "data": lambda m: list(m.parameters())[3].data,
            "detach": lambda m: m.head.weight.detach().clone(),
            "item": lambda m: torch.tensor(m.temperature.item()),
            "index": lambda m: m.embed.weight[3, 1:4],
            "sum of all": lambda m: sum(p.double().sum() for p in m.parameters()),
            "numpy": lambda m: torch.from_numpy(m.norm.weight.detach().float().numpy()),
            "torch function": lambda m: torch.stack([layer.norm.weight for layer in m.layers]),
            "deepcopy": lambda m: copy.deepcopy(m.layers[0].up.weight),
            "tolist": lambda m: torch.tensor(m.layers[0].norm.bias.tolist()),
        }
        for batch, (name, look) in zip(batches_for(131, len(looks)), looks.items()):
            pair.train([batch])
            assert torch.equal(look(ours), look(theirs)), name   # the first thing after the step
            assert "nan" not in repr(ours.norm.bias)
        pair.check()


def test_a_deepcopied_parameter_is_a_plain_one(tmp_path):
    with pair_of(OddModel, lohan_section(tmp_path)) as pair:
        pair.train(batches_for(131, 1))
        copied = copy.deepcopy(pair.engine.module.layers[0].down.weight)
        assert type(copied) is nn.Parameter and copied.requires_grad
        assert torch.equal(copied, pair.twin.model.layers[0].down.weight)
        with torch.no_grad():
            copied.zero_()
        pair.train(batches_for(131, 2)[1:])
        pair.check()


def test_a_view_that_was_kept_keeps_its_values(tmp_path):
    with pair_of(OddModel, lohan_section(tmp_path, "ssd")) as pair:
        pair.train(batches_for(131, 1))
        kept, copied = pair.engine.module.layers[0].down.weight.detach(), pair.twin.model.layers[0].down.weight.clone()
        state, copies = pair.engine.module.state_dict(), {n: v.clone() for n, v in pair.twin.model.state_dict().items()}
        pair.train(batches_for(131, 4)[1:])
        assert torch.equal(kept, copied)
        assert all(torch.equal(state[name], copies[name]) for name in copies)


def test_a_look_waits_for_nothing_else(tmp_path):
    with pair_of(OddModel, lohan_section(tmp_path, "ssd")) as pair:
        ours, theirs = pair.engine.module, pair.twin.model
        late = ours.layers[1].up.weight.lohan_block
        gate = Gate(pair.engine, blocked=lambda block_index: block_index >= late)
        pair.micro_step(lm_batch(131))
        gate.shut()
        pair.step()
        assert torch.equal(ours.layers[0].up.weight, theirs.layers[0].up.weight)
        assert ours.embed.weight.norm() == theirs.embed.weight.norm()
        seen: list[Any] = []
        looker = threading.Thread(target=lambda: seen.append(ours.layers[1].up.weight.detach().clone()))
        looker.start()
        looker.join(0.2)
        assert not seen, "it does wait for its own update"
        gate.open()
        looker.join(60)
        assert torch.equal(seen[0], theirs.layers[1].up.weight)
        pair.check()


class FusedHead(nn.Module):
    """The loss reads the weight of another module itself, as fused losses do."""

    def __init__(self):
        super().__init__()
        base = OddModel()
        self.embed, self.layers, self.norm = base.embed, base.layers, base.norm

    def forward(self, input_ids, labels):
        x_BTH = self.embed(input_ids)
        for layer in self.layers:
            x_BTH = layer(x_BTH)
        logits = F.linear(self.norm(x_BTH), self.embed.weight)
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())


@TIERS
@pytest.mark.parametrize("prefetch_depth", [0, 2])
def test_a_weight_used_in_another_modules_forward(tmp_path, tier, prefetch_depth):
    with pair_of(FusedHead, lohan_section(tmp_path, tier, prefetch_depth=prefetch_depth), clip=0.5,
                 accumulation=2) as pair:
        pair.train(batches_for(131, 6))
        pair.check()


def decay_towards_the_start(model, batch):
    """A penalty on weights, computed outside the model's forward: autograd saves the parameters themselves."""
    weights = [model.layers[0].up.weight, model.layers[0].norm.weight, model.head.weight]
    assert weights[0].norm() > 0   # a look before
    penalty = sum((weight - 1).pow(2).mean() + weight.pow(2).mean() + weight.norm() for weight in weights)
    return loss_of(model, batch) + penalty   # the forward drops those blocks


@TIERS
@DTYPE
def test_a_penalty_on_weights_outside_the_forward(tmp_path, tier, dtype):
    with pair_of(OddModel, lohan_section(tmp_path, tier, prefetch_depth=0), dtype=dtype, clip=1.0) as pair:
        pair.train(batches_for(131, 3), decay_towards_the_start)
        assert pair.engine.skipped_steps == 0
        pair.check()


# -- edits -------------------------------------------------------------------------------------------------------------


def multiply(model):
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)


def zero_one(model):
    nn.init.zeros_(model.layers[1].up.weight)


def fill_data(model):
    model.layers[1].up.weight.data.fill_(0.25)
    list(model.parameters())[-1].data[0] = 3.0


def fill_data_after_a_look(model):
    """The block is there already when `.data` is asked for."""
    assert model.layers[1].up.weight.norm() > 0 and model.layers[1].up.bias is not None
    model.layers[1].up.weight.data.fill_(0.25)
    model.layers[1].norm.weight.data.add_(1)


def replace_data(model):
    model.head.weight.data = torch.full_like(model.head.weight, 0.125)


def copy_rows(model):
    with torch.no_grad():
        model.embed.weight[5:7] = 0.5
        model.embed.weight.copy_(model.embed.weight.roll(1, 0))


def load_state(model):
    other = OddModel(seed=7).state_dict()
    assert not model.load_state_dict(other).missing_keys


EDITS = [multiply, zero_one, fill_data, fill_data_after_a_look, replace_data, copy_rows, load_state]


@TIERS
@DTYPE
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_edits_between_steps_persist(tmp_path, tier, dtype, edit):
    with pair_of(OddModel, lohan_section(tmp_path, tier), dtype=dtype, clip=1.0) as pair:
        batches = batches_for(131, 3)
        pair.train(batches[:1])
        edit(pair.engine.module)
        edit_twin(pair, edit)
        pair.check()
        pair.train(batches[1:2])
        pair.micro_step(batches[2])
        edit(pair.engine.module)    # between backward and step
        edit_twin(pair, edit)
        pair.step()
        pair.check()


def halve(model, name):
    with torch.no_grad():
        dict(model.named_parameters())[name].mul_(0.5)


def halve_data(model, name):
    dict(model.named_parameters())[name].data.mul_(0.5)


def halve_after_a_look_at_all(model, name):
    assert all(param.norm() >= 0 for param in model.parameters())
    halve(model, name)


@TIERS
@pytest.mark.parametrize("edit", [halve, halve_data, halve_after_a_look_at_all], ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "lm_head.weight"])
def test_an_edit_right_before_a_forward(tmp_path, tier, edit, name):
    """With nothing in between that would write it back."""
    with pair_of(tiny_llama, lohan_section(tmp_path, tier), clip=1.0) as pair:
        for batch in batches_for(257, 2):
            pair.train([batch])
            edit(pair.engine.module, name)
            edit_twin(pair, lambda model: edit(model, name))
        pair.train([batch])
        pair.check()


@pytest.mark.parametrize("edit", [fill_data, zero_one], ids=lambda edit: edit.__name__)
def test_edits_right_after_a_forward_persist(tmp_path, edit):
    """After a forward that no backward follows, the last units are still there."""
    with pair_of(OddModel, lohan_section(tmp_path, "ssd")) as pair:
        batches = batches_for(131, 3)
        for batch in batches:
            loss_of(pair.engine, batch)
            edit(pair.engine.module)
            edit_twin(pair, edit)
            pair.train([batch])
        pair.check()


def test_what_is_asked_for_by_name_sees_an_edit(tmp_path):
    with pair_of(OddModel, lohan_section(tmp_path, "ssd"), dtype="bf16") as pair:
        pair.train(batches_for(131, 1))
        weight = pair.engine.module.layers[1].up.weight
        nn.init.constant_(weight, 0.5)
        assert (safe_get_full_fp32_param(weight) == 0.5).all()
        nn.init.constant_(weight, 0.25)
        assert (engine_state(pair.engine)["layers.1.up.weight"]["master"] == 0.25).all()
        nn.init.constant_(weight, 0.75)
        name = "layers.1.up.weight"
        assert (pair.engine._zero3_consolidated_16bit_state_dict()[name] == 0.75).all()


# -- DeepSpeed's own ways ----------------------------------------------------------------------------------------------


@TIERS
@DTYPE
@pytest.mark.parametrize("in_place", [True, False])
def test_an_edit_in_gathered_parameters(tmp_path, tier, dtype, in_place):
    def edit(model):
        with GatheredParameters(list(model.layers[1].parameters()), modifier_rank=0):
            if in_place:
                nn.init.constant_(model.layers[1].up.weight, 0.5)
            else:
                model.layers[1].up.weight.data[2:4] = 0.5
            model.layers[1].norm.bias.data.add_(1)

    with pair_of(OddModel, lohan_section(tmp_path, tier), dtype=dtype, clip=1.0) as pair:
        batches = batches_for(131, 3)
        for batch in batches:
            edit(pair.engine.module)
            edit_twin(pair, edit)
            pair.train([batch])
        pair.check()


@TIERS
def test_looking_in_gathered_parameters(tmp_path, tier):
    with pair_of(OddModel, lohan_section(tmp_path, tier)) as pair:
        for batch in batches_for(131, 2):
            pair.train([batch])
            ours, theirs = list(pair.engine.module.parameters()), list(pair.twin.model.parameters())
            with GatheredParameters(ours):
                assert all(type(p) is nn.Parameter and torch.equal(p, q) for p, q in zip(ours, theirs))
            with GatheredParameters(ours[4]):
                assert torch.equal(ours[4].data, theirs[4])
            with pytest.raises(ZeroDivisionError), GatheredParameters(ours):
                raise ZeroDivisionError
        pair.check()


def test_step_inside_gathered_parameters_is_refused(tmp_path):
    with pair_of(OddModel, lohan_section(tmp_path), clip=1.0) as pair:
        first, second = batches_for(131, 2)
        pair.micro_step(first)
        with GatheredParameters(list(pair.engine.module.layers[1].parameters())):
            with pytest.raises(StepError, match="inside GatheredParameters"):
                pair.engine.step()
        pair.step()   # the same step, outside
        pair.train([second])
        pair.check()


@TIERS
@DTYPE
def test_safe_get_and_set(tmp_path, tier, dtype):
    with pair_of(OddModel, lohan_section(tmp_path, tier), dtype=dtype, clip=1.0) as pair:
        batches = batches_for(131, 4)
        pair.train(batches[:1])
        ours, twin = dict(pair.engine.module.named_parameters()), pair.twin
        for name, param in ours.items():
            assert torch.equal(safe_get_full_fp32_param(param), twin._master[name]), name
            assert torch.equal(safe_get_full_optimizer_state(param, "exp_avg"), twin._exp_avg[name]), name
            assert torch.equal(safe_get_full_optimizer_state(param, "exp_avg_sq"), twin._exp_avg_sq[name]), name
            assert safe_get_full_grad(param) is None
        for i, (name, param) in enumerate(ours.items()):
            value = torch.full(param.shape, 0.1 + i)
            if i % 3 == 0:
                safe_set_full_fp32_param(param, value)
                twin._master[name].copy_(value)
                dict(twin.model.named_parameters())[name].data.copy_(value)
            elif i % 3 == 1:
                safe_set_full_optimizer_state(param, value, "exp_avg")
                twin._exp_avg[name].copy_(value)
            else:
                safe_set_full_optimizer_state(param, value, "exp_avg_sq")
                twin._exp_avg_sq[name].copy_(value)
        pair.check()
        pair.train(batches[1:2])
        pair.micro_step(batches[2])
        for name, param in ours.items():
            grad = safe_get_full_grad(param)
            assert grad.shape == param.shape and torch.equal(grad.float(), twin._main_grad[name]), name
        safe_set_full_grad(ours["norm.weight"], torch.full((33,), 0.5))
        twin._main_grad["norm.weight"].fill_(0.5)
        safe_update_full_grad_vectorized([ours["head.weight"], ours["norm.bias"]], lambda grad, param: grad * 2)
        for name in ("head.weight", "norm.bias"):
            twin._main_grad[name] *= 2
        pair.step()
        pair.train(batches[3:])
        pair.check()
        assert DTYPES[dtype] == ours["norm.weight"].dtype


# -- parameters in host memory, where the CPU computes: units compute with the store's own tensors -------------------


class _Shrinking(nn.Linear):
    """Changes its weight in its own forward; `before_edit` is what a twin needs to know."""
    before_edit = staticmethod(lambda weight: None)

    def forward(self, x):
        with torch.no_grad():
            self.before_edit(self.weight)
            self.weight.mul_(0.75)
        return super().forward(x)


class _TwoShrinking(nn.Module):
    """One unit: the second weight changes when the first is saved for backward."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = _Shrinking(width, width), _Shrinking(width, width)

    def forward(self, x):
        return x + self.second(self.first(x).relu())


def _shrinking_model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(_Shrinking(33, 65), nn.ReLU(), *(_TwoShrinking(65) for _ in range(4)), _Shrinking(65, 33))


@pytest.mark.parametrize("linear", [nn.functional.linear, zero3_linear_wrap], ids=["torch", "zero3_linear"])
@pytest.mark.parametrize("tier", ["host", "ssd"])
@pytest.mark.parametrize("update", ["serial", "deferred", "eager"])
@DTYPE
def test_a_module_that_changes_its_weight_and_then_uses_it(tmp_path, monkeypatch, dtype, update, tier, linear):
    """zero3_linear: what `deepspeed.zero.Init` leaves behind; it saves the weight even if the input has no gradient."""
    monkeypatch.setattr(nn.functional, "linear", linear)
    section = lohan_section(tmp_path, tier, update)
    with pair_of(_shrinking_model, section, dtype=dtype, clip=1.0) as pair:
        twin_edits: list[tuple[nn.Parameter, torch.Tensor]] = []
        for module in pair.twin.model.modules():
            module.before_edit = lambda weight: twin_edits.append((weight, weight.detach().clone()))

        def loss_fn(model, x):
            loss = model(x).float().square().mean()
            masters = pair.twin._master
            for param, before in twin_edits:   # where bits changed, the master follows
                name = next(name for name, other in pair.twin.model.named_parameters() if other is param)
                if param.dtype != torch.float32:
                    changed = before.view(torch.int16) != param.detach().view(torch.int16)
                    masters[name].copy_(torch.where(changed, param.detach().float(), masters[name]))
            twin_edits.clear()
            return loss

        for seed in range(4):
            x = torch.randn(5, 33, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])
            pair.train([x], loss_fn)
        pair.check()


@TIERS
@DTYPE
@pytest.mark.parametrize("edited", ["layers.1.up", "layers.0.up"])
def test_a_weight_changed_in_place_between_forward_and_backward_is_refused(tmp_path, dtype, tier, edited):
    """As plain torch does; afterwards training goes on with the changed weight."""
    def halve(model):
        with torch.no_grad():
            model.get_submodule(edited).weight.mul_(0.5)

    first, second, third = batches_for(131, 3)
    plain = OddModel()
    loss = loss_of(plain, first)
    halve(plain)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pair_of(OddModel, lohan_section(tmp_path, tier), dtype=dtype, clip=1.0) as pair:
        pair.train([first])
        loss = loss_of(pair.engine, second)
        halve(pair.engine.module)
        edit_twin(pair, halve)
        with pytest.raises(StepError, match="changed after its forward"):
            pair.engine.backward(loss)
        pair.engine.reset_step()
        pair.train([third])
        pair.check()


@pytest.mark.parametrize("update", ["deferred", "eager"])
@DTYPE
def test_units_copy_nothing_and_whoever_looks_gets_a_copy(tmp_path, dtype, update):
    with pair_of(OddModel, lohan_section(tmp_path, update=update), dtype=dtype) as pair:
        batches = batches_for(131, 4)
        pair.train(batches[:1])
        fetched = pair.engine.lohan_stats()["param_bytes_fetched"]
        weight, seen = pair.engine.module.layers[1].up.weight, []
        handle = pair.engine.module.layers[1].up.register_forward_hook(lambda *_: seen.append(weight.data_ptr()))
        pair.train(batches[1:2])
        handle.remove()
        block, slot = pair.engine.offload.place_of(weight)
        info, store = pair.engine.offload.blocks[block].slots[slot], pair.engine.offload.store
        pair.engine.offload.gradients.updater.drain()
        addresses = [home.params[info.offset:].data_ptr() for home in store._slots[block]]
        assert seen and set(seen) <= set(addresses)
        assert pair.engine.lohan_stats()["param_bytes_fetched"] == fetched, "units computed with the store's tensors"

        loss = loss_of(pair.engine, batches[2])        # the last units are resident now, and lent
        held = [param.data for param in pair.engine.module.parameters()]
        values = [value.clone() for value in held]
        owned = {home.params.untyped_storage().data_ptr() for slots in store._slots for home in slots}
        assert not owned & {value.untyped_storage().data_ptr() for value in held}
        pair.engine.backward(loss)
        assert loss.item() == pair.twin.micro_step(batches[2])
        pair.step()
        pair.train(batches[3:])
        pair.engine.offload.gradients.updater.drain()
        assert all(torch.equal(value, old) for value, old in zip(held, values))
        pair.check()
