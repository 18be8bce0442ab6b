"""Models whose activations are swapped: alone, without an engine, or inside one."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lohan_ds.block import PAGE_NUMEL
from lohan_ds.memory.budget import MemoryBudget
from lohan_ds.memory.pinned_pool import PinnedPool
from lohan_ds.model_blocks import split_into_blocks
from lohan_ds.plan import ActivationPlan, ActivationPolicy
from lohan_ds.runtime.activation_swapper import ActivationSwapper
from lohan_ds.runtime.saved_weights import WeightHooks
from lohan_ds.runtime.streams import Streams, make_streams
from lohan_ds.runtime.swap_space import SwapSpace
from lohan_ds.store.native_io import make_ssd_io

CPU = torch.device("cpu")
MIB = 1 << 20


def activation_plan(names: Sequence[str], policies: Mapping[str, Mapping[str, ActivationPolicy]],
                    **sizes: int) -> ActivationPlan:
    """`policies`: unit name -> item -> policy; the unit "*" stands for all that are not named. Space for tiny models
    unless `sizes` says otherwise; everything is large enough to be swapped."""
    sizes = {"host_bytes": 8 * MIB, "ssd_bytes": 8 * MIB, "num_buffers": 2, "buffer_bytes": 64 << 10,
             "smallest_swap_bytes": 0, **sizes}
    unknown = set(policies) - {*names, "*"}
    assert not unknown, (unknown, names)
    return ActivationPlan(tuple(tuple(policies.get(name, policies.get("*", {})).items()) for name in names), **sizes)


def unit_names(model: nn.Module) -> list[str]:
    return [unit.name for unit in units_of(model)]


def units_of(model: nn.Module):
    """As the engine finds them."""
    return split_into_blocks(model, lambda param: 0 if param.requires_grad else None, PAGE_NUMEL).units


class Swapped:
    """A model in memory whose activations a swapper handles. `model(**batch)` runs under its hooks."""

    def __init__(self, model: nn.Module, swapper: ActivationSwapper, space: SwapSpace, budget: MemoryBudget):
        self.model, self.swapper, self.space, self.budget = model, swapper, space, budget

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(*self.swapper.saved_tensors_hooks):
            return self.model(*args, **kwargs)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        with torch.autograd.graph.saved_tensors_hooks(*self.swapper.saved_tensors_hooks):
            loss.backward(**kwargs)
        self.swapper.end_backward()


def attach_swapper(engine: Any, policies: Mapping[str, Mapping[str, ActivationPolicy]], dirs: Sequence[Any] = (),
                   make_io=make_ssd_io, **sizes: int) -> ActivationSwapper:
    """Gives an engine that has none an ActivationSwapper; the engine's end is its end."""
    offload = engine.offload
    units, streamer = offload.model_blocks.units, offload.streamer
    plan = activation_plan([unit.name for unit in units], policies, **({"ssd_bytes": 0} if not dirs else {}), **sizes)
    io = make_io(2) if dirs else None
    space = SwapSpace(plan, offload.pool, io, [str(path) for path in dirs], offload.streams)
    weights = WeightHooks(streamer.saved.pack_weight, streamer.saved.unpack, streamer.weights_version,
                          streamer.running_again)
    swapper = ActivationSwapper([(unit.name, unit.module) for unit in units], plan, space.tiers, offload.streams,
                                offload.device, weights)
    swapper.attach()
    streamer.saved.use_hooks(*swapper.saved_tensors_hooks)
    offload.closers += [*([io.close] if io is not None else []), space.close, swapper.detach]
    _after(streamer, "end_backward", swapper.end_backward)
    _after(streamer, "reset", swapper.reset)
    _after(engine.optimizer, "step", swapper.end_step)
    return swapper


def _after(owner: Any, name: str, then: Callable[[], None]) -> None:
    first = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        result = first(*args, **kwargs)
        then()
        return result
    setattr(owner, name, both)


@contextlib.contextmanager
def swapping(model: nn.Module, policies: Mapping[str, Mapping[str, ActivationPolicy]], dirs: Sequence[Any] = (),
             streams: Streams | None = None, make_io=make_ssd_io, budget_bytes: int = 64 * MIB,
             **sizes: int) -> Iterator[Swapped]:
    """Without `dirs` there is no SSD tier, without streams that are not unified no host tier."""
    streams = streams or make_streams(CPU)
    units = units_of(model)
    plan = activation_plan([unit.name for unit in units], policies, **({"ssd_bytes": 0} if not dirs else {}), **sizes)
    budget = MemoryBudget("host", budget_bytes)
    pool, io = PinnedPool(budget, pin=False), make_io(2) if dirs else None
    space = SwapSpace(plan, pool, io, [str(path) for path in dirs], streams)
    weights = WeightHooks(lambda tensor: None, lambda packed: packed,
                          lambda index: tuple(p._version for p in units[index].module.parameters()),
                          lambda index: contextlib.nullcontext())
    swapper = ActivationSwapper([(unit.name, unit.module) for unit in units], plan, space.tiers, streams, CPU, weights)
    swapper.attach()
    try:
        yield Swapped(model, swapper, space, budget)
    finally:
        swapper.detach()
        space.close()
        if io is not None:
            io.close()
        streams.close()
        pool.close()
