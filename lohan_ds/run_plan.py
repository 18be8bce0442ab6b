"""The plan of a run: what a config asks for, a model needs and this machine offers, put before the planner."""
from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lohan_ds.block import chunk_numel_for
from lohan_ds.config import LohanConfig
from lohan_ds.errors import ConfigError
from lohan_ds.memory.budget import available_host_bytes
from lohan_ds.model_blocks import ModelBlocks, split_into_blocks, values_of
from lohan_ds.plan import ActivationPlan, Durability, OffloadPlan
from lohan_ds.planner.machines import DEVICE_SHARE, HOST_SHARE, SSD_SHARE
from lohan_ds.planner.plan_file import PlanFile, block_names, load_plan
from lohan_ds.planner.plan_layout import offload_plan, tiers_used
from lohan_ds.planner.search import (STATE_BYTES_PER_NUMEL, PlanRequest, check_fits, fits, make_plan, with_read_ahead)
from lohan_ds.profile import Budgets, ModelSize
from lohan_ds.store.filenames import named_run_dirs
from lohan_ds.store.free_space import striped_free_bytes
from lohan_ds.store.manifest import read_manifests

NUM_SWAP_BUFFERS, SWAP_BUFFER_BYTES = 4, 8 << 20   # between device and SSD


def plan_run(model: nn.Module, config: LohanConfig, group_of, accumulation: int, device: torch.device,
             micro_batch: int | None = None) -> tuple[ModelBlocks, OffloadPlan, Budgets]:
    """Cuts the model and decides where its bytes live. Raises CapacityError when it does not fit. Moves nothing;
    works on meta tensors. `micro_batch`: sequences, None if unknown."""
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
    budgets = find_budgets(config, device, sum(p.nbytes for p in _tensors_in_memory(model_blocks)),
                           run_dirs if existing is not None else [])
    if given is not None:
        return (*_given_plan(given, config, model_blocks, accumulation, micro_batch, durability, budgets), budgets)
    request = PlanRequest(config.param_tier, config.optimizer_tier, config.update,
                          config.prefetch_depth, chunk_bytes, accumulation, durability,
                          _activation_plan(config, model_blocks))
    plan, blocks = make_plan(model_size(model_blocks), request, budgets)
    return model_blocks._replace(blocks=blocks), plan, budgets


def _given_plan(given: PlanFile, config: LohanConfig, model_blocks: ModelBlocks, accumulation: int,
                micro_batch: int | None, durability: Durability | None,
                budgets: Budgets) -> tuple[ModelBlocks, OffloadPlan]:
    """The plan of a file, checked against model, batch, config and budgets. `durability`: None if that is open."""
    where, size = f"lohan.plan {config.plan}", model_size(model_blocks)
    plan = offload_plan(given, size.blocks, [unit.name for unit in model_blocks.units], accumulation, micro_batch,
                        where)
    used = tiers_used(plan, size.blocks)
    if "ssd" in used and not config.ssd_paths:
        raise ConfigError(f"lohan.ssd_paths: missing, and {where} keeps things on the SSD; name a directory there")
    if config.run_name is not None:
        plan = _durable(plan, config.run_name, durability, size, budgets, where)
    check_fits(size, plan, budgets, f"Edit {where}, or plan again with `lohan plan --save-plan` and the flags "
                                    "--host-memory and --device-memory")
    if given.read_ahead_chunks is None:
        plan = with_read_ahead(size, plan, budgets)
    blocks = tuple(replace(block, chunk_numel=plan.chunk_numel) for block in size.blocks)
    return model_blocks._replace(blocks=blocks), plan


def _durable(plan: OffloadPlan, run_name: str, durability: Durability | None, size: ModelSize, budgets: Budgets,
             where: str) -> OffloadPlan:
    """For a run with a name: what it keeps lies on the SSD only. "shadow" where it is asked for, or fits."""
    names = block_names(size.blocks)
    on_host = [names[block.index] for block in size.blocks if plan.param_tier[block.index] == "host"
               or (block.trainable and plan.state_tier[block.index] == "host")]
    if on_host:
        raise ConfigError(f'{where}: block {on_host[0]} is kept on the host, which does not survive a crash, and '
                          f'lohan.run_name is {run_name!r}; write "ssd" for all blocks, or remove lohan.run_name')
    if plan.shadow and durability == "in_place":
        raise ConfigError(f'{where}: update "{plan.update}" needs shadow slots, which lohan.durability "in_place" does '
                          "without; change one of the two")
    shadowed = replace(plan, shadow=True, durability="shadow")
    is_shadow = durability == "shadow" or plan.shadow or (durability is None and fits(size, shadowed, budgets))
    return shadowed if is_shadow else replace(plan, durability="in_place")


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
        return ActivationPlan(policies, ssd_bytes=space, num_buffers=NUM_SWAP_BUFFERS, buffer_bytes=SWAP_BUFFER_BYTES)
    return ActivationPlan(policies, host_bytes=space)


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
