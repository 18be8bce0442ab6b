"""`rehearse`: steps of a model on a machine that are both not there, by the product's own engine.

[Note: what is real] The engine, its threads, queues and order of work; the files, and every byte in them; Adam and the
gradient norm. What is not: compute is time that passes on a lane (paced_streams.py), links, drives and Adam are slowed
down to the machine's rates, all at one scale (scale.py). Not seen here: kernels that slow down under copies, the
allocator, a CPU too slow for the Python between two layers (`Rehearsed.unpaced_s` is what it took here).
"""
from __future__ import annotations

import functools
import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lohan_ds.errors import ConfigError
from lohan_ds.model_blocks import split_into_blocks
from lohan_ds.offload import Offload
from lohan_ds.plan import OffloadPlan
from lohan_ds.planner.solution import Solution
from lohan_ds.profile import Budgets, HardwareProfile, ModelProfile
from lohan_ds.rehearsal.meters import DeviceMeter, PacedUpdate, covered_s
from lohan_ds.rehearsal.offload_plan import rehearsed_plan
from lohan_ds.rehearsal.oldest_first import OldestFirst
from lohan_ds.rehearsal.paced_io import PacedDrive, PacedIo
from lohan_ds.rehearsal.paced_streams import LaneEvent, PacedStreams
from lohan_ds.rehearsal.scale import Scale
from lohan_ds.rehearsal.timed_model import Clockwork, TimedModel
from lohan_ds.run_plan import RunPlan
from lohan_ds.step_protocol import StepProtocol
from lohan_ds.step_summary import STALL_CAUSES
from lohan_ds.stripe import even_stripe, shares
from lohan_ds.testing.harness import ds_config, engine_for

WARM_UP_STEPS = 1   # in which the engine learns the order of the units, and nothing trails from a step before
NO_LIMIT_BYTES = 1 << 60
LINKS = ("h2d", "d2h", "ssd_read", "ssd_write")


@dataclass(frozen=True)
class Rehearsed:
    """Of one step, the mean of all that count; seconds and bytes at full size."""
    step_s: float
    fastest_s: float                 # of these steps
    slowest_s: float
    forward_s: float                 # until the device had computed it; so is backward
    backward_s: float
    after_backward_s: float          # until `step()` was over
    stall_s: dict[str, float]        # that the training thread waited, by cause
    copy_wait_s: float               # that the device had work, but waited for a copy
    unpaced_s: float                 # that nobody computed or waited for anything of these: Python, and the real disk
    nbytes: dict[str, float]         # by link
    busy_s: dict[str, float]         # by resource, at the pace: device, h2d, d2h, ssd (mean of the drives), cpu
    busiest_drive_s: float
    updated_params: float
    kept_activation_bytes: float     # that the plan had swapped: its space was full
    num_steps: int


def rehearse(model: ModelProfile, hardware: HardwareProfile, num_ssds: int, solution: Solution, scale: Scale,
             num_steps: int, scratch: str | None = None, trace_path: str | None = None,
             on_step: Callable[[int], None] = lambda step: None) -> Rehearsed:
    """`model`: at full size, of the plan's micro-batch. `scratch`: a directory for files, the system's if None.
    `on_step`: called before each step. ConfigError where the device's memory is the host's."""
    if hardware.unified:
        raise ConfigError(f"{hardware.name}: what is rehearsed is a device with memory of its own; here it is the "
                          "host's, so train a few steps instead")
    paced, small = scale.hardware(hardware), scale.model(model)
    with tempfile.TemporaryDirectory(prefix="lohan_rehearsal_", dir=scratch) as folder:
        stage = _Stage(folder, small, paced, max(num_ssds, 1), solution, scale, trace_path)
        return stage.run(num_steps, on_step, rehearsed_plan(solution, model, hardware, small))


class _Stage:
    """One engine on doubles. One thread."""

    def __init__(self, folder: str, model: ModelProfile, hardware: HardwareProfile, num_ssds: int, solution: Solution,
                 scale: Scale, trace_path: str | None):
        self._model, self._hardware, self._solution, self._scale = model, hardware, solution, scale
        self._trace_path = trace_path or os.path.join(folder, "trace.json")
        paths = [os.path.join(folder, f"ssd{place}") for place in range(num_ssds)]
        for path in paths:
            os.mkdir(path)
        share = shares(hardware.ssd_stripe or even_stripe(num_ssds))
        self._drives = [(path, PacedDrive(hardware.ssd_read_bytes_per_s * share.get(place, 0),
                                          hardware.ssd_write_bytes_per_s * share.get(place, 0)))
                        for place, path in enumerate(paths)]
        self._meter = DeviceMeter()

    def run(self, num_steps: int, on_step: Callable[[int], None], plan: OffloadPlan) -> Rehearsed:
        streams = PacedStreams(self._hardware.h2d_bytes_per_s, self._hardware.d2h_bytes_per_s)
        streams.on_compute = self._meter.on_compute
        clock = Clockwork(streams)
        order = OldestFirst if self._solution.schedule.update == "barrier" else StepProtocol
        make_offload = functools.partial(Offload, streams=streams, make_protocol=order,
                                         make_io=functools.partial(PacedIo, drives=self._drives),
                                         make_plan=functools.partial(self._make_plan, plan))
        model = TimedModel(self._model, self._hardware.device_flops_per_s, clock)
        logger = logging.getLogger("lohan_ds")
        level = logger.level
        logger.setLevel(logging.WARNING)
        try:
            with engine_for(model, self._config(), make_offload=make_offload) as engine:
                return self._measure(engine, streams, model, num_steps, on_step)
        finally:
            logger.setLevel(level)
            clock.close()

    def _config(self) -> dict:
        lohan = {"ssd_paths": [path for path, _ in self._drives], "trace_path": self._trace_path,
                 "update_threads": 1}
        return ds_config(lohan, dtype="fp32" if self._model.size.blocks[0].dtype == "float32" else "bf16",
                         accumulation=self._solution.batch.accumulation, batch=1,
                         optimizer={"type": "AdamW", "params": {"lr": 1e-3}})

    def _make_plan(self, plan: OffloadPlan, model, config, group_of, *_):
        """As `run_plan.plan_run`: of the decisions that were made at full size."""
        model_blocks = split_into_blocks(model, group_of, plan.chunk_numel)
        ours, profiled = ([(block.numel, block.dtype, block.trainable) for block in blocks]
                          for blocks in (model_blocks.blocks, self._model.size.blocks))
        assert ours == profiled, "the timed model is cut like the profiled one"
        source = "the plan at full size"
        return RunPlan(model_blocks, plan, Budgets(*(NO_LIMIT_BYTES,) * 3, False, *(source,) * 3), 0)

    def _measure(self, engine, streams: PacedStreams, model: TimedModel, num_steps: int,
                 on_step: Callable[[int], None]) -> Rehearsed:
        offload = engine.offload
        updater = offload.gradients.updater
        streams.on_copy = self._meter.on_copy(streams.on_copy)
        updater.on_span = update = PacedUpdate(self._hardware.cpu_update_params_per_s, updater.on_span)
        x = torch.zeros(model.input_numel, dtype=model.dtype)
        moments, before = [], None
        for step in range(WARM_UP_STEPS + num_steps):
            on_step(step)
            if step == WARM_UP_STEPS:
                before = self._counts(offload, update)
            moments.append(self._step(engine, streams, x))
        counts = {key: value - before[key] for key, value in self._counts(offload, update).items()}
        updater.drain()
        moments[-1].wait()
        stalls = offload.recorder.intervals("stall")
        return self._figures(moments, counts, stalls)

    def _step(self, engine, streams: PacedStreams, x: torch.Tensor) -> _Moments:
        marks, stall_s = [], dict.fromkeys(STALL_CAUSES, 0.0)
        for _ in range(self._solution.batch.accumulation):
            loss = engine(x)
            marks.append(streams.compute_mark())
            engine.backward(loss)
            marks.append(streams.compute_mark())
            engine.step()
        if self._solution.schedule.update == "barrier":
            engine.offload.gradients.updater.drain()
        end_s = time.perf_counter()
        stall_s.update(engine.lohan_step_summary().stall_s)
        return _Moments(marks, end_s, stall_s)

    def _counts(self, offload: Offload, update: PacedUpdate) -> dict[str, float]:
        io, stats = offload.io, offload.stats()
        return {**{direction: self._meter.nbytes[direction] for direction in ("h2d", "d2h")},
                "ssd_read": io.bytes_read if io is not None else 0,
                "ssd_write": io.bytes_written if io is not None else 0,
                **{path: drive.busy_s for path, drive in self._drives},
                "cpu": update.busy_s, "params": update.num_params, "kept": stats.get("unplanned_kept_bytes", 0)}

    def _figures(self, moments: list[_Moments], counts: dict[str, float],
                 stalls: list[tuple[float, float]]) -> Rehearsed:
        starts = [each.end_s for each in moments[WARM_UP_STEPS - 1:-1]]
        counted = moments[WARM_UP_STEPS:]
        num_steps, begin_s, end_s = len(counted), starts[0], counted[-1].end_s
        to_seconds, to_bytes = 1 / self._scale.seconds / num_steps, 1 / self._scale.bytes / num_steps
        step_s = [(each.end_s - start) / self._scale.seconds for each, start in zip(counted, starts)]
        phases = [each.phases_s(start) for each, start in zip(counted, starts)]
        meter = self._meter
        device_s, wait_s = (covered_s(each, begin_s, end_s) for each in (meter.computing, meter.waiting))
        accounted_s = covered_s([*meter.computing, *meter.waiting, *stalls], begin_s, end_s)
        drives_s = [counts[path] * to_seconds for path, _ in self._drives]
        busy_s = {"device": device_s * to_seconds,
                  "h2d": counts["h2d"] / self._hardware.h2d_bytes_per_s * to_seconds,
                  "d2h": counts["d2h"] / self._hardware.d2h_bytes_per_s * to_seconds,
                  "ssd": sum(drives_s) / len(drives_s), "cpu": counts["cpu"] * to_seconds}
        return Rehearsed(
            sum(step_s) / num_steps, min(step_s), max(step_s),
            *(sum(phase) * to_seconds for phase in zip(*phases)),
            {cause: sum(each.stall_s[cause] for each in counted) * to_seconds for cause in STALL_CAUSES},
            wait_s * to_seconds, (end_s - begin_s - accounted_s) * to_seconds,
            {link: counts[link] * to_bytes for link in LINKS}, busy_s, max(drives_s), counts["params"] * to_bytes,
            counts["kept"] * to_bytes, num_steps)


@dataclass
class _Moments:
    """Of one step."""
    marks: list[LaneEvent | None]   # after forward and backward of each micro-step, in turns
    end_s: float                    # of time.perf_counter
    stall_s: dict[str, float]

    def wait(self) -> None:
        for mark in self.marks:
            if mark is not None:
                mark.host_wait()

    def phases_s(self, start_s: float) -> tuple[float, float, float]:
        """Seconds of forwards, backwards, and of what came after them. None of them begins before `start_s`."""
        seconds, before_s = [0.0, 0.0], start_s
        for place, mark in enumerate(self.marks):
            now_s = max(before_s, mark.end_s if mark is not None else before_s)
            seconds[place % 2] += now_s - before_s
            before_s = now_s
        return seconds[0], seconds[1], self.end_s - before_s

