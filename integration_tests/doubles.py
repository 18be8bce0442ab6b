"""Engines on test doubles, and the twin beside them: shared by test_timing.py and test_failures.py."""
from __future__ import annotations

import functools
import os
import time

from lohan_ds.rehearsal.paced_io import PacedDrive, PacedIo
from lohan_ds.store.native_io import make_ssd_io
from lohan_ds.store.ssd_io import ThreadSsdIo
from lohan_ds.testing.harness import DTYPES, ds_config
from lohan_ds.testing.models import lm_batch, loss_of, vocab_of
from lohan_ds.testing.twin import Twin

LR = {"lr": 1e-2, "weight_decay": 0.1}
ADAMW = {"type": "AdamW", "params": LR}


def use_doubles(monkeypatch, streams=None, make_io=make_ssd_io) -> None:
    """Engines made from now on use these instead of the device's streams and the real disk."""
    from lohan_ds.engine import LohanEngine
    from lohan_ds.offload import Offload
    make_offload = functools.partial(Offload, streams=streams, make_io=make_io)
    monkeypatch.setattr(LohanEngine, "make_offload", staticmethod(make_offload))


def one_drive(bytes_per_s: float):
    """I/O on one drive that moves so many bytes per second, whatever the number of threads: for `use_doubles`."""
    return functools.partial(PacedIo, drives=[("/", PacedDrive(bytes_per_s, bytes_per_s))])


def engine_config(ssd, dtype="fp32", clip=0.0, accumulation=1, **lohan):
    section = {"ssd_paths": [str(ssd)], "param_tier": "ssd", "optimizer_tier": "ssd", "chunk_bytes": "48KiB", **lohan}
    return ds_config(section, dtype=dtype, clip=clip, accumulation=accumulation, optimizer=ADAMW)


def train_engine(engine, batches, accumulation=1):
    for step in batches:
        for batch in step:
            engine.backward(loss_of(engine, batch))
            engine.step()


def step_alike(engine, twin, micro_batches) -> None:
    """One step of both, with the same losses."""
    for batch in micro_batches:
        theirs = twin.micro_step(batch)
        loss = loss_of(engine, batch)
        engine.backward(loss)
        assert loss.item() == theirs
        del loss   # and with it the graph
        engine.step()
    twin.step()


def train_twin(model, batches, dtype="fp32", clip=0.0):
    twin = Twin(model, None, DTYPES[dtype], clip, len(batches[0]), **LR)
    for step in batches:
        for batch in step:
            twin.micro_step(batch)
        twin.step()
    return twin.state()


def make_batches(model, num_steps, accumulation=1, seed=0):
    return [[lm_batch(vocab_of(model), seed=1000 * seed + 10 * step + micro) for micro in range(accumulation)]
            for step in range(num_steps)]


class SlowWrites(ThreadSsdIo):
    seconds = 0.002   # more, where the write must still be under way when others are there, on a busy machine too

    def _pwrite(self, fd, view, offset):
        time.sleep(self.seconds)
        return super()._pwrite(fd, view, offset)


def fresh_environment(**more: str) -> dict[str, str]:
    """For a process of its own on the CPU: the environment without the rank that this one has given itself."""
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in ours}
    return {**kept, "DS_ACCELERATOR": "cpu", **more}
