"""What each tier has free for this process right now."""
from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lohan_ds.errors import StoreError
from lohan_ds.memory.budget import available_host_bytes


class FreeBytes(NamedTuple):
    host: int      # under every cgroup limit
    device: int    # of an accelerator's own memory; the host's where it is one
    ssd: int       # that data striped evenly over all directories finds room for


def free_bytes_of_tiers(device: torch.device, ssd_paths: Sequence[str]) -> FreeBytes:
    host = available_host_bytes()
    on_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host
    drives = [drive_of(path) for path in ssd_paths]
    shares = [free_bytes(path) // drives.count(drive) for path, drive in zip(ssd_paths, drives)]
    return FreeBytes(host, on_device, len(shares) * min(shares, default=0))


def free_bytes(path: str) -> int:
    """Bytes free on the drive of a directory. StoreError if it cannot be told."""
    try:
        return shutil.disk_usage(path).free
    except OSError as error:
        raise StoreError(error.errno, f"is not a usable SSD directory: {error.strerror}", path) from error


def drive_of(path: str) -> int:
    """The number of the device that a directory is on. StoreError if it cannot be told."""
    try:
        return os.stat(path).st_dev
    except OSError as error:
        raise StoreError(error.errno, f"is not a usable SSD directory: {error.strerror}", path) from error
