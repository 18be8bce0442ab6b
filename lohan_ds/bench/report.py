"""What a run found, as JSON and as tables."""
from __future__ import annotations

import statistics
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from lohan_ds.bench.case import REFERENCE, SIZES
from lohan_ds.bench.figures import (TOLERANCE, Bound, SideFigures, bound_of, clipped_as_said, clipped_bound_s,
                                    loss_fall, ratio, refusal, side_figures)
from lohan_ds.bench.run import Results

FORMAT = 1
_CACHED_SHARE = 0.01      # of a side's bytes in the page cache, from which on it uses it
_VISIBLE_FALL = 10.0      # times the tolerance, that the loss must fall to show an update that is wrong


class Report:
    """Figures of every side that ran, and why the others did not."""

    def __init__(self, results: Results):
        self.results, turns = results, results.turns
        reference = turns[REFERENCE] if turns[REFERENCE].rounds else None
        self.sides: dict[str, SideFigures] = {
            name: side_figures(side, reference, results.num_params, results.case.dtype)
            for name, side in turns.items() if side.rounds}
        self.bounds: dict[str, Bound] = {}
        if results.compute.rounds:
            self.bounds = {name: bound_of(figures, results.compute, results.probes, results.num_params)
                           for name, figures in self.sides.items()}

    def notes(self) -> list[str]:
        """What a reader must know beside the numbers."""
        found, results = [], self.results
        case, turns = results.case, results.turns
        if results.interrupted:
            found.append(f"interrupted in round {len(results.probes)} of {results.schedule.num_rounds}")
        for name, side in turns.items():
            if side.failure:
                found.append(f"{name} did not run{' to the end' if side.rounds else ''}: {side.failure}")
            elif not clipped_as_said(side, case):
                found.append(f"{name}: the limit {case.clip_limit:g} was not met as --clip {case.clip} says")
            if len(side.starts) > 1:
                found.append(f"{name} was started {len(side.starts)} times: not all sides fit in memory side by side")
        for name, figures in self.sides.items():
            if figures.cached_share is not None and figures.cached_share > _CACHED_SHARE:
                found.append(f"{name} uses the page cache: {figures.cached_share:.0%} of its bytes on disk are in it")
            if figures.same_numerics is False:
                found.append(f"{name}: numerics differ from plain torch, losses by up to "
                             f"{figures.max_loss_difference:.2g} (rounding makes up to {TOLERANCE[case.dtype]:g})")
        if REFERENCE not in self.sides:
            found.append("plain torch did not run: no losses to compare with, so there are figures, but no ratios")
        else:
            fall = loss_fall(turns[REFERENCE])
            if fall < _VISIBLE_FALL * TOLERANCE[case.dtype]:
                found.append(f"the loss of plain torch fell by {fall:.2g} only: too little to see by the losses "
                             "whether a side trains rightly; use more steps")
        if results.compute.failure:
            found.append(f"no bounds: compute alone did not run: {results.compute.failure}")
        return found

    def lohan_is_right(self) -> bool:
        """No side of lohan failed, or disagrees with plain torch if that ran."""
        return all(name in self.sides and self.sides[name].same_numerics is not False and not turns.failure
                   for name, turns in self.results.turns.items() if turns.side.is_lohan)

    def ratio_of(self, name: str, other: str):
        """A Spread, or the reason why not."""
        reason = refusal(name, other, self.results.turns, self.sides)
        found = None if reason else ratio(self.results.turns[name], self.results.turns[other])
        return found or reason or "never in the same round"

    def as_json(self) -> dict[str, Any]:
        """ratio[side][other]: seconds per step of side over those of other; null where it is refused."""
        results, case = self.results, self.results.case
        names = list(results.turns)
        ratios = {a: {b: self.ratio_of(a, b) for b in names if b != a} for a in names}
        refused = {a: {b: r for b, r in row.items() if isinstance(r, str)} for a, row in ratios.items()}
        return {
            "format": FORMAT, "case": {**asdict(case), "clip_limit": case.clip_limit, "params": results.num_params,
                                       "model": asdict(SIZES[case.size])},
            "schedule": asdict(results.schedule),
            "sides": {name: self._side_json(name) for name in names},
            "ratio": {a: {b: None if isinstance(r, str) else r.median for b, r in row.items()}
                      for a, row in ratios.items()},
            "ratio_spread": {a: {b: [r.lowest, r.highest] for b, r in row.items() if not isinstance(r, str)}
                             for a, row in ratios.items()},
            "refused": {a: row for a, row in refused.items() if row},
            "probes": [asdict(probe) for probe in results.probes],
            "sweeps": {name: [{"settings": settings, "step_s": seconds} for settings, seconds in tried]
                       for name, tried in results.sweeps.items()},
            "notes": self.notes()}

    def _side_json(self, name: str) -> dict[str, Any]:
        turns = self.results.turns[name]
        found: dict[str, Any] = {"failure": turns.failure or None, "settings": turns.side.settings,
                                 "starts": len(turns.starts)}
        if name not in self.sides:
            return found
        figures = self.sides[name]
        found.update(asdict(figures), tokens_per_s=self.results.case.tokens_per_step / figures.step_s.median,
                     numerics={True: "same", False: "differ", None: None}[figures.same_numerics],
                     samples_s=[[step.total_s for step in turn.counted] for turn in turns.turns])
        if name in self.bounds:
            bound = self.bounds[name]
            forward_s, backward_s = self._compute_phases()
            clipped_s = clipped_bound_s(bound, forward_s, backward_s)
            found["bound"] = {**asdict(bound), "lower_s": bound.lower_s, "ratio": figures.step_s.median / bound.lower_s,
                              "forward_s": forward_s, "backward_s": backward_s, "clipped_s": clipped_s,
                              "clipped_ratio": figures.step_s.median / clipped_s}
        return found

    def _compute_phases(self) -> tuple[float, float]:
        steps = [step for turn in self.results.compute.turns for step in turn.counted]
        return tuple(statistics.median(step.phase_s[phase] for step in steps) for phase in ("forward", "backward"))

    def tables(self) -> list[Table | str]:
        return [self._head(), self._side_table(), self._ratio_table(), *self._bound_lines(), *self._sweep_lines(),
                *self.notes()]

    def _head(self) -> str:
        case, schedule = self.results.case, self.results.schedule
        dtype = case.dtype + (" stored, fp32 compute" if case.fp32_gemms else "")
        limit = f"clip {case.clip}" + (f" (limit {case.clip_limit:g})" if case.clip_limit else "")
        return (f"{self.results.num_params / 1e6:.1f}M parameters, {case.batch} x {case.seq} tokens, {dtype}, "
                f"{limit}, {case.num_threads} threads; {schedule.num_rounds} rounds of {schedule.num_counted} steps")

    def _side_table(self) -> Table:
        table = _table("side", "s/step (range)", "forward", "backward", "step", "CPU s", "tokens/s", "disk B/param r+w",
                       "peak RSS GB", "loss diff.", "x bound")
        for name, turns in self.results.turns.items():
            figures = self.sides.get(name)
            if figures is None:
                table.add_row(name, "did not run")
                continue
            step, bound = figures.step_s, self.bounds.get(name)
            difference = "-" if figures.max_loss_difference is None else f"{figures.max_loss_difference:.1e}"
            mark = " numerics differ" if figures.same_numerics is False else ""
            cached = figures.cached_share or 0
            table.add_row(
                name, f"{step.median:.2f} ({step.lowest:.2f}-{step.highest:.2f})",
                *(f"{figures.phase_s[phase]:.2f}" for phase in ("forward", "backward", "step")),
                f"{figures.cpu_s:.2f}", f"{self.results.case.tokens_per_step / step.median:.0f}",
                f"{figures.read_bytes_per_param:.1f}+{figures.written_bytes_per_param:.1f}"
                + (" cached" if cached > _CACHED_SHARE else ""),
                f"{figures.peak_rss_bytes / 1e9:.2f}", f"{difference}{mark}",
                f"{step.median / bound.lower_s:.2f}" if bound else "-")
        return table

    def _ratio_table(self) -> Table:
        names = list(self.results.turns)
        table = _table("s/step of row over column", *names)
        for name in names:
            cells = []
            for other in names:
                found = None if name == other else self.ratio_of(name, other)
                cells.append("" if found is None else "refused" if isinstance(found, str) else
                             f"{found.median:.2f} ({found.lowest:.2f}-{found.highest:.2f})")
            table.add_row(name, *cells)
        return table

    def _bound_lines(self) -> list[str]:
        lines = []
        for name, bound in self.bounds.items():
            if not self.results.turns[name].side.is_lohan:
                continue
            forward_s, backward_s = self._compute_phases()
            clipped_s, step_s = clipped_bound_s(bound, forward_s, backward_s), self.sides[name].step_s.median
            lines.append(f"{name}: compute alone {bound.compute_s:.2f} s, its bytes alone {bound.disk_s:.2f} s, Adam "
                         f"in memory alone {bound.memory_s:.2f} s: no less than {bound.lower_s:.2f} s, took "
                         f"{step_s / bound.lower_s:.2f} times that; T_b + max(T_f, S) {clipped_s:.2f} s, "
                         f"{step_s / clipped_s:.2f} times")
        return lines

    def _sweep_lines(self) -> list[str]:
        lines = []
        for name, tried in self.results.sweeps.items():
            chosen = self.results.turns[name].side.settings
            for settings, seconds in tried:
                words = ", ".join(f"{key} {value}" for key, value in settings.items())
                took = "does not run" if seconds is None else f"{seconds:.2f} s/step"
                lines.append(f"tried {name}: {words}: {took}{' <- used' if settings == chosen else ''}")
        return lines


def _table(*columns: str) -> Table:
    return Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
