"""`Rate`: how fast something goes, measured several times."""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from pydantic import BaseModel, ConfigDict

MIN_SAMPLES = 3
_STEADY = 0.5              # the lowest sample is at least this part of the highest


class Rate(BaseModel):
    """Units of the name it is kept under, per second."""
    model_config = ConfigDict(frozen=True, extra="forbid")

    per_s: float              # the median, or what `sample_rate` says
    lowest_per_s: float
    highest_per_s: float
    num_samples: int

    @property
    def is_steady(self) -> bool:
        """False when something else used the machine at times, or it does not keep up its first speed."""
        return self.lowest_per_s >= _STEADY * self.highest_per_s

    @classmethod
    def of(cls, samples: Sequence[float], quantile: float = 0.5) -> Rate:
        """`quantile`: the part of the samples that is to lie below `per_s`."""
        ordered = sorted(samples)
        middle = statistics.median(samples) if quantile == 0.5 else ordered[int(quantile * (len(ordered) - 1))]
        return cls(per_s=middle, lowest_per_s=ordered[0], highest_per_s=ordered[-1], num_samples=len(samples))


def sample_rate(work: Callable[[], float], seconds: float) -> Rate:
    """Calls `work`, which returns the amount it has done, over and over for about `seconds`, after one unmeasured call
    for what only happens the first time. The rate is what a quarter of the samples exceed: other processes on the same
    cores can make it slower, never faster."""
    work()
    samples: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(samples) < MIN_SAMPLES or time.perf_counter() < deadline:
        start = time.perf_counter()
        amount = work()
        samples.append(amount / (time.perf_counter() - start))
    return Rate.of(samples, quantile=0.75)
