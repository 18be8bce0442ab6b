"""Edits of weights that torch's in-place versions do not show: `.data`, NumPy, fused optimizers; at every moment.

Plain torch accepts all of them. Here they are either refused, or have the same bits as the twin; and they persist.
"""
from __future__ import annotations

import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from test_training_patterns import Pair, lohan_section, pair_of
from test_visible_parameters import edit_twin
from torch import nn

from lohan_ds.errors import StepError
from lohan_ds.testing.harness import DTYPES
from lohan_ds.testing.models import OddLayer

HIDDEN = 33
WEIGHTS = ("layers.2.norm.weight", "layers.2.down.weight", "layers.1.norm.weight", "layers.1.up.weight", "inp.weight")
NEIGHBOUR = "layers.1.down.bias"


class _NoHead(nn.Module):
    """Its last unit begins with a LayerNorm, of which autograd saves the weight itself; of a Linear it saves a view."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.inp = nn.Linear(HIDDEN, HIDDEN)
            self.layers = nn.ModuleList(OddLayer(HIDDEN) for _ in range(3))

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return x


def in_place(param):
    param.data.mul_(0.5)


def replaced(param):
    param.data = (param.detach() * 0.5).clone()


def fused_sgd(param):
    with torch.no_grad():
        torch._fused_sgd_([param], [torch.ones_like(param)], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0,
                          nesterov=False, maximize=False, is_first_step=True)


def through_numpy(param):
    param.detach().view(torch.uint8).numpy()[:] = 0x3C


def through_a_view(param):
    param[1:].detach().mul_(2)


def data_of_a_view(param):
    """Taken with grad on: the view is of a graph, its `.data` is not."""
    param[1:].data.mul_(2)


def data_of_chunks(param):
    for chunk in param.chunk(3):
        chunk.data.mul_(0.5)


def numpy_of_a_view(param):
    param.view(-1).detach().view(torch.uint8).numpy()[4:12] = 0x3C


UNSEEN = pytest.mark.parametrize("edit", [in_place, replaced, fused_sgd, through_numpy], ids=lambda edit: edit.__name__)
TIER_DTYPE = pytest.mark.parametrize("tier, dtype", [("ssd", "fp32"), ("host", "bf16")])


def batches(dtype: str, count: int) -> list[torch.Tensor]:
    return [torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])
            for seed in range(count)]


def loss_of(model, x):
    return model(x).float().square().mean()


def edit_both(pair: Pair, edit, name: str) -> None:
    edit(pair.engine.module.get_parameter(name))
    edit_twin(pair, lambda model: edit(model.get_parameter(name)))


def finish_or_refuse(pair: Pair, loss: torch.Tensor, x: torch.Tensor, twin_loss_of=loss_of) -> bool:
    """Backward of `loss`, and the twin's; True if ours was refused: then the twin goes on without its step too."""
    try:
        pair.engine.backward(loss)
    except StepError:
        pair.engine.reset_step()
        return True
    assert pair.twin.micro_step(x, twin_loss_of) == loss.item()
    pair.step()
    return False


@UNSEEN
@TIER_DTYPE
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_between_forward_and_backward(tmp_path, tier, dtype, activations, edit):
    num_refused = 0
    for name in WEIGHTS:
        section = lohan_section(tmp_path, tier, "eager", prefetch_depth=1, activations=activations)
        with pair_of(_NoHead, section, dtype=dtype) as pair:
            first, second, *more = batches(dtype, 4)
            pair.train([first], loss_of)
            loss = loss_of(pair.engine, second)
            edit(pair.engine.module.get_parameter(name))

            def edited_after_forward(model, x):
                loss = loss_of(model, x)
                edit_twin(pair, lambda model: edit(model.get_parameter(name)))   # noqa: B023
                return loss

            if finish_or_refuse(pair, loss, second, edited_after_forward):
                num_refused += 1
                edit_twin(pair, lambda model: edit(model.get_parameter(name)))   # noqa: B023
            pair.check()
            pair.train(more, loss_of)
            pair.check()
    assert num_refused < len(WEIGHTS) or edit is replaced


class _Once:
    """A forward hook that puts a hook on its module's output; it edits in the next backward, once."""

    def __init__(self, edit):
        self._edit, self._is_done = edit, False

    def __call__(self, module, args, output):
        output.register_hook(self._in_backward)

    def _in_backward(self, grad):
        if not self._is_done:
            self._is_done = True
            self._edit()


@UNSEEN
@TIER_DTYPE
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("hooked", ["layers.1", "layers.1.down"])
def test_in_a_backward_hook(tmp_path, tier, dtype, activations, hooked, edit):
    """The edited weight is the running unit's own, or another's."""
    for name in (*WEIGHTS, NEIGHBOUR):
        section = lohan_section(tmp_path, tier, "eager", prefetch_depth=1, activations=activations)
        with pair_of(_NoHead, section, dtype=dtype) as pair:
            first, second, *more = batches(dtype, 4)
            pair.train([first], loss_of)
            ours, theirs = pair.engine.module, pair.twin.model
            handles = [
                ours.get_submodule(hooked).register_forward_hook(_Once(lambda: edit(ours.get_parameter(name)))),  # noqa: B023
                theirs.get_submodule(hooked).register_forward_hook(_Once(
                    lambda: edit_twin(pair, lambda model: edit(model.get_parameter(name)))))]   # noqa: B023
            loss = loss_of(pair.engine, second)
            if finish_or_refuse(pair, loss, second):
                edit_twin(pair, lambda model: edit(model.get_parameter(name)))   # noqa: B023
            for handle in handles:
                handle.remove()
            pair.check()
            pair.train(more, loss_of)
            pair.check()


@pytest.mark.parametrize("edit", [fused_sgd, through_numpy, through_a_view, data_of_a_view, data_of_chunks,
                                  numpy_of_a_view], ids=lambda edit: edit.__name__)
@TIER_DTYPE
def test_between_steps(tmp_path, tier, dtype, edit):
    for name in WEIGHTS:
        with pair_of(_NoHead, lohan_section(tmp_path, tier), dtype=dtype, accumulation=2) as pair:
            xs = batches(dtype, 6)
            pair.train(xs[:2], loss_of)
            edit_both(pair, edit, name)
            pair.check()
            pair.micro_step(xs[2], loss_of)
            pair.engine.step()
            edit_both(pair, edit, name)
            pair.micro_step(xs[3], loss_of)
            pair.step()
            pair.train(xs[4:], loss_of)
            pair.check()


def all_data_at_once(model):
    torch._foreach_mul_([param.data for param in model.parameters()], 0.5)


def detached_one_after_the_other(model):
    for values in [param.detach().view(torch.uint8) for param in model.parameters()]:
        values.numpy()[:] = 0x3C


def through_the_state_dict(model):
    state = model.state_dict()
    for name in ("inp.weight", "layers.0.norm.weight", "layers.2.up.bias"):
        state[name].mul_(0.5)


@pytest.mark.parametrize("edit", [all_data_at_once, detached_one_after_the_other, through_the_state_dict],
                         ids=lambda edit: edit.__name__)
@TIER_DTYPE
def test_handles_of_all_blocks_at_once(tmp_path, tier, dtype, edit):
    """More than may be kept for looks."""
    with pair_of(_NoHead, lohan_section(tmp_path, tier, prefetch_depth=0), dtype=dtype) as pair:
        first, second, third = batches(dtype, 3)
        pair.train([first], loss_of)
        edit(pair.engine.module)
        edit_twin(pair, edit)
        pair.train([second], loss_of)
        pair.check()
        edit(pair.engine.module)
        edit_twin(pair, edit)
        pair.check()
        pair.train([third], loss_of)
        pair.check()


def seen(param):
    with torch.no_grad():
        param.mul_(0.5)


@pytest.mark.parametrize("before, between", [(replaced, in_place), (replaced, replaced), (replaced, seen),
                                             (seen, in_place), (seen, replaced)])
@TIER_DTYPE
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_one_before_forward_and_one_before_backward(tmp_path, tier, dtype, activations, before, between):
    """With all blocks resident all the time."""
    for name in WEIGHTS:
        section = lohan_section(tmp_path, tier, prefetch_depth=4, activations=activations)
        with pair_of(_NoHead, section, dtype=dtype) as pair:
            first, second, *more = batches(dtype, 4)
            pair.train([first], loss_of)
            loss_of(pair.engine, second)   # no backward follows: they stay
            edit_both(pair, before, name)
            loss = loss_of(pair.engine, second)
            expected = loss_of(pair.twin.model, second)
            edit_both(pair, between, name)
            try:
                pair.engine.backward(loss)
            except StepError:
                pair.engine.reset_step()
            else:
                assert loss.item() == expected.item()
                expected.backward()   # not refused either
                theirs = pair.twin.model.get_parameter("inp.weight").grad
                theirs = pair.twin._main_grad["inp.weight"] if theirs is None else theirs
                assert torch.equal(safe_get_full_grad(pair.engine.module.inp.weight), theirs.float())
                continue
            pair.check()
            pair.train(more, loss_of)
            pair.check()


class _KeepsWeight(torch.autograd.Function):
    """As many custom layers do: the weight is an attribute, used with grad on in a double backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        return grad @ ctx.weight, grad.t() @ x


class _GivesNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.weight, None


class _Custom(_NoHead):
    function = _KeepsWeight

    def __init__(self):
        super().__init__()
        for layer in self.layers:
            layer.down.forward = lambda x, weight=layer.down.weight: self.function.apply(x, weight)


class _CustomNone(_Custom):
    function = _GivesNone


def penalty(model, x):
    x = x.clone().requires_grad_()
    loss = loss_of(model, x)
    grad, = torch.autograd.grad(loss, x, create_graph=True)
    return loss + grad.float().square().sum()


@pytest.mark.parametrize("tier", ["ssd", "host"])
def test_a_double_backward_through_a_function_that_keeps_its_weight(tmp_path, tier):
    with pair_of(_Custom, lohan_section(tmp_path, tier, prefetch_depth=1)) as pair:
        for x in batches("fp32", 3):
            pair.micro_step(x, penalty)
            pair.step()
        pair.check()


def test_a_function_that_gives_no_gradient_for_a_weight(tmp_path):
    with pair_of(_CustomNone, lohan_section(tmp_path, "ssd", "eager")) as pair:
        before = pair.engine.module.layers[1].down.weight.detach().clone()
        pair.train(batches("fp32", 2), loss_of)
        assert torch.equal(pair.engine.module.layers[1].down.weight, before)
        pair.check()


def test_a_look_that_can_change_nothing_costs_no_second_read(tmp_path):
    with pair_of(_NoHead, lohan_section(tmp_path, "ssd")) as pair:
        pair.train(batches("fp32", 2), loss_of)
        pair.engine.offload.gradients.updater.drain()
        weight = pair.engine.module.layers[1].up.weight
        block = pair.engine.offload.blocks[weight.lohan_block]

        def bytes_of_a_look(look) -> int:
            pair.engine.offload.streamer.release_all()
            before = pair.engine.lohan_stats()["ssd_bytes_read"]
            look()
            pair.engine.offload.streamer.release_all()
            return pair.engine.lohan_stats()["ssd_bytes_read"] - before

        once = bytes_of_a_look(lambda: weight.norm())
        assert once >= block.param_bytes
        assert bytes_of_a_look(lambda: (weight * 2).sum()) == once
        assert bytes_of_a_look(lambda: weight.detach().norm()) > once, "it is compared with what is stored"
