"""The plan that a run makes for itself: `solve` with what is known when it starts, as a `PlanFile`. Values only."""
from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lohan_ds.errors import CapacityError
from lohan_ds.planner.machines import Machine
from lohan_ds.planner.outlook import RUNTIME_PARAM_TIERS, Request, outlook_of
from lohan_ds.planner.placement import Placement, group
from lohan_ds.planner.plan_file import PlanFile, block_names
from lohan_ds.planner.plan_layout import lay_out
from lohan_ds.planner.program import solve
from lohan_ds.planner.solution import Batch, Choices, Solution
from lohan_ds.planner.time_model import FULL_PREFETCH_DEPTH, UpdateOrder
from lohan_ds.profile import HardwareProfile, ModelProfile, ModelSize, UnitProfile


def without_activations(size: ModelSize, unit_names: Sequence[str]) -> ModelProfile:
    """For a run of which nobody knows the sequence length: only parameters and optimizer state are planned."""
    units = tuple(UnitProfile(name, "unit", blocks, 0.0, (), 0, 0) for name, blocks in zip(unit_names, size.units))
    return ModelProfile(size, units, micro_batch=1, sequence_length=1)


@dataclass(frozen=True)
class AutomaticPlan:
    """What was found, and what it was found with."""
    file: PlanFile
    solution: Solution
    choices: Choices
    model: ModelProfile
    hardware: HardwareProfile

    def page_text(self, num_ssds: int, clips: bool) -> str:
        """What `lohan plan` says of it."""
        from lohan_ds.planner.page import make_page
        from lohan_ds.planner.page_text import page_text
        (batch,) = self.choices.batches
        request = Request(batch, clips)
        outlook = outlook_of(self.solution, self.model, self.hardware, num_ssds, request, self.choices)
        machine = Machine(self.hardware, "this machine", num_ssds, 0, {})
        return page_text(make_page(self.file.model, self.model, machine, outlook))


def automatic_plan(model: ModelProfile, hardware: HardwareProfile, accumulation: int, updates: tuple[UpdateOrder, ...],
                   prefetch_depth: int | None, model_name: str) -> AutomaticPlan | None:
    """None if nothing fits. `prefetch_depth`: None if that is open."""
    depths = (FULL_PREFETCH_DEPTH, 1, 0) if prefetch_depth is None else (prefetch_depth,)
    choices = Choices((Batch(model.micro_batch, accumulation),), updates, depths, param_tiers=RUNTIME_PARAM_TIERS)
    try:
        solution = solve(model, hardware, choices)
    except CapacityError:
        return None
    return AutomaticPlan(lay_out(solution, model, hardware, model_name), solution, choices, model, hardware)


def plan_at_rates(file: PlanFile, hardware: HardwareProfile, model: ModelProfile) -> PlanFile | None:
    """The plan with other rates and activations, in the same space: blocks, update order and prefetch stay as they are.
    `model`: of the file. None if nothing fits."""
    groups, names = group(model), block_names(model.size.blocks)
    stored = Placement(
        tuple(Counter(file.blocks[names[index]].parameters for index in blocks.blocks) for blocks in groups.blocks),
        tuple(Counter(file.blocks[names[index]].optimizer_state for index in blocks.blocks if blocks.trainable)
              for blocks in groups.blocks), ())
    used = file.predicted.memory_bytes
    within = replace(hardware, host_bytes=used["host"], ssd_bytes=used["ssd"])
    choices = Choices((Batch(model.micro_batch, file.accumulation),), (file.update,), (file.prefetch_depth,),
                      param_tiers=RUNTIME_PARAM_TIERS, stored=stored)
    try:
        solution = solve(model, within, choices)
    except CapacityError:
        return None
    return lay_out(solution, model, hardware, file.model)


def same_blocks(profile: ModelProfile, size: ModelSize) -> ModelProfile | None:
    """The profile with the run's own blocks; None if it is of other ones."""
    def key(model: ModelSize) -> list[tuple]:
        return [(block.name, block.numel, block.dtype, block.trainable) for block in model.blocks]

    return replace(profile, size=size) if key(profile.size) == key(size) and profile.size.units == size.units else None
