"""What a rehearsal says: predicted beside rehearsed, as plain values and as text, 100 columns wide."""
from __future__ import annotations

from dataclasses import dataclass
from textwrap import wrap

from lohan_ds.planner.memory_model import format_bytes
from lohan_ds.planner.page_text import WIDTH
from lohan_ds.planner.text import RESOURCES, seconds_text, text_table
from lohan_ds.planner.solution import Solution
from lohan_ds.planner.time_model import UpdateOrder, resource_seconds
from lohan_ds.profile import HardwareProfile
from lohan_ds.rehearsal.rehearsal import LINKS, Rehearsed
from lohan_ds.rehearsal.scale import Scale

PHASES = ("forward", "backward", "after backward")
# Where each phase of the time model shows. With "eager" no phase is told apart: the update goes on under all of them.
SHOWS_AS: dict[UpdateOrder, dict[str, str]] = {
    "serial": {"forward": "forward", "backward": "backward", "update": "after backward"},
    "barrier": {"forward": "forward"},
    "deferred": {"backward": "backward", "forward + update": "forward"},
    "eager": {}}
LINK_NAMES = {"h2d": "to device", "d2h": "from device", "ssd_read": "SSD read", "ssd_write": "SSD written"}


@dataclass(frozen=True)
class Predicted:
    """By the planner's time model, of one step at full size."""
    step_s: float
    phases_s: dict[str, float]       # those of `PHASES` that it tells apart
    busy_s: dict[str, float]         # by resource
    nbytes: dict[str, float]         # by link
    binds: dict[str, str]            # resource by phase of its own


@dataclass(frozen=True)
class ModeReport:
    update: UpdateOrder
    prefetch_depth: int              # units
    predicted: Predicted
    rehearsed: Rehearsed
    error: float                     # share: predicted over rehearsed, less 1
    busiest: str                     # resource that was busy longest in the rehearsal
    busiest_share: float             # of the step


@dataclass(frozen=True)
class RehearsalReport:
    model: str
    hardware: str
    description: str                 # of the hardware
    num_ssds: int
    micro_batch: int                 # sequences
    accumulation: int                # micro-steps per step
    sequence_length: int             # tokens
    bytes_scale: float               # rehearsed bytes per byte
    seconds_scale: float             # rehearsed seconds per second
    modes: tuple[ModeReport, ...]
    not_fitting: dict[str, str]      # what lacks, by update


def mode_report(solution: Solution, hardware: HardwareProfile, rehearsed: Rehearsed) -> ModeReport:
    busiest = max(rehearsed.busy_s, key=rehearsed.busy_s.__getitem__)
    return ModeReport(solution.schedule.update, solution.schedule.prefetch_depth, _predicted(solution, hardware),
                      rehearsed, solution.step_s / rehearsed.step_s - 1, busiest,
                      rehearsed.busy_s[busiest] / rehearsed.step_s)


def _predicted(solution: Solution, hardware: HardwareProfile) -> Predicted:
    schedule, traffic, shows = solution.schedule, solution.step_traffic, SHOWS_AS[solution.schedule.update]
    phases_s: dict[str, float] = {}
    for phase in solution.time.phases:
        name = shows.get(phase.name)
        if name is not None:
            phases_s[name] = phases_s.get(name, 0.0) + phase.count * phase.seconds
    busy = resource_seconds(traffic, hardware, schedule.prefetch_depth)
    return Predicted(
        solution.step_s, phases_s if schedule.accumulation == 1 else {},
        {name: seconds for name, seconds in vars(busy).items() if name != "fetch"},
        {"h2d": traffic.h2d_bytes, "d2h": traffic.d2h_bytes, "ssd_read": traffic.ssd_read_bytes,
         "ssd_write": traffic.ssd_write_bytes},
        {phase.name: phase.binding for phase in solution.time.phases if phase.seconds})


def report_text(report: RehearsalReport) -> str:
    """Ends without a newline."""
    parts = [_headline(report), *(_mode(mode) for mode in report.modes)]
    parts += [wrap(f"update {update} does not fit: {lacks}", WIDTH) for update, lacks in report.not_fitting.items()]
    return "\n\n".join("\n".join(part) for part in parts)


def _headline(report: RehearsalReport) -> list[str]:
    scale = Scale(report.bytes_scale, report.seconds_scale)
    cut = f"{report.accumulation} x {report.micro_batch}" if report.accumulation > 1 else str(report.micro_batch)
    text = [f"{report.model} on {report.hardware}" + (f": {report.description}" if report.description else ""),
            f"{cut} sequences of {report.sequence_length} tokens per step; rehearsed with 1/{1 / scale.bytes:,.0f} of "
            f"the bytes and {scale.seconds:.3g} times the seconds; below, both are of full size"]
    return [line for each in text for line in wrap(each, WIDTH)]


def _mode(mode: ModeReport) -> list[str]:
    predicted, rehearsed = mode.predicted, mode.rehearsed
    lines = wrap(f"update {mode.update}, prefetch depth {mode.prefetch_depth}: {seconds_text(predicted.step_s)} per "
                 f"step predicted, {seconds_text(rehearsed.step_s)} rehearsed ({rehearsed.num_steps} steps: "
                 f"{seconds_text(rehearsed.fastest_s)} to {seconds_text(rehearsed.slowest_s)}); predicted is "
                 f"{mode.error:+.1%} off", WIDTH)
    phases_s = dict(zip(PHASES, (rehearsed.forward_s, rehearsed.backward_s, rehearsed.after_backward_s)))
    rows = [("seconds", "predicted", "rehearsed")]
    rows += [(name, seconds_text(predicted.phases_s[name]) if name in predicted.phases_s else "", seconds_text(seconds))
             for name, seconds in phases_s.items()]
    rows += [(f"{RESOURCES[name]} busy", seconds_text(predicted.busy_s[name]), seconds_text(seconds))
             for name, seconds in rehearsed.busy_s.items()]
    rows += [(LINK_NAMES[link], format_bytes(round(predicted.nbytes[link])),
              format_bytes(round(rehearsed.nbytes[link]))) for link in LINKS]
    lines += ["", *text_table(rows, "<>>"), ""]
    binds = ", ".join(f"{RESOURCES[resource]} in {phase}" for phase, resource in predicted.binds.items())
    lines += wrap(f"predicted to bind: {binds}; busiest in the rehearsal: {RESOURCES[mode.busiest]}, "
                  f"{mode.busiest_share:.0%} of the step", WIDTH)
    stalls = ", ".join(f"{cause} {seconds_text(seconds)}" for cause, seconds in rehearsed.stall_s.items())
    lines += wrap(f"the training thread waited for: {stalls}; the device, with work at hand, for copies "
                  f"{seconds_text(rehearsed.copy_wait_s)}", WIDTH)
    lines += wrap(f"neither paced nor slept: {seconds_text(rehearsed.unpaced_s)}, "
                  f"{rehearsed.unpaced_s / rehearsed.step_s:.1%} of the step", WIDTH)
    if rehearsed.kept_activation_bytes:
        lines += wrap(f"{format_bytes(round(rehearsed.kept_activation_bytes))} of activations stayed on the device "
                      "because the space that they were planned for was full", WIDTH)
    return lines

