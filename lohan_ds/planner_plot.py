"""A `Page` as a picture: what every resource does when, in one step, and the memory of every tier against its budget.

matplotlib is not a dependency: the extra "plot" brings it.
"""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lohan_ds.errors import ConfigError
from lohan_ds.planner.memory_model import format_bytes
from lohan_ds.planner.page import Page, StepFacts
from lohan_ds.planner.text import RESOURCES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORK_COLORS = {"forward": "#4477aa", "backward": "#ccbb44", "update": "#228833"}
SMALLEST_SHARE = 0.01   # of its budget: smaller items are drawn together
NARROWEST_LABEL = 0.1   # of the step: narrower phases have no room for their name
INCHES = (11, 8)


@dataclass(frozen=True)
class Bar:
    """One stretch of work of one resource."""
    resource: str
    work: str               # forward, backward or update
    start_s: float          # from the start of the step
    seconds: float


def check_matplotlib() -> None:
    """Raises ConfigError where it is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError('a picture needs matplotlib, which is not installed: pip install "lohan_ds[plot]"') from error


def timeline(plan: StepFacts) -> list[Bar]:
    """Each phase's work from the start of the phase on. The update of order "eager" fills what backward leaves free,
    then the tail, then what the next forward leaves free; that forward is the one at the start of the picture."""
    bars, free, start_s = [], [], 0.0
    resources = [name for name in RESOURCES if any(seconds[name] for seconds in plan.work_s.values())]
    for phase in plan.phases:
        works = [] if phase.name == "update tail" else phase.name.split(" + ")
        end_s = start_s + phase.count * phase.seconds
        for resource in resources:
            at_s = start_s
            for work in works:
                seconds = phase.count * plan.work_s[work][resource]
                bars.append(Bar(resource, work, at_s, seconds))
                at_s += seconds
            free.append((resource, phase.name, at_s, end_s - at_s))
        start_s = end_s
    if plan.update == "eager":
        order = ["backward", "update tail", "forward"]
        for resource in resources:
            left_s = plan.work_s["update"][resource]
            stretches = [(order.index(name), -at_s if name == "backward" else at_s, at_s, room_s)
                         for owner, name, at_s, room_s in free if owner == resource]
            for *_, at_s, room_s in sorted(stretches):   # the last backward, the first forward
                seconds = min(left_s, room_s)
                bars.append(Bar(resource, "update", at_s, seconds))
                left_s -= seconds
    return [bar for bar in bars if bar.seconds > 0]


def draw(page: Page, path: Path) -> None:
    """Writes a PNG. OSError if the file cannot be written."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=INCHES, layout="constrained")
    verdict = "" if page.fits else ": does not fit"
    figure.suptitle(f"{page.model.name}\non {page.hardware.profile['name']}{verdict}", fontsize=11)
    if page.plan is None:
        _draw_memory(figure.subplots(), page)
    else:
        above, below = figure.subplots(2, 1)
        _draw_timeline(above, page.plan)
        _draw_memory(below, page)
    figure.savefig(path, format="png", dpi=120)


def _draw_timeline(axes: Axes, plan: StepFacts) -> None:
    bars = timeline(plan)
    rows = list(dict.fromkeys(name for name in RESOURCES if any(bar.resource == name for bar in bars)))
    for work, color in WORK_COLORS.items():
        chosen = [bar for bar in bars if bar.work == work]
        axes.barh([rows.index(bar.resource) for bar in chosen], [bar.seconds for bar in chosen],
                  left=[bar.start_s for bar in chosen], height=0.7, color=color, label=work)
    start_s = 0.0
    for phase in plan.phases:
        seconds = phase.count * phase.seconds
        if seconds >= NARROWEST_LABEL * plan.step_s:
            times = f" x {phase.count}" if phase.count > 1 else ""
            axes.text(start_s + seconds / 2, -0.5, f"{phase.name}{times}:\n{RESOURCES[phase.binding]} binds",
                      ha="center", va="bottom", fontsize=8)
        start_s += seconds
        axes.axvline(start_s, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [RESOURCES[row] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -1.4)
    axes.set_xlim(0, plan.step_s * 1.001)
    axes.set_xlabel(f"seconds; update {plan.update}, {plan.step_s:.3g} s per step, {plan.tokens_per_s:,.0f} tokens/s")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)


def _draw_memory(axes: Axes, page: Page) -> None:
    """Each tier's items side by side, as shares of its budget."""
    from matplotlib import colormaps
    colors: dict[str, tuple] = {}
    labels = []
    for row, tier in enumerate(page.tiers):
        budget_bytes, left = max(tier.budget_bytes, 1), 0.0
        labels.append(f"{tier.tier}\n{format_bytes(tier.used_bytes)} of {format_bytes(tier.budget_bytes)}")
        large = [item for item in tier.items if item[1] >= SMALLEST_SHARE * budget_bytes]
        small_bytes = tier.used_bytes - sum(nbytes for _, nbytes in large)
        for what, nbytes in [*sorted(large, key=lambda item: -item[1]), ("all else", small_bytes)]:
            is_new = nbytes and what not in colors
            if is_new:
                colors[what] = colormaps["tab20"](len(colors) % 20)
            if nbytes:
                axes.barh(row, nbytes / budget_bytes, left=left, height=0.7, color=colors[what],
                          label=what if is_new else None)
            left += nbytes / budget_bytes
    axes.axvline(1.0, color="red", linewidth=1.5)
    axes.text(1.0, -0.5, "budget", ha="center", va="bottom", color="red", fontsize=8)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.8)
    axes.set_xlim(left=0, right=max(1.05, *(tier.used_bytes / max(tier.budget_bytes, 1) * 1.05 for tier in page.tiers)))
    axes.set_xlabel("share of the budget")
    if colors:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, frameon=False)
