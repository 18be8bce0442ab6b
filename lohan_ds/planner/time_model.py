"""Seconds per phase of one step, from bytes per link and rates. The cost model of LoHan's section IV-D, extended.

A phase lasts as long as its busiest resource: everything inside a phase overlaps, so a phase is a maximum and a step
is a sum of phases. The host-device link is duplex (two resources); an SSD is simplex (reads and writes add). Two
things are added to the paper's equations: the clamp on what goes on to the SSD, alpha*A = max(0, A - host room),
and the CPU update, which the paper leaves out. There is no fill or drain of pipelines and no latency: a bound to
come close to, not a promise.

[Note: update orders] Forward f, backward b and update u each have seconds per resource r. How they may overlap:

    serial    max f + max b + max u            all updates in step()
    barrier   max f + max (b + u)              the paper's order: in backward, next forward waits for all, eq. (1)
    deferred  max b + max (f + u)              held until the norm is known, then ahead of the next forward
    eager     max(max f + max b, max (f+b+u))  in backward and on into the next forward

Eager is the closed form of the best split of u over backward and the next forward when each resource may split its
own work. In `deferred` the program may move reads of optimizer state from u to b, into host memory that is left over.

Worked numbers: 13B parameters, batch 32, 143 TFLOP/s, 21 GB/s links, 18 GB/s SSD, all on the SSD, block inputs
swapped, all else recomputed: forward 5.9 s, backward + update 20.2 s, the SSD binds.
"""
from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Literal

from lohan_ds.planner.traffic import PhaseTraffic, StepTraffic
from lohan_ds.profile import HardwareProfile

UpdateOrder = Literal["serial", "barrier", "deferred", "eager"]
Phase = Literal["forward", "backward", "update"]
# Phases that run side by side, in the order they add up; [Note: update orders].
OVERLAPS: dict[UpdateOrder, tuple[tuple[Phase, ...], ...]] = {
    "serial": (("forward",), ("backward",), ("update",)),
    "barrier": (("forward",), ("backward", "update")),
    "deferred": (("backward",), ("forward", "update")),
    "eager": (("forward",), ("backward",)),
}
# The least a step takes whatever overlaps: one pass over all work of each resource.
WHOLE_STEP: dict[UpdateOrder, tuple[Phase, ...]] = {
    "serial": (), "barrier": (), "deferred": (), "eager": ("forward", "backward", "update")}
FULL_PREFETCH_DEPTH = 2   # units: one on its way from the SSD, one on its way to the device


@dataclass(frozen=True)
class Schedule:
    """How a step's phases overlap."""
    update: UpdateOrder
    prefetch_depth: int = FULL_PREFETCH_DEPTH   # units fetched ahead of the one that computes
    accumulation: int = 1                       # micro-steps per step


@dataclass(frozen=True)
class ResourceSeconds:
    """Seconds of work per resource in one phase."""
    device: float = 0.0   # compute; with `unified` also the CPU update: the same cores do both
    h2d: float = 0.0
    d2h: float = 0.0
    ssd: float = 0.0      # reads and writes add
    cpu: float = 0.0      # the update
    fetch: float = 0.0    # what too small a prefetch depth makes serial, see `resource_seconds`

    def __add__(self, other: ResourceSeconds) -> ResourceSeconds:
        return ResourceSeconds(*map(operator.add, vars(self).values(), vars(other).values()))

    @property
    def longest_s(self) -> float:
        return max(vars(self).values())

    @property
    def binding(self) -> str:
        """The resource that takes longest; the first of equals."""
        return max(vars(self), key=lambda name: getattr(self, name))


@dataclass(frozen=True)
class PhaseTime:
    """One phase, or phases that overlap ("backward + update")."""
    name: str
    count: int                       # times per step
    seconds: float                   # each time
    resources: ResourceSeconds = field(repr=False)

    @property
    def binding(self) -> str:
        return self.resources.binding


@dataclass(frozen=True)
class StepTime:
    """One step: the phases add up."""
    phases: tuple[PhaseTime, ...]

    @property
    def seconds(self) -> float:
        return sum(phase.count * phase.seconds for phase in self.phases)


def resource_seconds(traffic: PhaseTraffic, hardware: HardwareProfile, prefetch_depth: int) -> ResourceSeconds:
    """Seconds per resource: the terms of the maxima (2) and (5), and the CPU update.

    With a prefetch depth of 1 a unit's parameters must come from the SSD and reach the device while one other unit
    computes, so those two add up; with 0 the compute waits for both, so all three do.
    """
    update_s = _seconds(traffic.update_params, hardware.cpu_update_params_per_s)
    device_s = _seconds(traffic.flops, hardware.device_flops_per_s) + (update_s if hardware.unified else 0.0)
    fetch_s = 0.0
    if prefetch_depth < FULL_PREFETCH_DEPTH:
        fetch_s = (_seconds(traffic.param_h2d_bytes, hardware.h2d_bytes_per_s)
                   + _seconds(traffic.param_read_bytes, hardware.ssd_read_bytes_per_s)
                   + (device_s if prefetch_depth == 0 else 0.0))
    return ResourceSeconds(
        device=device_s,
        h2d=_seconds(traffic.h2d_bytes, hardware.h2d_bytes_per_s),
        d2h=_seconds(traffic.d2h_bytes, hardware.d2h_bytes_per_s),
        ssd=_seconds(traffic.ssd_read_bytes, hardware.ssd_read_bytes_per_s)
        + _seconds(traffic.ssd_write_bytes, hardware.ssd_write_bytes_per_s),
        cpu=0.0 if hardware.unified else update_s,
        fetch=fetch_s)


def _seconds(amount: float, rate_per_s: float) -> float:
    if not amount:
        return 0.0
    return amount / rate_per_s if rate_per_s else math.inf


def step_time(traffic: StepTraffic, hardware: HardwareProfile, schedule: Schedule) -> StepTime:
    """Equation (1) for every update order: the phases of a step, [Note: update orders].

    With accumulation only the last micro-step overlaps with the update; the others are forward and backward alone.
    """
    seconds = {phase: resource_seconds(getattr(traffic, phase), hardware, schedule.prefetch_depth)
               for phase in ("forward", "backward", "update")}
    overlaps = OVERLAPS[schedule.update]
    phases = [_phase_time(seconds, names, 1) for names in overlaps]
    if WHOLE_STEP[schedule.update]:
        whole = _phase_time(seconds, WHOLE_STEP[schedule.update], 1)
        tail_s = max(0.0, whole.seconds - sum(phase.seconds for phase in phases))
        phases.append(PhaseTime("update tail", 1, tail_s, whole.resources))
    if schedule.accumulation > 1:
        phases = [_phase_time(seconds, (name,), schedule.accumulation - 1) for name in ("forward", "backward")] + phases
    return StepTime(tuple(phases))


def _phase_time(seconds: dict[Phase, ResourceSeconds], names: tuple[Phase, ...], count: int) -> PhaseTime:
    resources = sum((seconds[name] for name in names), ResourceSeconds())
    return PhaseTime(" + ".join(names), count, resources.longest_s, resources)
