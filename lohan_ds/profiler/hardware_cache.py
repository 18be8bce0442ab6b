"""Where a `HardwareReport` is kept between runs: one file per machine, device and set of SSD directories."""
from __future__ import annotations

import os
import time
from pathlib import Path

from pydantic import ValidationError

from lohan_ds.profiler.hardware_report import HardwareReport

MAX_AGE_S = 30 * 24 * 3600.0


def cache_directory() -> Path:
    """The user's, after XDG_CACHE_HOME. Not created."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lohan_ds"


def cache_file(directory: Path, key: str) -> Path:
    return directory / f"hardware-{key}.json"


def load(path: Path) -> HardwareReport | None:
    """None if there is none that can be read, or none of this version."""
    try:
        return HardwareReport.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None


def save(path: Path, report: HardwareReport) -> None:
    """Mode 0600; other processes see the old file or the new one, never half of one. OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unnamed = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        fd = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with open(fd, "w") as file:
            file.write(report.model_dump_json(indent=1))
        os.replace(unnamed, path)
    finally:
        unnamed.unlink(missing_ok=True)


def why_stale(report: HardwareReport, conditions: dict[str, str]) -> str | None:
    """Why a report does not hold any more, None if it does."""
    age_s = time.time() - report.made_at_s
    if not 0 <= age_s <= MAX_AGE_S:
        return f"measured {age_s / 86400:.0f} days ago"
    for name in sorted(report.conditions.keys() | conditions.keys()):
        was, now = report.conditions.get(name), conditions.get(name)
        if was != now:
            return f"{name} was {was}, is {now}"
    return None
