"""LoHan's choice of what to swap: the benefit order and the convex search of Algorithm 1, tiers of all else given.

Saved activations are a prefix of the order "most FLOPs saved per byte first" (equation 6); block inputs come before
all and are never recomputed. The step's seconds are a convex function of the prefix's bytes, because recomputation
falls ever more slowly along the order and all else is linear: the first minimum is the minimum. The first bytes stay
on the device where it has room, the next go to the host, the rest on to the SSD (equation 3).
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lohan_ds.planner.placement import ItemClass, ModelGroups, ParamTier, StateTier
from lohan_ds.planner.time_model import Schedule, StepTime, step_time
from lohan_ds.planner.traffic import (
    PhaseTraffic, StepTraffic, compute_traffic, param_traffic, spilled_bytes, state_traffic, swap_traffic)
from lohan_ds.profile import HardwareProfile

CONVEX_ROUNDS = 200   # each leaves two thirds of the interval: below the precision of a float


@dataclass(frozen=True)
class SavedAmount:
    """A prefix of the order, cut anywhere."""
    saved_bytes: float        # kept + swapped
    kept_bytes: float         # on the device
    swapped_bytes: float      # to the host (the paper's A_G2M), of which
    spilled_bytes: float      # go on to the SSD (alpha * A_G2M)
    recompute_flops: float    # FLOP_r
    step_s: float


class ActivationSearch:
    """The seconds of a step as a function of the bytes saved, for one model, machine and schedule."""

    def __init__(self, groups: ModelGroups, hardware: HardwareProfile, schedule: Schedule, host_room_bytes: int,
                 device_room_bytes: int = 0, param_tier: ParamTier = "ssd", state_tier: StateTier = "ssd") -> None:
        self.order = benefit_order(groups.items)
        self.host_room_bytes = host_room_bytes
        self.forward_compute_s = groups.forward_flops / hardware.device_flops_per_s
        self._hardware, self._schedule, self._device_room_bytes = hardware, schedule, device_room_bytes
        self._base = compute_traffic(groups)
        for block in groups.blocks:
            self._base += param_traffic(block, param_tier).times(len(block.blocks))
            if block.trainable:
                self._base += state_traffic(block, state_tier).times(len(block.blocks))
        self.least_bytes = sum(item.nbytes * len(item.places) for item in self.order if item.is_input)
        self.all_bytes = sum(item.nbytes * len(item.places) for item in self.order)

    def amount(self, saved_bytes: float) -> SavedAmount:
        """Seconds when `saved_bytes` of the order are saved: equations (1)-(5) with the clamp of `spilled_bytes`."""
        kept = min(saved_bytes, self._device_room_bytes)
        swapped = saved_bytes - kept
        unpriced = SavedAmount(saved_bytes, kept, swapped, spilled_bytes(swapped, self.host_room_bytes),
                               recompute_flops(self.order, saved_bytes), 0.0)
        return replace(unpriced, step_s=self.time(unpriced).seconds)

    def time(self, amount: SavedAmount) -> StepTime:
        """The step of an amount, phase by phase."""
        traffic = self._base + swap_traffic(amount.swapped_bytes, amount.spilled_bytes)
        traffic += StepTraffic(backward=PhaseTraffic(flops=amount.recompute_flops))
        return step_time(traffic, self._hardware, self._schedule)

    def convex_optimum(self) -> SavedAmount:
        """The least seconds over all cuts, also inside an item; of equals the one that saves fewest bytes."""
        low, high = float(self.least_bytes), float(self.all_bytes)
        for _ in range(CONVEX_ROUNDS):
            left, right = low + (high - low) / 3, high - (high - low) / 3
            if self.amount(left).step_s <= self.amount(right).step_s:
                high = right
            else:
                low = left
        return min((self.amount(cut) for cut in (self.least_bytes, low, high, self.all_bytes)),
                   key=lambda amount: (amount.step_s, amount.saved_bytes))

    def algorithm_1(self) -> tuple[SavedAmount, tuple[int, ...]]:
        """Whole items, added one by one until the seconds no longer fall. Returns how many of each class of `order`.

        As published, but for block inputs: they are saved without asking.
        """
        counts = [len(item.places) if item.is_input else 0 for item in self.order]
        best = self.amount(self.least_bytes)
        for index, item in enumerate(self.order):
            while counts[index] < len(item.places):
                larger = self.amount(best.saved_bytes + item.nbytes)
                if larger.step_s >= best.step_s:
                    return best, tuple(counts)
                best = larger
                counts[index] += 1
        return best, tuple(counts)


def benefit_order(items: Sequence[ItemClass]) -> tuple[ItemClass, ...]:
    """Most FLOPs saved per byte first: OB = FLOP / A, equation (6). Block inputs before all."""
    return tuple(sorted(items, key=lambda item: -item.benefit))


def recompute_flops(order: Sequence[ItemClass], saved_bytes: float) -> float:
    """FLOP_r of equation (7): of everything behind the first `saved_bytes`, linear inside an item."""
    flops = 0.0
    for item in order:
        class_bytes = item.nbytes * len(item.places)
        saved = min(max(saved_bytes, 0.0), class_bytes)
        saved_bytes -= saved
        flops += item.recompute_flops * len(item.places) * (1 - saved / class_bytes)
    return flops


def slope_flops_per_byte(order: Sequence[ItemClass], saved_bytes: float) -> float:
    """-dFLOP_r/dA of equation (8): the benefit of the item that comes next; 0 behind the last."""
    for item in order:
        saved_bytes -= item.nbytes * len(item.places)
        if saved_bytes < 0:
            return 0.0 if math.isinf(item.benefit) else item.benefit
    return 0.0
