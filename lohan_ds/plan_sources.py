"""Plans that are not made of bytes alone: from a file of the user's, or from the rates of this machine."""
from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from lohan_ds.config import LohanConfig
from lohan_ds.errors import ConfigError
from lohan_ds.plan import Durability, LossTiles, OffloadPlan
from lohan_ds.planner.plan_file import PlanFile, block_names
from lohan_ds.planner.plan_layout import offload_plan, tiers_used
from lohan_ds.planner.search import LUXURY_HOST_SHARE, check_fits, fits, with_read_ahead, with_shadow_slots
from lohan_ds.profile import Budgets, HardwareProfile, ModelProfile, ModelSize


class RunFacts(NamedTuple):
    """Of a training, beside model and config."""
    micro_batch: int           # sequences
    clips: bool                # gradients, by their global norm
    # At a sequence length, with the loss in such tiles or None; ConfigError if it cannot be told.
    profile_model: Callable[[int, LossTiles | None], ModelProfile] | None = None


def plan_from_file(given: PlanFile, config: LohanConfig, size: ModelSize, unit_names: Sequence[str], accumulation: int,
                   facts: RunFacts | None, durability: Durability | None, budgets: Budgets,
                   tiles: LossTiles | None) -> OffloadPlan:
    """The plan of a file, checked against model, batch, config and budgets. `durability`: None if that is open.

    ConfigError or CapacityError, naming what it is that differs or lacks.
    """
    where = f"lohan.plan {config.plan}"
    plan = offload_plan(given, size.blocks, unit_names, accumulation, facts and facts.micro_batch, where)
    plan = replace(plan, loss_tiles=tiles)
    if config.sequence_length is not None and given.sequence_length not in (None, config.sequence_length):
        raise ConfigError(f"{where}: the plan is for sequences of {given.sequence_length} tokens, "
                          f"lohan.sequence_length is {config.sequence_length}; plan again with --seq, or change one of "
                          "the two")
    used = tiers_used(plan, size.blocks)
    if "ssd" in used and not config.ssd_paths:
        raise ConfigError(f"lohan.ssd_paths: missing, and {where} keeps things on the SSD; name a directory there")
    if config.run_name is not None:
        plan = _durable(plan, config.run_name, durability, size, budgets, where)
    check_fits(size, plan, budgets, f"Edit {where}, or plan again with `lohan plan --save-plan` and the flags "
                                    "--host-memory and --device-memory")
    return with_read_ahead(size, plan, budgets) if given.read_ahead_chunks is None else plan


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


class RatedPlan(NamedTuple):
    """A plan and what it was made from; without a file, bytes alone decided."""
    plan: OffloadPlan
    file: PlanFile | None
    profile: ModelProfile | None
    remark: str                    # for the user: what kept the plan from being a better one
    page_text: Callable[[], str] | None = None   # what `lohan plan` says of it, where all of a step is known


def may_plan_by_rates(config: LohanConfig, plan: OffloadPlan) -> bool:
    """Whether there is something to decide that the user left open, and that bytes alone have not decided."""
    forced = config.param_tier or config.optimizer_tier or config.activations or config.run_name
    return not forced and ("ssd" in plan.param_tier + plan.state_tier or config.sequence_length is not None)


def plan_by_rates(plan: OffloadPlan, config: LohanConfig, size: ModelSize, unit_names: Sequence[str],
                  accumulation: int, facts: RunFacts, device: torch.device, budgets: Budgets) -> RatedPlan:
    """Block by block, and where the sequence length is known item by item.

    `plan` is what bytes alone decided: it stays, with a remark and without a file, where rates or room are lacking.
    Measures nothing.
    """
    from lohan_ds.planner.automatic import automatic_plan, without_activations   # they import scipy
    from lohan_ds.profiler.hardware import cached_profile
    dtype = Counter(block.dtype for block in size.blocks).most_common(1)[0][0]
    hardware = cached_profile(config.ssd_paths, dtype, device)
    if hardware is None:
        flags = "".join(f" --ssd-path {path}" for path in config.ssd_paths)
        return RatedPlan(plan, None, None, f"this machine was not measured for {dtype} with these ssd_paths, so bytes "
                                           f"alone decide; for a plan by speed, block by block: lohan profile{flags}")
    profile, remark = _profile(config, size, facts, plan.loss_tiles)
    if profile is None:
        profile = without_activations(size, unit_names)
    updates = (config.update,) if config.update else ("deferred",) if facts.clips else ("eager", "deferred")
    share = 1.0 if any(unit.items for unit in profile.units) else LUXURY_HOST_SHARE[budgets.unified]
    found = automatic_plan(profile, _within(hardware, budgets, share), accumulation, updates, config.prefetch_depth,
                           "this run's model")
    better = None
    if found is not None:
        better = offload_plan(found.file, size.blocks, unit_names, accumulation, None, "automatic plan")
        better = replace(better, loss_tiles=plan.loss_tiles)
    if better is None or not fits(size, better, budgets):
        return RatedPlan(plan, None, None, "a plan by speed found no room, so bytes alone decide")
    if config.update is None and better.update == "deferred":
        better = with_shadow_slots(size, better, budgets)
    left_over = with_read_ahead(size, better, budgets).num_read_ahead_chunks
    better = replace(better, num_read_ahead_chunks=max(better.num_read_ahead_chunks, left_over))
    knows_compute = any(unit.items for unit in profile.units)
    page_text = functools.partial(found.page_text, len(config.ssd_paths), facts.clips) if knows_compute else None
    return RatedPlan(better, found.file, profile, remark, page_text)


def _profile(config: LohanConfig, size: ModelSize, facts: RunFacts,
             tiles: LossTiles | None) -> tuple[ModelProfile | None, str]:
    """None, and a remark, if it cannot be told."""
    from lohan_ds.planner.automatic import same_blocks
    if config.sequence_length is None:
        return None, "activations are not planned: lohan.sequence_length is not given"
    if facts.profile_model is None:
        return None, "activations are not planned: nobody can tell what the model saves"
    try:
        profile = same_blocks(facts.profile_model(config.sequence_length, tiles), size)
    except ConfigError as error:
        return None, f"activations are not planned: {error}"
    return profile, "" if profile else "activations are not planned: the model is not as its config builds it"


def _within(hardware: HardwareProfile, budgets: Budgets, host_share: float) -> HardwareProfile:
    """Its rates, with what this run may use. `host_share`: of the host's memory; the rest is left to activations."""
    return replace(hardware, host_bytes=int(host_share * budgets.host_bytes), device_bytes=budgets.device_bytes,
                   ssd_bytes=budgets.ssd_bytes)
