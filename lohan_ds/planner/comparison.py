"""What was predicted of a step against what was measured: at the start the prediction as text, later both side by side.

Values only. Phases are those of the training thread: the update of a deferred step is in the forward that follows it,
so "forward" is compared with the prediction of forward and update together.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from lohan_ds.planner.memory_model import format_bytes
from lohan_ds.planner.plan_file import PlanFile, Predicted
from lohan_ds.planner.text import RESOURCES, rate_text, seconds_text, text_table
from lohan_ds.profile import MemoryTier
from lohan_ds.step_summary import STALL_CAUSES, StepSummary

MOVED = {"ssd_read": "read from the SSD", "ssd_write": "written to the SSD", "h2d": "to the device",
         "d2h": "from the device"}
SHOWN_STALL_S = 0.005   # per step; less is not worth a line


@dataclass(frozen=True)
class Row:
    """One quantity of a step."""
    what: str
    predicted: float | None    # None: nobody predicts it
    measured: float
    is_bytes: bool = False

    @property
    def error(self) -> float | None:
        """Of the prediction, as a share of what was measured; None if that is nothing."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1


def compare(file: PlanFile, summaries: Sequence[StepSummary], memory_bytes: Mapping[MemoryTier, int]) -> list[Row]:
    """Means over steps. `memory_bytes`: the peak of each tier that was measured."""
    predicted, unified = file.predicted, file.hardware.unified
    knows_seconds = file.sequence_length is not None   # else the model's own compute is not in them
    seconds = {**predicted_phases(predicted), "total": predicted.step_s}
    rows = [Row(what, seconds[name] if knows_seconds else None,
                fmean(getattr(summary, f"{name}_s") for summary in summaries))
            for what, name in (("step", "total"), ("forward", "forward"), ("backward", "backward"), ("step()", "step"))]
    for cause in STALL_CAUSES:
        stalled_s = fmean(summary.stall_s[cause] for summary in summaries)
        if stalled_s >= SHOWN_STALL_S:
            rows.append(Row(f"  of that waiting: {cause}", None, stalled_s))
    rows += [Row(text, predicted.moved_bytes[name], fmean(summary.nbytes[name] for summary in summaries), True)
             for name, text in MOVED.items() if not (unified and name in ("h2d", "d2h"))]
    rows += [Row(f"{tier} memory", predicted.memory_bytes[tier], nbytes, True) for tier, nbytes in memory_bytes.items()]
    return [row for row in rows if row.predicted or row.measured]


def predicted_phases(predicted: Predicted) -> dict[str, float]:
    """Seconds by "forward", "backward" and "step" (the update, where it does not lie under the others)."""
    seconds = {"forward": 0.0, "backward": 0.0, "step": 0.0}
    for phase in predicted.phases:
        first = phase.name.split()[0]
        seconds[first if first in seconds else "step"] += phase.seconds
    return seconds


def comparison_text(rows: Sequence[Row], summaries: Sequence[StepSummary]) -> str:
    """A table for people."""
    table = [(f"steps {summaries[0].step} to {summaries[-1].step}", "predicted", "measured", "prediction off by")]
    for row in rows:
        show = (lambda value: format_bytes(round(value))) if row.is_bytes else seconds_text
        table.append((row.what, "" if row.predicted is None else show(row.predicted), show(row.measured),
                      "" if row.error is None else f"{row.error:+.0%}"))
    return "\n".join(["lohan plan, predicted against measured", *text_table(table, "<>>>")])


def prediction_text(file: PlanFile) -> str:
    """What a plan expects of a step, in the words of `lohan plan`."""
    predicted = file.predicted
    lines = [f"lohan plan, for {file.hardware.name}: {seconds_text(predicted.step_s)} per step, "
             f"{rate_text(predicted.tokens_per_s)} tokens/s" if file.sequence_length else
             f"lohan plan, for {file.hardware.name}: at least {seconds_text(predicted.step_s)} per step, compute not "
             "counted"]
    if not file.is_as_planned:
        lines.append("This is of the plan as it was made; the file was edited since.")
    lines += text_table([("phase", "seconds", "what binds")] +
                        [(phase.name, seconds_text(phase.seconds), RESOURCES[phase.binding])
                         for phase in predicted.phases if phase.seconds], "<><")
    moved = ", ".join(f"{format_bytes(predicted.moved_bytes[name])} {text}" for name, text in MOVED.items()
                      if name.startswith("ssd"))
    return "\n".join([*lines, f"per step {moved}"])
