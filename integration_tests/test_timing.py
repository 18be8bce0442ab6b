"""The same bits whatever the timing: delayed copies, slow disks, the smallest pools; and that work really overlaps.

No test here looks at a clock alone: a duration is only compared with that of the same work done another way.
"""
from __future__ import annotations

import dataclasses
import functools
import os
import random
import threading
import time

import pytest
import torch
from torch import nn

from integration_tests.doubles import (LR, SlowWrites, engine_config, make_batches, one_drive, train_engine, train_twin,
                                       use_doubles)
from lohan_ds.store.block_order import BlockOrder
from lohan_ds.store.ssd_io import ThreadSsdIo
from lohan_ds.testing.delayed_streams import DelayedStreams
from lohan_ds.testing.faulty_io import FaultyIo
from lohan_ds.testing.harness import engine_for, engine_state
from lohan_ds.testing.models import OddModel, lm_batch, loss_of, tiny_llama
from lohan_ds.testing.twin import Twin, assert_same_bits, diff_bits
from lohan_ds.work import Work

# -- the same bits ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("seed", range(30))
def test_same_bits_with_random_delays(seed, tmp_path, monkeypatch):
    """D47: overlap changes no loss, whatever comes late."""
    draw = random.Random(seed)
    make_model = draw.choice([OddModel, functools.partial(tiny_llama, tied=bool(seed % 2))])
    dtype, update = ("bf16", "fp32")[seed % 2], ("serial", "deferred")[seed // 2 % 2]
    accumulation, clip = (1, 3)[seed // 4 % 2], draw.choice([0.05, 1.0])
    use_doubles(monkeypatch, DelayedStreams(seed, max_delay_s=0.001),
                functools.partial(FaultyIo, seed=seed, max_delay_s=0.002, short_transfers=bool(seed % 3)))
    model = make_model(seed=seed)
    batches = make_batches(model, 3, accumulation, seed)
    config = engine_config(tmp_path, dtype, clip, accumulation, update=update, prefetch_depth=draw.choice([0, 1, 2, 4]),
                           chunk_bytes=draw.choice(["24KiB", "100KB", "1MiB"]), ssd_threads=draw.choice([2, 4]))
    with engine_for(model, config) as engine:
        train_engine(engine, batches)
        state = engine_state(engine)
    assert_same_bits(state, train_twin(make_model(seed=seed), batches, dtype, clip))


@pytest.mark.parametrize("kind,n", [("h2d", 3), ("h2d", 12), ("d2h", 2), ("d2h", 9)])
@pytest.mark.parametrize("dtype,accumulation", [("fp32", 1), ("bf16", 3)])
def test_one_copy_not_waited_for_gives_other_bits(kind, n, dtype, accumulation, tmp_path, monkeypatch):
    streams = DelayedStreams(0, max_delay_s=0.002, held_delay_s=10.0)  # longer than any hiccup of the machine
    use_doubles(monkeypatch, streams)
    model = OddModel()
    batches = make_batches(model, 2, accumulation)
    # One thread: reads, and so copies, come in the order in which they are waited for. Else waiting for an early one
    # can cover a late one, as on a real stream, and dropping that wait is harmless.
    with engine_for(model, engine_config(tmp_path, dtype, 1.0, accumulation, ssd_threads=1)) as engine:
        streams.drop_one_wait_at(n, kind)
        train_engine(engine, batches)
        assert streams.dropped()
        state = engine_state(engine)
    assert diff_bits(state, train_twin(OddModel(), batches, dtype, 1.0))


@pytest.mark.parametrize("update_is_waited_for", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_an_update_not_waited_for_gives_other_bits(update_is_waited_for, dtype, tmp_path, monkeypatch):
    if not update_is_waited_for:
        enter_read = BlockOrder._enter_read
        monkeypatch.setattr(BlockOrder, "_enter_read",
                            lambda self: (Work.completed(self.current_slot()), enter_read(self)[1]))
        monkeypatch.setattr(SlowWrites, "seconds", 0.02)
    use_doubles(monkeypatch, make_io=SlowWrites)
    model = OddModel()
    batches = make_batches(model, 3)
    with engine_for(model, engine_config(tmp_path, dtype, 1.0)) as engine:
        train_engine(engine, batches)
        state = engine_state(engine)
    assert bool(diff_bits(state, train_twin(OddModel(), batches, dtype, 1.0))) != update_is_waited_for


# -- the smallest pools ----------------------------------------------------------------------------------------------

class SkippingModel(OddModel):
    """Twelve tiny layers, of which a batch may leave some out."""

    def __init__(self):
        super().__init__(num_layers=12)

    def forward(self, input_ids, labels, skipped=()):
        kept = [layer for i, layer in enumerate(self.layers) if i not in skipped]
        x_BTH = self.embed(input_ids)
        for layer in kept:
            x_BTH = layer(x_BTH)
        logits_BTV = self.head(self.norm(x_BTH)) * self.temperature
        return nn.functional.cross_entropy(logits_BTV.float().flatten(0, 1), labels.flatten())


def use_plan(monkeypatch, **changes):
    """Engines made from now on have plans with these changes, whatever the planner would give them."""
    import lohan_ds.run_plan
    make_plan = lohan_ds.run_plan.make_plan

    def changed(*args, **kwargs):
        plan, blocks = make_plan(*args, **kwargs)
        return dataclasses.replace(plan, **changes), blocks

    monkeypatch.setattr(lohan_ds.run_plan, "make_plan", changed)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("prefetch_depth,num_chunk_buffers", [(0, 1), (1, 2)])
@pytest.mark.parametrize("doubles", [False, True])
@pytest.mark.parametrize("update", ["serial", "deferred", "eager"])
def test_smallest_pools(prefetch_depth, num_chunk_buffers, doubles, update, tmp_path, monkeypatch):
    use_plan(monkeypatch, num_chunk_buffers=num_chunk_buffers, num_read_ahead_chunks=num_chunk_buffers)
    if doubles:
        use_doubles(monkeypatch, DelayedStreams(1, max_delay_s=0.001),
                    functools.partial(FaultyIo, seed=1, max_delay_s=0.001))
    draw = random.Random(prefetch_depth)
    engine_model, twin_model = SkippingModel(), SkippingModel()
    twin = Twin(twin_model, None, clip=1.0, **LR)
    config = engine_config(tmp_path, clip=1.0, prefetch_depth=prefetch_depth, chunk_bytes="24KiB", ssd_threads=1,
                           update=update)
    with engine_for(engine_model, config) as engine:
        for step in range(5):
            batch = lm_batch(131, seed=step) | {"skipped": draw.sample(range(12), draw.choice([0, 3, 9]))}
            engine.train()
            loss = loss_of(engine, batch)
            engine.backward(loss)
            engine.step()
            assert loss.item() == twin.micro_step(batch)
            twin.step()
            batch = lm_batch(131, seed=100 + step) | {"skipped": draw.sample(range(12), draw.choice([0, 5]))}
            engine.eval()
            with torch.no_grad():
                assert loss_of(engine, batch).item() == loss_of(twin_model, batch).item()
        assert_same_bits(engine_state(engine), twin.state())


class CountedIo(SlowWrites):
    """Counts the bytes of requests that have been made and have not ended."""

    def __init__(self, num_threads):
        super().__init__(num_threads)
        self.count_lock = threading.Lock()
        self.in_flight_bytes = {"read": 0, "write": 0}
        self.peak_bytes = {"read": 0, "write": 0}

    def _count(self, verb, nbytes):
        with self.count_lock:
            self.in_flight_bytes[verb] += nbytes
            self.peak_bytes[verb] = max(self.peak_bytes[verb], self.in_flight_bytes[verb])

    def read(self, file, offset, buffer, *args, **kwargs):
        self._count("read", buffer.numel())
        work = super().read(file, offset, buffer, *args, **kwargs)
        work.on_done(lambda: self._count("read", -buffer.numel()))
        return work

    def write(self, file, offset, buffer, *args, **kwargs):
        self._count("write", buffer.numel())
        work = super().write(file, offset, buffer, *args, **kwargs)
        work.on_done(lambda: self._count("write", -buffer.numel()))
        return work


@pytest.mark.parametrize("update", ["serial", "deferred", "eager"])
def test_bytes_in_flight_stay_within_the_buffers(update, tmp_path, monkeypatch):
    """However slow the drive is, requests do not pile up: memory stays what the plan says (user case D27)."""
    use_doubles(monkeypatch, make_io=CountedIo)
    use_plan(monkeypatch, num_read_ahead_chunks=1)
    model = OddModel(num_layers=12)
    with engine_for(model, engine_config(tmp_path, "bf16", update=update, chunk_bytes="24KiB",
                                         ssd_threads=1)) as engine:
        io, plan, store = engine.offload.io, engine.offload.plan, engine.offload.store
        buffers_bytes = (plan.num_chunk_buffers + plan.num_read_ahead_chunks) * store.chunk_buffer_bytes
        held_bytes = []
        for step in make_batches(model, 3):
            io.peak_bytes = {"read": 0, "write": 0}
            train_engine(engine, [step])
            held_bytes.append(engine.offload.budget.used_bytes)
        engine.offload.gradients.updater.drain()
        fetched_bytes = (plan.prefetch_depth + 2) * max(block.param_bytes for block in engine.offload.blocks)
        updated_bytes = sum(block.state_bytes for block in engine.offload.blocks)
        assert 0 < io.peak_bytes["write"] <= buffers_bytes < updated_bytes / 4
        assert 0 < io.peak_bytes["read"] <= buffers_bytes + fetched_bytes
        assert held_bytes[1:] == held_bytes[:1] * 2


# -- overlap ---------------------------------------------------------------------------------------------------------

class SleepyLayer(nn.Module):
    """Parameters that take long to update, and compute that takes time and no CPU."""

    def __init__(self, hidden, inner, sleep_s):
        super().__init__()
        self.down = nn.Parameter(torch.randn(inner, hidden) * 0.01)
        self.sleep_s = sleep_s

    def forward(self, x):
        time.sleep(self.sleep_s)
        return x + nn.functional.linear(x, self.down)[..., :x.shape[-1]]


class SleepyModel(nn.Module):
    def __init__(self, num_layers=8, hidden=64, inner=2048, sleep_s=0.05):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.ModuleList(SleepyLayer(hidden, inner, sleep_s) for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def update_bytes(engine) -> int:
    """SSD bytes moved for updates so far. Parameters are 16-bit, so an update writes them and never reads them."""
    return sum(file.bytes_written + (file.bytes_read if ".state" in os.path.basename(file.path) else 0)
               for file in list(engine.offload.io._files))


def timed_steps(update, ssd, monkeypatch, num_steps=4):
    """(seconds of the fastest step, share of update bytes moved inside step(), share moved in the next forward)."""
    # 8 layers of 131,072 parameters, 26 bytes each on the SSD per update: 27 MB, 0.4 s, as long as the forward.
    use_doubles(monkeypatch, make_io=one_drive(70e6))
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    step_s, in_step, in_forward = [], 0, 0
    with engine_for(SleepyModel(), engine_config(ssd, "bf16", 1.0, update=update, chunk_bytes="512KiB")) as engine:
        first = update_bytes(engine)
        for step in range(num_steps + 1):   # the last one only forward
            start = time.monotonic()
            before = update_bytes(engine)
            loss = engine(x)
            in_forward += update_bytes(engine) - before
            if step == num_steps:
                break
            engine.backward(loss)
            before = update_bytes(engine)
            engine.step()
            in_step += update_bytes(engine) - before
            step_s.append(time.monotonic() - start)
        engine.offload.gradients.updater.drain()
        total = update_bytes(engine) - first
    assert total == num_steps * 26 * sum(p.numel() for p in SleepyModel().parameters())
    return min(step_s[1:]), in_step / total, in_forward / total   # a deferred update shows in the step after


def test_deferred_updates_move_during_the_next_forward(tmp_path, monkeypatch):
    serial_s, serial_in_step, serial_in_forward = timed_steps("serial", tmp_path, monkeypatch)
    deferred_s, deferred_in_step, deferred_in_forward = timed_steps("deferred", tmp_path, monkeypatch)
    print(f"deferred / serial step time {deferred_s:.2f} / {serial_s:.2f} = {deferred_s / serial_s:.2f}; share of "
          f"update bytes in step() {deferred_in_step:.3f} ({serial_in_step:.3f}), in forward {deferred_in_forward:.3f}")
    assert (serial_in_step, serial_in_forward) == (1.0, 0.0)
    assert deferred_in_step < 0.05
    assert deferred_in_forward >= 0.8
    assert deferred_s < 0.85 * serial_s


class SlowReads(ThreadSsdIo):
    def _pread(self, fd, view, offset):
        time.sleep(0.02)
        return super()._pread(fd, view, offset)


def test_prefetch_hides_reads(tmp_path, monkeypatch):
    use_doubles(monkeypatch, make_io=SlowReads)
    fastest_s = {}
    for depth in (0, 2):
        x = torch.randn(2, 64)
        with engine_for(SleepyModel(inner=64, sleep_s=0.02), engine_config(tmp_path, prefetch_depth=depth)) as engine:
            engine.eval()
            seconds = []
            for _ in range(4):
                start = time.monotonic()
                with torch.no_grad():
                    engine(x)
                seconds.append(time.monotonic() - start)
            fastest_s[depth] = min(seconds)
    print(f"forward with prefetch_depth 2 / 0: {fastest_s[2] / fastest_s[0]:.2f}")
    assert fastest_s[2] < 0.8 * fastest_s[0]


def test_adam_takes_the_number_of_threads_of_the_config(monkeypatch, tmp_path):
    import lohan_ds.updater
    seen, adam_update_ = [], lohan_ds.updater.adam_update_

    def recording(*args):
        seen.append(args[-1])
        adam_update_(*args)

    monkeypatch.setattr(lohan_ds.updater, "adam_update_", recording)
    model = tiny_llama()
    with engine_for(model, engine_config(tmp_path, update_threads=3)) as engine:
        train_engine(engine, make_batches(model, 1))
    assert seen and set(seen) == {3}
