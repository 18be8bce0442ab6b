"""The recorder on a whole engine: its shares are those of plain byte counters, and it is free when nobody asked."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

from integration_tests.doubles import engine_config, make_batches, one_drive, train_engine, train_twin, use_doubles
from integration_tests.test_timing import SleepyModel, update_bytes
from lohan_ds import offload, updater
from lohan_ds.adam import adam_update_
from lohan_ds.step_summary import RESOURCES
from lohan_ds.store.ssd_io import ThreadSsdIo
from lohan_ds.testing.delayed_streams import DelayedStreams
from lohan_ds.testing.harness import engine_for, engine_state
from lohan_ds.testing.models import OddModel
from lohan_ds.testing.twin import assert_same_bits

NUM_STEPS = 4


class SleepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


class SleepyBothWays(SleepyModel):
    """8 layers of 131,072 parameters; forward and backward take 0.24 s each."""

    def __init__(self):
        super().__init__(sleep_s=0.03)

    def forward(self, x):
        for layer in self.layers:
            x = SleepInBackward.apply(layer(x), layer.sleep_s)
        return x.float().square().mean()


def run(update, ssd, monkeypatch, capsys):
    """(counted share of update bytes that moved in forward or backward, summaries of the steps, lines printed)."""
    use_doubles(monkeypatch, make_io=one_drive(70e6))   # 27 MB a step: 0.39 s
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    hidden, summaries = 0, []
    capsys.readouterr()
    config = engine_config(ssd, "bf16", 1e6, update=update, chunk_bytes="512KiB", step_report=True)
    with engine_for(SleepyBothWays(), config) as engine:
        assert engine.lohan_step_summary() is None
        first = update_bytes(engine)
        recorder = engine.offload.recorder
        finish = recorder._finish_steps

        def keep(before):   # also looks at each summary that becomes final
            finished = []
            for step in [step for step in sorted(recorder._accounts) if step < before]:
                finished += finish(step + 1)
                summaries.append(recorder._latest)
            return finished

        recorder._finish_steps = keep
        for step in range(NUM_STEPS + 1):   # the last one only forward
            before = update_bytes(engine)
            loss = engine(x)
            hidden += update_bytes(engine) - before
            if step == NUM_STEPS:
                break
            before = update_bytes(engine)
            engine.backward(loss)
            hidden += update_bytes(engine) - before
            engine.step()
        engine.offload.gradients.updater.drain()
        last = engine.lohan_step_summary()
        total = update_bytes(engine) - first
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("lohan step")]
    assert last.step == NUM_STEPS and last.is_final
    return hidden / total, summaries, lines


def test_the_recorder_agrees_with_byte_counters(tmp_path, monkeypatch, capsys):
    step_bytes = 26 * sum(p.numel() for p in SleepyBothWays().parameters())
    for update in ("serial", "deferred", "eager"):
        counted, summaries, lines = run(update, tmp_path, monkeypatch, capsys)
        recorded = sum(s.hidden_bytes_share for s in summaries) / NUM_STEPS
        with capsys.disabled():
            print(f"\n{update}: share of update bytes under compute {recorded:.3f}, counted {counted:.3f}; of seconds "
                  + " ".join(f"{s.hidden_seconds_share:.2f}" for s in summaries))
            print(lines[2])
        assert [s.step for s in summaries] == list(range(1, NUM_STEPS + 1)) and all(s.is_final for s in summaries)
        assert all(s.update_bytes == step_bytes for s in summaries)
        assert [int(line.split()[2][:-1]) for line in lines] == list(range(1, NUM_STEPS + 1))
        assert recorded == pytest.approx(counted, abs=0.05)
        for s in summaries:   # what the model sleeps, at least
            assert s.forward_s >= 0.24 and s.backward_s >= 0.24
            assert s.busy_s["compute"] >= 0.44   # the last layer's backward sleep comes before its unit begins
            assert s.total_s >= s.forward_s + s.backward_s + s.step_s
        if update == "serial":
            assert recorded == 0 and all(s.stall_s["step"] > 0.2 and s.num_speculated == 0 for s in summaries)
            assert "hidden: 0 % of update bytes" in lines[0]
        else:
            assert recorded >= 0.8 and all(s.stall_s["step"] < 0.1 for s in summaries)
            assert (sum(s.num_speculated for s in summaries) > 0) == (update == "eager")


def test_stalls_name_what_was_waited_for(tmp_path, monkeypatch):
    use_doubles(monkeypatch, make_io=one_drive(15e6))   # the update takes 1.8 s
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    config = engine_config(tmp_path, "bf16", update="deferred", chunk_bytes="512KiB", step_report=True)
    with engine_for(SleepyBothWays(), config) as engine:
        for _ in range(2):
            engine.backward(engine(x))
            engine.step()
        stall_s = engine.lohan_step_summary().stall_s
    assert stall_s["update"] > 0.5 and stall_s["update"] > stall_s["parameters"] > 0


@pytest.mark.parametrize("update", ["deferred", "eager"])
def test_trace_of_every_resource(update, tmp_path, monkeypatch):
    """And the same bits as without a recorder."""
    streams = DelayedStreams(0, max_delay_s=0.001)
    use_doubles(monkeypatch, streams, one_drive(50e6))
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    trace_path = tmp_path / "trace.json"
    batches = make_batches(OddModel(), 3)
    config = engine_config(ssd, "bf16", 1e6, update=update, trace_path=str(trace_path))
    with engine_for(OddModel(), config) as engine:
        train_engine(engine, batches)
        state = engine_state(engine)
        nbytes = engine.lohan_step_summary().nbytes
    assert_same_bits(state, train_twin(OddModel(), batches, "bf16", 1e6))
    events = json.loads(trace_path.read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in spans} == {"phase", *RESOURCES}
    assert {event["name"] for event in spans if event["cat"] == "phase"} == {"forward", "backward", "step"}
    assert {event["args"]["update of step"] for event in spans if event["cat"] == "cpu_update"} == {1, 2, 3}
    assert all(nbytes[resource] > 0 for resource in RESOURCES if resource not in ("compute", "stall"))
    assert sorted(os.listdir(tmp_path)) == ["ssd", "trace.json"]


def test_accumulation_and_loss_backward(tmp_path):
    """A step is what ends with an update, whoever calls backward."""
    batches = make_batches(OddModel(), 2, accumulation=3)
    with engine_for(OddModel(), engine_config(tmp_path, accumulation=3, update="serial", step_report=True)) as engine:
        for step, micro_batches in enumerate(batches):
            for batch in micro_batches:
                engine(**batch).backward()
                engine.step()
            summary = engine.lohan_step_summary()
            assert summary.step == step + 1
            assert summary.backward_s > 0 and summary.forward_s > 0 and summary.step_s > 0


def test_nothing_is_recorded_unless_asked(tmp_path, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("a recorder was made")

    monkeypatch.setattr(offload, "Recorder", never)
    with engine_for(OddModel(), engine_config(tmp_path)) as engine:
        train_engine(engine, make_batches(OddModel(), 1))
        assert engine.lohan_step_summary() is None and engine.offload.recorder is None


def test_trace_at_exit_without_destroy(tmp_path):
    script = textwrap.dedent("""
        import sys
        from integration_tests.doubles import engine_config, make_batches, train_engine
        from lohan_ds.testing.harness import init_one_rank
        from lohan_ds.testing.models import OddModel
        import deepspeed
        init_one_rank()
        config = engine_config(sys.argv[1], step_report=True, trace_path=sys.argv[1] + "/trace.json")
        engine, *_ = deepspeed.initialize(model=OddModel(), config=config)
        train_engine(engine, make_batches(OddModel(), 2))
    """)
    env = {key: value for key, value in os.environ.items()   # those of a rank that an engine here has become
           if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=240,
                          env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert done.stdout.count("lohan step 1:") == done.stdout.count("lohan step 2:") == 1, done.stdout + done.stderr


class _HeldWrites(ThreadSsdIo):
    """Writes that come while `gate` is not set wait for it."""
    gate = threading.Event()

    def __init__(self, num_threads, **kwargs):
        super().__init__(num_threads + 32, **kwargs)   # held writes must not keep reads from theirs

    def _pwrite(self, fd, view, offset):
        self.gate.wait(30)
        return super()._pwrite(fd, view, offset)


def _slow_adam(*args):
    time.sleep(0.05)
    adam_update_(*args)


@pytest.mark.parametrize("report", [False, True], ids=["unrecorded", "recorded"])
@pytest.mark.parametrize("update", ["deferred", "eager"])
@pytest.mark.parametrize("forward_is_first", [False, True], ids=["update_first", "forward_first"])
def test_the_next_forward_waits_for_no_write(update, forward_is_first, report, tmp_path, monkeypatch):
    """The params that an update has made are handed to it from memory, whether somebody keeps records or not."""
    use_doubles(monkeypatch, make_io=_HeldWrites)
    if forward_is_first:
        monkeypatch.setattr(updater, "adam_update_", _slow_adam)
    _HeldWrites.gate.set()
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    config = engine_config(tmp_path, "bf16", update=update, chunk_bytes="2MiB", step_report=report)
    with engine_for(SleepyBothWays(), config) as engine:
        engine.backward(engine(x))
        engine.step()
        loss = engine(x)
        engine.offload.gradients.updater.drain()
        _HeldWrites.gate.clear()
        first_is_over = threading.Event()
        engine.module.layers[0].register_forward_hook(lambda *_: first_is_over.set())
        engine.backward(loss)
        engine.step()
        forward = threading.Thread(target=lambda: engine(x))
        forward.start()
        try:
            assert first_is_over.wait(10)
        finally:
            _HeldWrites.gate.set()
            forward.join()
