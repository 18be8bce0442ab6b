"""Facts a plan is made from: how big the model is and what the machine has. Values only, no torch.

Not decisions (those are `OffloadPlan`) and not knobs (those are the config).
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lohan_ds.block import Block
from lohan_ds.stripe import Stripe

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


@dataclass(frozen=True)
class HardwareProfile:
    """Rates and sizes of one machine, measured (`lohan profile`) or named in a file (`lohan plan --hardware`).

    Rates are sustained, of this one process. The host-device link is duplex: its two directions do not disturb each
    other. An SSD is simplex: times of reads and writes add.
    """
    name: str
    device_flops_per_s: float            # of the model's matrix products in the training dtype
    h2d_bytes_per_s: float               # host to device, pinned; math.inf when `unified`
    d2h_bytes_per_s: float               # device to host
    ssd_read_bytes_per_s: float          # of all SSD directories together; 0: there is none
    ssd_write_bytes_per_s: float
    cpu_update_params_per_s: float       # of the CPU Adam, everything in host RAM
    host_bytes: int                      # this process may use
    device_bytes: int
    ssd_bytes: int
    unified: bool = False                # the device's memory is host memory (a CPU as accelerator)
    num_ssds: int = 0                    # directories, each taken for a drive of its own; 0: unknown, as 1
    ssd_stripe: Stripe = ()              # over these directories, that the SSD rates are of; empty: even


@dataclass(frozen=True)
class ActivationItem:
    """What one operator inside a block saves for backward, or the block's input. All bytes are of one micro-batch."""
    name: str                            # within the block, e.g. "mlp.down_proj"; "input" for the block's input
    nbytes: int
    recompute_flops: float               # to make it again from the items before it; 0 for "input"
    is_input: bool = False               # the block's input: never recomputed
    is_outside: bool = False             # saved outside of units, or around them, as for the loss: can only be kept


@dataclass(frozen=True)
class UnitProfile:
    """One unit (what runs forward as a whole: a layer, the embedding, the head), in forward order."""
    name: str
    unit_class: str                      # units of equal class and shapes are alike
    blocks: tuple[int, ...]              # indexes into ModelSize.blocks
    forward_flops: float                 # of one micro-batch; backward is twice that
    items: tuple[ActivationItem, ...]    # all that its forward saves for backward
    output_bytes: int
    workspace_bytes: int                 # peak of temporaries beyond parameters, items and output


@dataclass(frozen=True)
class ModelProfile:
    """What a model costs to run, found without running it (`profiler/model.py`)."""
    size: ModelSize
    units: tuple[UnitProfile, ...]       # as many as size.units
    micro_batch: int                     # sequences
    sequence_length: int                 # tokens per sequence
