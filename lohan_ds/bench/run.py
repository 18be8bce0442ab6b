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
    interrupted: bool = False


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
        turns = {side.name: SideTurns(side) for side in [*chosen, Side(COMPUTE, COMPUTE)]}
        interrupted = _run_until_interrupted(workers, list(turns.values()), schedule, folder, case.dtype, probes, say)
    finally:
        workers.close()
    return Results(case, schedule, num_params, turns, turns.pop(COMPUTE), probes, sweeps, interrupted)


def _run_until_interrupted(workers: Workers, sides: list[SideTurns], schedule: Schedule, folder: str, dtype: str,
                           probes: list[Probe], say: Callable[[str], None]) -> bool:
    """Ctrl-C ends a run that has begun with what was measured; True then."""
    try:
        run_rounds(workers, sides, schedule.num_rounds, schedule.num_warmup, schedule.num_counted,
                   lambda: probes.append(probe(folder, dtype)), say)
    except KeyboardInterrupt:
        if not any(side.rounds for side in sides):
            raise
        for side in sides:
            if not side.rounds and not side.failure:
                side.failure = "the run was interrupted before its turn"
        return True
    return False


def _swept(workers: Workers, side: Side, schedule: Schedule, say: Callable[[str], None]):
    def seconds_of(settings: Settings) -> float | None:
        say(f"settings of {side.name}: {settings}")
        turns = SideTurns(side.with_settings(settings))
        turn = workers.turn(turns, schedule.num_warmup, _SWEEP_STEPS)
        workers.end(side.name)
        return None if turn is None else Spread.of([step.total_s for step in turn.counted]).median

    return sweep(side, seconds_of)
