"""Named machines: hardware profiles as JSON files, every number with where it comes from.

    {"name": "...", "description": "...", "num_ssds": 2,
     "device_flops_per_s": {"value": 1.43e14, "source": "..."}, ...}

A number may also stand alone, without a source; a rate without a limit is the string "Infinity". The keys are the
fields of `HardwareProfile`, and one more: ssd_rated_write_bytes (the drives' TBW, all together). That one, num_ssds and
ssd_stripe (a list of directories, by number from 0) are optional.
"""
from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lohan_ds.errors import ConfigError
from lohan_ds.profile import HardwareProfile
from lohan_ds.stripe import Stripe

FOLDER = Path(__file__).with_name("machines")
RATES = ("device_flops_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s", "ssd_read_bytes_per_s", "ssd_write_bytes_per_s",
         "cpu_update_params_per_s")
SIZES = ("host_bytes", "device_bytes", "ssd_bytes")
COUNTS = ("num_ssds", "ssd_rated_write_bytes")   # optional
MAY_BE_ZERO = ("ssd_read_bytes_per_s", "ssd_write_bytes_per_s", "ssd_bytes", *COUNTS)
TEXTS = ("name", "description")
# Of what this machine has free, what a plan may use; the rest is for everybody else. The engine does the same.
HOST_SHARE, DEVICE_SHARE, SSD_SHARE = 0.9, 0.9, 0.95


@dataclass(frozen=True)
class Machine:
    """A hardware profile, its drives, and where each number comes from."""
    profile: HardwareProfile
    description: str
    num_ssds: int                 # 0 if unknown
    ssd_rated_write_bytes: int    # of all drives together; 0 if unknown
    sources: Mapping[str, str]    # by key; those without one are absent


def names() -> list[str]:
    """The machines that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name_or_path: str) -> Machine:
    """A machine that comes with the package, by name (with or without .json), or a file of the user's."""
    path = Path(name_or_path)
    if not path.exists():
        path = FOLDER / f"{name_or_path.removesuffix('.json')}.json"
    if not path.is_file():
        raise ConfigError(f"hardware {name_or_path!r}: no such file, and no machine of that name; "
                          f"there are {', '.join(names())}")
    try:
        return parse(json.loads(path.read_text()), str(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error


def parse(content: Any, where: str) -> Machine:
    """Checks every key; `where` names the file in messages."""
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: a JSON object is needed, got {type(content).__name__}")
    known = {*TEXTS, "unified", "ssd_stripe", *RATES, *SIZES, *COUNTS}
    if unknown := sorted(set(content) - known):
        raise ConfigError(f"{where}: unknown keys {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    if missing := sorted({"name", *RATES, *SIZES} - set(content)):
        raise ConfigError(f"{where}: keys are missing: {', '.join(missing)}")
    numbers = {key: _number(content[key], key, where) for key in (*RATES, *SIZES, *COUNTS) if key in content}
    unified = content.get("unified", False)
    if not isinstance(unified, bool):
        raise ConfigError(f"{where}: unified must be true or false, got {unified!r}")
    profile_numbers = {field.name: numbers[field.name] for field in fields(HardwareProfile) if field.name in numbers}
    stripe = _stripe(content.get("ssd_stripe", []), int(numbers.get("num_ssds", 0)), where)
    return Machine(HardwareProfile(name=str(content["name"]), unified=unified, ssd_stripe=stripe, **profile_numbers),
                   str(content.get("description", "")), int(numbers.get("num_ssds", 0)),
                   int(numbers.get("ssd_rated_write_bytes", 0)),
                   {key: value["source"] for key, value in content.items()
                    if isinstance(value, dict) and "source" in value})


def _stripe(entry: Any, num_ssds: int, where: str) -> Stripe:
    if not isinstance(entry, (list, tuple)) or any(type(p) is not int or not 0 <= p < num_ssds for p in entry):
        raise ConfigError(f"{where}: ssd_stripe must be a list of whole numbers from 0 to num_ssds - 1 "
                          f"({num_ssds - 1}), got {entry!r}")
    return tuple(entry)


def _number(entry: Any, key: str, where: str) -> float | int:
    """A number, alone or as {"value": ..., "source": ...}; whole for sizes and counts."""
    if isinstance(entry, dict):
        if set(entry) - {"value", "source"} or "value" not in entry:
            raise ConfigError(f'{where}: {key} must be a number or {{"value": ..., "source": ...}}, got {entry!r}')
        entry = entry["value"]
    entry = math.inf if entry == "Infinity" and key in RATES else entry
    if isinstance(entry, bool) or not isinstance(entry, (int, float)) or math.isnan(entry):
        raise ConfigError(f"{where}: {key} must be a number, got {entry!r}")
    if entry < 0 or (entry == 0 and key not in MAY_BE_ZERO):
        raise ConfigError(f"{where}: {key} must be {'at least' if key in MAY_BE_ZERO else 'more than'} 0, got {entry}")
    if key in RATES:
        return float(entry)
    if not float(entry).is_integer():
        raise ConfigError(f"{where}: {key} must be a whole number, got {entry}")
    return int(entry)
