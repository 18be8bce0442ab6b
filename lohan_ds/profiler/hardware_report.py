"""`HardwareReport`: everything that was measured on a machine, and the `HardwareProfile` that follows from it."""
from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict
from rich import box
from rich.table import Table

from lohan_ds.planner.memory_model import format_bytes
from lohan_ds.profile import HardwareProfile
from lohan_ds.profiler.free_space import FreeBytes
from lohan_ds.profiler.links import LinkReport
from lohan_ds.profiler.rates import Rate
from lohan_ds.profiler.ssd import SsdRates, SsdReport
from lohan_ds.stripe import Stripe, even_stripe, shares_text, stripe_for, stripe_rate

FORMAT = 1                # of the file it is cached in
NOTHING_SHARED = 0.9      # of what drives do alone, when they do it together


class HardwareReport(BaseModel):
    """One machine with a set of SSD directories. Free memory is not part of it: it changes from minute to minute."""
    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = FORMAT
    made_at_s: float                       # seconds since the epoch
    seconds: float                         # that measuring took
    conditions: dict[str, str]             # what it holds for; see machine.py
    compute: dict[str, Rate]               # FLOP/s by dtype
    link: LinkReport | None                # None: the device's memory is host memory
    ssds: tuple[SsdReport, ...]
    ssds_together: SsdRates | None         # None: fewer than two
    cpu_update: Rate                       # parameters/s

    def profile(self, dtype: str, free: FreeBytes) -> HardwareProfile:
        """What the planner needs, for training in `dtype` with what is `free` now."""
        read, write = self._ssd_rates()
        return HardwareProfile(
            name=f"{self.conditions['host']} ({self.conditions['device']})",
            device_flops_per_s=self.compute[dtype].per_s,
            h2d_bytes_per_s=self.link.h2d_sustained_per_s if self.link else math.inf,
            d2h_bytes_per_s=self.link.d2h_sustained_per_s if self.link else math.inf,
            ssd_read_bytes_per_s=read, ssd_write_bytes_per_s=write,
            cpu_update_params_per_s=self.cpu_update.per_s,
            host_bytes=free.host, device_bytes=free.device, ssd_bytes=free.ssd, unified=self.link is None,
            num_ssds=len(self.ssds), ssd_stripe=() if self.stripe == even_stripe(len(self.ssds)) else self.stripe)

    @property
    def stripe(self) -> Stripe:
        """How data is best dealt to the directories: by the speed of each, reads and writes half each. Evenly where all
        together were slower than the slowest of them makes them, since then it is something that they share that binds.
        """
        if self.ssds_together is not None and min(self._kept("read"), self._kept("write")) < NOTHING_SHARED:
            return even_stripe(len(self.ssds))
        return stripe_for([2 / (1 / ssd.rates.read.per_s + 1 / ssd.kept_write_per_s) for ssd in self.ssds])

    @property
    def is_steady(self) -> bool:
        """Whether compute and update, which share cores with everybody else, went at one speed."""
        return all(rate.is_steady for rate in (*self.compute.values(), self.cpu_update))

    def _ssd_rates(self) -> tuple[float, float]:
        """Read and write of all directories together, with this stripe, for so long that fast caches do not matter."""
        if not self.ssds:
            return 0.0, 0.0
        read = self._kept("read") * stripe_rate(self.stripe, [ssd.rates.read.per_s for ssd in self.ssds])
        write = self._kept("write") * stripe_rate(self.stripe, [ssd.rates.write.per_s for ssd in self.ssds])
        return read, min(write, stripe_rate(self.stripe, [ssd.kept_write_per_s for ssd in self.ssds]))

    def _kept(self, verb: Literal["read", "write"]) -> float:
        """What all together did, evenly, of what the slowest alone lets them do."""
        if self.ssds_together is None:
            return 1.0
        alone = [getattr(ssd.rates, verb).per_s for ssd in self.ssds]
        return getattr(self.ssds_together, verb).per_s / stripe_rate(even_stripe(len(alone)), alone)


def hardware_table(report: HardwareReport, free: FreeBytes) -> Table:
    """Every measurement with its spread, then what is free."""
    table = Table("what", "rate", "lowest", "highest", "note", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
                  pad_edge=False, show_edge=False)
    for dtype, rate in report.compute.items():
        _row(table, f"compute, {dtype}", rate, "FLOP/s", report.conditions["device"])
    if report.link is None:
        table.add_row("host to device", "", "", "", "the device's memory is host memory: nothing to copy")
    else:
        note = "" if report.link.pinned else "not pinned: the system refused"
        _row(table, "host to device", report.link.h2d, "B/s", note)
        _row(table, "  while copying back", report.link.h2d_with_d2h, "B/s")
        _row(table, "device to host", report.link.d2h, "B/s", note)
        _row(table, "  while copying there", report.link.d2h_with_h2d, "B/s")
    for ssd in report.ssds:
        _ssd_rows(table, ssd)
    if report.ssds_together is not None:
        _rates_rows(table, f"{len(report.ssds)} SSD directories together", report.ssds_together, "evenly")
        table.add_row("  shares of the data", shares_text(report.stripe, len(report.ssds)), "", "", "in this order")
    _row(table, "CPU update", report.cpu_update, "params/s", f"{report.conditions['threads']} threads")
    table.add_row("free host memory", format_bytes(free.host), "", "", "under all cgroup limits")
    if report.link is not None:
        table.add_row("free device memory", format_bytes(free.device))
    if report.ssds:
        table.add_row("free on SSD", format_bytes(free.ssd), "", "", "evenly over all directories")
    return table


def _ssd_rows(table: Table, ssd: SsdReport) -> None:
    access = "O_DIRECT" if ssd.direct else "no O_DIRECT: the page cache, or RAM, is in these numbers"
    _rates_rows(table, ssd.path, ssd.rates, f"{ssd.file_system}, {access}")
    if ssd.sustained_write_per_s is None:
        table.add_row("  sustained write", "unknown", "", "",
                      f"did not slow down within {format_bytes(ssd.written_bytes)} written")
    else:
        table.add_row("  sustained write", f"{format_bytes(int(ssd.sustained_write_per_s))}/s", "", "",
                      "past the drive's fast cache")


def _rates_rows(table: Table, what: str, rates: SsdRates, note: str) -> None:
    table.add_row(what, "", "", "", note)
    _row(table, "  read", rates.read, "B/s")
    _row(table, "  write", rates.write, "B/s")
    _row(table, "  both at once", rates.mixed, "B/s", "read and written together, half each")


def _row(table: Table, what: str, rate: Rate, unit: str, note: str = "") -> None:
    note = "; ".join(part for part in (note, "" if rate.is_steady else "unsteady") if part)
    table.add_row(what, *(_per_s(value, unit) for value in (rate.per_s, rate.lowest_per_s, rate.highest_per_s)), note)


def _per_s(value: float, unit: str) -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.2f} {prefix}{unit}"
    return f"{value:.0f} {unit}"
