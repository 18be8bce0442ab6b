"""Which machine this is, and under what conditions its measurements hold."""
from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Sequence

import torch

from lohan_ds.store.free_space import drive_of
from lohan_ds.store.direct_io import file_system_type


def conditions(device: torch.device, ssd_paths: Sequence[str]) -> dict[str, str]:
    """By name; measurements made when any of them was different are out of date. Free space is not among them."""
    found = {"host": platform.node(), "cpu": _cpu_model(), "cores": str(len(os.sched_getaffinity(0))),
             "threads": str(torch.get_num_threads()), "device": _device_name(device), "torch": torch.__version__,
             "lohan_ds": importlib.metadata.version("lohan_ds")}
    for path in ssd_paths:
        drive = drive_of(path)
        found[f"drive of {os.path.realpath(path)}"] = (f"{os.major(drive)}:{os.minor(drive)} "
                                                       f"{file_system_type(path)}")
    return found


def machine_key(device: torch.device, ssd_paths: Sequence[str]) -> str:
    """A file name's worth of machine, device and directories, in any order."""
    parts = [_machine_id(), platform.node(), device.type, *sorted(os.path.realpath(path) for path in ssd_paths)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _machine_id() -> str:
    try:
        with open("/etc/machine-id") as file:
            return file.read().strip()
    except OSError:
        return ""
