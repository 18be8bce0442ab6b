"""The placement of one model under one schedule as a mixed-integer linear program. Solved by scipy's HiGHS.

Columns are counts, columns.py. A count's coefficients are the seconds and bytes of a single part, so no formula of
the time or memory model stands here a second time. Rows:

    counts      per class, the counts add up to its size; chunks read ahead are of state on the SSD
    time        per group of overlapping phases and resource r:  sum of seconds_r <= seconds of the group
    memory      per tier:  sum of bytes <= budget
    in flight   a switch (0 or 1) per item class: is any of it swapped; the unit with most in flight counts
    spill       a switch: is any activation on the SSD (it needs buffers)

The objective is the step's seconds. Without integers it bounds every placement from below, see program.py.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, OptimizeResult, milp
from scipy.sparse import csr_matrix

from lohan_ds.planner import footprint
from lohan_ds.planner.columns import AllowedTiers, columns_of
from lohan_ds.planner.memory_model import MEMORY_TIERS, total_bytes
from lohan_ds.planner.placement import ItemClass, ModelGroups
from lohan_ds.planner.time_model import OVERLAPS, WHOLE_STEP, Phase, ResourceSeconds, Schedule, resource_seconds
from lohan_ds.planner.traffic import StepTraffic, compute_traffic
from lohan_ds.profile import HardwareProfile, MemoryTier, ModelProfile

BYTES_UNIT = 1e6            # memory rows are in MB: the solver's tolerance of 1e-6 is then one byte
MOVED_BYTES_WEIGHT = 1e-3   # of a byte over the link, or made again, against one written to the SSD, at equal time
INFEASIBLE = 2              # scipy's status of a program that was proven to have no answer
Terms = Iterable[tuple[int, float]]   # (column number, coefficient)


@dataclass(frozen=True)
class Answer:
    """What the solver found."""
    counts: tuple[int, ...] | None   # by column; None if none was found
    bound_s: float                   # no placement has fewer seconds; infinite if none fits


class LinearProgram:
    """Built once per model, machine and schedule; the methods ask it different questions."""

    def __init__(self, model: ModelProfile, groups: ModelGroups, hardware: HardwareProfile, schedule: Schedule,
                 allowed: AllowedTiers) -> None:
        self.columns = columns_of(groups, hardware, schedule, allowed)
        self._model, self._groups, self._hardware, self._schedule = model, groups, hardware, schedule
        self._num_columns = len(self.columns)
        self._rows: list[tuple[dict[int, float], float, float]] = []   # coefficients, lower, upper
        self._switches: list[int] = []
        base = self._seconds(compute_traffic(groups))
        # Seconds are counted in multiples of the bare compute time, so that small and large models solve alike.
        self._unit_s = sum(seconds.longest_s for seconds in base.values()) or 1.0
        # By phase, seconds by resource (rows) and column; the last column is the model's own compute.
        each = [*(self._seconds(column.traffic) for column in self.columns), base]
        self._by_phase = {phase: np.array([tuple(vars(seconds[phase]).values()) for seconds in each]).T / self._unit_s
                          for phase in base}
        self._add_count_rows()
        self._add_read_ahead_rows()
        self._add_stored_rows(allowed)
        self._time_terms = self._add_time_rows()
        self._memory_rows = self._add_memory_rows()

    def bound_s(self) -> float:
        """Seconds that no placement can beat; infinite if none fits."""
        result = self._solve(self._time_terms, integer=False)
        return math.inf if result.status == INFEASIBLE else result.fun * self._unit_s

    def fastest(self, relative_gap: float, time_limit_s: float) -> Answer:
        """The fastest placement in whole numbers."""
        result = self._solve(self._time_terms, relative_gap=relative_gap, time_limit_s=time_limit_s)
        if result.status == INFEASIBLE:
            return Answer(None, math.inf)
        return Answer(self._counts(result), (result.mip_dual_bound or 0.0) * self._unit_s)

    def calmest(self, seconds: float, time_limit_s: float) -> tuple[int, ...] | None:
        """Of the placements that take at most `seconds`, one that writes least to the SSD, then moves and makes
        again least."""
        weights = []
        for number, column in enumerate(self.columns):
            moved = column.traffic.of_step(self._schedule.accumulation)
            remade_bytes = self._groups.items[column.class_index].nbytes if column.tier == "recompute" else 0
            held_bytes = column.nbytes.host if column.kind == "read_ahead" else 0
            busy_bytes = moved.h2d_bytes + moved.d2h_bytes + remade_bytes + held_bytes
            weights.append((number, (moved.ssd_write_bytes + MOVED_BYTES_WEIGHT * busy_bytes) / BYTES_UNIT))
        limit = (dict(self._time_terms), -math.inf, seconds / self._unit_s)
        return self._counts(self._solve(weights, [limit], relative_gap=1e-3, time_limit_s=time_limit_s))

    def least_missing(self, costs: Mapping[MemoryTier, float], time_limit_s: float) -> tuple[int, ...] | None:
        """The counts whose bytes beyond the budgets cost least, by tier; None if some part may lie nowhere."""
        extra = {tier: self._num_columns + i for i, tier in enumerate(MEMORY_TIERS)}
        rows = list(self._rows)
        for tier, row in self._memory_rows.items():
            terms, lower, upper = rows[row]
            rows[row] = ({**terms, extra[tier]: -1.0}, lower, upper)
        result = self._solve([(extra[tier], costs[tier]) for tier in MEMORY_TIERS], rows=rows,
                             num_columns=self._num_columns + len(extra), time_limit_s=time_limit_s)
        return self._counts(result)

    def _solve(self, objective: Terms, more_rows: Sequence[tuple] = (), rows: Sequence[tuple] | None = None,
               num_columns: int | None = None, integer: bool = True, relative_gap: float = 1e-4,
               time_limit_s: float = 10.0) -> OptimizeResult:
        rows = [*(self._rows if rows is None else rows), *more_rows]
        num_columns = num_columns or self._num_columns
        costs = np.zeros(num_columns)
        for number, cost in objective:
            costs[number] = cost
        upper = np.full(num_columns, np.inf)
        upper[:len(self.columns)] = [column.size for column in self.columns]
        upper[self._switches] = 1
        whole = np.zeros(num_columns)
        whole[:len(self.columns)] = integer
        whole[self._switches] = integer
        values = [value for terms, _, _ in rows for value in terms.values()]
        indices = [number for terms, _, _ in rows for number in terms]
        starts = np.cumsum([0, *(len(terms) for terms, _, _ in rows)])
        matrix = csr_matrix((values, indices, starts), shape=(len(rows), num_columns))
        limits = LinearConstraint(matrix, [row[1] for row in rows], [row[2] for row in rows])
        return milp(costs, integrality=whole, bounds=Bounds(0, upper), constraints=limits,
                    options={"mip_rel_gap": relative_gap, "time_limit": time_limit_s})

    def _counts(self, result: OptimizeResult) -> tuple[int, ...] | None:
        return None if result.x is None else tuple(int(round(count)) for count in result.x[:len(self.columns)])

    def _seconds(self, traffic: StepTraffic) -> dict[Phase, ResourceSeconds]:
        return {phase: resource_seconds(getattr(traffic, phase), self._hardware, self._schedule.prefetch_depth)
                for phase in ("forward", "backward", "update")}

    def _new_column(self) -> int:
        self._num_columns += 1
        return self._num_columns - 1

    def _add_row(self, terms: Terms, lower: float, upper: float) -> int:
        self._rows.append(({number: float(value) for number, value in terms if value}, lower, upper))
        return len(self._rows) - 1

    def _add_count_rows(self) -> None:
        sizes = {("params", i): len(block.blocks) for i, block in enumerate(self._groups.blocks)}
        sizes |= {("states", i): len(block.blocks) for i, block in enumerate(self._groups.blocks) if block.trainable}
        sizes |= {("activations", i): len(item.places) for i, item in enumerate(self._groups.items)}
        for key, size in sizes.items():
            members = [n for n, column in enumerate(self.columns) if (column.kind, column.class_index) == key]
            self._add_row(((number, 1.0) for number in members), size, size)

    def _add_read_ahead_rows(self) -> None:
        """Only what lies on the SSD is read ahead."""
        on_ssd = {column.class_index: number for number, column in enumerate(self.columns)
                  if (column.kind, column.tier) == ("states", "ssd")}
        for number, column in enumerate(self.columns):
            if column.kind == "read_ahead":
                chunks = self._groups.blocks[column.class_index].num_chunks
                states = [(on_ssd[column.class_index], -float(chunks))] if column.class_index in on_ssd else []
                self._add_row([(number, 1.0), *states], -math.inf, 0.0)

    def _add_stored_rows(self, allowed: AllowedTiers) -> None:
        for number, column in enumerate(self.columns):
            if allowed.stored is not None and column.kind in ("params", "states"):
                count = getattr(allowed.stored, column.kind)[column.class_index].get(column.tier, 0)
                self._add_row([(number, 1.0)], count, count)

    def _add_time_rows(self) -> list[tuple[int, float]]:
        """[Note: update orders] of time_model.py. Returns the step's seconds as terms."""
        times = {phases: self._add_phase(phases) for phases in OVERLAPS[self._schedule.update]}
        last_step = self._new_column()   # the last micro-step and the update
        self._add_row([(last_step, 1.0), *((time, -1.0) for time in times.values())], 0.0, math.inf)
        if WHOLE_STEP[self._schedule.update]:
            self._add_phase(WHOLE_STEP[self._schedule.update], last_step)
        terms = [(last_step, 1.0)]
        if self._schedule.accumulation > 1:
            alone = [times.get(phases) or self._add_phase(phases) for phases in (("forward",), ("backward",))]
            terms += [(time, self._schedule.accumulation - 1.0) for time in alone]
        return terms

    def _add_phase(self, phases: tuple[Phase, ...], time: int | None = None) -> int:
        """One row per resource: the phases' work on it takes no longer than column `time`, which is returned."""
        time = self._new_column() if time is None else time
        for *seconds, base in sum(self._by_phase[phase] for phase in phases):
            self._add_row([(time, 1.0), *((n, -value) for n, value in enumerate(seconds))], base, math.inf)
        return time

    def _add_memory_rows(self) -> dict[MemoryTier, int]:
        """Returns the number of every tier's row."""
        unified = self._hardware.unified
        in_flight, spill = self._add_in_flight_rows(), self._add_spill_row()
        fixed = total_bytes(footprint.fixed_needs(self._model, self._schedule, self._hardware))
        spill_bytes = footprint.spill_bytes(self._groups.items, self._hardware.num_ssds)
        budget = footprint.budget(self._hardware)
        rows = {}
        for tier in MEMORY_TIERS:
            terms = [(number, column.nbytes.of(tier) / BYTES_UNIT) for number, column in enumerate(self.columns)]
            terms.append((in_flight, footprint.at("device", 1, unified).of(tier)))
            terms.append((spill, footprint.at("host", spill_bytes, unified).of(tier) / BYTES_UNIT))
            rows[tier] = self._add_row(terms, -math.inf, (budget.of(tier) - fixed[tier]) / BYTES_UNIT)
        return rows

    def _add_in_flight_rows(self) -> int:
        """Returns the column of the most that any unit has in flight, in MB."""
        most = self._new_column()
        by_unit_class: dict[int, list[tuple[int, ItemClass]]] = {}
        for index, item in enumerate(self._groups.items):
            switch = self._add_switch(self._swapped(("host", "ssd"), index))
            by_unit_class.setdefault(item.unit_class, []).append((switch, item))
        for switches in by_unit_class.values():
            terms = [(switch, -footprint.in_flight_bytes([item]) / BYTES_UNIT) for switch, item in switches]
            self._add_row([(most, 1.0), *terms], 0.0, math.inf)
        return most

    def _add_spill_row(self) -> int:
        return self._add_switch([n for i in range(len(self._groups.items)) for n in self._swapped(("ssd",), i)])

    def _swapped(self, tiers: tuple[str, ...], item_index: int) -> list[int]:
        return [n for n, column in enumerate(self.columns)
                if column.kind == "activations" and column.class_index == item_index and column.tier in tiers]

    def _add_switch(self, numbers: list[int]) -> int:
        """A 0-or-1 column that is 1 if any of the columns is not 0."""
        switch = self._new_column()
        self._switches.append(switch)
        size = sum(self.columns[number].size for number in numbers)
        self._add_row([(switch, float(size)), *((number, -1.0) for number in numbers)], 0.0, math.inf)
        return switch
