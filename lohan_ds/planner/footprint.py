"""Bytes each tier needs under a placement: what lies there, what is on its way, what the running unit works in.

Parameters, gradients and buffers of the runtime are counted by `memory_model`; this adds activations and turns
everything into counts. Linear in the counts except for two things, which `in_flight_bytes` and `spill_bytes` state.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lohan_ds.block import round_up
from lohan_ds.plan import OffloadPlan
from lohan_ds.planner.memory_model import IO_ALIGN_BYTES, Need, needs, num_chunk_buffers, num_spill_buffers
from lohan_ds.planner.placement import (
    ActivationTier, BlockClass, ItemClass, ModelGroups, ParamTier, Placement, StateTier)
from lohan_ds.planner.time_model import Schedule, UpdateOrder
from lohan_ds.profile import HardwareProfile, MemoryTier, ModelProfile

SPILL_BUFFER_BYTES = 64 * 2**20   # of each between device and SSD; larger items pass in pieces
TENSORS_PER_ITEM = 4         # of what is swapped: as many may be rounded up to a page each
HELD_GRADIENTS = "gradients held until the update"   # as `memory_model` names them
# Orders that may drop or redo an update keep the old values in a second slot.
WITH_SHADOW: tuple[UpdateOrder, ...] = ("eager",)


@dataclass(frozen=True)
class TierBytes:
    """Bytes per tier."""
    device: int = 0
    host: int = 0
    ssd: int = 0

    def __add__(self, other: TierBytes) -> TierBytes:
        return TierBytes(self.device + other.device, self.host + other.host, self.ssd + other.ssd)

    def times(self, count: int) -> TierBytes:
        return TierBytes(self.device * count, self.host * count, self.ssd * count)

    def of(self, tier: MemoryTier) -> int:
        return getattr(self, tier)


def budget(hardware: HardwareProfile) -> TierBytes:
    """What there is. With `unified` the device has none of its own."""
    return TierBytes(0 if hardware.unified else hardware.device_bytes, hardware.host_bytes, hardware.ssd_bytes)


def at(tier: MemoryTier, nbytes: int, unified: bool) -> TierBytes:
    """`nbytes` in one tier; with `unified` what the device needs is charged to the host."""
    return TierBytes(**{"host" if unified and tier == "device" else tier: nbytes})


def param_bytes(block: BlockClass, tier: ParamTier, update: UpdateOrder, unified: bool) -> TierBytes:
    """Of one block's parameters at rest. The second slot of those on the device waits on the host."""
    shadow = at("host" if tier == "device" else tier, block.param_bytes, unified)
    return at(tier, block.param_bytes, unified) + shadow.times(update in WITH_SHADOW and block.trainable)


def state_bytes(block: BlockClass, tier: StateTier, update: UpdateOrder) -> TierBytes:
    """Of one block's optimizer state at rest."""
    return at(tier, block.state_bytes, False).times(2 if update in WITH_SHADOW else 1)


def read_ahead_bytes(blocks: Iterable[BlockClass]) -> TierBytes:
    """Of the buffer of one chunk that is read ahead: all are of the size that the largest needs."""
    return TierBytes(host=max((block.chunk_buffer_bytes for block in blocks if block.trainable), default=0))


def activation_bytes(item: ItemClass, tier: ActivationTier, unified: bool) -> TierBytes:
    """Of one saved item between forward and backward. Recomputed ones are in the running unit's bytes only."""
    if tier == "recompute":
        return TierBytes()
    if tier == "keep":
        return at("device", item.nbytes, unified)
    return at(tier, swapped_bytes(item.nbytes), unified)


def swapped_bytes(nbytes: int) -> int:
    """Space that one swapped item is given."""
    return round_up(nbytes, IO_ALIGN_BYTES) + (TENSORS_PER_ITEM - 1) * IO_ALIGN_BYTES


def in_flight_bytes(items: Iterable[ItemClass]) -> int:
    """Device bytes of one unit's swapped items: those of the unit before (forward) or after (backward) the running
    one are on their way while it works. `items` are the classes of which any item of the unit is swapped."""
    return sum(item.nbytes * item.num_per_unit for item in items)


def spill_bytes(items: Iterable[ItemClass], num_ssds: int) -> int:
    """Host bytes of the buffers between device and SSD, if any of `items` is spilled."""
    return num_spill_buffers(num_ssds) * spill_buffer_bytes(item.nbytes for item in items)


def spill_buffer_bytes(item_bytes: Iterable[int]) -> int:
    """Of one buffer between device and SSD."""
    return min(max((round_up(nbytes, IO_ALIGN_BYTES) for nbytes in item_bytes), default=0), SPILL_BUFFER_BYTES)


def fixed_needs(model: ModelProfile, schedule: Schedule, hardware: HardwareProfile) -> list[Need]:
    """Items that no count changes: staging and update buffers, held gradients, resident parameters, the running unit.

    Asked of `memory_model` with everything on the SSD, which needs the most buffers; what lies at rest there is left
    out. The paper's order ("barrier") updates on arrival and holds no gradients.
    """
    num_blocks = len(model.size.blocks)
    probe = OffloadPlan(
        param_tier=("ssd",) * num_blocks, state_tier=("ssd",) * num_blocks, update="deferred",
        prefetch_depth=schedule.prefetch_depth, chunk_numel=max(block.chunk_numel for block in model.size.blocks),
        num_chunk_buffers=num_chunk_buffers(hardware.num_ssds), accumulate_fp32=schedule.accumulation > 1)
    items = [need for need in needs(model.size, probe, hardware.unified) if need.tier != "ssd"]
    if schedule.update == "barrier" and schedule.accumulation == 1:
        items = [need for need in items if need.what != HELD_GRADIENTS]
    running_bytes = max(sum(item.nbytes for item in unit.items) + unit.output_bytes + unit.workspace_bytes
                        for unit in model.units)
    return [*items, Need("host" if hardware.unified else "device", "the running unit's activations", running_bytes)]


def placement_needs(groups: ModelGroups, placement: Placement, update: UpdateOrder,
                    hardware: HardwareProfile) -> list[Need]:
    """Every item of more than 0 bytes that the counts decide; `fixed_needs` come on top."""
    unified = hardware.unified
    params = states = activations = TierBytes()
    for block, counts in zip(groups.blocks, placement.params):
        for tier, count in counts.items():
            params += param_bytes(block, tier, update, unified).times(count)
    for block, counts in zip(groups.blocks, placement.states):
        for tier, count in counts.items():
            states += state_bytes(block, tier, update).times(count)
    for item, counts in zip(groups.items, placement.activations):
        for tier, count in counts.items():
            activations += activation_bytes(item, tier, unified).times(count)
    ahead = read_ahead_bytes(groups.blocks).times(sum(placement.read_ahead))
    swapped = [item for item, counts in zip(groups.items, placement.activations)
               if counts.get("host", 0) + counts.get("ssd", 0)]
    in_flight = max((in_flight_bytes(item for item in swapped if item.unit_class == unit_class)
                     for unit_class in {item.unit_class for item in swapped}), default=0)
    spills = any(counts.get("ssd", 0) for counts in placement.activations)
    spill = spill_bytes(groups.items, hardware.num_ssds) if spills else 0
    slots = " (two slots of what is trained)" if update in WITH_SHADOW else ""
    items = []
    for what, total in ((f"parameters{slots}", params), (f"optimizer state{slots}", states),
                        (f"state read ahead ({sum(placement.read_ahead)} chunks)", ahead),
                        ("saved activations", activations),
                        ("activations on their way", at("device", in_flight, unified)),
                        ("buffers of activations to and from the SSD", at("host", spill, unified))):
        items += [Need(tier, what, total.of(tier)) for tier in ("host", "device", "ssd")]
    return [item for item in items if item.nbytes > 0]
