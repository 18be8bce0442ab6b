"""What the program may choose from, and what it found: values to print, save and compare with a run."""
from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from lohan_ds.planner.columns import AllowedTiers
from lohan_ds.planner.memory_model import Need, total_bytes
from lohan_ds.planner.placement import (
    ACTIVATION_TIERS, PARAM_TIERS, STATE_TIERS, ActivationTier, ModelGroups, ParamTier, Placement, StateTier)
from lohan_ds.planner.time_model import FULL_PREFETCH_DEPTH, Schedule, StepTime, UpdateOrder
from lohan_ds.planner.traffic import PhaseTraffic, StepTraffic
from lohan_ds.profile import MemoryTier


@dataclass(frozen=True)
class Batch:
    """How the sequences of one step are cut."""
    micro_batch: int          # sequences
    accumulation: int = 1     # micro-steps per step


@dataclass(frozen=True)
class Choices:
    """What the program may choose from. One entry means that the user forced it."""
    batches: tuple[Batch, ...]
    updates: tuple[UpdateOrder, ...] = ("eager", "deferred")
    prefetch_depths: tuple[int, ...] = (FULL_PREFETCH_DEPTH, 1, 0)   # units
    param_tiers: tuple[ParamTier, ...] = PARAM_TIERS
    state_tiers: tuple[StateTier, ...] = STATE_TIERS
    activation_tiers: tuple[ActivationTier, ...] = ACTIVATION_TIERS
    stored: Placement | None = None    # whose counts of parameters and states must stay

    @property
    def tiers(self) -> AllowedTiers:
        return AllowedTiers(self.param_tiers, self.state_tiers, self.activation_tiers, self.stored)

    def schedules(self) -> list[tuple[Batch, Schedule]]:
        return [(batch, Schedule(update, depth, batch.accumulation))
                for batch, update, depth in product(self.batches, self.updates, self.prefetch_depths)]


@dataclass(frozen=True)
class Solution:
    """A plan and what is known about it."""
    batch: Batch
    schedule: Schedule
    groups: ModelGroups
    placement: Placement          # counts per class and tier
    traffic: StepTraffic          # per micro-step and update
    time: StepTime                # per phase, with what binds
    needs: tuple[Need, ...]       # bytes per tier, item by item
    budget_bytes: dict[MemoryTier, int]
    bound_s: float                # no plan of these choices does this plan's tokens in less time

    @property
    def step_s(self) -> float:
        return self.time.seconds

    @property
    def tokens_per_step(self) -> int:
        return self.groups.num_tokens * self.batch.accumulation

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.step_s

    @property
    def gap(self) -> float:
        """Share of the step that a better plan could at most save."""
        return max(0.0, 1 - self.bound_s / self.step_s)

    @property
    def used_bytes(self) -> dict[MemoryTier, int]:
        return total_bytes(list(self.needs))

    @property
    def step_traffic(self) -> PhaseTraffic:
        """All that one step computes and moves."""
        return self.traffic.of_step(self.batch.accumulation)

    @property
    def ssd_write_bytes_per_step(self) -> int:
        return self.step_traffic.ssd_write_bytes

    @property
    def fits(self) -> bool:
        return all(nbytes <= self.budget_bytes[tier] for tier, nbytes in self.used_bytes.items())
