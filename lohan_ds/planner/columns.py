"""The program's columns: how many parts of one class lie in one tier, and what a single part there costs."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from lohan_ds.planner import footprint
from lohan_ds.planner.footprint import TierBytes
from lohan_ds.planner.placement import ActivationTier, ModelGroups, ParamTier, Placement, StateTier
from lohan_ds.planner.time_model import Schedule
from lohan_ds.planner.traffic import (StepTraffic, activation_traffic, param_traffic, read_ahead_traffic,
                                      state_traffic)
from lohan_ds.profile import HardwareProfile

Kind = Literal["params", "states", "read_ahead", "activations"]


@dataclass(frozen=True)
class AllowedTiers:
    """Where things may lie."""
    params: tuple[ParamTier, ...]
    states: tuple[StateTier, ...]
    activations: tuple[ActivationTier, ...]
    stored: Placement | None = None    # whose counts of parameters and states must stay


@dataclass(frozen=True)
class Column:
    """One count."""
    kind: Kind
    class_index: int         # into ModelGroups.blocks or .items
    tier: str
    size: int                # of the class: the most there can be
    traffic: StepTraffic     # of one part
    nbytes: TierBytes        # of one part


def columns_of(groups: ModelGroups, hardware: HardwareProfile, schedule: Schedule,
               allowed: AllowedTiers) -> list[Column]:
    """Every count the program chooses; tiers that the machine lacks have none."""
    return [*_block_columns(groups, hardware, schedule, allowed), *_read_ahead_columns(groups, hardware, schedule),
            *_item_columns(groups, hardware, allowed)]


def _block_columns(groups: ModelGroups, hardware: HardwareProfile, schedule: Schedule,
                   allowed: AllowedTiers) -> Iterator[Column]:
    for index, block in enumerate(groups.blocks):
        size = len(block.blocks)
        for tier in allowed.params:
            if _has(hardware, tier) and (tier != "device" or not block.is_master):
                yield Column("params", index, tier, size, param_traffic(block, tier),
                             footprint.param_bytes(block, tier, schedule.update, hardware.unified))
        for tier in allowed.states if block.trainable else ():
            if _has(hardware, tier):
                yield Column("states", index, tier, size, state_traffic(block, tier),
                             footprint.state_bytes(block, tier, schedule.update))


def _read_ahead_columns(groups: ModelGroups, hardware: HardwareProfile, schedule: Schedule) -> Iterator[Column]:
    """Chunks, not blocks. Only in the last micro-step of a step, so with accumulation it is left out."""
    if schedule.update == "deferred" and schedule.accumulation == 1 and _has(hardware, "ssd"):
        nbytes = footprint.read_ahead_bytes(groups.blocks)
        for index, block in enumerate(groups.blocks):
            if block.state_bytes:
                yield Column("read_ahead", index, "ssd", len(block.blocks) * block.num_chunks,
                             read_ahead_traffic(block), nbytes)


def _item_columns(groups: ModelGroups, hardware: HardwareProfile, allowed: AllowedTiers) -> Iterator[Column]:
    """With `unified` an item that is kept is on the host already; a block's input is never recomputed, and what is
    saved outside of units is kept, because the runtime sees units only."""
    for index, item in enumerate(groups.items):
        for tier in ("keep",) if item.is_outside else allowed.activations:
            if (_has(hardware, tier) and not (tier == "host" and hardware.unified)
                    and not (tier == "recompute" and item.is_input)):
                yield Column("activations", index, tier, len(item.places), activation_traffic(item, tier),
                             footprint.activation_bytes(item, tier, hardware.unified))


def _has(hardware: HardwareProfile, tier: str) -> bool:
    """Whether the machine has the tier: an SSD needs rates, a device memory of its own."""
    if tier == "ssd":
        return hardware.ssd_read_bytes_per_s > 0 and hardware.ssd_write_bytes_per_s > 0
    return not (tier == "device" and hardware.unified)


def placement_of(groups: ModelGroups, columns: Sequence[Column], counts: Sequence[int]) -> Placement:
    """The counts as a placement."""
    placed: dict[Kind, list[dict[str, int]]] = {
        "params": [{} for _ in groups.blocks], "states": [{} for _ in groups.blocks],
        "read_ahead": [{} for _ in groups.blocks], "activations": [{} for _ in groups.items]}
    for column, count in zip(columns, counts):
        if count:
            placed[column.kind][column.class_index][column.tier] = count
    return Placement(*(tuple(placed[kind]) for kind in ("params", "states", "activations")),
                     tuple(counts.get("ssd", 0) for counts in placed["read_ahead"]))
