"""Step time of every update order against the formulas of the design: timed sleep for compute, a paced drive.

    python -m integration_tests.bench_overlap [--case ssd|balanced|compute] [--mode MODE] [--steps 6] [--rounds 2]
        [--chunk-bytes 128KiB] [--scale 1] [--trace DIR]

Modes: serial; barrier (LoHan's own order: in backward, oldest gradient first, and the next forward waits for all);
deferred; oldest: eager, oldest first; eager; and deferred+ahead and eager+ahead, where there is host memory for
optimizer state of the first blocks, read ahead in backward.

Bytes, threads, files and engine are real. Blocks are equal. T_f and T_b are what the model slept, S the bytes that
moved in a step over the pace of the drive, which reads and writes share. Each engine's first step, in which it learns
the order, does not count. A ratio is printed only if all modes and rounds of the case gave the same losses.
"ratio, real compute" counts to T_f and T_b all of forward and backward that is no stall: hooks, Python, small matrices.
"""
from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from torch import nn

from integration_tests.doubles import engine_config, one_drive
from integration_tests.test_timing import update_bytes
from lohan_ds.rehearsal.oldest_first import OldestFirst
from lohan_ds.step_protocol import StepProtocol
from lohan_ds.step_summary import STALL_CAUSES
from lohan_ds.testing.harness import engine_for

MODES = ("serial", "barrier", "deferred", "deferred+ahead", "oldest", "eager", "eager+ahead")
UPDATE = {"barrier": "eager", "oldest": "eager"}   # of the mode, where it is not its name
NUM_BLOCKS, BLOCK_NUMEL, HIDDEN = 24, 65536, 64
BYTES_PER_PARAM = 26 + 2 + 2   # update, fetches of forward and backward
CASES = {"ssd": (0.4, 0.8, 1.8), "balanced": (0.4, 0.8, 1.2), "compute": (0.4, 0.8, 0.6)}   # nominal T_f, T_b, S


@contextlib.contextmanager
def product_as(mode: str, bytes_per_s: float) -> Iterator[None]:
    """The product's own code, with a paced drive and the update order of `mode`."""
    import lohan_ds.planner.search
    from lohan_ds.engine import LohanEngine
    from lohan_ds.offload import Offload
    make_offload = functools.partial(Offload, make_io=one_drive(bytes_per_s),
                                     make_protocol=OldestFirst if mode in ("barrier", "oldest") else StepProtocol)
    with contextlib.ExitStack() as undo:
        undo.enter_context(patch.object(LohanEngine, "make_offload", staticmethod(make_offload)))
        if not mode.endswith("+ahead"):
            undo.enter_context(patch.object(lohan_ds.planner.search, "_num_read_ahead_chunks", lambda *_: 0))
        yield


class Sleeper:
    """Sleeps, and knows how long it really slept."""

    def __init__(self):
        self.slept_s = {"forward": 0.0, "backward": 0.0}

    def sleep(self, phase: str, seconds: float) -> None:
        start = time.perf_counter()
        time.sleep(seconds)
        self.slept_s[phase] += time.perf_counter() - start


class _SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sleep):
        ctx.sleep = sleep
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.sleep()
        return grad.clone(), None


class SleepyBlock(nn.Module):
    def __init__(self, sleeper: Sleeper, forward_s: float, backward_s: float):
        super().__init__()
        self.down = nn.Parameter(torch.randn(BLOCK_NUMEL // HIDDEN, HIDDEN) * 0.01)
        self.sleep_forward = functools.partial(sleeper.sleep, "forward", forward_s)
        self.sleep_backward = functools.partial(sleeper.sleep, "backward", backward_s)

    def forward(self, x):
        self.sleep_forward()
        x = x + nn.functional.linear(x, self.down)[..., :HIDDEN]
        return _SleepInBackward.apply(x, self.sleep_backward)


class SleepyModel(nn.Module):
    def __init__(self, sleeper: Sleeper, forward_s: float, backward_s: float):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.ModuleList(
                SleepyBlock(sleeper, forward_s / NUM_BLOCKS, backward_s / NUM_BLOCKS) for _ in range(NUM_BLOCKS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


@dataclass
class Figures:
    """Of all measured steps of one mode; bytes are those that moved in these steps."""
    step_s: list[float] = field(default_factory=list)
    phase_s: dict[str, list[float]] = field(default_factory=lambda: {"forward": [], "backward": [], "step": []})
    slept_s: dict[str, list[float]] = field(default_factory=lambda: {"forward": [], "backward": []})
    stall_s: dict[str, list[float]] = field(default_factory=lambda: {cause: [] for cause in STALL_CAUSES})
    update_bytes: dict[str, int] = field(default_factory=lambda: {"forward": 0, "backward": 0, "step": 0})
    all_bytes: int = 0
    losses: list[list[float]] = field(default_factory=list)   # by round
    num_speculated: list[int] = field(default_factory=list)

    @property
    def update_bytes_per_step(self) -> float:
        return sum(self.update_bytes.values()) / len(self.step_s)

    @property
    def fetch_bytes_per_step(self) -> float:
        return self.all_bytes / len(self.step_s) - self.update_bytes_per_step


def measure(mode: str, case: str, num_steps: int, trace_dir: str | None, figures: Figures, chunk_bytes: str) -> None:
    forward_s, backward_s, ssd_s = CASES[case]   # scaled by `main`
    bytes_per_s = NUM_BLOCKS * BLOCK_NUMEL * BYTES_PER_PARAM / ssd_s
    sleeper, x, losses = Sleeper(), torch.ones(2, HIDDEN, dtype=torch.bfloat16), []
    with tempfile.TemporaryDirectory(prefix="bench_overlap_") as ssd, product_as(mode, bytes_per_s):
        trace = os.path.join(trace_dir or ssd, f"{case}_{mode}.json")   # also asks for a recorder
        config = engine_config(ssd, "bf16", 1e6, update=UPDATE.get(mode, mode.removesuffix("+ahead")),
                               chunk_bytes=chunk_bytes, trace_path=trace)
        with engine_for(SleepyModel(sleeper, forward_s, backward_s), config) as engine:
            for step in range(num_steps + 1):
                slept, all_before = dict(sleeper.slept_s), engine.offload.store.bytes_read \
                    + engine.offload.store.bytes_written
                moments, moved = [time.perf_counter()], [update_bytes(engine)]
                loss = engine(x)
                moments.append(time.perf_counter())
                moved.append(update_bytes(engine))
                engine.backward(loss)
                moments.append(time.perf_counter())
                moved.append(update_bytes(engine))
                engine.step()
                if mode == "barrier":
                    engine.offload.gradients.updater.drain()
                moments.append(time.perf_counter())
                moved.append(update_bytes(engine))
                losses.append(loss.item())
                if step == 0:
                    continue
                summary = engine.offload.recorder.step_summary(0)
                figures.step_s.append(moments[-1] - moments[0])
                figures.all_bytes += engine.offload.store.bytes_read + engine.offload.store.bytes_written \
                    - all_before
                for place, phase in enumerate(("forward", "backward", "step")):
                    figures.phase_s[phase].append(moments[place + 1] - moments[place])
                    figures.update_bytes[phase] += moved[place + 1] - moved[place]
                for phase in slept:
                    figures.slept_s[phase].append(sleeper.slept_s[phase] - slept[phase])
                for cause in STALL_CAUSES:
                    figures.stall_s[cause].append(summary.stall_s[cause])
                figures.num_speculated.append(summary.num_speculated)
    figures.losses.append(losses)


def formula(mode: str, forward_s: float, backward_s: float, ssd_s: float) -> float:
    if mode == "serial":
        return forward_s + backward_s + ssd_s
    if mode == "barrier":
        return forward_s + max(backward_s, ssd_s)
    if mode.startswith("deferred"):
        return backward_s + max(forward_s, ssd_s)
    return max(forward_s + backward_s, ssd_s)


def report(case: str, figures: dict[str, Figures]) -> None:
    first = next(iter(figures.values())).losses[0]
    same = all(losses == first for f in figures.values() for losses in f.losses)
    rate = NUM_BLOCKS * BLOCK_NUMEL * BYTES_PER_PARAM / CASES[case][2]
    print(f"\n{case}: {NUM_BLOCKS} blocks of {BLOCK_NUMEL} parameters, drive {rate / 1e6:.1f} MB/s, "
          f"{len(next(iter(figures.values())).step_s)} steps per mode; losses "
          + ("the same in all modes and rounds" if same else "DIFFER: no ratios"))
    print("mode           | s/step median (min-max) | formula | ratio | update bytes hidden (forward, backward) "
          "| T_f    T_b    S      (update, fetch MB) | ratio, S of updates only | ratio, real compute")
    for mode, f in figures.items():
        forward_s, backward_s = (statistics.median(f.slept_s[phase]) for phase in ("forward", "backward"))
        update, fetch = f.update_bytes_per_step, f.fetch_bytes_per_step
        ssd_s, median, total = (update + fetch) / rate, statistics.median(f.step_s), sum(f.update_bytes.values())
        shares = [f.update_bytes[phase] / total for phase in ("forward", "backward")]
        stalled = [sum(seconds) for seconds in zip(f.stall_s["parameters"], f.stall_s["update"])]   # all in forward
        real_s = statistics.median(a - b for a, b in zip(f.phase_s["forward"], stalled)), \
            statistics.median(f.phase_s["backward"])
        expected = [formula(mode, forward_s, backward_s, ssd_s), formula(mode, forward_s, backward_s, update / rate),
                    formula(mode, *real_s, ssd_s)]
        ratios = [f"{median / seconds:.3f}" if same else "  -  " for seconds in expected]
        print(f"{mode:14} | {median:.3f} ({min(f.step_s):.3f}-{max(f.step_s):.3f})     | {expected[0]:.3f}   | "
              f"{ratios[0]} | {sum(shares):6.1%} ({shares[0]:6.1%}, {shares[1]:6.1%})               "
              f"| {forward_s:.3f}  {backward_s:.3f}  {ssd_s:.3f}  ({update / 1e6:.1f}, {fetch / 1e6:.1f})        "
              f"| {ratios[1]}                    | {ratios[2]}")
    for mode, f in figures.items():
        phases = ", ".join(f"{phase} {statistics.median(seconds):.3f}" for phase, seconds in f.phase_s.items())
        stalls = ", ".join(f"{cause} {statistics.median(seconds):.3f}" for cause, seconds in f.stall_s.items())
        print(f"  {mode:14}: {phases}; stalled: {stalls}; blocks speculated {statistics.median(f.num_speculated):g}",
              flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), action="append", help="default: all")
    parser.add_argument("--mode", choices=MODES, action="append", help="default: all")
    parser.add_argument("--chunk-bytes", default="128KiB", help="7 of the default make a block")
    parser.add_argument("--scale", type=float, default=1.0, help="of all seconds: what Python takes weighs less")
    parser.add_argument("--steps", type=int, default=6, help="measured per engine")
    parser.add_argument("--rounds", type=int, default=2, help="engines per mode, the modes taking turns")
    parser.add_argument("--trace", help="a folder for the traces of the last round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    CASES.update({case: tuple(args.scale * seconds for seconds in times) for case, times in CASES.items()})
    for case in args.case or CASES:
        figures = {mode: Figures() for mode in args.mode or MODES}
        for _ in range(args.rounds):
            for mode in figures:
                measure(mode, case, args.steps, args.trace, figures[mode], args.chunk_bytes)
        report(case, figures)


if __name__ == "__main__":
    main()
