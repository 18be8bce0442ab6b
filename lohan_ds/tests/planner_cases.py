"""Small models and machines for the planner's tests, and the exhaustive search that they are small enough for."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from lohan_ds.block import PAGE_NUMEL, make_block
from lohan_ds.planner.columns import columns_of, placement_of
from lohan_ds.planner.footprint import budget, fixed_needs, placement_needs
from lohan_ds.planner.memory_model import MEMORY_TIERS, total_bytes
from lohan_ds.planner.placement import Placement, group
from lohan_ds.planner.solution import Choices
from lohan_ds.planner.time_model import step_time
from lohan_ds.planner.traffic import step_traffic
from lohan_ds.profile import ActivationItem, HardwareProfile, ModelProfile, ModelSize, UnitProfile

MB = 10**6


def small_model(num_units: int = 2, items: tuple[tuple[int, float], ...] = ((4 * MB, 8e9),), input_bytes: int = 2 * MB,
                pages: int = 500, trainable: bool = True) -> ModelProfile:
    """Equal units of one block each; `items` are (bytes, FLOPs). The micro-batch is 2 sequences of 8 tokens."""
    blocks = tuple(make_block(i, f"unit.{i}", "bfloat16", [("weight", (pages * PAGE_NUMEL,), 0 if trainable else None)],
                              8 * PAGE_NUMEL) for i in range(num_units))
    saved = (ActivationItem("input", input_bytes, 0.0, is_input=True),
             *(ActivationItem(f"item.{i}", nbytes, flops) for i, (nbytes, flops) in enumerate(items)))
    flops = 1e10 + sum(flops for _, flops in items)
    units = tuple(UnitProfile(f"unit.{i}", "unit", (i,), flops, saved, input_bytes, MB) for i in range(num_units))
    return ModelProfile(ModelSize(blocks, tuple((i,) for i in range(num_units)), pages * PAGE_NUMEL), units, 2, 8)


def machine(**changes) -> HardwareProfile:
    """A machine on which a small model has much of everything."""
    values = {"name": "test", "device_flops_per_s": 1e13, "h2d_bytes_per_s": 2e10, "d2h_bytes_per_s": 2e10,
              "ssd_read_bytes_per_s": 6e9, "ssd_write_bytes_per_s": 3e9, "cpu_update_params_per_s": 1e9,
              "host_bytes": 10**9, "device_bytes": 10**9, "ssd_bytes": 10**10}
    return HardwareProfile(**{**values, **changes})


def exhaustive_s_per_token(model: ModelProfile, hardware: HardwareProfile, choices: Choices) -> float | None:
    """The least seconds per token of every placement that fits, each weighed on its own; None if none fits.

    Only for the micro-batch of the profile.
    """
    groups, available = group(model), budget(hardware)
    best = None
    for batch, schedule in choices.schedules():
        fixed = fixed_needs(model, schedule, hardware)
        for placement in every_placement(model, hardware, choices, schedule):
            used = total_bytes([*fixed, *placement_needs(groups, placement, schedule.update, hardware)])
            if all(used[tier] <= available.of(tier) for tier in MEMORY_TIERS):
                seconds = _best_read_ahead_s(groups, placement, hardware, schedule, available.host - used["host"])
                s_per_token = seconds / (groups.num_tokens * batch.accumulation)
                best = s_per_token if best is None else min(best, s_per_token)
    return best


def _best_read_ahead_s(groups, placement, hardware, schedule, free_bytes: int) -> float:
    """Over every number of chunks read ahead, of one class of blocks; seconds fall and then rise with it."""
    def seconds(num_chunks: int) -> float:
        return step_time(step_traffic(groups, replace(placement, read_ahead=(num_chunks,))), hardware, schedule).seconds

    block, = groups.blocks
    if schedule.update != "deferred" or schedule.accumulation > 1 or not placement.states[0].get("ssd"):
        return seconds(0)
    low, high = 0, min(placement.states[0]["ssd"] * block.num_chunks, free_bytes // block.chunk_buffer_bytes)
    while high - low > 2:
        third = (high - low) // 3
        if seconds(low + third) <= seconds(high - third):
            high -= third
        else:
            low += third
    return min(seconds(count) for count in range(low, high + 1))


def every_placement(model: ModelProfile, hardware: HardwareProfile, choices: Choices, schedule) -> Iterator[Placement]:
    groups = group(model)
    columns = columns_of(groups, hardware, schedule, choices.tiers)
    classes: dict[tuple, list[int]] = {}
    for number, column in enumerate(columns):
        if column.kind == "read_ahead":
            continue
        classes.setdefault((column.kind, column.class_index), []).append(number)
    splits = [[dict(zip(numbers, counts)) for counts in compositions(columns[numbers[0]].size, len(numbers))]
              for numbers in classes.values()]
    for chosen in product(*splits):
        counts = {number: count for split in chosen for number, count in split.items()}
        yield placement_of(groups, columns, [counts.get(number, 0) for number in range(len(columns))])


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write `total` as an ordered sum of `parts` counts."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)
