"""Numbers of a run: medians and spread, ratios, losses compared, lower bounds. Only arithmetic.

A ratio of two sides is the median over rounds of the ratio of their medians in that round: what slows the machine for
longer than a round slows both.
"""
from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lohan_ds.bench.case import Case
from lohan_ds.bench.probes import Probe
from lohan_ds.bench.rounds import SideTurns
from lohan_ds.bench.turns import PHASES, Turn

# Largest difference of a loss from plain torch's that rounding makes; see `numerics_of`.
TOLERANCE = {"fp32": 1e-3, "bf16": 1e-2}


@dataclass(frozen=True)
class Spread:
    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        return cls(statistics.median(samples), min(samples), max(samples))


@dataclass(frozen=True)
class SideFigures:
    step_s: Spread                       # over all counted steps
    phase_s: Mapping[str, float]         # medians
    cpu_s: float                         # of all threads, median
    settle_s: float                      # what was left to do after the last step of a turn; not in step_s
    read_bytes_per_param: float          # of a step
    written_bytes_per_param: float
    peak_rss_bytes: int
    peak_rss_steps_bytes: int
    cached_share: float | None
    max_loss_difference: float | None    # None: plain torch did not run
    same_numerics: bool | None


@dataclass(frozen=True)
class Bound:
    """Seconds below which no step can go here."""
    compute_s: float                     # forward and backward of plain torch without an optimizer
    disk_s: float                        # the side's own bytes of a step at the drive's mixed rate
    memory_s: float                      # Adam over everything, in host memory

    @property
    def lower_s(self) -> float:
        return max(self.compute_s, self.disk_s, self.memory_s)


def side_figures(turns: SideTurns, reference: SideTurns | None, num_params: int, dtype: str) -> SideFigures:
    """`reference`: plain torch, None if it did not run."""
    steps = [step for turn in turns.turns for step in turn.counted]
    shares = [turn.cached_share for turn in turns.turns if turn.cached_share is not None]
    difference = None if reference is None else max_loss_difference(turns, reference)
    return SideFigures(
        step_s=Spread.of([step.total_s for step in steps]),
        phase_s={phase: statistics.median(step.phase_s[phase] for step in steps) for phase in PHASES},
        cpu_s=statistics.median(step.cpu_s for step in steps),
        settle_s=statistics.median(turn.settle_s for turn in turns.turns),
        read_bytes_per_param=statistics.fmean(step.read_bytes for step in steps) / num_params,
        written_bytes_per_param=statistics.fmean(step.written_bytes for step in steps) / num_params,
        peak_rss_bytes=max(turn.peak_rss_bytes for turn in turns.turns),
        peak_rss_steps_bytes=max(turn.peak_rss_steps_bytes for turn in turns.turns),
        cached_share=max(shares) if shares else None,
        max_loss_difference=difference,
        same_numerics=None if difference is None else difference <= TOLERANCE[dtype])


def losses_of(start: Sequence[Turn]) -> list[float]:
    """Of one process, by step."""
    return [step.loss for turn in start for step in turn.steps]


def max_loss_difference(turns: SideTurns, reference: SideTurns) -> float:
    """Over all steps of all processes that the reference has made too; infinite if one is not a number."""
    expected = max((losses_of(start) for start in reference.starts), key=len)
    differences = [abs(loss - other) for start in turns.starts for loss, other in zip(losses_of(start), expected)]
    return math.inf if any(math.isnan(difference) for difference in differences) else max(differences)


def loss_fall(reference: SideTurns) -> float:
    """From the first step to the lowest: how much of training the comparison of losses can see."""
    losses = max((losses_of(start) for start in reference.starts), key=len)
    return losses[0] - min(losses)


def clipped_as_said(turns: SideTurns, case: Case) -> bool:
    """Whether every counted step was clipped, or none, as the case demands. Sides that report no norm pass."""
    norms = [step.grad_norm for turn in turns.turns for step in turn.counted if step.grad_norm is not None]
    if case.clip == "every":
        return all(norm > case.clip_limit for norm in norms)
    return case.clip == "none" or all(norm < case.clip_limit for norm in norms)


def ratio(side: SideTurns, other: SideTurns) -> Spread | None:
    """Seconds per step of `side` over those of `other`; None if no round has both."""
    both = side.rounds.keys() & other.rounds.keys()
    return Spread.of([_median_s(side.rounds[i]) / _median_s(other.rounds[i]) for i in both]) if both else None


def _median_s(turn: Turn) -> float:
    return statistics.median(step.total_s for step in turn.counted)


def refusal(name: str, other: str, sides: Mapping[str, SideTurns], figures: Mapping[str, SideFigures]) -> str:
    """Why there is no ratio of these two, "" if there is one. A peer that trains differently is only marked."""
    for one in (name, other):
        if one not in figures:
            return f"{one}: {sides[one].failure or 'did not run'}"
    for one in (name, other):
        if figures[one].same_numerics is None:
            return "plain torch did not run: nobody knows whether both train alike"
    for one in (name, other):
        if sides[one].side.is_lohan and not figures[one].same_numerics:
            return f"{one} disagrees with plain torch: losses differ by {figures[one].max_loss_difference:.2g}"
    return ""


def bound_of(figures: SideFigures, compute: SideTurns, probes: Sequence[Probe], num_params: int) -> Bound:
    moved = (figures.read_bytes_per_param + figures.written_bytes_per_param) * num_params
    compute_s = statistics.median(step.total_s for turn in compute.turns for step in turn.counted)
    return Bound(compute_s, moved / statistics.median(probe.mixed_bytes_per_s for probe in probes),
                 num_params / statistics.median(probe.adam_params_per_s for probe in probes))


def clipped_bound_s(bound: Bound, forward_s: float, backward_s: float) -> float:
    """T_b + max(T_f, S): when the norm must be known before anything is updated, and nothing is read ahead."""
    return backward_s + max(forward_s, bound.disk_s)
