"""What the drives of some directories have room for."""
from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from lohan_ds.errors import StoreError


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


def striped_free_bytes(paths: Sequence[str]) -> int:
    """What data striped evenly over `paths` finds room for: as many times the smallest share of a path; 0 for none."""
    drives = [drive_of(path) for path in paths]
    shares = [free_bytes(path) // drives.count(drive) for path, drive in zip(paths, drives)]
    return len(shares) * min(shares, default=0)
