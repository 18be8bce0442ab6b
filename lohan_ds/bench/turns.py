"""`Turn`: some steps that a side trained in one go, as its process measured them. Plain values."""
from __future__ import annotations

from dataclasses import dataclass

PHASES = ("forward", "backward", "step")


@dataclass(frozen=True)
class StepRecord:
    index: int                # since the start of the process, 0 is the first
    counts: bool              # False: warm-up, or the step in which an overlapping side gets going
    total_s: float            # from the end of the step before, so that nothing lies between two steps
    phase_s: dict[str, float]   # of PHASES
    cpu_s: float              # of all threads of the process; on a busy machine it says more than total_s
    loss: float
    grad_norm: float | None
    read_bytes: int           # from any drive, by this process, as the kernel counts
    written_bytes: int


@dataclass(frozen=True)
class Turn:
    steps: tuple[StepRecord, ...]
    settle_s: float           # until nothing was under way any more, after the last step
    peak_rss_bytes: int       # of the process so far, its set-up included
    peak_rss_steps_bytes: int   # without its set-up
    cached_share: float | None   # of the bytes in its files, in the page cache; None without files

    @property
    def counted(self) -> tuple[StepRecord, ...]:
        return tuple(step for step in self.steps if step.counts)
