"""A run with a name, killed by kill -9 and started again: the same script ends with the bits of an unbroken run."""
from __future__ import annotations

import functools
import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import nn

from integration_tests.doubles import fresh_environment, use_doubles
from integration_tests.test_huggingface import AUTO, report, run, save_model
from lohan_ds.config import parse
from lohan_ds.errors import StepError, StoreError
from lohan_ds.store.commits import DirtyStore, committed_step
from lohan_ds.store.filenames import named_run_dirs
from lohan_ds.testing.faulty_io import FaultyIo
from lohan_ds.testing.harness import ds_config, engine_for, engine_state
from lohan_ds.testing.models import lm_batch, loss_of, tiny_llama
from lohan_ds.testing.twin import assert_same_bits

JOBS = Path(__file__).parent / "jobs"
STEPS = 6


class Plain:
    """The plain loop of jobs/named_run_job.py in processes of its own."""

    def __init__(self, folder, clip=1.0, accumulation=1, dtype="fp32", **lohan):
        (folder / "ssd").mkdir(parents=True)
        self.folder = folder
        self.section = {"ssd_paths": [str(folder / "ssd")], "chunk_bytes": "24KiB", "run_name": "t", **lohan}
        config = {"lohan": self.section} | ({dtype: {"enabled": True}} if dtype != "fp32" else {})
        self.job = {"ds_config": config, "clip": clip, "accumulation": accumulation, "steps": STEPS,
                    "out": str(folder / "out.pt"), "checkpoint": str(folder / "checkpoint")}

    def run(self, **job) -> int:
        done = subprocess.run([sys.executable, JOBS / "named_run_job.py", json.dumps({**self.job, **job})],
                              env=fresh_environment(), capture_output=True, text=True, timeout=200)
        assert done.returncode in (0, -signal.SIGKILL), done.stdout[-2000:] + done.stderr[-4000:]
        return done.returncode

    def result(self) -> dict:
        return torch.load(self.folder / "out.pt")


KILLS = [("eager", 1.0, 1, "fp32", (3, "step")), ("deferred", 0.5, 1, "bf16", (4, "backward")),
         ("auto", 1e9, 2, "bf16", (3, 0.02)), ("serial", 1.0, 1, "fp32", (4, "save"))]


@pytest.mark.parametrize(("update", "clip", "accumulation", "dtype", "kill_at"), KILLS,
                         ids=lambda value: str(value).replace(" ", ""))
def test_killed_and_started_again(tmp_path, update, clip, accumulation, dtype, kill_at):
    options = {"clip": clip, "accumulation": accumulation, "dtype": dtype, "update": update}
    straight, broken = Plain(tmp_path / "straight", **options), Plain(tmp_path / "broken", **options)
    assert straight.run() == 0
    assert broken.run(kill_at=kill_at) == -signal.SIGKILL
    assert broken.run() == 0
    expected, got = straight.result(), broken.result()
    assert kill_at[0] - 2 <= got["begun_at"] <= kill_at[0] + 1
    assert got["lr"] == expected["lr"] and torch.equal(got["random"], expected["random"])
    assert got["state"].keys() == expected["state"].keys()
    assert all(torch.equal(got["state"][name], expected["state"][name]) for name in expected["state"])


def test_trainer_follows_the_run(tmp_path):
    """Its counter, data and learning rate; no checkpoint is needed, and an older one given is passed over."""
    model = save_model(tmp_path, tiny_llama(tied=True, vocab_size=129))

    def job(name, **more):
        folder = tmp_path / name
        (folder / "ssd").mkdir(parents=True, exist_ok=True)
        section = {"ssd_paths": [str(folder / "ssd")], "chunk_bytes": "60 kB", "run_name": "t"}
        return {"model": model, "ds_config": {**AUTO, "lohan": section}, "out": str(folder / "out"), **more}

    straight, broken = job("straight"), job("broken", kill_at=5)
    run([sys.executable, JOBS / "trainer_job.py"], straight)
    done = run([sys.executable, JOBS / "trainer_job.py"], broken, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    at = committed_step(named_run_dirs([str(tmp_path / "broken" / "ssd")], "t"))
    assert at in (4, 5)
    run([sys.executable, JOBS / "trainer_job.py"], job("broken", resume=str(tmp_path / "broken/out/checkpoint-3")))
    ours, theirs = report(broken)["log"], report(straight)["log"]
    rest = [entry for entry in theirs if entry["step"] > at and "loss" in entry]
    assert [entry for entry in ours if entry["step"] > at and "loss" in entry] == rest and len(rest) == STEPS - at
    from safetensors.torch import load_file
    a, b = (load_file(Path(j["out"]) / "final" / "model.safetensors") for j in (straight, broken))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    again = run([sys.executable, JOBS / "trainer_job.py"], job("broken"))   # a finished run trains no further
    assert f"goes on after step {STEPS}" in again.stdout and not [e for e in report(broken)["log"] if "loss" in e]


def test_loading_the_best_model_leaves_the_run_where_it_ended(tmp_path):
    """The best by a metric that falls is the first; started again, the finished run trains no further."""
    (tmp_path / "ssd").mkdir()
    section = {"ssd_paths": [str(tmp_path / "ssd")], "chunk_bytes": "60 kB", "run_name": "t"}
    job = {"model": save_model(tmp_path, tiny_llama(tied=True, vocab_size=129)), "best": True,
           "ds_config": {**AUTO, "lohan": section}, "out": str(tmp_path / "out")}
    run([sys.executable, JOBS / "trainer_job.py"], job)
    assert committed_step(named_run_dirs([str(tmp_path / "ssd")], "t")) == STEPS
    from safetensors.torch import load_file
    final, first = (load_file(tmp_path / "out" / name / "model.safetensors") for name in ("final", "checkpoint-3"))
    assert all(torch.equal(final[name], first[name]) for name in first)
    again = run([sys.executable, JOBS / "trainer_job.py"], {**job, "best": False})
    assert f"goes on after step {STEPS}" in again.stdout


def config_of(tmp_path, **section):
    (tmp_path / "ssd").mkdir(exist_ok=True)
    return ds_config({"ssd_paths": [str(tmp_path / "ssd")], "chunk_bytes": "24KiB", "run_name": "t", **section},
                     clip=1.0, optimizer={"type": "AdamW", "params": {"lr": 1e-3}})


def train(engine, until_step):
    while engine.global_steps < until_step:
        engine.backward(loss_of(engine, lm_batch(128, seed=engine.global_steps)))
        engine.step()


def llama():
    torch.manual_seed(0)
    return tiny_llama()


def test_two_processes_never_share_a_run(tmp_path):
    with engine_for(llama(), config_of(tmp_path)) as engine:
        train(engine, 1)
        with pytest.raises(StoreError, match="in use by process"), engine_for(llama(), config_of(tmp_path)):
            pass
        train(engine, 2)


def test_in_place_survives_a_good_end_and_says_so_after_a_bad_one(tmp_path):
    config = config_of(tmp_path, durability="in_place")
    with engine_for(llama(), config) as engine:
        assert "durability in_place" in engine.offload.plan_table and not engine.offload.plan.shadow
        train(engine, 2)
        state = engine_state(engine)
    with engine_for(llama(), config) as engine:
        assert engine.global_steps == 2
        assert_same_bits(engine_state(engine), state)
        train(engine, 3)
        engine.save_checkpoint(str(tmp_path / "checkpoint"))
        assert committed_step(named_run_dirs(parse(config).ssd_paths, "t")) == 3
        train(engine, 4)
        engine.offload.store._commits.last   # noqa: B018 - dirty by now; ends here, without destroy()'s commit
        engine.offload.closers.remove(engine.offload._finish)
    with pytest.raises(DirtyStore, match="checkpoint"), engine_for(llama(), config):
        pass


def test_a_changed_chunk_size_or_update_mode_changes_nothing(tmp_path):
    with engine_for(llama(), config_of(tmp_path, update="deferred")) as engine:
        train(engine, 2)
        state = engine_state(engine)
    with engine_for(llama(), config_of(tmp_path, chunk_bytes="48KiB", update="eager")) as engine:
        assert engine.global_steps == 2
        assert_same_bits(engine_state(engine), state)
        train(engine, 3)


def test_another_model_is_refused_by_name(tmp_path):
    with engine_for(llama(), config_of(tmp_path)) as engine:
        train(engine, 1)
    torch.manual_seed(0)
    with pytest.raises(StoreError, match="another model"), engine_for(tiny_llama(tied=True), config_of(tmp_path)):
        pass


def reopened(tmp_path, **options):
    """(global_steps, random state that is put back, state) of a fresh start."""
    with engine_for(llama(), config_of(tmp_path, **options)) as engine:
        return engine.global_steps, engine.random_state, engine_state(engine)


CUT_OFF_IN = [("serial", "lohan_ds.runtime.param_streamer.ParamStreamer.prefetch_first"),
              ("deferred", "lohan_ds.engine.pack_state")]


@pytest.mark.timeout(120)   # and the engine does not hang when it is destroyed
@pytest.mark.parametrize(("update", "cut_off"), CUT_OFF_IN)
def test_a_step_that_is_cut_off_is_not_committed(tmp_path, monkeypatch, update, cut_off):
    """By an LR scheduler that raises, or Ctrl-C: the update is decided, the counters have not moved."""
    with engine_for(llama(), config_of(tmp_path, update=update)) as engine:
        train(engine, 2)
        before = engine_state(engine)
        engine.backward(loss_of(engine, lm_batch(128, seed=2)))
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(cut_off, interrupt)
            engine.step()
        with pytest.raises(StepError, match="cut off"):
            loss_of(engine, lm_batch(128, seed=3))
    step, _, state = reopened(tmp_path)
    assert step == 2
    assert_same_bits(state, before)


def interrupt(*_):
    raise KeyboardInterrupt


def interrupted_at(call, number):
    """`call`, but for that time, at which Ctrl-C comes."""
    count = itertools.count(1)
    return lambda *args: interrupt() if next(count) == number else call(*args)


@pytest.mark.parametrize("durability", ["shadow", "in_place"])
def test_a_load_that_is_cut_off_is_not_committed(tmp_path, durability):
    checkpoint = str(tmp_path / "checkpoint")
    with engine_for(llama(), config_of(tmp_path, durability=durability)) as engine:
        train(engine, 1)
        engine.save_checkpoint(checkpoint)
        train(engine, 2)
        before = engine_state(engine)
        engine.offload.write = interrupted_at(engine.offload.write, 20)
        with pytest.raises(KeyboardInterrupt):
            engine.load_checkpoint(checkpoint)
        with pytest.raises(StepError, match="cut off"):
            train(engine, 3)
    if durability == "in_place":
        with pytest.raises(DirtyStore, match="checkpoint"):
            reopened(tmp_path, durability=durability)
        return
    step, _, state = reopened(tmp_path)
    assert step == 2
    assert_same_bits(state, before)


@pytest.mark.parametrize("durability", ["shadow", "in_place"])
def test_a_load_that_is_refused_harms_nothing(tmp_path, durability):
    with engine_for(llama(), config_of(tmp_path, durability=durability)) as engine:
        train(engine, 1)
        engine.save_checkpoint(str(tmp_path / "checkpoint"))
        train(engine, 2)
        before = engine_state(engine)
        file, = (tmp_path / "checkpoint").glob("*/*optim_states.pt")
        saved = torch.load(file, weights_only=False)
        saved["optimizer_state_dict"]["fp32_flat_groups"][7] = torch.zeros(3)
        torch.save(saved, file)
        with pytest.raises(StoreError, match="got 3 elements, needed"):
            engine.load_checkpoint(str(tmp_path / "checkpoint"))
        assert engine.global_steps == 2
        assert_same_bits(engine_state(engine), before)
        train(engine, 3)
        after = engine_state(engine)
    step, _, state = reopened(tmp_path, durability=durability)
    assert step == 3
    assert_same_bits(state, after)


def test_a_load_says_which_step_it_replaces(tmp_path, capsys):
    with engine_for(llama(), config_of(tmp_path)) as engine:
        train(engine, 1)
        engine.save_checkpoint(str(tmp_path / "checkpoint"))
        train(engine, 2)
    with engine_for(llama(), config_of(tmp_path)) as engine:
        capsys.readouterr()
        engine.load_checkpoint(str(tmp_path / "checkpoint"))
        assert "replaces step 2 of run 't' by step 1" in capsys.readouterr().out
    assert reopened(tmp_path)[0] == 1


def set_master(weight):
    safe_set_full_fp32_param(weight, torch.zeros(weight.shape))


def edit_in_place(weight):
    with torch.no_grad():
        weight.zero_()
    safe_get_full_fp32_param(weight)   # here the edit reaches the store


@pytest.mark.parametrize("edit", [set_master, edit_in_place])
def test_an_edit_that_is_cut_off_is_not_committed(tmp_path, edit):
    """Between the weight and its master."""
    config = {**config_of(tmp_path), "bf16": {"enabled": True}}
    with engine_for(llama(), config) as engine:
        train(engine, 2)
        before = engine_state(engine)
        engine.offload.store.write_array = interrupted_at(engine.offload.store.write_array, 2)
        with pytest.raises(KeyboardInterrupt):
            edit(engine.module.model.layers[0].mlp.up_proj.weight)
    with engine_for(llama(), config) as engine:
        assert engine.global_steps == 2
        assert_same_bits(engine_state(engine), before)


@pytest.mark.parametrize("update", ["deferred", "eager"])
def test_nothing_happens_after_the_end(tmp_path, update):
    """Of a run that has ended before its engine, as Trainer ends it before it loads its best checkpoint."""
    checkpoint = str(tmp_path / "checkpoint")
    with engine_for(llama(), config_of(tmp_path, update=update)) as engine:
        train(engine, 1)
        engine.save_checkpoint(checkpoint)
        at_1 = engine_state(engine)
        train(engine, 2)
        at_2 = engine_state(engine)
        engine.backward(loss_of(engine, lm_batch(128, seed=2)))
        engine.end_run()
        with pytest.raises(StepError, match="has ended"):
            engine.step()
        for _ in range(2):
            with pytest.raises(StepError, match="has ended"):
                engine.backward(loss_of(engine, lm_batch(128, seed=3)))
            with pytest.raises(StepError, match="has ended"):
                engine.step()
            engine.load_checkpoint(checkpoint)
        assert_same_bits(engine_state(engine), at_1)
    step, _, state = reopened(tmp_path, update=update)
    assert step == 2
    assert_same_bits(state, at_2)


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 32))

    def forward(self, x):
        return self.layers(x).square().mean()


@pytest.mark.parametrize("through", ["engine", "module"])
def test_random_numbers_go_on_at_the_first_training_forward(tmp_path, through):
    """Whatever calls it, and whatever was drawn or evaluated before."""
    x, states = torch.ones(4, 32), []
    for stops in ([3], [2, 3]):
        folder = tmp_path / str(len(stops))
        folder.mkdir()
        for stop in stops:
            torch.manual_seed(0)
            with engine_for(Dropping(), config_of(folder)) as engine:
                if engine.global_steps:
                    engine.eval()
                    engine.module(torch.rand(4, 32))
                    engine.train()
                while engine.global_steps < stop:
                    engine.backward((engine if through == "engine" else engine.module)(x))
                    engine.step()
                state = engine_state(engine)
        states.append(state)
    assert_same_bits(*states)


def test_the_first_step_after_resuming_is_whole(tmp_path):
    """Saved between the micro-batches of a step: none of them counts, and the random numbers are the boundary's."""
    config = {**config_of(tmp_path), "gradient_accumulation_steps": 3}
    with engine_for(llama(), config) as engine:
        for micro_step in range(4):
            engine.backward(loss_of(engine, lm_batch(128, seed=micro_step)))
            engine.step()
            if engine.micro_steps == 3:
                at_boundary = torch.get_rng_state()
            torch.rand(7)
        assert engine.global_steps == 1
        engine.save_checkpoint(str(tmp_path / "checkpoint"))
    with engine_for(llama(), config) as engine:
        assert (engine.global_steps, engine.micro_steps) == (1, 3)
        assert engine.random_state["torch"] == at_boundary.numpy().tobytes()
        engine.save_checkpoint(str(tmp_path / "checkpoint"))   # before the first forward: still the same
        assert not engine.is_gradient_accumulation_boundary()
    _, random_state, _ = reopened(tmp_path)
    assert random_state["torch"] == at_boundary.numpy().tobytes()


def test_edits_in_place_are_kept(tmp_path):
    with engine_for(llama(), config_of(tmp_path)) as engine:
        train(engine, 1)
        loss_of(engine, lm_batch(128, seed=5))
        weight = engine.module.model.layers[1].mlp.up_proj.weight
        with torch.no_grad():
            weight.mul_(0.5)
        edited = weight.detach().clone()
    _, _, state = reopened(tmp_path)
    assert torch.equal(state["model.layers.1.mlp.up_proj.weight"]["param"], edited)


@pytest.mark.timeout(60)
def test_a_late_block_that_the_next_step_does_not_use(tmp_path, monkeypatch):
    """Its update must not wait for buffers that wait for its own commit."""
    use_doubles(monkeypatch, make_io=functools.partial(FaultyIo, max_delay_s=0.03))
    monkeypatch.setattr("lohan_ds.planner.search._num_read_ahead_chunks", lambda *_: 0)
    torch.manual_seed(0)
    with engine_for(TwoHeads(), config_of(tmp_path, update="deferred")) as engine:
        for step in range(4):
            engine.backward(engine(torch.ones(2, 64), head=step % 2))
            engine.step()
    assert committed_step(named_run_dirs([str(tmp_path / "ssd")], "t")) == 4


class TwoHeads(nn.Module):
    """A batch uses one of them; they are the last in forward order, and large."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(64, 600) for _ in range(2))

    def forward(self, x, head):
        for layer in self.layers:
            x = x + layer(x)
        return self.heads[1 - head](x).square().mean()
