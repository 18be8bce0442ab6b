"""Drives that fail without a crash: full, broken, slow, partial. Training ends with an error that says where, or not at
all; the run reopens at a whole step and goes on.
"""
from __future__ import annotations

import errno
import itertools
import os
import random
import tempfile
import time
from collections.abc import Iterable

from integration_tests.crashes import (NUM_STEPS, READ_AHEAD, SYNC_DELAY_S, Mode, Reference, Sweep, reopen, ssd_paths,
                                       watch)
from lohan_ds.errors import StepError, StoreError
from lohan_ds.store.ssd_io import ThreadSsdIo
from lohan_ds.testing.crashing_io import CrashingIo
from lohan_ds.testing.faulty_io import FaultyIo

ERRORS = (errno.EIO, errno.ENOSPC)
KINDS = ("one request fails", "a read fails", "the drive is full", "short and slow", "a request stalls")
STALL_S = 0.3   # many times what a step takes


class StallingIo(ThreadSsdIo):
    """The `at_call`-th system call takes very long."""

    def __init__(self, num_threads: int, at_call: int):
        super().__init__(num_threads)
        self._calls, self._at_call = itertools.count(), at_call

    def _pread(self, fd: int, view: memoryview, offset: int) -> int:
        self._stall()
        return super()._pread(fd, view, offset)

    def _pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        self._stall()
        return super()._pwrite(fd, view, offset)

    def _fdatasync(self, fd: int) -> None:
        self._stall()
        super()._fdatasync(fd)

    def _stall(self) -> None:
        if next(self._calls) == self._at_call:
            time.sleep(STALL_S)


def fail_drives(folder: str, mode: Mode, reference: Reference, seeds: Iterable[int], sweep: Sweep) -> None:
    """The kinds take turns by seed; what fails is drawn."""
    for seed in seeds:
        _fail_drive(folder, mode, reference, seed, sweep)


def _fail_drive(folder: str, mode: Mode, reference: Reference, seed: int, sweep: Sweep) -> None:
    draw, kind = random.Random(seed), KINDS[seed % len(KINDS)]
    number = draw.choice(ERRORS)
    if kind == "one request fails":
        requests = [event for event in reference.events if event != READ_AHEAD]
        place = draw.randrange(len(requests))
        at = requests[place], requests[:place].count(requests[place])
        io = CrashingIo(2, at, seed, number, SYNC_DELAY_S)
        kind = f"{os.strerror(number)}: {at[0]}"
    elif kind == "a request stalls":
        io, number = StallingIo(2, draw.randrange(100)), 0
    else:
        io = FaultyIo(2, seed, max_delay_s=0.002, short_transfers=True)
        if kind == "a read fails":
            number = errno.EIO
            io.inject("read", number, at_call=draw.randrange(30))
        elif kind == "the drive is full":
            number = errno.ENOSPC
            io.inject("write", number, after_bytes=draw.randrange(reference.bytes_written))
        else:
            number = 0
    what = f"{mode.name}, {kind}, seed {seed}"
    with tempfile.TemporaryDirectory(dir=folder) as run_folder:
        paths, started, durable, error = ssd_paths(run_folder), 0, -1, None
        try:
            with mode.training(paths, io) as training:
                if isinstance(io, CrashingIo):
                    watch(training, io)
                durable = 0
                while training.step < NUM_STEPS:
                    started, durable = training.step + 1, max(durable, training.store.last_commit[0])
                    training.run(started)
                training.finish()
                durable = NUM_STEPS
        except (StoreError, StepError) as raised:
            error = raised
        if isinstance(io, CrashingIo) and not io.struck:
            number, kind = 0, "what was to fail did not come"
        sweep.hits[kind] += 1
        if (error is None) != (number == 0):
            sweep.losses.append(f"{what}: got {error!r}")
        elif error is not None and not _says_where(error, number, run_folder):
            sweep.losses.append(f"{what}: it does not say enough: {error}")
        reopen(paths, mode, reference, started, durable, what, sweep)


def _says_where(error: Exception, number: int, folder: str) -> bool:
    message = str(error)
    says_numbers = number != errno.ENOSPC or "needed" in message and "free" in message or "sync failed" in message
    return folder in message and os.strerror(number) in message and says_numbers
