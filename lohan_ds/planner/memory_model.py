"""Bytes each tier needs under a plan, item by item, and the table that shows them. No torch.

Not here: the user's own data, and activations unless the plan knows them: those depend on the batch. The table says so.

Worked size: 32 Llama-7B layers (bf16; 405 MB of params and 2.43 GB of state each), everything on the host, GPU,
prefetch_depth 2: host 13.0 GB params + 77.7 GB state + 13.0 GB held gradients + 1.6 GB staging buffers
(4 layers), device 1.6 GB of resident layers and 0.4 GB of gradients on their way. Shadow slots: 90.7 GB more.
"""
from __future__ import annotations

from dataclasses import dataclass

from lohan_ds.block import DTYPE_BYTES, Block, round_up
from lohan_ds.plan import NUM_GRADIENT_SUM_BUFFERS, OffloadPlan, gradient_staging_bytes
from lohan_ds.profile import Budgets, MemoryTier, ModelSize

IO_ALIGN_BYTES = 4096
NORM_SEGMENT_NUMEL = 16384   # elements for each sum of squares, as in ops/grad_accumulate.py
MEMORY_TIERS: tuple[MemoryTier, ...] = ("host", "device", "ssd")
NOT_INCLUDED = "Not included: activations, logits and your own data; leave room for them in host and device memory."
DATA_NOT_INCLUDED = "Not included: your own data and libraries; leave room for them in host and device memory."
DEVICE_ACTIVATIONS = "activations, the running unit's included"


def num_chunk_buffers(num_ssds: int) -> int:
    """Of the update pipeline read | Adam | write. A chunk lies on one drive: each has one to read and one to write."""
    return 2 * max(num_ssds, 1) + 1


def num_spill_buffers(num_ssds: int) -> int:
    """Between device and SSD: each drive has one to write and one to read, and one each is copied out and in."""
    return 2 * max(num_ssds, 1) + 2


@dataclass(frozen=True)
class Need:
    """One item of what a plan needs."""
    tier: MemoryTier
    what: str
    nbytes: int


def needs(model: ModelSize, plan: OffloadPlan, unified: bool) -> list[Need]:
    """Every item of more than 0 bytes. With `unified`, device items are charged to the host.

    Chunk sizes come from `plan.chunk_numel`, not from the blocks, so a plan can be weighed before blocks are
    rebuilt. Grows with `prefetch_depth`, `chunk_numel` and `shadow`, never shrinks; the search relies on that.
    """
    items = [*_at_rest(model, plan), *_for_store(model, plan), *_for_update(model, plan),
             *_for_compute(model, plan, unified), *_for_activations(plan, unified), *_for_loss(plan, unified)]
    return [item for item in items if item.nbytes > 0]


def total_bytes(items: list[Need]) -> dict[MemoryTier, int]:
    """Bytes needed per tier; every tier is a key."""
    return {tier: sum(item.nbytes for item in items if item.tier == tier) for tier in MEMORY_TIERS}


def missing_bytes(items: list[Need], budgets: Budgets) -> dict[MemoryTier, int]:
    """Bytes lacking per tier, 0 where the tier is big enough; every tier is a key."""
    return {tier: max(0, needed - budgets.available_bytes(tier)) for tier, needed in total_bytes(items).items()}


def _at_rest(model: ModelSize, plan: OffloadPlan) -> list[Need]:
    """Parameters and optimizer state where they live between uses; shadow slots are a second copy of the trained."""
    items = []
    for tier in ("host", "ssd"):
        param_bytes = sum(b.param_bytes for b in model.blocks if plan.param_tier[b.index] == tier)
        state_bytes = sum(b.state_bytes for b in model.blocks if plan.state_tier[b.index] == tier)
        shadow_bytes = sum((b.param_bytes if plan.param_tier[b.index] == tier else 0)
                           + (b.state_bytes if plan.state_tier[b.index] == tier else 0)
                           for b in model.blocks if b.trainable and plan.shadow)
        items += [Need(tier, "parameters", param_bytes), Need(tier, "optimizer state", state_bytes),
                  Need(tier, "shadow slots", shadow_bytes)]
    return items


def _for_store(model: ModelSize, plan: OffloadPlan) -> list[Need]:
    """The store's one buffer for what is not aligned: what lies on SSD of the largest chunk, of frozen blocks too."""
    nbytes = max(min(plan.chunk_numel, b.numel)
                 * ((DTYPE_BYTES[b.dtype] if plan.param_tier[b.index] == "ssd" else 0)
                    + (4 * len(b.state_kinds) if plan.state_tier[b.index] == "ssd" else 0)) for b in model.blocks)
    return [Need("host", "staging buffer of the store (1 chunk)", nbytes)]


def _for_update(model: ModelSize, plan: OffloadPlan) -> list[Need]:
    """Held gradients and the buffers of the pipeline read | Adam | write; all of it host memory."""
    trainable = [b for b in model.blocks if b.trainable]
    gradients = sum(b.numel * (4 if plan.accumulate_fp32 else DTYPE_BYTES[b.dtype]) for b in trainable)
    record_bytes = update_buffer_bytes(model, plan)
    scratch_numel = max((min(plan.chunk_numel, b.numel) for b in trainable), default=0)
    return [Need("host", "gradients held until the update", gradients),
            Need("host", f"update buffers ({plan.num_chunk_buffers} chunks)", plan.num_chunk_buffers * record_bytes),
            Need("host", f"state read ahead ({plan.num_read_ahead_chunks} chunks)",
                 plan.num_read_ahead_chunks * record_bytes),
            Need("host", "fp32 gradient of one chunk", scratch_numel * 4)]


def _for_activations(plan: OffloadPlan, unified: bool) -> list[Need]:
    """Where activations are swapped to, and what is on the device if the plan knows it."""
    swap, device = plan.activations, "host" if unified else "device"
    return [Need("host", "swapped activations", 0 if unified else swap.host_bytes),
            Need("host", f"buffers of swapped activations ({swap.num_buffers})", swap.num_buffers * swap.buffer_bytes),
            Need("ssd", "swapped activations", swap.ssd_bytes), Need(device, DEVICE_ACTIVATIONS, swap.device_bytes)]


def _for_loss(plan: OffloadPlan, unified: bool) -> list[Need]:
    """Of a loss that is always computed in tiles. Whole logits depend on the batch."""
    tiles = plan.loss_tiles
    nbytes = 0 if tiles is None or tiles.is_automatic else tiles.workspace_bytes
    return [Need("host" if unified else "device", "loss: one tile's logits, fp32 gradient of the head", nbytes)]


def update_buffer_bytes(model: ModelSize, plan: OffloadPlan) -> int:
    """Of one chunk buffer of the update; 0 when no trained block is on SSD."""
    on_ssd = [b for b in model.blocks if b.trainable and "ssd" in (plan.state_tier[b.index], plan.param_tier[b.index])]
    return max((chunk_record_bytes(b, plan.chunk_numel) for b in on_ssd), default=0)


def chunk_record_bytes(block: Block, chunk_numel: int) -> int:
    """Bytes of the largest chunk's state arrays and params, as read from and written to the SSD."""
    numel = min(chunk_numel, block.numel)
    return (round_up(numel * 4 * len(block.state_kinds), IO_ALIGN_BYTES)
            + round_up(numel * DTYPE_BYTES[block.dtype], IO_ALIGN_BYTES))


def _for_compute(model: ModelSize, plan: OffloadPlan, unified: bool) -> list[Need]:
    """Resident parameters, their staging buffers, and gradients on their way to the held ones.

    Resident at once: the unit that computes, `prefetch_depth` ahead of it, 1 behind; never more than the whole
    model, because units may share blocks. A gradient exists twice on a separate device (one being produced, one
    being copied to the host), once where the memory is the host's. Where gradients are not accumulated, small ones
    are packed there: some are waiting, two buffers are on their way.
    """
    device: MemoryTier = "host" if unified else "device"
    num_resident = plan.prefetch_depth + 2
    unit_bytes = sorted((sum(model.blocks[i].param_bytes for i in unit) for unit in model.units), reverse=True)
    resident = min(sum(unit_bytes[:num_resident]), sum(b.param_bytes for b in model.blocks))
    grad_bytes = model.largest_param_numel * max((DTYPE_BYTES[b.dtype] for b in model.blocks if b.trainable), default=0)
    staging = 0 if unified else num_resident * max(b.param_bytes for b in model.blocks)
    grad_staging = 0 if unified or not grad_bytes else 2 * model.largest_param_numel * 4
    packing = 0 if unified or plan.accumulate_fp32 else gradient_staging_bytes(model.blocks)
    num_sums = max((sum(-(-slot.numel // NORM_SEGMENT_NUMEL) for slot in b.slots) for b in model.blocks
                    if b.trainable), default=0)
    sums_bytes = NUM_GRADIENT_SUM_BUFFERS * round_up(8 * num_sums, IO_ALIGN_BYTES)
    return [Need("host", f"staging buffers ({num_resident} blocks)", staging),
            Need("host", "staging buffers (2 gradients)", grad_staging),
            Need("host", "sums of squares of packed gradients", sums_bytes if packing else 0),
            Need(device, "gradients being packed (3 buffers)", 3 * packing),
            Need(device, f"resident parameters ({num_resident} units)", resident),
            Need(device, "gradients of the largest parameter", grad_bytes * (1 if unified else 2))]


def format_bytes(nbytes: int) -> str:
    """"1.50 GB": decimal units, so that small models do not read as 0.00 GB."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


def table(items: list[Need], budgets: Budgets) -> str:
    """Needed against available, per tier: each item, the sum, where the budget comes from, and the verdict."""
    totals, missing = total_bytes(items), missing_bytes(items, budgets)
    rows = [("tier", "what", "needed", "available", "verdict")]
    for tier in MEMORY_TIERS:
        if tier == "device" and budgets.unified:
            rows.append((tier, "is host memory, counted there", "", "", ""))
            continue
        rows += [(tier, item.what, format_bytes(item.nbytes), "", "") for item in items if item.tier == tier]
        verdict = f"MISSING {format_bytes(missing[tier])}" if missing[tier] else "fits"
        available = f"{format_bytes(budgets.available_bytes(tier))} ({budgets.source(tier)})"
        rows.append((tier, "sum", format_bytes(totals[tier]), available, verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = []
    for row in rows:
        cells = [row[i].rjust(widths[i]) if i == 2 else row[i].ljust(widths[i]) for i in range(5)]
        lines.append("  ".join(cells).rstrip())
    knows_activations = any(item.what == DEVICE_ACTIVATIONS for item in items)
    return "\n".join([*lines, DATA_NOT_INCLUDED if knows_activations else NOT_INCLUDED])
