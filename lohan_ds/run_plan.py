"""The plan of a run: what a config asks for, a model needs and this machine offers, put before the planner."""
from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lohan_ds.block import chunk_numel_for
from lohan_ds.config import LohanConfig
from lohan_ds.errors import ConfigError
from lohan_ds.memory.budget import available_host_bytes
from lohan_ds.model_blocks import ModelBlocks, split_into_blocks, values_of
from lohan_ds.plan import ActivationPlan, LossTiles, OffloadPlan, loss_tiles
from lohan_ds.plan_sources import RunFacts, may_plan_by_rates, plan_by_rates, plan_from_file
from lohan_ds.planner.machines import DEVICE_SHARE, HOST_SHARE, SSD_SHARE
from lohan_ds.planner.memory_model import num_spill_buffers
from lohan_ds.planner.plan_file import PlanFile, load_plan
from lohan_ds.planner.plan_layout import tiers_used
from lohan_ds.planner.search import STATE_BYTES_PER_NUMEL, PlanRequest, make_plan
from lohan_ds.profile import Budgets, ModelProfile, ModelSize
from lohan_ds.runtime.tiled_head import UnknownHead, find_head
from lohan_ds.store.block_files import required_ssd_bytes
from lohan_ds.store.filenames import named_run_dirs
from lohan_ds.store.free_space import striped_free_bytes
from lohan_ds.store.manifest import Manifest, read_manifests
from lohan_ds.stripe import Stripe, even_stripe, shares_text

logger = logging.getLogger(__name__)
SWAP_BUFFER_BYTES = 8 << 20   # of each buffer between device and SSD


class RunPlan(NamedTuple):
    """What a run is carried out by."""
    model_blocks: ModelBlocks
    plan: OffloadPlan
    budgets: Budgets
    model_bytes: int               # of the model's own tensors in RAM, which give way to the store
    file: PlanFile | None = None   # that the plan was made from
    profile: ModelProfile | None = None   # what the plan of the file was made with, if that is known
    remark: str = ""               # for the user: what kept the automatic plan from being a better one
    page_text: Callable[[], str] | None = None   # what `lohan plan` says of it; None if that is not known


def plan_run(model: nn.Module, config: LohanConfig, group_of, accumulation: int, device: torch.device,
             facts: RunFacts | None = None) -> RunPlan:
    """Cuts the model and decides where its bytes live. Raises CapacityError when it does not fit. Moves nothing;
    works on meta tensors. `facts`: of the training; without, the plan is made of bytes alone."""
    given = load_plan(config.plan) if config.plan else None
    run_dirs = named_run_dirs(config.ssd_paths, config.run_name) if config.run_name else []
    existing = read_manifests(run_dirs) if run_dirs else None
    chunk_bytes, durability = config.chunk_bytes, config.durability if config.run_name else "none"
    if given is not None:
        chunk_bytes = given.chunk_bytes
    if existing is not None:   # its files are as they are
        if given is not None and chunk_numel_for(chunk_bytes) != existing.chunk_numel:
            raise ConfigError(f"{config.plan}: the run {config.run_name!r} was begun with chunk_bytes "
                              f"{existing.chunk_numel * STATE_BYTES_PER_NUMEL}, the plan has {chunk_bytes}; keep that")
        chunk_bytes = existing.chunk_numel * STATE_BYTES_PER_NUMEL
        if durability not in (None, existing.durability):
            raise ConfigError(f'lohan.durability: got "{durability}", but the run {config.run_name!r} was begun with '
                              f'"{existing.durability}"; keep that, or choose another lohan.run_name')
        durability = existing.durability
    cut_bytes = chunk_bytes or config.with_defaults().chunk_bytes
    model_blocks = split_into_blocks(model, group_of, chunk_numel_for(cut_bytes))
    model_bytes = sum(p.nbytes for p in _tensors_in_memory(model_blocks))
    budgets = find_budgets(config, device, model_bytes, run_dirs if existing is not None else [])
    size, tiles = model_size(model_blocks), _loss_tiles(model, config, device)
    if given is not None:
        plan = plan_from_file(given, config, size, _unit_names(model_blocks), accumulation, facts, durability, budgets,
                              tiles)
        plan = _with_stripe(plan, plan.stripe, size, config, device, existing)
        return RunPlan(_with_chunks(model_blocks, plan), plan, budgets, model_bytes, given)
    request = PlanRequest(config.param_tier, config.optimizer_tier, config.update,
                          config.prefetch_depth, chunk_bytes, accumulation, durability,
                          _activation_plan(config, model_blocks), tiles, len(config.ssd_paths))
    plan, _ = make_plan(size, request, budgets)
    model_blocks = _with_chunks(model_blocks, plan)
    if facts is None or not may_plan_by_rates(config, plan):
        return RunPlan(model_blocks, _with_stripe(plan, (), size, config, device, existing), budgets, model_bytes)
    rated = plan_by_rates(plan, config, model_size(model_blocks), _unit_names(model_blocks), accumulation, facts,
                          device, budgets)
    plan = _with_stripe(rated.plan, (), size, config, device, existing)
    return RunPlan(model_blocks, plan, budgets, model_bytes, rated.file, rated.profile, rated.remark,
                   rated.page_text)


def _with_stripe(plan: OffloadPlan, given: Stripe, size: ModelSize, config: LohanConfig, device: torch.device,
                 existing: Manifest | None) -> OffloadPlan:
    """Striped as the run is that exists; else as `given`, by a file; else by the speed of each directory, if it was
    measured and the faster ones have the room. ConfigError for a file that names a directory that is not there."""
    paths = config.ssd_paths
    if existing is not None:
        return replace(plan, stripe=existing.stripe)
    if max(given, default=-1) >= len(paths):
        raise ConfigError(f"{config.plan}: stripe names directory {max(given)}, counted from 0, but lohan.ssd_paths "
                          f"has {len(paths)}; name as many there, in the same order, or remove stripe from the plan")
    if len(paths) < 2 or "ssd" not in tiers_used(plan, size.blocks):
        return replace(plan, stripe=())
    stripe = given or _by_speed(plan, size, paths, device)
    for index in sorted(set(range(len(paths))) - set(stripe)) if stripe else ():
        reason = f"{config.plan} leaves it out" if given else "which is so slow that the others would wait for it"
        logger.warning("lohan.ssd_paths: nothing is kept in %s, %s", paths[index], reason)
    return replace(plan, stripe=stripe)


def _by_speed(plan: OffloadPlan, size: ModelSize, paths: Sequence[str], device: torch.device) -> Stripe:
    """Empty: evenly."""
    from lohan_ds.profiler.hardware import cached_stripe   # with all that measures
    stripe = cached_stripe(paths, device)
    if stripe in ((), even_stripe(len(paths))):
        return ()
    needed = required_ssd_bytes(size.blocks, plan) + plan.activations.ssd_bytes
    room = int(SSD_SHARE * striped_free_bytes(paths, stripe))
    if needed <= room:
        return stripe
    logger.warning("lohan.ssd_paths: their speeds ask for shares of %s, which leave room for %d of the %d bytes "
                   "needed; all get as much, and the slowest binds", shares_text(stripe, len(paths)), room, needed)
    return ()


def _with_chunks(model_blocks: ModelBlocks, plan: OffloadPlan) -> ModelBlocks:
    return model_blocks._replace(blocks=tuple(replace(block, chunk_numel=plan.chunk_numel)
                                              for block in model_blocks.blocks))


def _unit_names(model_blocks: ModelBlocks) -> list[str]:
    return [unit.name for unit in model_blocks.units]


def _activation_plan(config: LohanConfig, model_blocks: ModelBlocks) -> ActivationPlan:
    """The same policy for all layers: units whose class occurs more than once. What there is one of only is kept."""
    if config.activations in (None, "keep"):
        return ActivationPlan()
    policy = config.activations if config.activations == "recompute" else f"swap_{config.activations}"
    count = Counter(type(unit.module) for unit in model_blocks.units)
    policies = tuple((("", policy),) if count[type(unit.module)] > 1 and any(unit.module.children()) else ()
                     for unit in model_blocks.units)
    space = config.activation_space or 0
    if config.activations == "ssd":
        return ActivationPlan(policies, ssd_bytes=space, num_buffers=num_spill_buffers(len(config.ssd_paths)),
                              buffer_bytes=SWAP_BUFFER_BYTES)
    return ActivationPlan(policies, host_bytes=space)


def _loss_tiles(model: nn.Module, config: LohanConfig, device: torch.device) -> LossTiles | None:
    """None too for a model without a head that can be computed in tiles."""
    if config.loss_tile_tokens == 0:
        return None
    try:
        _, head = find_head(model)
    except UnknownHead:
        return None
    total_bytes = _total_device_bytes(config, device) if config.loss_tile_tokens is None else 0
    return loss_tiles(config.loss_tile_tokens, total_bytes, head.out_features, head.in_features,
                      head.weight.dtype.itemsize, head.weight.requires_grad)


def _total_device_bytes(config: LohanConfig, device: torch.device) -> int:
    """Not what is free just now: a run that is started again must round as before."""
    if config.device_memory:
        return config.device_memory
    if device.type == "cpu":
        return config.host_memory or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return torch.cuda.get_device_properties(device).total_memory


def find_budgets(config: LohanConfig, device: torch.device, model_bytes: int, own_dirs: Sequence[str] = ()) -> Budgets:
    """What each tier offers. `model_bytes`: of the model's own tensors in RAM, which give way to the store. `own_dirs`:
    what lies in them is this run's already."""
    unified = device.type == "cpu"
    if config.host_memory:
        host, host_source = config.host_memory, "lohan.host_memory"
    else:
        host = int(HOST_SHARE * (available_host_bytes() + model_bytes))
        host_source = f"{_percent(HOST_SHARE)} of the RAM available"
    if config.device_memory:
        on_device, device_source = config.device_memory, "lohan.device_memory"
    elif unified:
        on_device, device_source = host, host_source
    else:
        on_device = int(DEVICE_SHARE * torch.cuda.mem_get_info(device)[0])
        device_source = f"{_percent(DEVICE_SHARE)} of the free device memory"
    ssd, ssd_source = 0, "no lohan.ssd_paths"
    if config.ssd_paths:
        ssd = int(SSD_SHARE * striped_free_bytes(config.ssd_paths))
        ssd_source = f"{_percent(SSD_SHARE)} of the free space of lohan.ssd_paths"
        ssd += sum(entry.stat().st_size for path in own_dirs for entry in os.scandir(path))
        if config.ssd_space:
            ssd, ssd_source = config.ssd_space, "lohan.ssd_space"
    return Budgets(host, on_device, ssd, unified, host_source, device_source, ssd_source)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def model_size(model_blocks: ModelBlocks) -> ModelSize:
    """The sizes that a plan is made from."""
    largest = max((slot.numel for block in model_blocks.blocks for slot in block.slots), default=0)
    return ModelSize(model_blocks.blocks, tuple(unit.blocks for unit in model_blocks.units), largest)


def _tensors_in_memory(model_blocks: ModelBlocks) -> list[Tensor]:
    return [t for members in model_blocks.params for t in map(values_of, members) if t.device.type == "cpu"]
