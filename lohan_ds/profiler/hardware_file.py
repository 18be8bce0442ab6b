"""A `HardwareProfile` as a JSON file: what `lohan profile --json` writes and `lohan plan --hardware` reads. No torch.

    {"name": "desk", "device_flops_per_s": 1.4e14, "h2d_bytes_per_s": 2.1e10, ..., "unified": false}

The keys are the fields of HardwareProfile. A rate that has no limit is the string "Infinity".
"""
from __future__ import annotations

import json
import math
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from lohan_ds.errors import ConfigError
from lohan_ds.profile import HardwareProfile

_MAY_BE_ZERO = ("ssd_read_bytes_per_s", "ssd_write_bytes_per_s", "ssd_bytes")   # there is no SSD
_KINDS = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float)}


def dump_profile(profile: HardwareProfile) -> str:
    """As JSON text."""
    values = {name: "Infinity" if value == math.inf else value for name, value in asdict(profile).items()}
    return json.dumps(values, indent=2)


def save_profile(profile: HardwareProfile, path: str | Path) -> None:
    """OSError if the file cannot be written."""
    Path(path).write_text(dump_profile(profile) + "\n")


def load_profile(path: str | Path) -> HardwareProfile:
    """ConfigError, naming the file and the key, if it is not there or not a hardware profile."""
    try:
        values = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: is not a readable JSON file: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must be an object with the keys of a hardware profile, got {values!r:.60}")
    known = {field.name: field for field in fields(HardwareProfile)}
    for name in values:
        if name not in known:
            raise ConfigError(f"{path}: {name}: there is no such key; the keys are {', '.join(known)}")
    for name, field in known.items():
        if name in values:
            values[name] = _checked(path, name, field.type, values[name])
        elif field.default is MISSING:
            raise ConfigError(f"{path}: {name}: missing")
    return HardwareProfile(**values)


def _checked(path: str | Path, name: str, kind: str, value: Any) -> Any:
    """`kind` is the field's type by its name in the source."""
    if value == "Infinity" and kind == "float":
        value = math.inf
    if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise ConfigError(f"{path}: {name}: must be a {kind}, got {value!r}")
    if kind in ("int", "float"):
        smallest_is_zero = name in _MAY_BE_ZERO
        if not (value >= 0 if smallest_is_zero else value > 0):
            raise ConfigError(f"{path}: {name}: must be {'at least' if smallest_is_zero else 'more than'} 0, "
                              f"got {value!r}")
    return float(value) if kind == "float" else value
