"""What is left when a run ends badly: nothing. What goes on after an exception that was caught: exact training."""
from __future__ import annotations

import contextlib
import errno
import functools
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
from torch import nn

from integration_tests.doubles import SlowWrites, engine_config, make_batches, train_engine, train_twin, use_doubles
from lohan_ds.errors import CapacityError, ConfigError, StepError, StoreError
from lohan_ds.testing.delayed_streams import DelayedStreams
from lohan_ds.testing.faulty_io import FaultyIo
from lohan_ds.testing.harness import ds_config, engine_for, engine_state, init_one_rank
from lohan_ds.testing.models import OddModel, lm_batch, loss_of
from lohan_ds.testing.twin import assert_same_bits

SCRIPT = os.path.join(os.path.dirname(__file__), "failing_training.py")


def our_threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith(("lohan-", "delayed-")))


def open_files(directory) -> list[str]:
    paths = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return [path for path in paths if path.startswith(str(directory))]


def hooks_of(model: nn.Module) -> int:
    """Hooks on modules and parameters, all kinds."""
    counts = [len(value) for module in model.modules() for name, value in vars(module).items()
              if name.endswith("_hooks") and hasattr(value, "__len__")]
    counts += [len(p._post_accumulate_grad_hooks or ()) + len(p._backward_hooks or ()) for p in model.parameters()]
    return sum(counts)


def assert_nothing_left(ssd) -> None:
    assert our_threads() == []
    assert open_files(ssd) == []
    assert os.listdir(ssd) == []


@pytest.fixture(autouse=True)
def _leaves_nothing(tmp_path):
    gc.collect()
    assert our_threads() == []
    yield
    gc.collect()
    assert our_threads() == []


# -- exceptions in the user's code -----------------------------------------------------------------------------------

class _BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("bad backward")


class BreakableModel(OddModel):
    """Fails in its middle layer: `breaks` is None, "forward" or "backward"."""

    breaks = None

    def __init__(self):
        super().__init__()
        self.layers[1].register_forward_hook(self._after_layer)

    def _after_layer(self, layer, args, output):
        if self.breaks == "forward":
            raise RuntimeError("bad forward")
        return _BadBackward.apply(output) if self.breaks == "backward" else output


@pytest.mark.parametrize("breaks", ["forward", "backward"])
@pytest.mark.parametrize("doubles", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_training_goes_on_after_an_exception(breaks, doubles, accumulation, tmp_path, monkeypatch):
    if doubles:
        use_doubles(monkeypatch, DelayedStreams(0, max_delay_s=0.001),
                    functools.partial(FaultyIo, seed=0, max_delay_s=0.001))
    model = BreakableModel()
    batches = make_batches(model, 4, accumulation)
    with engine_for(model, engine_config(tmp_path, clip=1.0, accumulation=accumulation)) as engine:
        train_engine(engine, batches[:2])
        engine.backward(loss_of(engine, batches[2][0]))   # its gradients are dropped by the exception
        if accumulation > 1:
            engine.step()
        model.breaks = breaks
        with pytest.raises(RuntimeError, match=f"bad {breaks}"):
            engine.backward(loss_of(engine, batches[3][0]))
        model.breaks = None
        train_engine(engine, batches[2:])
        state = engine_state(engine)
        assert engine.global_steps == 4
    assert_same_bits(state, train_twin(OddModel(), batches, clip=1.0))
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("waits_in", ["updater.drain", "wait_collected"])
def test_ctrl_c_while_a_serial_step_waits(waits_in, tmp_path):
    """The step has happened, as a whole, or not at all."""
    def interrupted():
        wait()
        raise KeyboardInterrupt

    batches = make_batches(OddModel(), 4)
    with engine_for(OddModel(), engine_config(tmp_path, clip=1.0, update="serial")) as engine:
        train_engine(engine, batches[:2])
        engine.backward(loss_of(engine, batches[2][0]))
        gradients = engine.offload.gradients
        owner, name = (gradients.updater, "drain") if waits_in == "updater.drain" else (gradients, "wait_collected")
        wait = getattr(owner, name)
        setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        setattr(owner, name, wait)
        if waits_in == "wait_collected":
            assert_same_bits(engine_state(engine), train_twin(OddModel(), batches[:2], clip=1.0))
            engine.step()
        assert_same_bits(engine_state(engine), train_twin(OddModel(), batches[:3], clip=1.0))
        train_engine(engine, batches[3:])
        assert_same_bits(engine_state(engine), train_twin(OddModel(), batches, clip=1.0))


# -- failures in the background --------------------------------------------------------------------------------------

@pytest.mark.parametrize("update", ["deferred", "serial"])
@pytest.mark.parametrize("operation,number", [("write", errno.EIO), ("read", errno.EIO), ("write", errno.ENOSPC)])
def test_a_failing_disk_surfaces_at_the_next_call(operation, number, update, tmp_path, monkeypatch):
    use_doubles(monkeypatch, make_io=FaultyIo)
    monkeypatch.setattr("lohan_ds.planner.search._num_read_ahead_chunks", lambda *_: 0)   # else nothing is left to read
    batches = make_batches(OddModel(), 4)
    with engine_for(OddModel(), engine_config(tmp_path, clip=1.0, update=update)) as engine:
        train_engine(engine, batches[:2])
        engine.backward(loss_of(engine, batches[2][0]))
        engine.offload.io.inject(operation, number, at_call=3)
        with pytest.raises(StepError) as raised:
            engine.step()
            loss_of(engine, batches[3][0])
        assert str(tmp_path) in str(raised.value) and os.strerror(number) in str(raised.value)
        if number == errno.ENOSPC:
            assert "needed" in str(raised.value) and "free" in str(raised.value)
        causes, cause = [], raised.value
        while cause is not None:
            causes.append(type(cause))
            cause = cause.__cause__
        assert StoreError in causes and OSError in causes
        for call in (lambda: loss_of(engine, batches[3][0]), engine.optimizer.step, lambda: engine_state(engine)):
            with pytest.raises(StepError):
                call()
    assert_nothing_left(tmp_path)


def test_a_disk_that_fills_up_while_the_model_is_taken_over(tmp_path, monkeypatch):
    class FullDisk(FaultyIo):
        def __init__(self, num_threads):
            super().__init__(num_threads)
            self.inject("write", errno.ENOSPC, after_bytes=10_000)

    use_doubles(monkeypatch, make_io=FullDisk)
    with pytest.raises(StoreError, match="bytes needed, free") as raised, \
            engine_for(OddModel(), engine_config(tmp_path)):
        pass
    assert str(tmp_path) in str(raised.value)
    assert_nothing_left(tmp_path)


@pytest.mark.parametrize("limited_by", ["lohan.ssd_space", "disk"])
def test_too_little_space_is_refused_before_anything_is_written(limited_by, tmp_path, monkeypatch):
    model = OddModel(hidden=330, num_layers=3, vocab=13100)   # 8.6 million parameters, 100 MB of state
    before = {name: param.clone() for name, param in model.named_parameters()}
    more = {"ssd_space": "20MB"} if limited_by == "lohan.ssd_space" else {}
    if limited_by == "disk":
        usage = shutil.disk_usage(tmp_path)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=20_000_000))
    with pytest.raises(CapacityError, match="needed") as raised, engine_for(model, engine_config(tmp_path, **more)):
        pass
    assert "ssd" in str(raised.value).lower()
    assert_nothing_left(tmp_path)
    for name, param in model.named_parameters():
        values = param.ds_tensor.view(param.ds_shape) if hasattr(param, "ds_tensor") else param
        assert torch.equal(values, before[name])


# -- destroy, collect, repeat ----------------------------------------------------------------------------------------

def test_destroy_twice_and_during_an_update(tmp_path, monkeypatch):
    use_doubles(monkeypatch, make_io=functools.partial(SlowWrites))
    model = OddModel(num_layers=12)
    with engine_for(model, engine_config(tmp_path, clip=1.0, chunk_bytes="24KiB")) as engine:
        train_engine(engine, make_batches(model, 1))
        engine.destroy()
        assert_nothing_left(tmp_path)
        engine.destroy()
    assert_nothing_left(tmp_path)
    assert hooks_of(model) == 0


def test_destroy_does_not_wait_for_a_long_update(tmp_path, monkeypatch):
    class VerySlowWrites(FaultyIo):
        def _pwrite(self, fd, view, offset):
            time.sleep(self.write_delay_s)
            return super()._pwrite(fd, view, offset)

        write_delay_s = 0.0

    use_doubles(monkeypatch, make_io=VerySlowWrites)
    model = OddModel(num_layers=12)
    with engine_for(model, engine_config(tmp_path, chunk_bytes="24KiB", ssd_threads=1)) as engine:
        engine.backward(loss_of(engine, lm_batch(131)))
        engine.offload.io.write_delay_s = 0.2
        engine.offload.io.inject("write", errno.EIO, at_call=10**9)  # counts from here
        engine.step()
        engine.destroy()
        num_writes = engine.offload.io.num_calls["write"]
    assert num_writes < len(engine.offload.blocks)   # the whole update has two and more for each
    assert_nothing_left(tmp_path)


def test_destroy_does_not_wait_for_writes_that_read_ahead_has_queued(tmp_path, monkeypatch):
    """They have buffers of their own, so there may be as many as the update has."""
    class Stalled(FaultyIo):
        go = threading.Event()
        num_writes = 0
        stalls = False

        def _pwrite(self, fd, view, offset):
            if self.stalls:
                type(self).num_writes += 1
                assert self.go.wait(20), "destroy() waits for what is queued"
            return super()._pwrite(fd, view, offset)

        def cancel(self):
            super().cancel()
            self.go.set()

    use_doubles(monkeypatch, make_io=Stalled)
    model = OddModel(num_layers=12)
    config = engine_config(tmp_path, update="deferred", chunk_bytes="24KiB", ssd_threads=1)
    with engine_for(model, config) as engine:
        assert engine.offload.plan.num_read_ahead_chunks > 12
        engine.backward(loss_of(engine, lm_batch(131)))
        Stalled.stalls = True
        engine.step()
        engine.destroy()
    assert Stalled.num_writes <= 1   # that of the one thread
    assert_nothing_left(tmp_path)


def test_an_engine_that_is_forgotten_is_closed(tmp_path):
    import deepspeed
    init_one_rank()
    model = OddModel()
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=engine_config(tmp_path))
    train_engine(engine, make_batches(model, 1))
    assert our_threads() and os.listdir(tmp_path)
    del engine, optimizer, model
    gc.collect()
    assert_nothing_left(tmp_path)


def test_an_engine_is_closed_when_the_collector_runs_in_its_own_thread(tmp_path, monkeypatch):
    import deepspeed

    is_forgotten = threading.Event()   # else all could be written before
    is_forgotten.set()

    class CollectingIo(SlowWrites):
        def __init__(self, num_threads):
            super().__init__(num_threads + 32)   # held writes must not keep reads from theirs

        def _pwrite(self, fd, view, offset):
            is_forgotten.wait(20)
            gc.collect()
            return super()._pwrite(fd, view, offset)

    use_doubles(monkeypatch, make_io=CollectingIo)
    init_one_rank()
    gc.collect()
    gc.freeze()   # what other tests have left would make every collection take a second
    engine, *others = deepspeed.initialize(model=OddModel(num_layers=12), config=engine_config(tmp_path))
    gc.disable()
    try:
        is_forgotten.clear()
        engine.backward(loss_of(engine, lm_batch(131)))
        engine.step()
        del engine, others
        is_forgotten.set()
        deadline = time.monotonic() + 20
        while our_threads() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert_nothing_left(tmp_path)
    finally:
        gc.enable()
        gc.unfreeze()


def test_engines_one_after_the_other_leave_nothing(tmp_path):
    batches = make_batches(OddModel(), 2)
    num_fds, rss, states = [], [], []
    for _ in range(5):
        model = OddModel()
        with engine_for(model, engine_config(tmp_path, clip=1.0)) as engine:
            train_engine(engine, batches)
            states.append(engine_state(engine))
        assert_nothing_left(tmp_path)
        assert hooks_of(model) == 0
        del model, engine
        gc.collect()
        num_fds.append(len(os.listdir("/proc/self/fd")))
        rss.append(psutil.Process().memory_info().rss)
    assert num_fds[-1] <= num_fds[0]
    assert rss[-1] - rss[0] < 40e6
    for state in states[1:]:
        assert_same_bits(state, states[0])


def test_two_engines_side_by_side(tmp_path):
    batches = [make_batches(OddModel(), 3, seed=seed) for seed in (1, 2)]
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with engine_for(OddModel(seed=1), engine_config(tmp_path / "a", clip=1.0)) as a, \
            engine_for(OddModel(seed=2), engine_config(tmp_path / "b", "bf16", update="serial")) as b:
        for step_a, step_b in zip(*batches):
            loss_a, loss_b = loss_of(a, step_a[0]), loss_of(b, step_b[0])
            b.backward(loss_b)
            a.backward(loss_a)
            a.step()
            b.step()
        states = engine_state(a), engine_state(b)
    assert_same_bits(states[0], train_twin(OddModel(seed=1), batches[0], clip=1.0))
    assert_same_bits(states[1], train_twin(OddModel(seed=2), batches[1], "bf16"))
    assert_nothing_left(tmp_path / "a")
    assert_nothing_left(tmp_path / "b")


# -- processes that end badly ----------------------------------------------------------------------------------------

def _is_alive(process):
    """A zombie is gone: whoever inherited it has not asked for its status yet."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Run:
    """A training process, or DeepSpeed's launcher with one, in a session of its own."""

    def __init__(self, tmp_path, how, launcher):
        self.ssd, self.status_file = tmp_path / "ssd", tmp_path / "status"
        self.ssd.mkdir(parents=True)
        self.log = open(tmp_path / "log", "w+b")
        env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
               "PYTHONPATH": os.path.dirname(os.path.dirname(SCRIPT))}
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            env.pop(name, None)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        command = [SCRIPT, str(self.ssd), str(self.status_file), how]
        if launcher:
            command = ["-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--master_port", port, *command]
        else:
            env |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self.process = psutil.Popen([sys.executable, *command], env=env, stdout=self.log, stderr=subprocess.STDOUT,
                                    start_new_session=True)
        self.num_processes = 3 if launcher else 1
        self.family = [self.process]

    def wait_for(self, status, may_have_ended=False):
        """Until the script got that far; False if it ended before."""
        while not (self.status_file.exists() and status in self.status_file.read_text().splitlines()):
            if not psutil.pid_exists(self.process.pid) or self.process.poll() is not None:
                return False
            time.sleep(0.05)
        with contextlib.suppress(psutil.NoSuchProcess):
            self.family = [self.process, *self.process.children(recursive=True)]
        num_processes = len([p for p in self.family if p.is_running() and p.name().startswith("python")])
        assert may_have_ended or num_processes == self.num_processes, self.output()
        return True

    def output(self):
        self.log.flush()
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-6000:]

    def assert_all_gone(self, within_s=10):
        """All processes gone, exit status not 0, nothing on the SSD."""
        gone, alive = psutil.wait_procs(self.family, timeout=within_s)
        alive = [process for process in alive if _is_alive(process)]
        assert not alive, (alive, self.output())
        assert self.process.returncode != 0, self.output()
        assert os.listdir(self.ssd) == [], self.output()

    def kill(self):
        for process in self.family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass
        self.log.close()


RUNS = [(how, launcher) for how in ("raise", "loop SIGINT", "loop SIGTERM") for launcher in (False, True)] + [
    ("loop kill launch", True), ("loop kill runner", True), ("finish", False), ("edit", False)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All at once: most of their time they import, which the cores can share."""
    made = {key: Run(tmp_path_factory.mktemp("run"), key[0].split()[0], key[1]) for key in RUNS}
    yield made
    for run in made.values():
        run.kill()


@pytest.mark.parametrize("launcher", [False, True])
def test_an_exception_in_step_2_ends_the_run(launcher, runs):
    run = runs["raise", launcher]
    if run.wait_for("step 1", may_have_ended=True):   # all runs began together
        run.process.wait(timeout=30)
    run.assert_all_gone()
    assert "step 2 is bad" in run.output()


@pytest.mark.parametrize("launcher", [False, True])
def test_ctrl_c_ends_the_run(launcher, runs):
    run = runs["loop SIGINT", launcher]
    assert run.wait_for("step 0"), run.output()
    os.killpg(run.process.pid, signal.SIGINT)   # what a terminal does
    run.assert_all_gone()


@pytest.mark.parametrize("launcher", [False, True])
def test_sigterm_during_slow_writes_ends_the_run(launcher, runs):
    run = runs["loop SIGTERM", launcher]
    assert run.wait_for("step 0"), run.output()
    run.process.terminate()
    run.assert_all_gone()


@pytest.mark.parametrize("which", ["launch", "runner"])
def test_a_killed_launcher_takes_the_run_along(which, runs):
    run = runs[f"loop kill {which}", True]
    assert run.wait_for("step 0"), run.output()
    victim, = [p for p in run.family if f"deepspeed.launcher.{which}" in p.cmdline()]
    victim.kill()
    gone, alive = psutil.wait_procs(run.family, timeout=10)
    assert not alive, (alive, run.output())
    assert os.listdir(run.ssd) == [], run.output()


def test_a_script_that_forgets_to_destroy_ends_well(runs):
    run = runs["finish", False]
    assert run.process.wait(timeout=60) == 0, run.output()
    assert "finished" in run.status_file.read_text()
    assert os.listdir(run.ssd) == []


def test_an_edit_at_the_end_of_a_script_that_forgets_to_destroy_is_in_the_run(runs):
    run = runs["edit", False]
    assert run.process.wait(timeout=60) == 0, run.output()
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))
    with engine_for(model, engine_config(run.ssd, chunk_bytes="24KiB", run_name="edited")) as engine:
        assert engine.global_steps == 3
        state = engine_state(engine)
    assert all((state[f"layers.{layer}.weight"]["master"] == 0.25).all() for layer in (0, 7))
    assert (state["layers.3.weight"]["master"] != 0.25).any()


@pytest.mark.parametrize("wrong", ["optimizer", "scheduler"])
def test_a_failed_initialize_leaves_nothing(tmp_path, wrong):
    """Whether it fails before the parameters are moved or after."""
    model = OddModel()
    scheduler = {"scheduler": {"type": "WarmupLR", "params": {"nonsense": 1}}} if wrong == "scheduler" else {}
    config = ds_config({"ssd_paths": [str(tmp_path)], "param_tier": "ssd"}, **scheduler)
    client = torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=wrong == "optimizer")
    with pytest.raises((ConfigError, TypeError)):
        with engine_for(model, config, optimizer=client):
            pass
    assert not [t.name for t in threading.enumerate() if t.name.startswith("lohan-")]
    assert list(tmp_path.iterdir()) == []
