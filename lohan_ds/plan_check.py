"""`PlanCheck`: holds a plan against what its run measures, says how far it was off, and has it made again."""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from lohan_ds.planner.comparison import Row, compare, comparison_text, prediction_text
from lohan_ds.planner.plan_file import PlanFile
from lohan_ds.planner.rate_watch import NUM_STEPS, Drift, RateWatch
from lohan_ds.profile import HardwareProfile, MemoryTier
from lohan_ds.step_summary import StepSummary

NUM_WARM_UP_STEPS = 2    # caches fill and kernels are chosen: not counted
FIRST_AFTER_STEPS = 5
LINKS = {"ssd": "the SSD", "h2d": "the link to the device", "d2h": "the link from the device",
         "cpu_update": "the CPU update"}
Replan = Callable[[PlanFile, HardwareProfile], PlanFile | None]


class PlanCheck:
    """Belongs to the training thread. `file` is the plan that is carried out, with what was predicted of it."""

    def __init__(self, file: PlanFile, say: Callable[[str], None],
                 peak_bytes: Callable[[], Mapping[MemoryTier, int]], every_steps: int | None = None,
                 replan: Replan | None = None, change: Callable[[PlanFile], bool | None] | None = None):
        """Says the comparison after the first steps, and again every so many. `replan`: the plan at other rates, with
        all that is stored where it is; None leaves the plan alone. `change`: carries out what differs in a plan; True
        if that is done, False if it must be tried again after the next step, None if it cannot be done."""
        self.file = file
        self._say, self._peak_bytes, self._every_steps = say, peak_bytes, every_steps
        self._replan, self._change = replan, change
        self._watch = RateWatch(file.hardware)
        self._recent: deque[StepSummary] = deque(maxlen=NUM_STEPS)
        self._num_steps = 0
        self._is_over = False
        self._wanted: PlanFile | None = None   # to be carried out as soon as that can be

    def add(self, summary: StepSummary) -> None:
        """A step's update is over."""
        self._num_steps += 1
        if self._num_steps <= NUM_WARM_UP_STEPS:
            return
        self._recent.append(summary)
        if self._num_steps == FIRST_AFTER_STEPS or (
                self._every_steps and self._num_steps > FIRST_AFTER_STEPS and self._num_steps % self._every_steps == 0):
            self._say(comparison_text(self.rows(), list(self._recent)))
        for drift in () if self._is_over else self._watch.add(summary):
            self._on_drift(drift)
        self._try_change()

    def end(self) -> None:
        """The run is being closed: nothing is planned or changed any more."""
        self._is_over = True

    def rows(self) -> list[Row]:
        """Over the last steps; empty before there are any."""
        return compare(self.file, self._recent, self._peak_bytes()) if self._recent else []

    def _on_drift(self, drift: Drift) -> None:
        lines = [f"lohan plan: for {NUM_STEPS} steps {LINKS[drift.link]} has gone at {drift.factor:.2f} of the rate "
                 "that was planned with", "the plan so far:", prediction_text(self.file)]
        other = self._replan and self._replan(self.file, drift.hardware)
        if other is None:
            lines.append("It stays as it is; to plan anew: lohan profile --refresh, then start again.")
        else:
            same = other.activations == self.file.activations
            lines += ["at the rate measured, with all that is stored where it is:", prediction_text(other),
                      "Its decisions are the same." if same else "It decides otherwise about activations."]
            self._wanted = None if same else other
            self.file = other if same else self.file
        self._say("\n".join(lines))

    def _try_change(self) -> None:
        if self._wanted is None or self._is_over:
            return
        done = None if self._change is None else self._change(self._wanted)
        if done is False:
            return
        if done:
            self.file = self._wanted
            self._recent.clear()
        self._say("lohan plan: " + ("from the next step on the new plan holds" if done else
                                    "the new plan needs space that was not taken at the start; the old one goes on"))
        self._wanted = None
