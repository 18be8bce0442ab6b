"""Crashes of a small training run, and what is there afterwards: never anything but a whole step.

A `CrashingIo` dies at a chosen event and forgets what was not synced. The run is reopened, every bit is compared with
the same step of a run that was left alone, and it goes on. Used by crash_sweep.py and test_crash.py.
"""
from __future__ import annotations

import collections
import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

from lohan_ds.errors import LohanError
from lohan_ds.testing.crashing_io import CrashingIo
from lohan_ds.testing.durable_training import DurableTraining, State, durable_training, same

NUM_STEPS = 4        # before the crash; two more after it
MOST_STEPS_LOST = 2  # the one under way, and the one that is trailing or whose record is under way
SYNC_DELAY_S = 0.01  # so long that slots are asked for before they are free


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
    steps_lost: collections.Counter = field(default_factory=collections.Counter)
    losses: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        hits = "\n".join(f"  {count:5} x {what}" for what, count in sorted(self.hits.items()))
        return "\n".join([f"{self.hits.total()} crashes:", hits, f"steps lost: {dict(sorted(self.steps_lost.items()))}",
                          f"losses: {len(self.losses)}", *self.losses])


def ssd_paths(folder: str) -> list[str]:
    """Two new directories, for a run that is striped over them."""
    paths = [os.path.join(folder, name) for name in "ab"]
    for path in paths:
        os.makedirs(path)
    return paths


def make_reference(folder: str, update: str) -> Reference:
    io = CrashingIo(2)
    with durable_training(ssd_paths(os.path.join(folder, f"reference {update}")), update, io) as training:
        states = {0: training.state()}
        for step in range(1, NUM_STEPS + 3):
            train(training, step, io)
            states[step] = training.state()
            if step == NUM_STEPS:
                training.finish()
                events, bytes_written = list(io.events), io.bytes_written
    return Reference(states, events, bytes_written)


def crash(folder: str, update: str, reference: Reference, at_event: int, seed: int, sweep: Sweep) -> None:
    """One crash and what follows; nothing if the run ended before that event."""
    with tempfile.TemporaryDirectory(dir=folder) as run_folder:
        paths, io = ssd_paths(run_folder), CrashingIo(2, at_event, seed, sync_delay_s=SYNC_DELAY_S)
        started, durable = 0, -1
        try:
            with _nothing_removed(), durable_training(paths, update, io) as training:
                durable = 0
                while training.step < NUM_STEPS:
                    started, durable = training.step + 1, max(durable, training.store.last_commit[0])
                    train(training, started, io)
                training.finish()
        except (LohanError, OSError):
            if not io.dead:
                raise
        if not io.dead:
            return
        sweep.hits[io.events[at_event]] += 1
        io.lose_power()
        reopen(paths, update, reference, started, durable, f"{update}, event {at_event} ({io.events[at_event]}), seed "
                                                           f"{seed}", sweep)


def reopen(paths: list[str], update: str, reference: Reference, started: int, durable: int, what: str,
           sweep: Sweep) -> None:
    """The run must be at a whole step, no older than `durable` (-1: it may not exist yet), and go on exactly."""
    try:
        with durable_training(paths, update) as training:
            step = training.step
            if not same(training.state(), reference.states[step]):
                sweep.losses.append(f"{what}: other bits at step {step}")
            elif step < durable or started - step > MOST_STEPS_LOST:
                sweep.losses.append(f"{what}: back at step {step}, {durable} was durable, {started} begun")
            else:
                sweep.steps_lost[started - step] += 1
                training.run(NUM_STEPS + 2)
                training.finish()
                if not same(training.state(), reference.states[NUM_STEPS + 2]):
                    sweep.losses.append(f"{what}: other bits after going on from step {step}")
    except (LohanError, OSError) as error:
        sweep.losses.append(f"{what}: cannot be reopened: {error!r}")


def train(training: DurableTraining, until_step: int, io: CrashingIo) -> None:
    """Tells the `io` what it is written to for."""
    def on_phase(phase: str) -> None:
        if phase == "in backward":
            io.begin_step()
        io.phase = phase

    training.run(until_step, on_phase)


def _nothing_removed():
    """A dead machine does not tidy up."""
    return mock.patch("lohan_ds.store.run_dirs.remove_directory")


@contextlib.contextmanager
def fast_folder() -> Iterator[str]:
    """In RAM, where there is some: what is lost is decided by the CrashingIo."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        yield folder
