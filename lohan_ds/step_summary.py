"""`StepSummary`: what one step took, on which resources, and how much of its update lay under compute.

`StepAccount` has the sums it is made from. What the words mean is told by [Note: steps and windows] in
runtime/recorder.py.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from lohan_ds.config import format_bytes

RESOURCES = ("compute", "h2d", "d2h", "ssd_read", "ssd_write", "cpu_update", "stall")
PHASES = ("forward", "backward", "step", "other")
STALL_CAUSES = ("parameters", "update", "gradient", "activation", "step")
_MAX_INTERVALS = 20_000       # kept apart per resource and step

Moment = float | Callable[[], float | None]   # of time.perf_counter; a device's is called once it may be known


class Span(NamedTuple):
    resource: str
    name: str
    start_s: Moment
    end_s: Moment
    nbytes: int
    for_step: int | None      # the step whose update it is of
    window: int               # the step that was under way when it ended


class Phase(NamedTuple):
    name: str
    start_s: float
    end_s: float              # inf while it lasts


@dataclass(frozen=True)
class StepSummary:
    """Of one step. Shares are None when there was no update."""
    step: int
    forward_s: float
    backward_s: float
    step_s: float
    total_s: float
    busy_s: dict[str, float]              # by resource: the union of its spans
    nbytes: dict[str, int]                # by resource
    update_bytes: int                     # over the SSDs; if there were none, those of state that Adam worked on
    hidden_bytes_share: float | None      # of update_bytes
    hidden_seconds_share: float | None    # of the union of the update's Adam and SSD spans
    stall_s: dict[str, float]             # by cause
    num_speculated: int                   # block updates begun in backward that stood
    num_dropped: int                      # and that did not
    is_final: bool                        # its update is over
    ssd_busy_s: float = 0.0               # the union of its reads and writes

    def line(self) -> str:
        if self.hidden_bytes_share is None:
            hidden = "no update"
        else:   # rounded down: 100 % are all
            hidden = f"{math.floor(100 * self.hidden_bytes_share + 1e-6)} % of update bytes"
        stalled = ", ".join(f"{cause} {self.stall_s[cause]:.2f}" for cause in STALL_CAUSES
                            if cause in ("parameters", "update") or self.stall_s[cause] >= 0.005)
        return (f"lohan step {self.step}: {self.total_s:.2f} s (forward {self.forward_s:.2f}, backward "
                f"{self.backward_s:.2f}, step {self.step_s:.2f}) | hidden: {hidden} | stalled: {stalled} | ssd "
                f"read {self._rate('ssd_read')}, written {self._rate('ssd_write')} | speculated {self.num_speculated} "
                f"dropped {self.num_dropped}" + ("" if self.is_final else " | update not over"))

    def _rate(self, resource: str) -> str:
        nbytes, busy_s = self.nbytes[resource], self.busy_s[resource]
        return format_bytes(nbytes) + (f" at {format_bytes(nbytes / busy_s)}/s" if busy_s else "")


class Intervals:
    """The union of spans, each added soon after it ended. Beyond `max_intervals` the oldest become mere sums."""

    def __init__(self, hidden_s: Callable[[float, float], float] = lambda start, end: 0.0,
                 max_intervals: int = _MAX_INTERVALS):
        self._hidden_s, self._max_intervals = hidden_s, max_intervals
        self._intervals: list[tuple[float, float]] = []   # disjoint, oldest first
        self._folded = (0.0, 0.0)                         # seconds, seconds hidden

    def add(self, start: float, end: float) -> None:
        later = []
        while self._intervals and self._intervals[-1][1] >= start:
            last = self._intervals.pop()
            if last[0] > end:
                later.append(last)   # wholly after the new one
            else:
                start, end = min(start, last[0]), max(end, last[1])
        self._intervals.append((start, end))
        self._intervals.extend(reversed(later))
        if len(self._intervals) > self._max_intervals:
            half = self._max_intervals // 2
            self._folded = self.seconds(self._intervals[:half])
            del self._intervals[:half]

    def seconds(self, intervals: list[tuple[float, float]] | None = None) -> tuple[float, float]:
        """(all, of those hidden)"""
        intervals = self._intervals if intervals is None else intervals
        return (self._folded[0] + sum(end - start for start, end in intervals),
                self._folded[1] + sum(self._hidden_s(start, end) for start, end in intervals))


class StepAccount:
    """The sums of one step."""

    def __init__(self, hidden_s: Callable[[float, float], float]):
        self.label: int | None = None        # set when the step has ended
        self.phase_s = dict.fromkeys(PHASES, 0.0)
        self.busy = {resource: Intervals() for resource in RESOURCES}
        self.ssd = Intervals()
        self.nbytes = dict.fromkeys(RESOURCES, 0)
        self.stall_s = dict.fromkeys(STALL_CAUSES, 0.0)
        self.update = Intervals(hidden_s)
        self.update_bytes = {"ssd": [0, 0.0], "cpu": [0, 0.0]}   # all, hidden
        self.num_speculated, self.num_dropped = 0, 0
        self._span_hidden_s = hidden_s

    def add(self, span: Span) -> None:
        start, end = span.start_s, span.end_s
        self.busy[span.resource].add(start, end)
        if span.resource in ("ssd_read", "ssd_write"):
            self.ssd.add(start, end)
        self.nbytes[span.resource] += span.nbytes
        if span.resource == "stall":
            self.stall_s[span.name] += end - start
        if span.for_step is not None:
            self.update.add(start, end)
            sums = self.update_bytes["cpu" if span.resource == "cpu_update" else "ssd"]
            sums[0] += span.nbytes
            sums[1] += span.nbytes * self._span_hidden_s(start, end) / (end - start) if end > start else 0.0

    def summary(self, label: int, is_final: bool) -> StepSummary:
        update_bytes, hidden_bytes = self.update_bytes["ssd"] if self.update_bytes["ssd"][0] else \
            self.update_bytes["cpu"]
        update_s, hidden_s = self.update.seconds()
        return StepSummary(
            label, self.phase_s["forward"], self.phase_s["backward"], self.phase_s["step"], sum(self.phase_s.values()),
            {resource: busy.seconds()[0] for resource, busy in self.busy.items()}, dict(self.nbytes), update_bytes,
            hidden_bytes / update_bytes if update_bytes else None, hidden_s / update_s if update_s else None,
            dict(self.stall_s), self.num_speculated, self.num_dropped, is_final, self.ssd.seconds()[0])
