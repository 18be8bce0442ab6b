"""Real processes on a real disk, killed with SIGKILL at a drawn moment, and what they leave."""
from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import tempfile
import threading
from collections.abc import Iterable

from integration_tests.crashes import NUM_STEPS, Mode, Reference, Sweep, reopen, ssd_paths
from lohan_ds.store.ssd_io import ThreadSsdIo
from lohan_ds.testing.durable_training import tiny_blocks


class KillingIo(ThreadSsdIo):
    """Kills its process `delay_s` after `after_bytes` have been written; without delay, within a write."""

    def __init__(self, num_threads: int, after_bytes: int, delay_s: float):
        super().__init__(num_threads)
        self._left_bytes, self._delay_s = after_bytes, delay_s
        self._count_lock = threading.Lock()

    def _pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        with self._count_lock:
            left, self._left_bytes = self._left_bytes, self._left_bytes - len(view)
        if 0 <= left < len(view):
            if self._delay_s:
                threading.Timer(self._delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            else:
                super()._pwrite(fd, view[:left // 4096 * 4096], offset)
                os.kill(os.getpid(), signal.SIGKILL)
        return super()._pwrite(fd, view, offset)


def _train_until_killed(paths: list[str], mode: Mode, after_bytes: int, delay_s: float, progress) -> None:
    """In a process of its own. `progress`: (step begun, last durable one), shared."""
    logging.disable(logging.WARNING)
    with mode.training(paths, KillingIo(2, after_bytes, delay_s)) as training:
        while training.step < NUM_STEPS:
            progress[:] = training.step + 1, training.store.last_commit[0]
            training.run(training.step + 1)
        training.finish()


def kill_processes(folder: str, mode: Mode, reference: Reference, seeds: Iterable[int], sweep: Sweep) -> None:
    """A process per seed, killed after a drawn number of bytes, first values included, or a little later."""
    context = multiprocessing.get_context("forkserver")   # imports once, with one thread: from there it can be forked
    context.set_forkserver_preload([__name__])
    total_bytes = (NUM_STEPS + 1) * sum(block.param_bytes + block.state_bytes for block in tiny_blocks())
    for seed in seeds:
        draw = random.Random(seed)
        after_bytes, delay_s = draw.randrange(total_bytes), draw.choice([0.0, draw.uniform(0, 0.02)])
        with tempfile.TemporaryDirectory(dir=folder) as run_folder:
            paths, progress = ssd_paths(run_folder), context.RawArray("i", [0, -1])
            process = context.Process(target=_train_until_killed, args=(paths, mode, after_bytes, delay_s, progress))
            process.start()
            process.join(60)
            if process.exitcode != -signal.SIGKILL:   # 0: it ended sooner
                assert process.exitcode == 0, (seed, process.exitcode)
                continue
            started, durable = progress
            sweep.hits["SIGKILL of a process" + (" before its first commit" if durable < 0 else "")] += 1
            reopen(paths, mode, reference, started, durable, f"{mode.name}, SIGKILL after {after_bytes} bytes and "
                                                             f"{delay_s:.4f} s, seed {seed}", sweep)
