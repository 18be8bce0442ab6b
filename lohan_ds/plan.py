"""`OffloadPlan`: the decisions a run is carried out by. Frozen plain values, no torch."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tier = Literal["host", "ssd"]
# "eager" speculates in the backward of every step. "auto": the engine chooses step by step, eager while none of the
# last 20 steps was clipped, else deferred.
UpdateMode = Literal["serial", "deferred", "eager", "auto"]


@dataclass(frozen=True)
class OffloadPlan:
    """Where each block's bytes live and when they move. Never changes during a step."""
    param_tier: tuple[Tier, ...]       # by block index
    state_tier: tuple[Tier, ...]       # by block index (master, exp_avg, exp_avg_sq)
    update: UpdateMode
    prefetch_depth: int                # units fetched ahead of the one that computes
    chunk_numel: int                   # elements
    num_chunk_buffers: int             # of the update pipeline read | Adam | write
    accumulate_fp32: bool              # gradients are held in fp32 (several micro-steps), else in the param dtype
    shadow: bool = False               # every trained block has two slots, so an update can be dropped
