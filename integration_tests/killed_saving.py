"""Processes that are killed with SIGKILL while they save a checkpoint, and what can be loaded then."""
from __future__ import annotations

import functools
import logging
import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from integration_tests.crashes import Sweep
from integration_tests.doubles import engine_config, fresh_environment, make_batches, train_engine
from lohan_ds.testing.harness import engine_for, engine_state
from lohan_ds.testing.models import OddModel
from lohan_ds.testing.twin import State, diff_bits

NUM_STEPS = 4
DURING = "during a save"


def batches() -> list:
    """Of so many steps."""
    return make_batches(OddModel(), NUM_STEPS)


def config(ssd: str | Path, tier: str = "ssd") -> dict:
    return engine_config(ssd, "bf16", clip=1.0, param_tier=tier, optimizer_tier=tier)


def make_states(ssd: str | Path) -> dict[int, State]:
    """By number of steps; one compute thread, as everywhere here."""
    states, num_threads = {}, torch.get_num_threads()
    torch.set_num_threads(1)
    with engine_for(OddModel(), config(ssd)) as engine:
        for number, step in enumerate(batches(), start=1):
            train_engine(engine, [step])
            states[number] = engine_state(engine)
    torch.set_num_threads(num_threads)
    return states


def load(folder: str | Path, ssd: str | Path) -> tuple[int, State]:
    """The number of steps of the latest checkpoint, 0 if there is none, and what a model of other weights has then."""
    with engine_for(OddModel(seed=9), config(ssd)) as engine:
        engine.load_checkpoint(folder)
        return engine.global_steps, engine_state(engine)


class Calls:
    """Counts the system calls that name, sync and remove files from now on; kills the process before number `kill_at`.
    """

    def __init__(self):
        self.count, self.kill_at = 0, -1
        for name in ("fsync", "rename", "unlink", "rmdir"):
            setattr(os, name, functools.partial(self._call, getattr(os, name)))

    def _call(self, call: Callable, *args, **kwargs) -> None:
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1
        call(*args, **kwargs)


def _save_until_killed(folder: str, ssd: str, tag: str, share: float, at_call: bool, saved) -> None:
    """In a process of its own, which ends when `share` of the time is over that a save takes, or of the system calls
    that name, sync and remove files. `saved`: shared, set to 1 when the save is over."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for name in set(os.environ) - set(fresh_environment()):   # a rank of its own
        os.environ.pop(name)
    with engine_for(OddModel(), config(ssd)) as engine:
        train_engine(engine, batches()[:1])
        engine.save_checkpoint(folder, tag="one", save_latest=False)   # the first one takes longer
        calls, start_s = Calls(), time.monotonic()
        engine.save_checkpoint(folder, tag="one")
        save_s, num_calls = time.monotonic() - start_s, calls.count
        train_engine(engine, batches()[1:2])
        engine.offload.gradients.updater.drain()
        if at_call:
            calls.count, calls.kill_at = 0, int(share * num_calls)
        else:
            threading.Timer(share * save_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        engine.save_checkpoint(folder, tag=tag)
        saved.value = 1
        if at_call:   # there were fewer
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


def kill_savers(folder: str | Path, states: dict[int, State], seeds: Iterable[int], sweep: Sweep) -> None:
    """A process per seed, killed in a save, which in every other one replaces a checkpoint; at a drawn moment, or at a
    drawn system call."""
    context = multiprocessing.get_context("forkserver")   # imports once, with one thread: from there it can be forked
    context.set_forkserver_preload([__name__])
    for seed in seeds:
        tag, at_call, share = ("two", "one")[seed % 2], seed % 4 > 1, random.Random(seed).uniform(0, 1.1)
        with tempfile.TemporaryDirectory(dir=folder) as run_folder:
            ssd, checkpoints = os.path.join(run_folder, "ssd"), os.path.join(run_folder, "checkpoints")
            os.mkdir(ssd)
            saved = context.RawValue("i", 0)
            process = context.Process(target=_save_until_killed, args=(checkpoints, ssd, tag, share, at_call, saved))
            process.start()
            process.join(120)
            assert process.exitcode == -signal.SIGKILL, (seed, process.exitcode)
            where = "after a save" if saved.value else f"{DURING} {'beside' if tag == 'two' else 'over'} another"
            what = f"SIGKILL {where}, at a {'system call' if at_call else 'moment'}"
            sweep.hits[what] += 1
            try:
                step, state = load(checkpoints, ssd)
            except Exception as error:   # noqa: BLE001 - whatever a broken checkpoint comes to
                sweep.losses.append(f"{what}, {share:.2f} through, seed {seed}: cannot be loaded: {error!r}")
                continue
            if step not in (1, 2) or step < 1 + saved.value or diff_bits(state, states[step]):
                sweep.losses.append(f"{what}, {share:.2f} through, seed {seed}: other bits at step {step}")
            sweep.steps_lost[2 - step] += 1
