"""Bytes per link and FLOPs, per phase of one step: what a placement computes and moves, to time, print and measure.

Every amount is linear in a placement's counts, so the program's columns are the traffic of single blocks and items.

Worked numbers: 13B parameters, all on the SSD, per step: 16P = 208 GB read and 14P = 182 GB written, 4P up, 2P down.
"""
from __future__ import annotations

import operator
from dataclasses import dataclass

from lohan_ds.planner.placement import (
    ActivationTier, BlockClass, ItemClass, ModelGroups, ParamTier, Placement, StateTier)


@dataclass(frozen=True)
class PhaseTraffic:
    """What one phase computes and moves. Bytes unless named otherwise."""
    flops: float = 0.0
    param_h2d_bytes: int = 0
    activation_h2d_bytes: int = 0
    gradient_d2h_bytes: int = 0
    activation_d2h_bytes: int = 0
    param_read_bytes: int = 0         # from the SSD
    state_read_bytes: int = 0
    activation_read_bytes: int = 0
    param_write_bytes: int = 0        # to the SSD
    state_write_bytes: int = 0
    activation_write_bytes: int = 0
    update_params: int = 0            # elements updated by the CPU

    def __add__(self, other: PhaseTraffic) -> PhaseTraffic:
        return PhaseTraffic(*map(operator.add, vars(self).values(), vars(other).values()))

    def times(self, count: float) -> PhaseTraffic:
        return PhaseTraffic(*(amount * count for amount in vars(self).values()))

    @property
    def h2d_bytes(self) -> int:
        return self.param_h2d_bytes + self.activation_h2d_bytes

    @property
    def d2h_bytes(self) -> int:
        return self.gradient_d2h_bytes + self.activation_d2h_bytes

    @property
    def ssd_read_bytes(self) -> int:
        return self.param_read_bytes + self.state_read_bytes + self.activation_read_bytes

    @property
    def ssd_write_bytes(self) -> int:
        return self.param_write_bytes + self.state_write_bytes + self.activation_write_bytes


@dataclass(frozen=True)
class StepTraffic:
    """Forward and backward of one micro-step, and the update of one step."""
    forward: PhaseTraffic = PhaseTraffic()
    backward: PhaseTraffic = PhaseTraffic()
    update: PhaseTraffic = PhaseTraffic()

    def __add__(self, other: StepTraffic) -> StepTraffic:
        return StepTraffic(self.forward + other.forward, self.backward + other.backward, self.update + other.update)

    def times(self, count: float) -> StepTraffic:
        return StepTraffic(self.forward.times(count), self.backward.times(count), self.update.times(count))

    def of_step(self, accumulation: int) -> PhaseTraffic:
        """All that one step of `accumulation` micro-steps computes and moves."""
        return (self.forward + self.backward).times(accumulation) + self.update


def param_traffic(block: BlockClass, tier: ParamTier) -> StepTraffic:
    """Of one block's parameters: the terms 2P of equations (2) and (5), and the gradients' 2P.

    Those that stay on the device are not fetched; what the CPU updated goes up once per step. On the SSD they are
    read for every fetch, and for the update where they are the master, and written once per step.
    """
    gradient = PhaseTraffic(gradient_d2h_bytes=block.param_bytes * block.trainable)
    if tier == "device":
        return StepTraffic(backward=gradient,
                           update=PhaseTraffic(param_h2d_bytes=block.param_bytes * block.trainable))
    fetched_bytes = block.param_bytes * block.num_uses
    on_ssd = tier == "ssd"
    fetch = PhaseTraffic(param_h2d_bytes=fetched_bytes, param_read_bytes=fetched_bytes * on_ssd)
    return StepTraffic(fetch, fetch + gradient,
                       PhaseTraffic(param_read_bytes=block.param_bytes * block.is_master * on_ssd,
                                    param_write_bytes=block.param_bytes * block.trainable * on_ssd))


def state_traffic(block: BlockClass, tier: StateTier) -> StepTraffic:
    """Of one trained block's optimizer state: 12P read and 12P written, of the 14P + 14P of equation (5)."""
    ssd_bytes = block.state_bytes * (tier == "ssd")
    return StepTraffic(update=PhaseTraffic(state_read_bytes=ssd_bytes, state_write_bytes=ssd_bytes,
                                           update_params=block.numel))


def read_ahead_traffic(block: BlockClass) -> StepTraffic:
    """Of one chunk of state that a deferred update finds read already: a read that moves from update to backward."""
    nbytes = block.state_bytes // block.num_chunks
    return StepTraffic(backward=PhaseTraffic(state_read_bytes=nbytes), update=PhaseTraffic(state_read_bytes=-nbytes))


def activation_traffic(item: ItemClass, tier: ActivationTier) -> StepTraffic:
    """Of one item: A_G2M and alpha*A_G2M of equations (2) and (5), or its part of FLOP_r."""
    if tier == "keep":
        return StepTraffic()
    if tier == "recompute":
        return StepTraffic(backward=PhaseTraffic(flops=item.recompute_flops))
    return swap_traffic(item.nbytes, item.nbytes * (tier == "ssd"))


def swap_traffic(swapped_bytes: float, spilled_bytes: float) -> StepTraffic:
    """Of activations that leave the device, of which `spilled_bytes` go on to the SSD (A and alpha*A)."""
    return StepTraffic(PhaseTraffic(activation_d2h_bytes=swapped_bytes, activation_write_bytes=spilled_bytes),
                       PhaseTraffic(activation_h2d_bytes=swapped_bytes, activation_read_bytes=spilled_bytes))


def spilled_bytes(swapped_bytes: float, host_room_bytes: float) -> float:
    """alpha*A of equation (3), with the clamp that the paper leaves out: never below 0."""
    return max(0, swapped_bytes - host_room_bytes)


def compute_traffic(groups: ModelGroups) -> StepTraffic:
    """The model's own FLOPs, nothing recomputed: FLOP_f and 2 FLOP_f of equations (2) and (5)."""
    return StepTraffic(PhaseTraffic(flops=groups.forward_flops), PhaseTraffic(flops=2 * groups.forward_flops))


def step_traffic(groups: ModelGroups, placement: Placement) -> StepTraffic:
    """All that a placement computes and moves."""
    total = compute_traffic(groups)
    for block, params, states in zip(groups.blocks, placement.params, placement.states):
        for tier, count in params.items():
            total += param_traffic(block, tier).times(count)
        for tier, count in states.items():
            total += state_traffic(block, tier).times(count)
    for block, count in zip(groups.blocks, placement.read_ahead):
        total += read_ahead_traffic(block).times(count)
    for item, counts in zip(groups.items, placement.activations):
        for tier, count in counts.items():
            total += activation_traffic(item, tier).times(count)
    return total
