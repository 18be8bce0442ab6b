"""What the drives of some directories have room for."""
from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Sequence

from lohan_ds.errors import StoreError
from lohan_ds.stripe import Stripe, even_stripe


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


def striped_free_bytes(paths: Sequence[str], stripe: Stripe = ()) -> int:
    """What data striped over `paths` finds room for until the first drive is full; 0 for none. Empty `stripe`: evenly.
    """
    stripe = stripe or even_stripe(len(paths))
    drives = [drive_of(path) for path in paths]
    free = {drive: free_bytes(path) for path, drive in zip(paths, drives)}
    places = Counter(drives[index] for index in stripe)
    return min((free[drive] * len(stripe) // count for drive, count in places.items()), default=0)
