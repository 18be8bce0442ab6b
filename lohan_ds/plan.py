"""`OffloadPlan`: the decisions a run is carried out by. Frozen plain values, no torch."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lohan_ds.block import Block
from lohan_ds.stripe import Stripe

Tier = Literal["host", "ssd"]
# Whether the run survives its process: "shadow" at the last committed step, whenever it ends; "in_place" only where it
# was closed in good order.
Durability = Literal["none", "shadow", "in_place"]
# "eager" speculates in the backward of every step. "auto": the engine chooses step by step, eager while none of the
# last 20 steps was clipped, else deferred.
UpdateMode = Literal["serial", "deferred", "eager", "auto"]
ActivationPolicy = Literal["keep", "swap_host", "swap_ssd", "recompute"]
NUM_GRADIENT_SUM_BUFFERS = 4   # of sums of squares on their way from the device
_MAX_GRADIENT_STAGING_BYTES = 64 << 20   # larger gradients are one large copy anyway


def gradient_staging_bytes(blocks: Iterable[Block]) -> int:
    """Of one device buffer in which a block's gradients are packed; larger blocks take several. 0: none has several."""
    several = [b.param_bytes for b in blocks if b.trainable and len(b.slots) > 1]
    return min(_MAX_GRADIENT_STAGING_BYTES, max(several, default=0))


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


TILE_TOKENS = 512
WHOLE_LOGITS_SHARE = 1 / 16   # of the device's memory: what whole logits may take where nobody says how to compute them


@dataclass(frozen=True)
class LossTiles:
    """When head and loss of a language model are computed over a few tokens at a time."""
    tile_tokens: int                   # tokens at a time
    whole_logits_bytes: int = 0        # logits that take no more are computed at once; 0: always in tiles
    workspace_bytes: int = 0           # on the device, of one tile's logits and a trained head's gradient in fp32

    def apply_to(self, tokens: int, vocabulary_size: int, element_bytes: int) -> bool:
        """Whether a batch is computed in tiles."""
        return logits_bytes(tokens, vocabulary_size, element_bytes) > self.whole_logits_bytes

    @property
    def is_automatic(self) -> bool:
        return self.whole_logits_bytes > 0


def logits_bytes(tokens: int, vocabulary_size: int, element_bytes: int) -> int:
    """Of whole logits at the peak: as the head gives them, in fp32, and the gradient of that."""
    return tokens * vocabulary_size * (element_bytes + 4 + 4)


def loss_tiles(tile_tokens: int | None, device_bytes: int, vocabulary_size: int, hidden_size: int,
               element_bytes: int, trains_head: bool) -> LossTiles:
    """As asked for; with None only where whole logits take much of the device's memory."""
    num_tokens = tile_tokens or TILE_TOKENS
    whole_bytes = 0 if tile_tokens else int(WHOLE_LOGITS_SHARE * device_bytes)
    workspace_bytes = logits_bytes(num_tokens, vocabulary_size, element_bytes)
    if trains_head:
        workspace_bytes += 4 * vocabulary_size * hidden_size
    return LossTiles(num_tokens, whole_bytes, workspace_bytes)


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
    num_read_ahead_chunks: int = 0     # of optimizer state on SSD, of the first blocks, read in backward
    loss_tiles: LossTiles | None = None   # None: logits are always whole
    stripe: Stripe = ()                # over the SSD directories; empty: evenly
