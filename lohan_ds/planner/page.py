"""`Page`: all that `lohan plan` says, as plain values: printed by page_text.py, drawn by planner_plot.py, or as JSON.

What is unknown, or without an end, is None.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from lohan_ds.planner.machines import Machine
from lohan_ds.planner.memory_model import MEMORY_TIERS, Need, total_bytes
from lohan_ds.planner.outlook import OtherUpdate, Outlook, Request
from lohan_ds.planner.placement import group
from lohan_ds.planner.shortage import Shortage
from lohan_ds.planner.solution import Solution
from lohan_ds.planner.time_model import resource_seconds
from lohan_ds.planner.what_if import WhatIf, drive_life
from lohan_ds.profile import HardwareProfile, MemoryTier, ModelProfile, ModelSize


@dataclass(frozen=True)
class ModelFacts:
    name: str
    num_parameters: int
    num_trainable: int             # of them
    dtypes: tuple[str, ...]        # of the parameters
    micro_batch: int               # sequences
    accumulation: int              # micro-steps per step
    sequence_length: int           # tokens
    tokens_per_step: int
    forward_flops: float           # of one micro-batch


@dataclass(frozen=True)
class HardwareFacts:
    profile: Mapping[str, float | int | str | bool]   # the fields of `HardwareProfile`; no limit is None
    description: str
    num_ssds: int                  # 0: unknown


@dataclass(frozen=True)
class TierUse:
    """One tier against its budget."""
    tier: MemoryTier
    used_bytes: int
    budget_bytes: int
    missing_bytes: int
    items: tuple[tuple[str, int], ...]   # what, bytes


@dataclass(frozen=True)
class PhaseLine:
    """A phase, or phases that overlap."""
    name: str
    count: int                     # times per step
    seconds: float                 # each time
    binding: str                   # a resource: a key of `StepFacts.work_s`'s values


@dataclass(frozen=True)
class BlockShare:
    """Blocks whose parameters, or optimizer state, lie in one tier."""
    num_blocks: int
    nbytes: int


@dataclass(frozen=True)
class ActivationLine:
    """Saved activations of one name in units of one class."""
    unit_class: str
    item: str                      # names within the unit
    policies: Mapping[str, int]    # items by keep, host, ssd, recompute
    nbytes: Mapping[str, int]      # likewise, of one micro-batch


@dataclass(frozen=True)
class SsdFacts:
    read_bytes_per_step: int
    write_bytes_per_step: int
    rated_write_bytes: int | None  # all drives' together
    life_steps: float | None       # until that is written
    life_days: float | None


@dataclass(frozen=True)
class StepFacts:
    """The plan's decisions, and what a step takes."""
    update: str
    prefetch_depth: int            # units
    step_s: float
    tokens_per_s: float
    gap: float                     # share of the step that a better plan could at most save
    phases: tuple[PhaseLine, ...]
    work_s: Mapping[str, Mapping[str, float]]   # of one forward, backward and update; by resource
    params: Mapping[str, BlockShare]            # by tier
    states: Mapping[str, BlockShare]            # by tier
    activations: tuple[ActivationLine, ...]
    ssd: SsdFacts


@dataclass(frozen=True)
class Variant:
    """What the plan would become."""
    change: str
    step_s: float | None           # None if it does not fit
    tokens_per_s: float | None
    factor: float                  # of tokens/s against the plan's; 0 if it does not fit
    reason: str                    # why it does not fit


@dataclass(frozen=True)
class MissingFacts:
    message: str                   # what is missing, where and when
    change: str                    # the cheapest that would fit
    step_s: float                  # with the change
    tokens_per_s: float


@dataclass(frozen=True)
class Page:
    fits: bool
    model: ModelFacts
    hardware: HardwareFacts
    clipping: bool
    device_parameters: bool
    plan: StepFacts | None         # None if nothing fits
    tiers: tuple[TierUse, ...]     # of the plan, or of what lacks least
    other_update: Variant | None
    what_if: tuple[Variant, ...]
    missing: MissingFacts | None
    notes: tuple[str, ...]


def make_page(model_name: str, model: ModelProfile, machine: Machine, outlook: Outlook,
              notes: Sequence[str] = ()) -> Page:
    """`model`: of the micro-batch asked for."""
    request, hardware, solution, lack = outlook.request, machine.profile, outlook.solution, outlook.shortage
    return Page(
        fits=solution is not None, model=_model_facts(model_name, model, request),
        hardware=HardwareFacts({key: None if value == math.inf else value for key, value in asdict(hardware).items()},
                               machine.description, machine.num_ssds),
        clipping=request.clipping, device_parameters=request.device_parameters,
        plan=None if solution is None else _step_facts(model, machine, solution),
        tiers=_tier_uses(lack.needs if solution is None else solution.needs, hardware),
        other_update=None if solution is None else _other_update(outlook.other_update, solution),
        what_if=tuple(map(_variant, outlook.what_ifs)),
        missing=None if lack is None else _missing_facts(lack, outlook.with_change), notes=tuple(notes))


def _model_facts(name: str, model: ModelProfile, request: Request) -> ModelFacts:
    groups = group(model)
    return ModelFacts(name, _num_parameters(model.size, False), _num_parameters(model.size, True),
                      tuple(sorted({block.dtype for block in model.size.blocks})), model.micro_batch,
                      request.batch.accumulation, model.sequence_length,
                      groups.num_tokens * request.batch.accumulation, groups.forward_flops)


def _num_parameters(size: ModelSize, only_trainable: bool) -> int:
    return sum(slot.numel for block in size.blocks if block.trainable or not only_trainable for slot in block.slots)


def _tier_uses(needs: Sequence[Need], hardware: HardwareProfile) -> tuple[TierUse, ...]:
    """With `unified` there is no device tier: its bytes are the host's."""
    used = total_bytes(list(needs))
    return tuple(TierUse(tier, used[tier], budget, max(0, used[tier] - budget),
                         tuple((need.what, need.nbytes) for need in needs if need.tier == tier))
                 for tier in MEMORY_TIERS if not (tier == "device" and hardware.unified)
                 for budget in (getattr(hardware, f"{tier}_bytes"),))


def _step_facts(model: ModelProfile, machine: Machine, solution: Solution) -> StepFacts:
    schedule, placement, blocks = solution.schedule, solution.placement, solution.groups.blocks
    work_s = {phase: vars(resource_seconds(traffic, machine.profile, schedule.prefetch_depth))
              for phase, traffic in vars(solution.traffic).items()}
    return StepFacts(
        schedule.update, schedule.prefetch_depth, solution.step_s, solution.tokens_per_s, solution.gap,
        tuple(PhaseLine(phase.name, phase.count, phase.seconds, phase.binding) for phase in solution.time.phases),
        work_s, _block_shares([block.param_bytes for block in blocks], placement.params),
        _block_shares([block.state_bytes for block in blocks], placement.states),
        _activation_lines(model, solution), _ssd_facts(machine, solution))


def _block_shares(block_bytes: Sequence[int], placed: Sequence[Mapping[str, int]]) -> dict[str, BlockShare]:
    """Both by class of blocks."""
    shares: dict[str, BlockShare] = {}
    for nbytes, counts in zip(block_bytes, placed):
        for tier, count in counts.items():
            before = shares.get(tier, BlockShare(0, 0))
            shares[tier] = BlockShare(before.num_blocks + count, before.nbytes + count * nbytes)
    return shares


def _activation_lines(model: ModelProfile, solution: Solution) -> tuple[ActivationLine, ...]:
    """Units that differ only in sizes ("Layer", "Layer:2") are taken together."""
    lines: dict[tuple[str, str], tuple[dict[str, int], dict[str, int]]] = {}
    for item, counts in zip(solution.groups.items, solution.placement.activations):
        unit_class = model.units[item.places[0][0]].unit_class.split(":")[0]
        names = ", ".join(dict.fromkeys(name for _, name in item.places))
        policies, nbytes = lines.setdefault((unit_class, names), ({}, {}))
        for policy, count in counts.items():
            policies[policy] = policies.get(policy, 0) + count
            nbytes[policy] = nbytes.get(policy, 0) + count * item.nbytes
    return tuple(ActivationLine(*key, *amounts) for key, amounts in lines.items())


def _ssd_facts(machine: Machine, solution: Solution) -> SsdFacts:
    moved, rated_bytes = solution.step_traffic, machine.ssd_rated_write_bytes
    life = drive_life(solution, rated_bytes) if rated_bytes and moved.ssd_write_bytes else None
    return SsdFacts(round(moved.ssd_read_bytes), round(moved.ssd_write_bytes), rated_bytes or None,
                    life and life.steps, life and life.days)


def _variant(answer: WhatIf) -> Variant:
    solution = answer.solution
    if solution is None:
        return Variant(answer.change, None, None, 0.0, answer.reason)
    return Variant(answer.change, solution.step_s, solution.tokens_per_s, answer.tokens_per_s_factor, "")


def _other_update(other: OtherUpdate, planned: Solution) -> Variant:
    solution = other.solution
    if solution is None:
        return Variant(f"update {other.update}", None, None, 0.0, other.shortage.lacks)
    return Variant(f"update {other.update}", solution.step_s, solution.tokens_per_s,
                   solution.tokens_per_s / planned.tokens_per_s, "")


def _missing_facts(lack: Shortage, after: Solution) -> MissingFacts:
    return MissingFacts(f"{lack.lacks}, at {lack.when}", lack.change, after.step_s, after.tokens_per_s)
