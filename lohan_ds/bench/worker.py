"""The process of one side: makes its trainer, trains the steps it is told to, and measures them.

It is asked with (number of steps that do not count, number that do) and answers with a `Turn`; None ends it. Any answer
that is a str is the reason why it could not go on.
"""
from __future__ import annotations

import logging
import os
import time
import traceback
import warnings
from multiprocessing.connection import Connection

from lohan_ds.bench.case import Case, Side
from lohan_ds.bench.process_facts import (be_first_to_be_killed, cached_share, drive_bytes, end_with_parent,
                                          forget_peak_rss, peak_rss_bytes)
from lohan_ds.bench.turns import StepRecord, Turn

COMPUTE = "compute"     # in place of a side's kind: forward and backward of plain torch, no optimizer


def serve(connection: Connection, side: Side, case: Case, folder: str, log_path: str) -> None:
    """`folder`: empty, on the drive to measure. `log_path`: takes all that libraries print."""
    _print_to(log_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):   # each side is a rank of its own
        os.environ.pop(name, None)
    try:
        end_with_parent()
        be_first_to_be_killed()
        session = Session(side, case, folder)
        connection.send("ready")
        while (request := connection.recv()) is not None:
            connection.send(session.turn(*request))
        session.trainer.close()
    except EOFError:
        return   # whoever asked is gone
    except BaseException as error:  # noqa: BLE001 - said in the table
        traceback.print_exc()
        connection.send(f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")


class Session:
    """A trainer, its steps so far and the peaks of its memory."""

    def __init__(self, side: Side, case: Case, folder: str):
        import torch
        torch.set_num_threads(case.num_threads)
        self.folder, self.num_steps = folder, 0
        from lohan_ds.bench.model import make_batch
        self.batch = make_batch(case)
        self.trainer = make_trainer(side, case, folder)
        self.setup_peak_bytes = peak_rss_bytes()
        forget_peak_rss()

    def turn(self, num_uncounted: int, num_counted: int) -> Turn:
        steps, end_s, moved, cpu_s = [], time.perf_counter(), drive_bytes(), time.process_time()
        for place in range(num_uncounted + num_counted):
            marks = [time.perf_counter()]
            loss = self.trainer.forward(self.batch)
            marks.append(time.perf_counter())
            self.trainer.backward(loss)
            marks.append(time.perf_counter())
            self.trainer.step()
            marks.append(time.perf_counter())
            begin_s, end_s, before, moved = end_s, marks[-1], moved, drive_bytes()
            cpu_before_s, cpu_s = cpu_s, time.process_time()
            phase_s = {name: marks[i + 1] - marks[i] for i, name in enumerate(("forward", "backward", "step"))}
            steps.append(StepRecord(self.num_steps, place >= num_uncounted, end_s - begin_s, phase_s,
                                    cpu_s - cpu_before_s, loss.item(), self.trainer.grad_norm(),
                                    moved[0] - before[0], moved[1] - before[1]))
            self.num_steps += 1
        self.trainer.settle()
        settle_s = time.perf_counter() - end_s
        peak = peak_rss_bytes()
        return Turn(tuple(steps), settle_s, max(peak, self.setup_peak_bytes), peak, cached_share(self.folder))


def make_trainer(side: Side, case: Case, folder: str):
    if side.settings.get("native_pin"):
        os.environ["DS_PIN_MEMORY_BACKEND"] = "native"
    from lohan_ds.bench.model import make_model
    model = make_model(case)
    if side.kind == "torch":
        from lohan_ds.bench.trainers import PlainTrainer
        return PlainTrainer(model, case, own_adam=side.variant == "lohan-adam")
    if side.kind == COMPUTE:
        from lohan_ds.bench.trainers import ComputeTrainer
        return ComputeTrainer(model, case)
    if side.kind == "fsdp2":
        from lohan_ds.bench.trainers import Fsdp2Trainer
        return Fsdp2Trainer(model, case)
    from lohan_ds.bench import engines
    return (engines.lohan_trainer if side.is_lohan else engines.deepspeed_trainer)(model, case, side, folder)


def _print_to(log_path: str) -> None:
    """Everything that would go to standard output and error, also from libraries and what they compile."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    logging.getLogger("lohan_ds").setLevel(logging.WARNING)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.simplefilter("ignore")
