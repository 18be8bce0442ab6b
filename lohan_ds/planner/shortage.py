"""Why nothing fits: the bytes each tier lacks, and the cheapest change that would do.

Settings are tried before hardware: a smaller micro-batch (with more accumulation: the same tokens per step), tiers,
update order and prefetch depth that the user had ruled out. A change is named only after planning again with it.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lohan_ds.planner.columns import placement_of
from lohan_ds.planner.footprint import budget, fixed_needs, placement_needs
from lohan_ds.planner.linear_program import LinearProgram
from lohan_ds.planner.memory_model import MEMORY_TIERS, Need, format_bytes, total_bytes
from lohan_ds.planner.placement import ACTIVATION_TIERS, PARAM_TIERS, STATE_TIERS, group, with_micro_batch
from lohan_ds.planner.solution import Batch, Choices
from lohan_ds.planner.time_model import Schedule
from lohan_ds.profile import HardwareProfile, MemoryTier, ModelProfile

# What a byte more of each tier costs, relative to one of SSD: about the prices of drives, RAM and devices.
TIER_COSTS: dict[MemoryTier, float] = {"ssd": 1.0, "host": 50.0, "device": 1000.0}
# A tier that the machine does not have is priced at rates that do not matter: only bytes count here.
ANY_RATE_PER_S = 1e9
SEARCH_SECONDS = 0.3   # per batch and schedule


@dataclass(frozen=True)
class Shortage:
    """What stands between a request and a plan."""
    missing_bytes: dict[MemoryTier, int]   # of what was asked for; the combination that would cost least
    batch: Batch                           # at which they are missing
    schedule: Schedule
    change: str                            # the cheapest that fits, for people
    choices: Choices                       # with the change made
    hardware: HardwareProfile              # with the change made
    needs: tuple[Need, ...]                # of what was asked for, item by item

    @property
    def lacks(self) -> str:
        """What is missing, for people."""
        return ", ".join(f"{tier} lacks {format_bytes(nbytes)} ({nbytes} bytes)"
                         for tier, nbytes in self.missing_bytes.items() if nbytes)

    @property
    def when(self) -> str:
        """At which batch and schedule, for people."""
        return (f"micro-batch {self.batch.micro_batch}, update {self.schedule.update}, "
                f"prefetch depth {self.schedule.prefetch_depth}")

    def __str__(self) -> str:
        return f"does not fit: {self.lacks}, at {self.when}\nthe cheapest change that would fit: {self.change}"


def shortage(model: ModelProfile, hardware: HardwareProfile, choices: Choices) -> Shortage:
    """For a request that `solve` refused. Raises `ValueError` if the tiers allowed leave a part without a place."""
    lack = _least_missing(model, hardware, choices)
    for change, widened in _settings(choices):
        if not any(_least_missing(model, hardware, widened).missing_bytes.values()):
            return Shortage(lack.missing_bytes, lack.batch, lack.schedule, change, widened, hardware, lack.needs)
    change = " and ".join(f"{format_bytes(nbytes)} more {'SSD space' if tier == 'ssd' else f'{tier} memory'}"
                          for tier, nbytes in lack.missing_bytes.items() if nbytes)
    return Shortage(lack.missing_bytes, lack.batch, lack.schedule, change, choices,
                    _larger(hardware, lack.missing_bytes), lack.needs)


@dataclass(frozen=True)
class _Lack:
    """What one batch and schedule lacks."""
    missing_bytes: dict[MemoryTier, int]
    batch: Batch
    schedule: Schedule
    needs: tuple[Need, ...]

    @property
    def cost(self) -> float:
        return sum(TIER_COSTS[tier] * nbytes for tier, nbytes in self.missing_bytes.items())


def _least_missing(model: ModelProfile, hardware: HardwareProfile, choices: Choices) -> _Lack:
    """The batch and schedule whose missing bytes cost least; the first of equals. Shallow prefetch needs least."""
    shallow = replace(choices, prefetch_depths=(min(choices.prefetch_depths),))
    lacks = [lack for batch, schedule in shallow.schedules()
             if (lack := _missing(model, hardware, choices, batch, schedule)) is not None]
    if not lacks:
        raise ValueError(f"the tiers allowed leave no place on {hardware.name} for some part of the model: {choices}")
    return min(lacks, key=lambda lack: lack.cost)


def _missing(model: ModelProfile, hardware: HardwareProfile, choices: Choices, batch: Batch,
             schedule: Schedule) -> _Lack | None:
    model, hardware = with_micro_batch(model, batch.micro_batch), _with_ssd(hardware)
    groups = group(model)
    program = LinearProgram(model, groups, hardware, schedule, choices.tiers)
    counts = program.least_missing(TIER_COSTS, SEARCH_SECONDS)
    if counts is None:
        return None
    placement = placement_of(groups, program.columns, counts)
    needs = [*fixed_needs(model, schedule, hardware),
             *placement_needs(groups, placement, schedule.update, hardware)]
    used, available = total_bytes(needs), budget(hardware)
    return _Lack({tier: max(0, used[tier] - available.of(tier)) for tier in MEMORY_TIERS}, batch, schedule,
                 tuple(needs))


def _with_ssd(hardware: HardwareProfile) -> HardwareProfile:
    """A machine without an SSD as one whose SSD has no room: what it lacks can then be counted in bytes."""
    if hardware.ssd_read_bytes_per_s and hardware.ssd_write_bytes_per_s:
        return hardware
    return replace(hardware, ssd_read_bytes_per_s=ANY_RATE_PER_S, ssd_write_bytes_per_s=ANY_RATE_PER_S, ssd_bytes=0)


def _larger(hardware: HardwareProfile, missing: dict[MemoryTier, int]) -> HardwareProfile:
    more = {f"{tier}_bytes": getattr(hardware, f"{tier}_bytes") + missing[tier] for tier in MEMORY_TIERS}
    return replace(_with_ssd(hardware) if missing["ssd"] else hardware, **more)


def _settings(choices: Choices) -> Iterator[tuple[str, Choices]]:
    """Changes of settings, the least disturbing first; the last makes all of them."""
    smallest = min(choices.batches, key=lambda batch: batch.micro_batch)
    micro_batch, batches = smallest.micro_batch, []
    while micro_batch % 2 == 0:
        micro_batch //= 2
        batch = Batch(micro_batch, smallest.accumulation * smallest.micro_batch // micro_batch)
        batches.append((f"micro-batch {batch.micro_batch} with {batch.accumulation} accumulation steps", (batch,)))
    for change, smaller in batches:
        yield change, replace(choices, batches=smaller)
    released, wider = _wider(choices)
    if wider == choices:
        return
    yield released, wider
    for change, smaller in batches:
        yield f"{change}, {released}", replace(wider, batches=smaller)


def _wider(choices: Choices) -> tuple[str, Choices]:
    """Without what the user forced, and what that was. Parameters stay on the device only where that was allowed."""
    params = tuple(tier for tier in PARAM_TIERS if tier != "device" or tier in choices.param_tiers)
    tiers = replace(choices, param_tiers=params, state_tiers=STATE_TIERS, activation_tiers=ACTIVATION_TIERS)
    released, wider = [], choices
    if "deferred" not in choices.updates:
        released, wider = ["update deferred"], replace(wider, updates=(*choices.updates, "deferred"))
    if 0 not in choices.prefetch_depths:
        released, wider = [*released, "prefetch depth 0"], replace(wider, prefetch_depths=(*choices.prefetch_depths, 0))
    if any(set(getattr(tiers, kind)) - set(getattr(choices, kind))
           for kind in ("param_tiers", "state_tiers", "activation_tiers")):
        released = [*released, "every tier allowed"]
        wider = replace(tiers, updates=wider.updates, prefetch_depths=wider.prefetch_depths)
    return " and ".join(released), wider
