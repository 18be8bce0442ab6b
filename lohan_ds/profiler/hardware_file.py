"""A `HardwareProfile` as JSON: what `lohan profile --json` writes; planner/machines.py reads it. No torch.

The keys are the fields of HardwareProfile. A rate that has no limit is the string "Infinity".
"""
from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

from lohan_ds.profile import HardwareProfile


def dump_profile(profile: HardwareProfile) -> str:
    """As JSON text."""
    values = {name: "Infinity" if value == math.inf else value for name, value in asdict(profile).items()}
    return json.dumps(values, indent=2)


def save_profile(profile: HardwareProfile, path: str | Path) -> None:
    """OSError if the file cannot be written."""
    Path(path).write_text(dump_profile(profile) + "\n")
