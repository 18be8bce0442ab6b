"""The order of a run: rounds, in which every side has one turn, in a new order each, while the others wait.

A side keeps its process from round to round as long as memory allows. If it does not, the one that has waited longest
ends and starts again in its next turn, warm-up and all.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lohan_ds.bench.case import Case, Side
from lohan_ds.bench.turns import Turn
from lohan_ds.bench.worker_process import SideFailed, WorkerProcess
from lohan_ds.memory.budget import available_host_bytes

_BYTES_PER_PARAM, _LIBRARY_BYTES = 17, 3 << 30   # of a side that has not run yet, at least: how large it may become
_STEPS_TO_GET_GOING = 1    # of a side that waited: what overlaps with the step before it


class Worker(Protocol):
    def turn(self, num_uncounted: int, num_counted: int) -> Turn: ...

    def close(self) -> None: ...


@dataclass
class SideTurns:
    """What a side has done. `failure`: why it did not go on, "" if it did."""
    side: Side
    starts: list[list[Turn]] = field(default_factory=list)   # [process][turn]
    rounds: dict[int, Turn] = field(default_factory=dict)    # by round
    failure: str = ""

    @property
    def turns(self) -> list[Turn]:
        return [turn for start in self.starts for turn in start]


class Workers:
    """The processes that are alive; the one used last is the last. One thread."""

    def __init__(self, case: Case, num_params: int, folder: str, start: Callable[..., Worker] = WorkerProcess,
                 available_bytes: Callable[[], int] = available_host_bytes):
        self._case, self._num_params, self._folder = case, num_params, folder
        self._start, self._available_bytes = start, available_bytes
        self._alive: dict[str, Worker] = {}
        self._peak_bytes: dict[str, int] = {}

    def turn(self, turns: SideTurns, num_warmup: int, num_counted: int) -> Turn | None:
        """None if the side failed, now or before."""
        name = turns.side.name
        if turns.failure:
            return None
        try:
            worker = self._alive.pop(name, None)
            num_uncounted = _STEPS_TO_GET_GOING
            if worker is None:
                self._make_room(name)
                worker, num_uncounted = self._start(turns.side, self._case, self._folder), num_warmup
                turns.starts.append([])
            self._alive[name] = worker
            turn = worker.turn(num_uncounted, num_counted)
        except SideFailed as failure:
            self._alive.pop(name, None)
            turns.failure = str(failure)
            return None
        self._peak_bytes[name] = turn.peak_rss_bytes
        turns.starts[-1].append(turn)
        return turn

    def _make_room(self, name: str) -> None:
        needed = self._peak_bytes.get(name, _BYTES_PER_PARAM * self._num_params + _LIBRARY_BYTES)
        while self._alive and self._available_bytes() < needed:
            self._alive.pop(next(iter(self._alive))).close()

    def end(self, name: str) -> None:
        worker = self._alive.pop(name, None)
        if worker is not None:
            worker.close()

    def close(self) -> None:
        for name in list(self._alive):
            self.end(name)


def run_rounds(workers: Workers, sides: Sequence[SideTurns], num_rounds: int, num_warmup: int, num_counted: int,
               between: Callable[[], None], say: Callable[[str], None]) -> None:
    """Adds to `sides`. `between` is called before each round, when no side is running."""
    for round_index in range(num_rounds):
        between()
        first = round_index % len(sides)
        for side in [*sides[first:], *sides[:first]]:
            say(f"round {round_index + 1} of {num_rounds}: {side.side.name}")
            turn = workers.turn(side, num_warmup, num_counted)
            if turn is not None:
                side.rounds[round_index] = turn
