"""`RateWatch`: whether a link goes at the rate that the plan was made with. Pure: it is told, and has no clock.

A rate says little while its resource is hardly used: steps count only where it was busy for a share of them. Reads and
writes of an SSD disturb each other, so it is judged as a whole: the seconds that the plan gives the bytes that moved,
against the seconds that it was busy.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from lohan_ds.profile import HardwareProfile
from lohan_ds.step_summary import StepSummary

MAX_ERROR = 0.1          # of a rate
NUM_STEPS = 20           # in a row that it must be off by more, to one side
LEAST_BUSY_SHARE = 0.25  # of a step
STATE_BYTES_PER_PARAM = 12   # as the recorder counts the update
RATES = {"ssd": ("ssd_read_bytes_per_s", "ssd_write_bytes_per_s"), "h2d": ("h2d_bytes_per_s",),
         "d2h": ("d2h_bytes_per_s",), "cpu_update": ("cpu_update_params_per_s",)}


@dataclass(frozen=True)
class Drift:
    """A link that stayed off."""
    link: str
    factor: float                  # measured rate over the plan's, mean of the steps
    hardware: HardwareProfile      # the plan's, with the measured rate


class RateWatch:
    """One thread. Tells each drift once: from then on it expects the measured rate."""

    def __init__(self, hardware: HardwareProfile):
        self.hardware = hardware
        self._off: dict[str, list[float]] = {link: [] for link in RATES}   # factors of the last steps in a row

    def add(self, summary: StepSummary) -> list[Drift]:
        """One more step; what has been off for long enough now."""
        drifts = []
        for link, factor in rate_factors(summary, self.hardware).items():
            off = self._off[link]
            if abs(factor - 1) <= MAX_ERROR or (off and (factor > 1) != (off[-1] > 1)):
                off.clear()
            if abs(factor - 1) > MAX_ERROR:
                off.append(factor)
            if len(off) == NUM_STEPS:
                mean = sum(off) / NUM_STEPS
                self.hardware = replace(self.hardware, **{name: getattr(self.hardware, name) * mean
                                                          for name in RATES[link]})
                drifts.append(Drift(link, mean, self.hardware))
                off.clear()
        return drifts


def rate_factors(summary: StepSummary, hardware: HardwareProfile) -> dict[str, float]:
    """Measured rate over expected, of the links that were busy enough to tell."""
    expected_s = {
        "ssd": _seconds(summary.nbytes["ssd_read"], hardware.ssd_read_bytes_per_s)
        + _seconds(summary.nbytes["ssd_write"], hardware.ssd_write_bytes_per_s),
        "h2d": _seconds(summary.nbytes["h2d"], hardware.h2d_bytes_per_s),
        "d2h": _seconds(summary.nbytes["d2h"], hardware.d2h_bytes_per_s),
        "cpu_update": _seconds(summary.nbytes["cpu_update"] / STATE_BYTES_PER_PARAM, hardware.cpu_update_params_per_s)}
    busy_s = {**summary.busy_s, "ssd": summary.ssd_busy_s}
    return {link: seconds / busy_s[link] for link, seconds in expected_s.items()
            if seconds and busy_s[link] >= LEAST_BUSY_SHARE * summary.total_s > 0}


def _seconds(amount: float, rate_per_s: float) -> float:
    return amount / rate_per_s if amount and rate_per_s else 0.0
