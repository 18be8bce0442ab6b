"""What a plan would gain from other hardware or another batch, and how long its drives last.

Every answer is a new plan of the changed request: nothing is extrapolated but the rates of a drive more.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

from lohan_ds.errors import CapacityError
from lohan_ds.planner.memory_model import format_bytes
from lohan_ds.planner.program import solve
from lohan_ds.planner.shortage import shortage
from lohan_ds.planner.solution import Batch, Choices, Solution
from lohan_ds.profile import HardwareProfile, ModelProfile

SECONDS_PER_DAY = 86400


@dataclass(frozen=True)
class WhatIf:
    """One change and what it brings."""
    change: str
    solution: Solution | None     # None if it does not fit
    tokens_per_s_factor: float    # against the plan asked about; 0 if it does not fit
    reason: str = ""              # why it does not fit


@dataclass(frozen=True)
class DriveLife:
    """Until the drives have written what they are rated for; reads wear nothing."""
    steps: float                  # infinite if nothing is written
    days: float                   # of uninterrupted training


def what_if(model: ModelProfile, hardware: HardwareProfile, choices: Choices, solution: Solution,
            num_ssds: int) -> list[WhatIf]:
    """One more SSD, twice the RAM, a micro-batch twice as large; the first only where SSDs are counted."""
    batch = solution.batch
    larger_batch = Batch(2 * batch.micro_batch, batch.accumulation)
    changes: list[tuple[str, HardwareProfile, Choices]] = []
    if num_ssds:
        changes.append((f"one more SSD ({num_ssds + 1} instead of {num_ssds})", with_ssds(hardware, num_ssds,
                                                                                         num_ssds + 1), choices))
    changes.append((f"twice the RAM ({format_bytes(2 * hardware.host_bytes)})",
                    replace(hardware, host_bytes=2 * hardware.host_bytes), choices))
    changes.append((f"micro-batch {larger_batch.micro_batch} instead of {batch.micro_batch}", hardware,
                    replace(choices, batches=(larger_batch,))))
    return [_answer(model, *change, solution) for change in changes]


def _answer(model: ModelProfile, change: str, hardware: HardwareProfile, choices: Choices,
            before: Solution) -> WhatIf:
    try:
        after = solve(model, hardware, choices)
    except CapacityError:
        return WhatIf(change, None, 0.0, shortage(model, hardware, choices).lacks)
    return WhatIf(change, after, after.tokens_per_s / before.tokens_per_s)


def with_ssds(hardware: HardwareProfile, num_ssds: int, new_num_ssds: int) -> HardwareProfile:
    """The machine with another number of equal drives: rates and space in proportion."""
    factor = new_num_ssds / num_ssds
    return replace(hardware, ssd_read_bytes_per_s=hardware.ssd_read_bytes_per_s * factor,
                   ssd_write_bytes_per_s=hardware.ssd_write_bytes_per_s * factor,
                   ssd_bytes=round(hardware.ssd_bytes * factor), num_ssds=new_num_ssds, ssd_stripe=())


def drive_life(solution: Solution, rated_write_bytes: int) -> DriveLife:
    """`rated_write_bytes` is the TBW of all drives together: writes are spread evenly over them."""
    written = solution.ssd_write_bytes_per_step
    steps = rated_write_bytes / written if written else float("inf")
    return DriveLife(steps, steps * solution.step_s / SECONDS_PER_DAY)
