"""How many CPU threads work on updates and on gradients that have come off the accelerator."""
from __future__ import annotations

import os

import psutil
import torch


def num_update_threads(device: torch.device, wanted: int | None) -> int | None:
    """`wanted` where the user says so. None, torch's number, where the CPU computes too.

    Beside an accelerator all physical cores that this process may use but one, which launches kernels. Torch's number
    is no measure there: launchers set OMP_NUM_THREADS to 1, which would make updates as slow as one core.
    """
    if wanted is not None or device.type == "cpu":
        return wanted
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed) - 1)
