"""Drives that fail without a crash: full, broken, slow, partial. Training ends with an error that says where, or not at
all; the run reopens at a whole step and goes on.
"""
from __future__ import annotations

import errno
import os
import random
import tempfile
from collections.abc import Iterable

from integration_tests.crashes import NUM_STEPS, SYNC_DELAY_S, Reference, Sweep, reopen, ssd_paths
from lohan_ds.errors import StepError, StoreError
from lohan_ds.testing.crashing_io import CrashingIo
from lohan_ds.testing.durable_training import durable_training
from lohan_ds.testing.faulty_io import FaultyIo

ERRORS = (errno.EIO, errno.ENOSPC)
KINDS = ("one request fails", "a read fails", "the drive is full", "short and slow")


def fail_drives(folder: str, update: str, reference: Reference, seeds: Iterable[int], sweep: Sweep) -> None:
    """The kinds take turns by seed; what fails is drawn."""
    for seed in seeds:
        _fail_drive(folder, update, reference, seed, sweep)


def _fail_drive(folder: str, update: str, reference: Reference, seed: int, sweep: Sweep) -> None:
    draw, kind = random.Random(seed), KINDS[seed % len(KINDS)]
    number = draw.choice(ERRORS)
    if kind == "one request fails":
        at_event = draw.randrange(len(reference.events) - 1)
        io = CrashingIo(2, at_event, seed, number, SYNC_DELAY_S)
        kind = f"{os.strerror(number)}: {reference.events[at_event]}"
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
    what = f"{update}, {kind}, seed {seed}"
    sweep.hits[kind] += 1
    with tempfile.TemporaryDirectory(dir=folder) as run_folder:
        paths, started, durable, error = ssd_paths(run_folder), 0, -1, None
        try:
            with durable_training(paths, update, io) as training:
                durable = 0
                while training.step < NUM_STEPS:
                    started, durable = training.step + 1, max(durable, training.store.last_commit[0])
                    training.run(started)
                training.finish()
                durable = NUM_STEPS
        except (StoreError, StepError) as raised:
            error = raised
        if (error is None) != (number == 0):
            sweep.losses.append(f"{what}: got {error!r}")
        elif error is not None and not _says_where(error, number, run_folder):
            sweep.losses.append(f"{what}: it does not say enough: {error}")
        reopen(paths, update, reference, started, durable, what, sweep)


def _says_where(error: Exception, number: int, folder: str) -> bool:
    message = str(error)
    says_numbers = number != errno.ENOSPC or "needed" in message and "free" in message or "sync failed" in message
    return folder in message and os.strerror(number) in message and says_numbers
