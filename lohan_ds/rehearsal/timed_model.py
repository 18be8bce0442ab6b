"""`TimedModel`: a model that saves, moves and is updated like the profiled one, and computes by letting time pass.

Each unit has the parameters of its blocks and makes, one after the other, the items that the profile says it saves,
each in a module of the item's own name, so a plan's policies apply as they would to the real one. What an item costs to
make is the duration of one operation (`Clockwork.item`): a forward that runs again does not pay for results that are
still there. Values mean nothing: gradients are zeros.
"""
from __future__ import annotations

import uuid
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lohan_ds.profile import ModelProfile, UnitProfile
from lohan_ds.rehearsal.paced_streams import PacedStreams

BACKWARD = 2     # times the forward: by how many FLOPs
OWN_CODE = "forward"


class Clockwork:
    """The operation `item(x, numel, seconds) -> y`: `y` is (numel,) of x's dtype, made by so much compute."""

    def __init__(self, streams: PacedStreams):
        self._streams = streams
        namespace = f"lohan_rehearsal_{uuid.uuid4().hex}"   # operations are global; this one is ours alone
        self._library = torch.library.Library(namespace, "DEF")
        self._library.define("item(Tensor x, int numel, float seconds) -> Tensor")
        self._library.impl("item", self._make, "CPU")
        self.item = getattr(torch.ops, namespace).item.default

    def _make(self, x: Tensor, numel: int, seconds: float) -> Tensor:
        self.compute("forward", seconds)
        return x.new_empty(numel)

    def compute(self, name: str, seconds: float) -> None:
        if seconds:
            self._streams.compute(name, seconds)

    def close(self) -> None:
        self._library._destroy()


class _Make(torch.autograd.Function):
    """One item from the one before. Saves what `saves` says: "x" (the unit's input), "y", and always the weights."""

    @staticmethod
    def forward(ctx, x, work, *weights):
        y = work.clock.item(x, work.numel, work.seconds)
        ctx.work, ctx.x_numel = work, x.numel()
        ctx.save_for_backward(*([x] if work.saves_input else ()), *([y] if work.is_saved else ()), *weights)
        ctx.weights = [(weight.shape, weight.dtype, weight.requires_grad) for weight in weights]
        return y

    @staticmethod
    def backward(ctx, grad):
        ctx.saved_tensors   # as a real backward would: waits for what is on its way back, or computes it again
        ctx.work.clock.compute("backward", BACKWARD * ctx.work.seconds)
        grads = [torch.zeros(shape, dtype=dtype) if trained else None for shape, dtype, trained in ctx.weights]
        return grad.new_empty(ctx.x_numel), None, *grads


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.numel, ctx.dtype = x.numel(), x.dtype
        return torch.zeros(())

    @staticmethod
    def backward(ctx, grad):
        return torch.empty(ctx.numel, dtype=ctx.dtype)


class _Work:
    """One operation of a unit, and the weights it uses."""

    def __init__(self, clock: Clockwork, numel: int, seconds: float, is_saved: bool):
        self.clock, self.numel, self.seconds, self.is_saved = clock, numel, seconds, is_saved
        self.saves_input = False


class _Item(nn.Module):
    """What a module of that name does in the real unit; others may be inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList()

    def forward(self, x: Tensor, work: _Work, weights: Sequence[nn.Parameter]) -> Tensor:
        return _Make.apply(x, work, *weights)


class TimedUnit(nn.Module):
    """Items in the order of the profile, and at last the output."""

    def __init__(self, profile: UnitProfile, params: Sequence[nn.Parameter], output_numel: int, flops_per_s: float,
                 itemsize: int, clock: Clockwork):
        super().__init__()
        made = [item for item in profile.items if not item.is_input and item.nbytes]
        rest_flops = max(0.0, profile.forward_flops - sum(item.recompute_flops for item in made))
        works = [(item.name, _Work(clock, item.nbytes // itemsize, item.recompute_flops / flops_per_s, True))
                 for item in made]
        works.append((OWN_CODE, _Work(clock, output_numel, rest_flops / flops_per_s, False)))
        works[0][1].saves_input = any(item.is_input and item.nbytes for item in profile.items)
        self._steps: list[tuple[_Item | None, _Work, list[nn.Parameter]]] = []
        self.own_weights = nn.ParameterList()
        for place, (name, work) in enumerate(works):
            module = None if name == OWN_CODE else self._module(name)
            begin, end = (-(-each * len(params) // len(works)) for each in (place, place + 1))   # the first has some
            weights = list(params[begin:end])
            (self.own_weights if module is None else module.weights).extend(weights)
            self._steps.append((module, work, weights))

    def _module(self, path: str) -> _Item:
        module: nn.Module = self
        for name in path.split("."):
            if name not in module._modules:
                module.add_module(name, _Item())
            module = module._modules[name]
        return module

    def forward(self, x: Tensor) -> Tensor:
        for module, work, weights in self._steps:
            x = _Make.apply(x, work, *weights) if module is None else module(x, work, weights)
        return x


class TimedModel(nn.Module):
    """`forward(x)` is a loss. `profile` and `flops_per_s` are scaled; blocks come out as the profile has them."""

    def __init__(self, profile: ModelProfile, flops_per_s: float, clock: Clockwork):
        super().__init__()
        dtype = getattr(torch, profile.size.blocks[0].dtype)
        inputs = [sum(item.nbytes for item in unit.items if item.is_input) for unit in profile.units]
        outputs = [following or unit.output_bytes for following, unit in zip(inputs[1:], profile.units)]
        outputs.append(profile.units[-1].output_bytes)
        self.input_numel = max(1, inputs[0] // dtype.itemsize)
        self.dtype = dtype
        params: dict[int, list[nn.Parameter]] = {}   # by block
        self.units = nn.ModuleList()
        for unit, blocks, nbytes in zip(profile.units, profile.size.units, outputs):
            members = []
            for index in blocks:
                block = profile.size.blocks[index]
                if index in params:   # tied: one of them is used again
                    members.append(max(params[index], key=torch.numel))
                    continue
                params[index] = [nn.Parameter(torch.zeros(slot.shape, dtype=getattr(torch, block.dtype)),
                                              requires_grad=block.trainable) for slot in block.slots]
                members += params[index]
            self.units.append(TimedUnit(unit, members, max(1, nbytes // dtype.itemsize), flops_per_s, dtype.itemsize,
                                        clock))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return _Loss.apply(x)
