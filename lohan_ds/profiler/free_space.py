"""What each tier has free for this process right now."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from lohan_ds.memory.budget import available_host_bytes
from lohan_ds.store.free_space import striped_free_bytes


class FreeBytes(NamedTuple):
    host: int      # under every cgroup limit
    device: int    # of an accelerator's own memory; the host's where it is one
    ssd: int       # that data striped evenly over all directories finds room for


def free_bytes_of_tiers(device: torch.device, ssd_paths: Sequence[str]) -> FreeBytes:
    host = available_host_bytes()
    on_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host
    return FreeBytes(host, on_device, striped_free_bytes(ssd_paths))
