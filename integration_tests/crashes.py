"""Crashes of a small training run, and what is there afterwards: never anything but a whole step.

A `CrashingIo` dies at a chosen event and forgets what was not synced. The run is reopened, every bit is compared with
the same step of a run that was left alone, and it goes on. With durability "in_place" it may be refused instead. Used
by crash_sweep.py and test_crash.py.
"""
from __future__ import annotations

import collections
import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

from lohan_ds.block import Chunk
from lohan_ds.errors import LohanError
from lohan_ds.plan import UpdateMode
from lohan_ds.store.block_store import ChunkArrays
from lohan_ds.store.commits import DirtyStore
from lohan_ds.store.ssd_io import ThreadSsdIo
from lohan_ds.testing.crashing_io import CrashingIo
from lohan_ds.testing.durable_training import DurableTraining, State, durable_training, same
from lohan_ds.work import Work

NUM_STEPS = 4        # before the crash; two more after it
SYNC_DELAY_S = 0.01  # so long that slots are asked for before they are free
READ_AHEAD = "state read ahead"   # an event in memory: the others reach the disk

PHASES = ("manifest write", "manifest rename", "write of first values", "update in backward", "trailing update",
          "trailing update under the next backward", "slot reuse", READ_AHEAD, "data sync", "details write",
          "details rename", "dirty mark write", "dirty mark rename", "record write", "record rename", "directory sync")


@dataclass(frozen=True)
class Mode:
    """How a run is trained and kept."""
    name: str
    update: UpdateMode
    num_read_ahead_chunks: int = 0
    durability: str = "shadow"

    def training(self, paths: list[str], io: ThreadSsdIo | None = None) -> contextlib.AbstractContextManager:
        return durable_training(paths, self.update, io, self.durability, self.num_read_ahead_chunks)

    @property
    def steps_per_commit(self) -> int:
        """What is changed in place is committed only at its end."""
        return 1 if self.durability == "shadow" else NUM_STEPS

    def impossible(self) -> dict[str, str]:
        """Phases that cannot be, and why. What contradicts it is a loss."""
        reasons = {}
        if self.update == "deferred":
            reasons["update in backward"] = "no update begins before step() knows the norm"
        if not self.num_read_ahead_chunks:
            reasons[READ_AHEAD] = "the plan has no buffers for it"
        if self.durability == "in_place":
            reasons["slot reuse"] = "a block has one slot"
        else:
            reasons |= dict.fromkeys(("dirty mark write", "dirty mark rename"), "nothing is changed in place")
        return reasons


MODES = {mode.name: mode for mode in (Mode("eager", "eager", num_read_ahead_chunks=2), Mode("deferred", "deferred"),
                                      Mode("read-ahead", "deferred", num_read_ahead_chunks=2),
                                      Mode("in_place", "deferred", durability="in_place"))}


@dataclass
class Reference:
    """A run that was left alone."""
    states: dict[int, State]   # by step
    events: list[str]          # of the first `NUM_STEPS`, and the end
    bytes_written: int         # by then


@dataclass
class Sweep:
    """What many crashes came to."""
    hits: collections.Counter = field(default_factory=collections.Counter)         # by what was interrupted
    seen: collections.Counter = field(default_factory=collections.Counter)         # most events of a kind in one run
    steps_lost: collections.Counter = field(default_factory=collections.Counter)
    num_refused: int = 0                                                           # changed in place when it ended
    losses: list[str] = field(default_factory=list)

    def check_phases(self, mode: Mode, least_hits: int) -> list[str]:
        """What is wrong: a phase that was hit less often, or one that is seen though it cannot be."""
        impossible = mode.impossible()
        return [f"{mode.name}: {phase!r} hit {self.hits[phase]} times, needed {least_hits}"
                for phase in PHASES if phase not in impossible and self.hits[phase] < least_hits] + \
               [f"{mode.name}: {phase!r} cannot be, because {reason}, but it was"
                for phase, reason in impossible.items() if self.seen[phase]]

    def __str__(self) -> str:
        hits = "\n".join(f"  {count:5} x {what}" for what, count in sorted(self.hits.items()))
        refused = [f"refused, because it was changed in place: {self.num_refused}"] if self.num_refused else []
        return "\n".join([f"{self.hits.total()} crashes:", hits, f"steps lost: {dict(sorted(self.steps_lost.items()))}",
                          *refused, f"losses: {len(self.losses)}", *self.losses])


def ssd_paths(folder: str) -> list[str]:
    """Two new directories, for a run that is striped over them."""
    paths = [os.path.join(folder, name) for name in "ab"]
    for path in paths:
        os.makedirs(path)
    return paths


def make_reference(folder: str, mode: Mode) -> Reference:
    io = CrashingIo(2)
    with mode.training(ssd_paths(os.path.join(folder, f"reference {mode.name}")), io) as training:
        watch(training, io)
        states = {0: training.state()}
        for step in range(1, NUM_STEPS + 3):
            training.run(step)
            states[step] = training.state()
            if step == NUM_STEPS:
                training.finish()
                events, bytes_written = list(io.events), io.bytes_written
    return Reference(states, events, bytes_written)


def crash(folder: str, mode: Mode, reference: Reference, at: tuple[str, int] | int, seed: int, sweep: Sweep) -> bool:
    """One crash and what follows; False and nothing if the run ended before that event. `at`: as of `CrashingIo`."""
    with tempfile.TemporaryDirectory(dir=folder) as run_folder:
        paths, io = ssd_paths(run_folder), CrashingIo(2, at, seed, sync_delay_s=SYNC_DELAY_S)
        started = 0
        try:
            with _nothing_removed(), mode.training(paths, io) as training:
                watch(training, io)
                while training.step < NUM_STEPS:
                    started = training.step + 1
                    training.run(started)
                training.finish()
        except (LohanError, OSError):
            if not io.dead:
                raise
        sweep.seen |= collections.Counter(io.events)
        if not io.dead:
            return False
        sweep.hits[io.events[-1]] += 1
        io.lose_power()
        what = f"{mode.name}, at {at} ({io.events[-1]}), seed {seed}"
        successor = io.durable_step + mode.steps_per_commit
        reopen(paths, mode, reference, started, io.durable_step, what, sweep, at_most=successor)
        return True


def reopen(paths: list[str], mode: Mode, reference: Reference, started: int, durable: int, what: str,
           sweep: Sweep, at_most: int = NUM_STEPS) -> None:
    """The run must be at a whole step, no older than `durable` (-1: it may not exist yet), no younger than `at_most`,
    without the step under way and what was to be committed then at worst. It must go on exactly, and be there after its
    end. One that was changed in place may be refused for good instead.
    """
    try:
        with mode.training(paths) as training:
            step = training.step
            if not same(training.state(), reference.states[step]):
                sweep.losses.append(f"{what}: other bits at step {step}")
                return
            if not durable <= step <= max(at_most, 0) or started - step > 1 + mode.steps_per_commit:
                sweep.losses.append(f"{what}: back at step {step}, {durable} was durable, {started} begun")
                return
            training.run(NUM_STEPS + 2)
            training.finish()
        with mode.training(paths) as training:
            if training.step != NUM_STEPS + 2 or not same(training.state(), reference.states[NUM_STEPS + 2]):
                sweep.losses.append(f"{what}: other bits after going on from step {step} to {training.step}")
            else:
                sweep.steps_lost[started - step] += 1
    except DirtyStore as error:
        if mode.durability == "in_place" and 0 < started and durable < NUM_STEPS and _is_refused(paths, mode):
            sweep.num_refused += 1
        else:
            sweep.losses.append(f"{what}: cannot be reopened: {error!r}")
    except (LohanError, OSError) as error:
        sweep.losses.append(f"{what}: cannot be reopened: {error!r}")


def _is_refused(paths: list[str], mode: Mode) -> bool:
    try:
        with mode.training(paths):
            return False
    except DirtyStore:
        return True


def watch(training: DurableTraining, io: CrashingIo) -> None:
    """Tells the `io` what it is written to for, and what is read ahead."""
    store = training.store
    load_chunk, save_chunk = store.load_chunk, store.save_chunk

    def watched_load(*args, ahead: bool = False, **kwargs) -> Work:
        load = load_chunk(*args, ahead=ahead, **kwargs)
        if ahead:
            load.on_done(lambda: io.happens(READ_AHEAD))
        return load

    def watched_save(block_index: int, chunk: Chunk, arrays: ChunkArrays, speculative: bool = False,
                     for_step: int | None = None) -> Work:
        io.updates(block_index, decided=not speculative)
        return save_chunk(block_index, chunk, arrays, speculative, for_step)

    store.load_chunk, store.save_chunk, training.on_phase = watched_load, watched_save, io.on_phase


def _nothing_removed():
    """A dead machine does not tidy up."""
    return mock.patch("lohan_ds.store.run_dirs.remove_directory")


@contextlib.contextmanager
def fast_folder() -> Iterator[str]:
    """In RAM, where there is some: what is lost is decided by the CrashingIo."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield folder
