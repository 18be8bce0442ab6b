"""From a solution's counts to a `PlanFile` that names every block and item, and from there to an `OffloadPlan`.

Which of equal parts lies where is said by [Note: layout] in placement.py. Values only, no torch.
"""
from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from lohan_ds.block import Block, chunk_numel_for
from lohan_ds.errors import ConfigError
from lohan_ds.plan import ActivationPlan, ActivationPolicy, OffloadPlan
from lohan_ds.planner.footprint import spill_buffer_bytes, swapped_bytes
from lohan_ds.planner.memory_model import num_chunk_buffers, num_spill_buffers
from lohan_ds.planner.placement import block_tiers, item_tiers
from lohan_ds.planner.plan_file import (BlockEntry, ItemEntry, ItemPolicy, PhaseEntry, PlanFile, Predicted, UnitsEntry,
                                        block_names)
from lohan_ds.planner.search import STATE_BYTES_PER_NUMEL
from lohan_ds.planner.solution import Solution
from lohan_ds.profile import HardwareProfile, ModelProfile, UnitProfile

POLICIES: dict[ItemPolicy, ActivationPolicy] = {
    "keep": "keep", "host": "swap_host", "ssd": "swap_ssd", "recompute": "recompute"}
MAX_NAMED = 3   # blocks or units in a message


def lay_out(solution: Solution, model: ModelProfile, hardware: HardwareProfile, model_name: str) -> PlanFile:
    """`model`: of the solution's micro-batch. ConfigError for parameters that stay on the device, or an update order,
    that the runtime does not carry out."""
    groups, placement, schedule = solution.groups, solution.placement, solution.schedule
    if any(counts.get("device") for counts in placement.params):
        raise ConfigError("a plan with parameters that stay on the device cannot be saved: the runtime does not carry "
                          "that out yet")
    if schedule.update == "barrier":
        raise ConfigError('a plan with update "barrier" cannot be saved: the runtime does not carry that out')
    blocks = model.size.blocks
    params, states = block_tiers(groups.blocks, placement.params), block_tiers(groups.blocks, placement.states)
    is_known = any(unit.items for unit in model.units)
    file = PlanFile(
        model=model_name, hardware=hardware, micro_batch=model.micro_batch if is_known else None,
        accumulation=solution.batch.accumulation, sequence_length=model.sequence_length if is_known else None,
        update=schedule.update, prefetch_depth=schedule.prefetch_depth,
        chunk_bytes=STATE_BYTES_PER_NUMEL * max(block.chunk_numel for block in blocks),   # as `footprint` counts
        blocks={name: BlockEntry(parameters=params[block.index], numel=block.numel, dtype=block.dtype,
                                 optimizer_state=states.get(block.index))
                for name, block in zip(block_names(blocks), blocks)},
        activations=_units_entries(model.units, item_tiers(groups.items, placement.activations)),
        read_ahead_chunks=sum(placement.read_ahead) if is_known and schedule.update == "deferred" else None,
        stripe=hardware.ssd_stripe,
        running_unit_bytes=max(sum(item.nbytes for item in unit.items) + unit.output_bytes + unit.workspace_bytes
                               for unit in model.units))
    return file.model_copy(update={"predicted": _predicted(solution, file.decisions_key)})


def _units_entries(units: Sequence[UnitProfile], tiers: dict[tuple[int, str], str]) -> tuple[UnitsEntry, ...]:
    """Of units that save anything, those that do the same together."""
    together: dict[tuple, UnitsEntry] = {}
    for index, unit in enumerate(units):
        items = {item.name: ItemEntry(policy=tiers[index, item.name], nbytes=item.nbytes)
                 for item in unit.items if item.nbytes and not item.is_outside}
        outside_bytes = sum(item.nbytes for item in unit.items if item.is_outside)
        if items or outside_bytes:
            key = (*items.items(), outside_bytes)
            names = (*together[key].units, unit.name) if key in together else (unit.name,)
            together[key] = UnitsEntry(units=names, items=items, outside_bytes=outside_bytes)
    return tuple(together.values())


def _predicted(solution: Solution, decisions: str) -> Predicted:
    moved = solution.step_traffic
    return Predicted(
        decisions=decisions, step_s=solution.step_s, tokens_per_s=solution.tokens_per_s,
        phases=tuple(PhaseEntry(name=phase.name, seconds=phase.count * phase.seconds, binding=phase.binding)
                     for phase in solution.time.phases),
        moved_bytes={"ssd_read": round(moved.ssd_read_bytes), "ssd_write": round(moved.ssd_write_bytes),
                     "h2d": round(moved.h2d_bytes), "d2h": round(moved.d2h_bytes)},
        memory_bytes=solution.used_bytes)


def offload_plan(file: PlanFile, blocks: Sequence[Block], unit_names: Sequence[str], accumulation: int,
                 micro_batch: int | None, where: str) -> OffloadPlan:
    """What the file says, for this model and batch. `where`: the file, for messages. `micro_batch`: None if unknown.

    ConfigError, naming the difference, if the file is of another model or batch. Whether it fits is not looked at.
    """
    _check_blocks(file, blocks, where)
    _check_batch(file, accumulation, micro_batch, where)
    entries = [file.blocks[name] for name in block_names(blocks)]
    return OffloadPlan(
        param_tier=tuple(entry.parameters for entry in entries),
        state_tier=tuple(entry.optimizer_state or entry.parameters for entry in entries), update=file.update,
        prefetch_depth=file.prefetch_depth, chunk_numel=chunk_numel_for(file.chunk_bytes),
        num_chunk_buffers=num_chunk_buffers(file.hardware.num_ssds), accumulate_fp32=accumulation > 1,
        shadow=file.update in ("eager", "auto"), activations=_activation_plan(file, unit_names, where),
        num_read_ahead_chunks=file.read_ahead_chunks or 0, stripe=file.stripe)


def _check_blocks(file: PlanFile, blocks: Sequence[Block], where: str) -> None:
    names = block_names(blocks)
    unknown = [name for name in file.blocks if name not in names]
    missing = [name for name in names if name not in file.blocks]
    if unknown or missing:
        parts = [_unknown("block", unknown, names)] if unknown else []
        parts += [f"no place for {_some('block', missing)} of the model"] if missing else []
        raise ConfigError(f"{where}: the plan is for another model: {'; '.join(parts)}; plan this one with "
                          "`lohan plan --save-plan`")
    for name, block in zip(names, blocks):
        entry = file.blocks[name]
        if (entry.numel, entry.dtype) != (block.numel, block.dtype):
            raise ConfigError(f"{where}: the plan is for another model: block {name} has {entry.numel} elements of "
                              f"{entry.dtype} in the plan, {block.numel} of {block.dtype} in the model; plan this one "
                              "with `lohan plan --save-plan`")
        if block.trainable and entry.optimizer_state is None:
            raise ConfigError(f"{where}: block {name} is trained, but the plan has no optimizer_state for it; write "
                              '"host" or "ssd"')


def _check_batch(file: PlanFile, accumulation: int, micro_batch: int | None, where: str) -> None:
    pairs = (("gradient_accumulation_steps", file.accumulation, accumulation),
             ("train_micro_batch_size_per_gpu", file.micro_batch, micro_batch))
    for key, planned, given in pairs:
        if None not in (planned, given) and planned != given:
            raise ConfigError(f"{where}: the plan is for {key} {planned}, this run has {given}; plan again with "
                              "--micro-batch and --accumulation, or change one of the two")


def _activation_plan(file: PlanFile, unit_names: Sequence[str], where: str) -> ActivationPlan:
    policies: dict[str, dict[str, ItemEntry]] = {}
    nbytes = dict.fromkeys(POLICIES, 0)
    in_flight_bytes, spilled = 0, []
    for entry in file.activations:
        unknown = [name for name in entry.units if name not in unit_names]
        if unknown:
            raise ConfigError(f"{where}: {_unknown('unit', unknown, unit_names)}")
        twice = [name for name in entry.units if name in policies]
        if twice:
            raise ConfigError(f"{where}: unit {twice[0]} is named twice in activations; leave it in one place")
        policies.update(dict.fromkeys(entry.units, entry.items))
        for item in entry.items.values():
            each = swapped_bytes(item.nbytes) if item.policy in ("host", "ssd") else item.nbytes
            nbytes[item.policy] += each * len(entry.units)
        nbytes["keep"] += entry.outside_bytes * len(entry.units)
        in_flight_bytes = max(in_flight_bytes, sum(
            item.nbytes for item in entry.items.values() if item.policy in ("host", "ssd")))
        spilled += [item.nbytes for item in entry.items.values() if item.policy == "ssd" and entry.units]
    moves = any(item.policy != "keep" for items in policies.values() for item in items.values())
    return ActivationPlan(
        tuple(_unit_policies(policies.get(name, {})) for name in unit_names) if moves else (),
        host_bytes=nbytes["host"], ssd_bytes=nbytes["ssd"],
        num_buffers=num_spill_buffers(file.hardware.num_ssds) if spilled else 0,
        buffer_bytes=spill_buffer_bytes(spilled) if spilled else 0,
        device_bytes=nbytes["keep"] + in_flight_bytes + file.running_unit_bytes)


def _unit_policies(items: dict[str, ItemEntry]) -> tuple[tuple[str, ActivationPolicy], ...]:
    """Empty where all are kept: such a unit runs without hooks."""
    if all(item.policy == "keep" for item in items.values()):
        return ()
    return tuple((name, POLICIES[item.policy]) for name, item in items.items())


def _unknown(what: str, unknown: Sequence[str], known: Sequence[str]) -> str:
    close = difflib.get_close_matches(unknown[0], known, 1)
    return f"the model has no {_some(what, unknown)}" + (f"; did you mean {close[0]}?" if close else "")


def _some(what: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{what}{'s' * (len(names) > 1)} {', '.join(names[:MAX_NAMED])}{more}"


def tiers_used(plan: OffloadPlan, blocks: Iterable[Block]) -> set[str]:
    """Where anything of a plan lies between uses."""
    states = {plan.state_tier[block.index] for block in blocks if block.trainable}
    return {*plan.param_tier, *states} | ({"ssd"} if plan.activations.ssd_bytes else set())
