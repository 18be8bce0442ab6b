"""Facts a plan is made from: how big the model is and what the machine has. Values only, no torch.

Not decisions (those are `OffloadPlan`) and not knobs (those are the config).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lohan_ds.block import Block

MemoryTier = Literal["host", "device", "ssd"]


@dataclass(frozen=True)
class ModelSize:
    """What `split_into_blocks` found. The only size table of a model."""
    blocks: tuple[Block, ...]            # in forward order; at least one
    units: tuple[tuple[int, ...], ...]   # by unit, the indexes of the blocks it needs to run
    largest_param_numel: int             # elements of the model's largest single parameter


@dataclass(frozen=True)
class Budgets:
    """Bytes this process may use per tier, and for messages where each number comes from."""
    host_bytes: int
    device_bytes: int       # not looked at when `unified`
    ssd_bytes: int          # free on all SSD paths together; 0 = no SSD
    unified: bool           # accelerator memory is host memory: what the device needs is charged to the host
    host_source: str        # e.g. "lohan.host_memory" or "available RAM under the cgroup limit"
    device_source: str
    ssd_source: str

    def available_bytes(self, tier: MemoryTier) -> int:
        return {"host": self.host_bytes, "device": self.device_bytes, "ssd": self.ssd_bytes}[tier]

    def source(self, tier: MemoryTier) -> str:
        return {"host": self.host_source, "device": self.device_source, "ssd": self.ssd_source}[tier]
