"""`OffloadPlan`: the decisions a run is carried out by. Frozen plain values, no torch."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tier = Literal["host", "ssd"]
# Whether the run survives its process: "shadow" at the last committed step, whenever it ends; "in_place" only where it
# was closed in good order.
Durability = Literal["none", "shadow", "in_place"]
# "eager" speculates in the backward of every step. "auto": the engine chooses step by step, eager while none of the
# last 20 steps was clipped, else deferred.
UpdateMode = Literal["serial", "deferred", "eager", "auto"]
ActivationPolicy = Literal["keep", "swap_host", "swap_ssd", "recompute"]


@dataclass(frozen=True)
class ActivationPlan:
    """What becomes of what autograd saves from forward to backward. By default all of it stays where it is.

    An *item* is what one module of a unit produces: its output, and what its own code computes outside of its
    children. Its name is the module's path inside the unit ("mlp.down_proj"), "forward" for the unit's own code, and
    "input" for the tensors that the unit is called with. Only what autograd saves takes space: an item that it does not
    save costs nothing where it is kept, and is computed again where something after it is recomputed.
    """
    policies: tuple[tuple[tuple[str, ActivationPolicy], ...], ...] = ()
    """(item, policy) of each unit, by unit index. A path that is not named does as its nearest parent, at last as ""
    (the whole unit), as "forward" does; "input" does as "" where that swaps. What nobody names is kept. An input cannot
    be recomputed."""
    host_bytes: int = 0                # of host memory for "swap_host"; each item is rounded up to 4096
    ssd_bytes: int = 0                 # of SSD space for "swap_ssd", over all directories; likewise
    num_buffers: int = 0               # host buffers between device and SSD, at least 1 for "swap_ssd"
    buffer_bytes: int = 0              # of each of them, a multiple of 4096; larger items pass in pieces
    smallest_swap_bytes: int = 4096    # what is smaller is kept
    device_bytes: int = 0              # of device memory for what is kept, on its way or running; 0: unknown


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
    activations: ActivationPlan = ActivationPlan()
    durability: Durability = "none"    # any other needs every tier on SSD; "shadow" needs `shadow`
    num_read_ahead_chunks: int = 0     # of optimizer state on SSD, read in backward when updates wait for step()
