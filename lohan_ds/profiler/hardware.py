"""`profile_hardware`: the rates of this machine, measured by the product's own code or taken from the cache."""
from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lohan_ds.block import DTYPE_BYTES
from lohan_ds.config import AUTOMATIC
from lohan_ds.errors import ConfigError
from lohan_ds.profile import HardwareProfile
from lohan_ds.profiler.compute import measure_compute
from lohan_ds.profiler.cpu_update import measure_cpu_update
from lohan_ds.profiler.free_space import FreeBytes, free_bytes_of_tiers
from lohan_ds.profiler.hardware_cache import cache_directory, cache_file, load, save, why_stale
from lohan_ds.profiler.hardware_report import HardwareReport
from lohan_ds.profiler.links import LinkReport, measure_link
from lohan_ds.profiler.machine import conditions, machine_key
from lohan_ds.profiler.rates import Rate
from lohan_ds.profiler.ssd import SsdLimits, measure_ssds
from lohan_ds.runtime.streams import make_streams
from lohan_ds.stripe import Stripe

Progress = Callable[[str], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What measuring may take; with the defaults it is over in less than a minute."""
    compute_s: float = 4.0       # for each dtype
    link_s: float = 6.0
    cpu_update_s: float = 4.0
    ssd: SsdLimits = SsdLimits()


def profile_hardware(ssd_paths: Sequence[str] = (), dtype: str = "bfloat16", refresh: bool = False,
                     device: torch.device | None = None, limits: Limits = Limits(),
                     progress: Progress = lambda what: None,
                     cache: Path | None = None) -> tuple[HardwareProfile, HardwareReport, FreeBytes]:
    """Rates of this machine for training in `dtype` with these SSD directories, and what every tier has free now.

    Measured if the cache has nothing that still holds, or on `refresh`; `progress` is told each thing that is about to
    be measured. device: where the model computes; the first GPU, else the CPU. cache: a directory; None: the user's.
    ConfigError for a dtype or directory that cannot be used, CapacityError if a drive is too full to measure.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype: got {dtype!r}, supported are {', '.join(DTYPE_BYTES)}")
    for path in ssd_paths:
        if not os.path.isdir(path):
            raise ConfigError(f"{path}: is not a directory; name existing directories on SSDs")
    device = device or torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    file = cache_file(cache or cache_directory(), machine_key(device, ssd_paths))
    here = conditions(device, ssd_paths)
    report = None if refresh else _still_good(load(file), here, ssd_paths)
    known = report
    if report is None:
        report = _measure(device, [os.path.abspath(path) for path in ssd_paths], dtype, here, limits, progress)
    elif dtype not in report.compute:
        rate = _compute_rate(device, dtype, limits, progress)
        report = report.model_copy(update={"compute": {**report.compute, dtype: rate}})
    if report is not known:
        _try_save(file, report)
    free = free_bytes_of_tiers(device, ssd_paths)
    return report.profile(dtype, free), report, free


def cached_profile(ssd_paths: Sequence[str], dtype: str, device: torch.device,
                   cache: Path | None = None) -> HardwareProfile | None:
    """As `profile_hardware` if that would measure nothing, else None."""
    file = cache_file(cache or cache_directory(), machine_key(device, ssd_paths))
    report = _still_good(load(file), conditions(device, ssd_paths), ssd_paths)
    if report is None or dtype not in report.compute:
        return None
    return report.profile(dtype, free_bytes_of_tiers(device, ssd_paths))


def cached_stripe(ssd_paths: Sequence[str], device: torch.device, cache: Path | None = None) -> Stripe:
    """That suits the speeds of these directories, in their order; empty if they were not measured."""
    file = cache_file(cache or cache_directory(), machine_key(device, ssd_paths))
    report = _still_good(load(file), conditions(device, ssd_paths), ssd_paths)
    return () if report is None else report.stripe


def _still_good(report: HardwareReport | None, here: dict[str, str],
                ssd_paths: Sequence[str]) -> HardwareReport | None:
    """With the directories in the order of `ssd_paths`: it may have been measured in another."""
    if report is None:
        return None
    by_path = {os.path.realpath(ssd.path): ssd for ssd in report.ssds}
    ssds = [by_path.get(os.path.realpath(path)) for path in ssd_paths]
    reason = why_stale(report, here)
    if reason is None and None not in ssds:
        return report.model_copy(update={"ssds": tuple(ssds)})
    reason = reason or "its directories had other names"   # links that point elsewhere now
    logger.info("this machine is measured again: %s", reason)
    return None


def _measure(device: torch.device, ssd_paths: Sequence[str], dtype: str, here: dict[str, str], limits: Limits,
             progress: Progress) -> HardwareReport:
    start = time.perf_counter()
    ssds, together = measure_ssds(ssd_paths, limits.ssd, progress) if ssd_paths else ((), None)   # what may not fit
    compute = {dtype: _compute_rate(device, dtype, limits, progress)}
    link = _link(device, limits, progress)
    progress("CPU update; the first time its operator may be compiled")
    cpu_update = measure_cpu_update(limits.cpu_update_s, AUTOMATIC["chunk_bytes"])
    return HardwareReport(made_at_s=time.time(), seconds=time.perf_counter() - start, conditions=here,
                          compute=compute, link=link, ssds=ssds, ssds_together=together, cpu_update=cpu_update)


def _compute_rate(device: torch.device, dtype: str, limits: Limits, progress: Progress) -> Rate:
    progress(f"compute, {dtype}")
    return measure_compute(device, getattr(torch, dtype), limits.compute_s)


def _link(device: torch.device, limits: Limits, progress: Progress) -> LinkReport | None:
    streams = make_streams(device)
    try:
        if streams.unified:
            return None
        progress("host and device, copies both ways")
        return measure_link(streams, device, limits.link_s)
    finally:
        streams.close()


def _try_save(file: Path, report: HardwareReport) -> None:
    try:
        save(file, report)
    except OSError as error:
        logger.warning("the measurements cannot be kept for the next time: %s", error)
