"""`profile_model`: what a model costs to run, unit by unit, worked out on meta tensors: no weights, no data, seconds.

What it finds are shapes: bytes and FLOPs. How fast they move is the hardware's business. What depends on the values of
tensors cannot be found (a mixture of experts must compute all chosen rows in one grouped product, as transformers does
by default). Worked size: GPT-3 175B, one sequence of 2048 tokens: 141 GB of items, 0.73 PFLOP of forward, 0.2 s.
"""
from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lohan_ds.block import chunk_numel_for
from lohan_ds.config import AUTOMATIC
from lohan_ds.errors import ConfigError, LohanError
from lohan_ds.model_blocks import ModelBlocks, split_into_blocks
from lohan_ds.plan import logits_bytes, loss_tiles
from lohan_ds.planner.memory_model import format_bytes
from lohan_ds.profile import ModelProfile, ModelSize, UnitProfile
from lohan_ds.profiler.device_kernels import DeviceKernels
from lohan_ds.profiler.held_gradients import held_gradient_bytes
from lohan_ds.profiler.meta_model import meta_arguments, meta_model
from lohan_ds.profiler.model_report import ModelReport
from lohan_ds.profiler.op_trace import OpTrace
from lohan_ds.profiler.unit_runs import UnitRuns
from lohan_ds.runtime.tiled_head import TiledHead, UnknownHead, find_head


def find_loss(output: Any) -> Any:
    """The loss in what a model returned: itself if it is a tensor, its `loss`, or all of it if it has none."""
    if isinstance(output, Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return output if loss is None else loss


def profile_model(model: nn.Module, inputs: tuple | Mapping[str, Any], micro_batch: int, sequence_length: int,
                  device_type: str = "cuda", loss_of: Callable[[Any], Any] = find_loss,
                  chunk_bytes: int = AUTOMATIC["chunk_bytes"], loss_tile_tokens: int | None = 0,
                  device_bytes: int = 0) -> tuple[ModelProfile, ModelReport]:
    """The profile of one micro-batch of training, and how it was found.

    model: on any device, in the mode (train) and with the dtypes and frozen parameters of the run. inputs: its
    arguments, or keyword arguments, for `micro_batch` x `sequence_length`; only the shapes of their tensors matter.
    device_type: "cuda" or "cpu", which decides about attention kernels. loss_tile_tokens: as lohan's key, with
    `device_bytes` for None, and without effect on a model that has no such head. Nothing is allocated but Python
    objects; the model is not changed. ConfigError, naming the module, if the forward needs the values of tensors.

    A unit's workspace holds the gradient of each of its parameters while that is made (not once it is copied away),
    gradients of tied parameters that autograd holds back meanwhile, and what the model returned.
    """
    start_s = time.perf_counter()
    model = meta_model(model)
    args, kwargs = ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})
    args, kwargs = meta_arguments((args, kwargs))
    model_blocks = split_into_blocks(model, lambda p: 0 if p.requires_grad else None, chunk_numel_for(chunk_bytes))
    trace = OpTrace([*model.parameters(), *model.buffers()])
    kernels = DeviceKernels(trace, device_type)
    tiled_head, loss = _loss(model, micro_batch * sequence_length, loss_tile_tokens, device_bytes)
    runs = UnitRuns(model, model_blocks.units, trace, tiled_head)
    try:
        with torch.device("meta"), trace, kernels:
            runs.run(args, kwargs, loss_of)
    except LohanError:
        raise
    except Exception as error:
        raise ConfigError(f"the cost of {type(model).__name__} cannot be told without running it: on tensors without "
                          f"values, module {runs.paths.current or 'at the top'!r} failed: {error}") from error
    profile = ModelProfile(_size(model_blocks), _unit_profiles(model_blocks, runs, _head(model)), micro_batch,
                           sequence_length)
    report = ModelReport(type(model).__name__, time.perf_counter() - start_s, runs.num_run,
                         len(runs.calls), runs.ledger.saved_bytes, device_type,
                         kernels.num_fused_attention, kernels.num_unfused_attention, loss)
    return profile, report


def _loss(model: nn.Module, num_tokens: int, loss_tile_tokens: int | None,
          device_bytes: int) -> tuple[TiledHead | None, str]:
    """A head that computes in tiles, if this batch would, and what to say about the loss."""
    try:
        _, head = find_head(model)
    except UnknownHead:
        return None, ""
    element_bytes, is_trained = head.weight.dtype.itemsize, head.weight.requires_grad
    tiles = loss_tiles(loss_tile_tokens, device_bytes, head.out_features, head.in_features, element_bytes, is_trained)
    whole_bytes = format_bytes(logits_bytes(num_tokens, head.out_features, element_bytes))
    if loss_tile_tokens == 0 or not tiles.apply_to(num_tokens, head.out_features, element_bytes):
        return None, f"all logits at once, {whole_bytes} with their gradient"
    return TiledHead(model, tiles), (
        f"in tiles of {tiles.tile_tokens} tokens, {format_bytes(tiles.workspace_bytes)}"
        f"{' with the gradient of the head in fp32' * is_trained}; all logits at once would take {whole_bytes}")


def _size(model_blocks: ModelBlocks) -> ModelSize:
    largest = max(slot.numel for block in model_blocks.blocks for slot in block.slots)
    return ModelSize(model_blocks.blocks, tuple(unit.blocks for unit in model_blocks.units), largest)


def _head(model: nn.Module) -> nn.Module | None:
    """Of a language model, if a run may compute it in tiles."""
    try:
        return find_head(model)[1]
    except UnknownHead:
        return None


def _unit_profiles(model_blocks: ModelBlocks, runs: UnitRuns, head: nn.Module | None) -> tuple[UnitProfile, ...]:
    """Units of one module class that cost the same get one name of class: "Layer", the next kind "Layer:2"."""
    modules = {id(unit.module) for unit in model_blocks.units}
    held_bytes = held_gradient_bytes(model_blocks.units, runs.calls)
    for index in set(runs.calls) - set(runs.calls[-1:]):   # the last unit has the logits as its output
        held_bytes[index] += runs.returned_bytes           # the caller may keep them during all of backward
    names: dict[tuple, str] = {}
    kinds_of_class: dict[str, int] = {}
    profiles = []
    for index, (unit, tally) in enumerate(zip(model_blocks.units, runs.tallies)):
        has_units_inside = sum(id(module) in modules for module in unit.module.modules()) > 1
        is_kept = has_units_inside or unit.module is head   # the runtime swaps the inner ones; tiles have no logits
        items = tuple(replace(item, is_outside=item.is_outside or is_kept) for item in runs.ledger.items(index))
        profile = UnitProfile("", type(unit.module).__name__, (), float(tally.forward_flops), items,
                              tally.output_bytes, tally.workspace_bytes + held_bytes[index])
        shapes = tuple(slot.shape for b in unit.blocks for slot in model_blocks.blocks[b].slots)
        key = (profile, shapes)
        if key not in names:
            number = kinds_of_class[profile.unit_class] = kinds_of_class.get(profile.unit_class, 0) + 1
            names[key] = profile.unit_class + (f":{number}" if number > 1 else "")
        profiles.append(replace(profile, name=unit.name, blocks=unit.blocks, unit_class=names[key]))
    return tuple(profiles)
