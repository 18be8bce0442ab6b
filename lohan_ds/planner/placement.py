"""How many of a model's alike parts lie where: groups of equal blocks and equal saved activations, and their counts.

Equal parts are interchangeable, so a placement is a count per tier, not a choice per part. `spread` turns counts
back into a tier per part, [Note: layout]. Values only.

[Note: layout]
Each tier is spread evenly over depth: contiguous layouts leave one link idle while another works, and a runtime that
looks a few units ahead cannot make up for that. Who goes first is chosen by what nothing can hide. The first blocks lie
in the fastest tier in use: the next forward begins with their update and with their parameters. The last items of
forward are kept where any are: backward begins with them, and a swapped one would have no compute to hide under.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lohan_ds.planner.memory_model import chunk_record_bytes
from lohan_ds.profile import ModelProfile

ParamTier = Literal["device", "host", "ssd"]
StateTier = Literal["host", "ssd"]
ActivationTier = Literal["keep", "host", "ssd", "recompute"]   # "keep": stays on the device; "host", "ssd": swapped
PARAM_TIERS: tuple[ParamTier, ...] = ("device", "host", "ssd")
STATE_TIERS: tuple[StateTier, ...] = ("host", "ssd")
ACTIVATION_TIERS: tuple[ActivationTier, ...] = ("keep", "host", "ssd", "recompute")


@dataclass(frozen=True)
class BlockClass:
    """Blocks of equal size and kind."""
    name: str                        # of the first one
    blocks: tuple[int, ...]          # indexes into ModelSize.blocks
    numel: int                       # elements of one block
    param_bytes: int                 # of one block, as the device needs them
    state_bytes: int                 # of one block: 12 per element of a 16-bit block, 0 where frozen
    trainable: bool
    num_chunks: int                  # of one block
    chunk_buffer_bytes: int          # that the update of its largest chunk takes
    num_uses: int                    # units that need one block: each fetches it in forward and in backward
    is_master: bool                  # the parameters are what the CPU updates (fp32): they never stay on the device


@dataclass(frozen=True)
class ItemClass:
    """Saved activations of equal size and cost in units of one class."""
    name: str                        # of the item, within its unit
    unit_class: int                  # items of equal number lie in the same units
    places: tuple[tuple[int, str], ...]   # (unit index, item name), in forward order
    num_per_unit: int
    nbytes: int                      # of one item, of one micro-batch
    recompute_flops: float           # of one item
    is_input: bool                   # a block's input: never recomputed
    is_outside: bool = False         # can only be kept

    @property
    def benefit(self) -> float:
        """FLOPs saved per byte swapped: the paper's offloading benefit OB, equation (6). Inputs come before all."""
        return float("inf") if self.is_input else self.recompute_flops / self.nbytes


@dataclass(frozen=True)
class ModelGroups:
    """A model as the planner counts it."""
    blocks: tuple[BlockClass, ...]
    items: tuple[ItemClass, ...]     # those of 0 bytes left out
    forward_flops: float             # of one micro-batch
    num_tokens: int                  # of one micro-batch


@dataclass(frozen=True)
class Placement:
    """Counts per tier; every class's counts add up to its size. Tiers that are absent hold none."""
    params: tuple[Mapping[ParamTier, int], ...]           # by block class
    states: tuple[Mapping[StateTier, int], ...]           # by block class; empty where frozen
    activations: tuple[Mapping[ActivationTier, int], ...]  # by item class
    read_ahead: tuple[int, ...] = ()                      # by block class: chunks of state on SSD read in backward


def group(model: ModelProfile) -> ModelGroups:
    """Sorts blocks and activations into classes; the order is that of first appearance."""
    return ModelGroups(_block_classes(model), _item_classes(model), sum(u.forward_flops for u in model.units),
                       model.micro_batch * model.sequence_length)


def _block_classes(model: ModelProfile) -> tuple[BlockClass, ...]:
    uses = [0] * len(model.size.blocks)
    for unit in model.size.units:
        for index in unit:
            uses[index] += 1
    classes: dict[tuple, BlockClass] = {}
    for block in model.size.blocks:
        key = (block.numel, block.dtype, block.trainable, uses[block.index])
        known = classes.get(key)
        classes[key] = replace(known, blocks=(*known.blocks, block.index)) if known else BlockClass(
            block.name, (block.index,), block.numel, block.param_bytes, block.state_bytes, block.trainable,
            -(-block.numel // block.chunk_numel), chunk_record_bytes(block, block.chunk_numel), uses[block.index],
            block.trainable and not block.has_separate_master)
    return tuple(classes.values())


def _item_classes(model: ModelProfile) -> tuple[ItemClass, ...]:
    unit_classes: dict[tuple, int] = {}
    places: dict[tuple, list[tuple[int, str]]] = {}
    for index, unit in enumerate(model.units):
        unit_class = unit_classes.setdefault((unit.unit_class, unit.items), len(unit_classes))
        for item in unit.items:
            if item.nbytes:
                key = (unit_class, item.nbytes, item.recompute_flops, item.is_input, item.is_outside)
                places.setdefault(key, []).append((index, item.name))
    return tuple(ItemClass(found[0][1], key[0], tuple(found), sum(unit == found[0][0] for unit, _ in found), *key[1:])
                 for key, found in places.items())


def with_micro_batch(model: ModelProfile, micro_batch: int) -> ModelProfile:
    """The profile at another micro-batch: activations and FLOPs grow in proportion."""
    if micro_batch == model.micro_batch:
        return model
    factor = micro_batch / model.micro_batch
    items = {unit.items: tuple(replace(item, nbytes=round(item.nbytes * factor),
                                       recompute_flops=item.recompute_flops * factor) for item in unit.items)
             for unit in model.units}   # alike units share theirs
    units = tuple(replace(unit, forward_flops=unit.forward_flops * factor, items=items[unit.items],
                          output_bytes=round(unit.output_bytes * factor),
                          workspace_bytes=round(unit.workspace_bytes * factor)) for unit in model.units)
    return replace(model, units=units, micro_batch=micro_batch)


def spread(counts: Mapping[str, int], first: str | None = None) -> tuple[str, ...]:
    """A tier per part with the given counts, each tier as evenly over the parts as the others allow.

    Every part goes to the tier that is furthest behind its share. `spread({"host": 2, "ssd": 4})` is ssd, host, ssd,
    ssd, host, ssd. `first` is half a part ahead, so that it begins: host, ssd, ssd, host, ssd, ssd.
    """
    total = sum(counts.values())
    given = dict.fromkeys(counts, 0)
    tiers = []
    for index in range(total):
        tier = max((tier for tier in counts if given[tier] < counts[tier]), key=lambda tier: (
            counts[tier] * (2 * index + 1) - 2 * total * given[tier] + total * (tier == first), counts[tier]))
        given[tier] += 1
        tiers.append(tier)
    return tuple(tiers)


def block_tiers(classes: Sequence[BlockClass], counts: Sequence[Mapping[str, int]]) -> dict[int, str]:
    """The tier of every block that `counts` (of params or states, by class) places, by block index; [Note: layout]."""
    return {index: tier for block_class, placed in zip(classes, counts)
            for index, tier in zip(block_class.blocks, spread(placed, _fastest(placed)))}


def _fastest(counts: Mapping[str, int]) -> str | None:
    return next((tier for tier in PARAM_TIERS if counts.get(tier)), None)   # nearest the device first


def item_tiers(classes: Sequence[ItemClass],
               counts: Sequence[Mapping[ActivationTier, int]]) -> dict[tuple[int, str], str]:
    """The tier of every saved activation, by (unit index, item name); [Note: layout]."""
    return {place: tier for item_class, placed in zip(classes, counts)
            for place, tier in zip(reversed(item_class.places), spread(placed, "keep"))}
