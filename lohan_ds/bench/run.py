"""A whole run: settings of DeepSpeed's sides first, then the rounds, then what came of it."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lohan_ds.bench.case import Case, Side
from lohan_ds.bench.deepspeed_settings import Settings, best_of, start_settings, sweep
from lohan_ds.bench.figures import Spread
from lohan_ds.bench.model import count_params
from lohan_ds.bench.probes import Probe, probe
from lohan_ds.bench.rounds import SideTurns, Workers, run_rounds
from lohan_ds.bench.worker import COMPUTE

_SWEEP_STEPS = 2


@dataclass(frozen=True)
class Schedule:
    """How much is measured."""
    num_rounds: int = 3
    num_warmup: int = 2       # steps of a new process that do not count
    num_counted: int = 3      # steps of a turn that do
    sweep: bool = True        # of DeepSpeed's settings


@dataclass
class Results:
    case: Case
    schedule: Schedule
    num_params: int
    turns: dict[str, SideTurns]            # by side
    compute: SideTurns
    probes: list[Probe]
    sweeps: dict[str, list[tuple[Settings, float | None]]]   # by side: what was tried, and its seconds per step


def run(case: Case, sides: Sequence[Side], schedule: Schedule, folder: str,
        say: Callable[[str], None] = lambda what: None) -> Results:
    """`folder`: on the drive to measure. What goes wrong in a side is in its turns; StoreError or CapacityError if the
    drive itself cannot be measured."""
    num_params, probes, sweeps, chosen = count_params(case), [], {}, []
    workers = Workers(case, num_params, folder)
    try:
        for side in sides:
            tried = list(_swept(workers, side, schedule, say)) if schedule.sweep else []
            if tried:
                sweeps[side.name] = tried
            chosen.append(side.with_settings(best_of(tried) if tried else start_settings(side)))
        compute = Side(COMPUTE, COMPUTE)
        turns = run_rounds(workers, [*chosen, compute], schedule.num_rounds, schedule.num_warmup, schedule.num_counted,
                           lambda: probes.append(probe(folder, case.dtype)), say)
    finally:
        workers.close()
    return Results(case, schedule, num_params, turns, turns.pop(COMPUTE), probes, sweeps)


def _swept(workers: Workers, side: Side, schedule: Schedule, say: Callable[[str], None]):
    def seconds_of(settings: Settings) -> float | None:
        say(f"settings of {side.name}: {settings}")
        turns = SideTurns(side.with_settings(settings))
        turn = workers.turn(turns, schedule.num_warmup, _SWEEP_STEPS)
        workers.end(side.name)
        return None if turn is None else Spread.of([step.total_s for step in turn.counted]).median

    return sweep(side, seconds_of)
