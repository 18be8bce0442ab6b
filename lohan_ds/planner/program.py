"""The general program for one rank: batch, update order, prefetch, and the tiers of all states and activations.

Batches and schedules are few and are tried one by one; the counts in each are a linear program (linear_program.py).
Relaxed programs bound all of them first, so most need no search in whole numbers: a schedule whose bound is above the
best plan so far cannot win. The least bound left is the certificate: no plan at all is faster than
`Solution.bound_s`. For all states and parameters on the SSD and the order "barrier" the bound is LoHan's convex
optimum (activation_search.py).
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from lohan_ds.errors import CapacityError
from lohan_ds.planner import footprint
from lohan_ds.planner.columns import placement_of
from lohan_ds.planner.linear_program import LinearProgram
from lohan_ds.planner.memory_model import MEMORY_TIERS
from lohan_ds.planner.placement import ModelGroups, group, with_micro_batch
from lohan_ds.planner.solution import Batch, Choices, Solution
from lohan_ds.planner.time_model import Schedule, step_time
from lohan_ds.planner.traffic import step_traffic
from lohan_ds.profile import HardwareProfile, ModelProfile

SLACK = 0.004           # of the seconds: plans this close count as equal, and the calmest of them wins
SEARCH_GAP = 0.001      # of the seconds: how close to its bound a schedule's search stops
SEARCH_SECONDS = 0.3    # per schedule, for the fastest plan and again for the calmest
TOLERANCE = 1e-6        # of the seconds: the solver's
MARGIN_BYTES = 2**20    # taken off the budgets where a count that the solver took for whole overran one


def solve(model: ModelProfile, hardware: HardwareProfile, choices: Choices, slack: float = SLACK) -> Solution:
    """The plan with most tokens per second that fits. Raises `CapacityError` where none does (shortage.py says why).

    Of plans within `slack` of the fastest it takes the one with the deepest prefetch, then the one that writes least
    to the SSD, then the one that moves least. `Solution.gap` is certified and counts that in.
    """
    models = {batch: with_micro_batch(model, batch.micro_batch) for batch in choices.batches}
    groups = {batch: group(scaled) for batch, scaled in models.items()}
    candidates = sorted((_Candidate(models[batch], groups[batch], hardware, choices, batch, schedule)
                         for batch, schedule in choices.schedules()), key=lambda c: c.bound_s_per_token)
    fastest = min(_searched(candidates, slack), key=lambda c: c.found_s_per_token, default=None)
    if fastest is None or fastest.found is None:
        raise CapacityError(f"no plan fits {hardware.name}")
    bound_s_per_token = min(candidate.bound_s_per_token for candidate in candidates)
    limit_s_per_token = fastest.found_s_per_token * (1 + slack + TOLERANCE)
    for candidate in sorted(candidates, key=lambda c: -c.schedule.prefetch_depth):
        if candidate.bound_s_per_token <= limit_s_per_token:
            candidate.search(slack)
            if candidate.found_s_per_token <= limit_s_per_token:
                return candidate.calmest(limit_s_per_token, bound_s_per_token)
    raise AssertionError("the fastest plan is within its own limit")


def _searched(candidates: list[_Candidate], slack: float) -> Iterator[_Candidate]:
    """Candidates, best bound first, until no bound is better than what was found."""
    best_s_per_token = math.inf
    for candidate in candidates:
        if candidate.bound_s_per_token >= best_s_per_token:
            return
        candidate.search(slack)
        best_s_per_token = min(best_s_per_token, candidate.found_s_per_token)
        yield candidate


class _Candidate:
    """One batch and schedule: its program, its bound, and what a search in whole numbers found."""

    def __init__(self, model: ModelProfile, groups: ModelGroups, hardware: HardwareProfile, choices: Choices,
                 batch: Batch, schedule: Schedule) -> None:
        self.batch, self.schedule = batch, schedule
        self._model, self._groups, self._hardware = model, groups, hardware
        self._num_tokens = self._groups.num_tokens * batch.accumulation
        self._tiers = choices.tiers
        self._program = LinearProgram(model, groups, hardware, schedule, choices.tiers)
        self.bound_s_per_token = self._program.bound_s() / self._num_tokens
        self.found: Solution | None = None
        self._is_searched = False

    @property
    def found_s_per_token(self) -> float:
        return math.inf if self.found is None else self.found.step_s / self._num_tokens

    def search(self, slack: float) -> None:
        """Looks for the fastest plan, once. Sharpens `bound_s_per_token`."""
        if self._is_searched:
            return
        self._is_searched = True
        answer = self._program.fastest(min(SEARCH_GAP, slack), SEARCH_SECONDS)
        self.bound_s_per_token = max(self.bound_s_per_token, answer.bound_s / self._num_tokens)
        if answer.counts is None:
            return
        self.found = self._solution(answer.counts)
        if not self.found.fits:
            counts = self._tightened().fastest(min(SEARCH_GAP, slack), SEARCH_SECONDS).counts
            self.found = None if counts is None else self._solution(counts)
        self.bound_s_per_token = min(self.bound_s_per_token, self.found_s_per_token)   # rounding of the solver

    def calmest(self, limit_s_per_token: float, bound_s_per_token: float) -> Solution:
        """The calmest plan of at most so many seconds, or the one that `search` found."""
        limit_s = limit_s_per_token * self._num_tokens
        counts = self._program.calmest(limit_s, SEARCH_SECONDS)
        calm = self.found if counts is None else self._solution(counts)
        if not calm.fits or calm.step_s > limit_s * (1 + TOLERANCE):
            calm = self.found
        return replace(calm, bound_s=min(calm.step_s, bound_s_per_token * self._num_tokens))

    def _tightened(self) -> LinearProgram:
        hardware = self._hardware
        hardware = replace(hardware, host_bytes=hardware.host_bytes - MARGIN_BYTES,
                           device_bytes=hardware.device_bytes - MARGIN_BYTES,
                           ssd_bytes=hardware.ssd_bytes - MARGIN_BYTES)
        return LinearProgram(self._model, self._groups, hardware, self.schedule, self._tiers)

    def _solution(self, counts: tuple[int, ...]) -> Solution:
        """Time and bytes anew from the counts, by the models and not by the solver."""
        placement = placement_of(self._groups, self._program.columns, counts)
        traffic = step_traffic(self._groups, placement)
        budget = footprint.budget(self._hardware)
        return Solution(
            self.batch, self.schedule, self._groups, placement, traffic,
            step_time(traffic, self._hardware, self.schedule),
            (*footprint.fixed_needs(self._model, self.schedule, self._hardware),
             *footprint.placement_needs(self._groups, placement, self.schedule.update, self._hardware)),
            {tier: budget.of(tier) for tier in MEMORY_TIERS}, 0.0)

