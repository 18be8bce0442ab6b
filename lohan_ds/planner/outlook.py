"""What can be said about training a model on a machine before it is tried: the plan, its alternatives, or the shortage.

Values and the few calls of the planner that find them; page.py puts them on one page.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lohan_ds.errors import CapacityError
from lohan_ds.planner.placement import PARAM_TIERS, ParamTier
from lohan_ds.planner.program import solve
from lohan_ds.planner.shortage import Shortage, shortage
from lohan_ds.planner.solution import Batch, Choices, Solution
from lohan_ds.planner.time_model import UpdateOrder
from lohan_ds.planner.what_if import WhatIf, what_if
from lohan_ds.profile import HardwareProfile, ModelProfile

# Where the runtime can keep parameters between uses.
RUNTIME_PARAM_TIERS: tuple[ParamTier, ...] = ("host", "ssd")


@dataclass(frozen=True)
class Request:
    """What the user wants to train, beside model and machine."""
    batch: Batch
    clipping: bool = True              # of the global norm: most steps are then updated after `step()`
    device_parameters: bool = False    # plan also with parameters that stay on the device: not carried out yet

    @property
    def choices(self) -> Choices:
        return Choices((self.batch,), ("deferred",) if self.clipping else ("eager", "deferred"),
                       param_tiers=PARAM_TIERS if self.device_parameters else RUNTIME_PARAM_TIERS)

    def choices_of(self, updates: Sequence[UpdateOrder] | None) -> list[Choices]:
        """One for each of these update orders; None: the planner has the choice among those that clipping leaves."""
        choices = self.choices
        return [choices] if updates is None else [replace(choices, updates=(update,)) for update in updates]


@dataclass(frozen=True)
class OtherUpdate:
    """The plan with the update order that was not taken."""
    update: UpdateOrder
    solution: Solution | None          # None if it does not fit
    shortage: Shortage | None


@dataclass(frozen=True)
class Outlook:
    """Either a solution with what would change it, or a shortage."""
    request: Request
    solution: Solution | None
    other_update: OtherUpdate | None   # None where there is no solution
    what_ifs: tuple[WhatIf, ...]
    shortage: Shortage | None
    with_change: Solution | None       # of a shortage: what its cheapest change leads to


def look_ahead(model: ModelProfile, hardware: HardwareProfile, num_ssds: int, request: Request) -> Outlook:
    """`num_ssds`: 0 if unknown; then nothing is said about one more."""
    choices = request.choices
    try:
        solution = solve(model, hardware, choices)
    except CapacityError:
        lack = shortage(model, hardware, choices)
        return Outlook(request, None, None, (), lack, solve(model, lack.hardware, lack.choices))
    return outlook_of(solution, model, hardware, num_ssds, request, choices)


def outlook_of(solution: Solution, model: ModelProfile, hardware: HardwareProfile, num_ssds: int, request: Request,
               choices: Choices) -> Outlook:
    """Of what was found with these choices."""
    other: UpdateOrder = "eager" if solution.schedule.update == "deferred" else "deferred"
    return Outlook(request, solution, _other_update(model, hardware, choices, other),
                   tuple(what_if(model, hardware, choices, solution, num_ssds)), None, None)


def _other_update(model: ModelProfile, hardware: HardwareProfile, choices: Choices, update: UpdateOrder) -> OtherUpdate:
    choices = replace(choices, updates=(update,))
    try:
        return OtherUpdate(update, solve(model, hardware, choices), None)
    except CapacityError:
        return OtherUpdate(update, None, shortage(model, hardware, choices))
