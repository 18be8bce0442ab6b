"""Trainer and Accelerate, unchanged scripts in processes of their own, against plain DeepSpeed ZeRO-3 and plain HF."""
from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from integration_tests.doubles import fresh_environment
from lohan_ds.testing.models import tiny_gpt2, tiny_llama

JOBS = Path(__file__).parent / "jobs"
AUTO = {"train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
                              "stage3_param_persistence_threshold": "auto"}}


def ds_config(tmp_path, **lohan) -> dict:
    """Everything "auto", the lohan section included (D07)."""
    (tmp_path / "ssd").mkdir(exist_ok=True)
    section = {"enabled": "auto", "update": "auto", "host_memory": "auto", "device_memory": "auto",
               "prefetch_depth": "auto", "chunk_bytes": "60 kB", "ssd_paths": [str(tmp_path / "ssd")],
               "optimizer_tier": "ssd", "param_tier": "ssd", **lohan}
    return {**AUTO, "lohan": section}


def save_model(tmp_path, model) -> str:
    model.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def run(command: list, job: dict, check: bool = True, **env) -> subprocess.CompletedProcess:
    Path(job["out"]).mkdir(exist_ok=True)
    environment = fresh_environment(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
                                    MASTER_PORT=str(free_port()), **env)
    done = subprocess.run([*map(str, command), json.dumps(job)], env=environment, capture_output=True, text=True,
                          timeout=280)
    assert not check or done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def free_port() -> int:
    import socket
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def report(job: dict) -> dict:
    return json.loads((Path(job["out"]) / "report.json").read_text())


def losses_of(rows: list[dict], first_step: int = 0) -> list[tuple]:
    return [(r["step"], r.get("loss"), r.get("grad_norm"), r.get("learning_rate"), r.get("eval_loss"),
             r.get("eval_accuracy")) for r in rows
            if r["step"] > first_step]


def logits_of(folder, plain_env: bool = True) -> torch.Tensor:
    """By plain transformers in a fresh process without lohan."""
    code = ("import sys, torch; from transformers import AutoModelForCausalLM; "
            "m = AutoModelForCausalLM.from_pretrained(sys.argv[1]); "
            "torch.save(m(torch.arange(12)[None]).logits, sys.argv[1] + '/logits.pt')")
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, env=fresh_environment(LOHAN_DS_AUTOLOAD="0"))
    return torch.load(Path(folder) / "logits.pt")


@pytest.fixture(scope="module")
def trainer_runs(tmp_path_factory):
    """The same Trainer job by plain ZeRO-3, by lohan through the launcher, and by lohan resumed from step 3."""
    tmp_path = tmp_path_factory.mktemp("trainer")
    model = save_model(tmp_path, tiny_llama(tied=True, vocab_size=129))
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--no_local_rank",
                "--master_port", free_port()]
    jobs = {"plain": {"model": model, "ds_config": AUTO, "out": str(tmp_path / "plain")},
            "lohan": {"model": model, "ds_config": ds_config(tmp_path), "out": str(tmp_path / "lohan"),
                      "train_twice": True}}
    jobs["resumed"] = {**jobs["lohan"], "out": str(tmp_path / "resumed"), "train_twice": False,
                       "resume": str(tmp_path / "lohan" / "checkpoint-3")}
    jobs["tiled"] = {**jobs["lohan"], "ds_config": ds_config(tmp_path, loss_tile_tokens=8),
                     "out": str(tmp_path / "tiled")}
    run([sys.executable, JOBS / "trainer_job.py"], jobs["plain"])
    run([sys.executable, JOBS / "trainer_job.py"], jobs["tiled"])
    run([*launcher, JOBS / "trainer_job.py"], jobs["lohan"])
    run([sys.executable, JOBS / "trainer_job.py"], jobs["resumed"])
    return tmp_path, jobs


@pytest.mark.parametrize("name", ["lohan", "tiled"])
def test_trainer_logs_equal_plain_zero3(trainer_runs, name):
    """Loss, grad_norm and learning rate, for clip 1.0 and accumulation 4 (D46); loss and metrics of evaluation."""
    _, jobs = trainer_runs
    plain, lohan = report(jobs["plain"]), report(jobs[name])
    assert (plain["engine"], lohan["engine"]) == ("DeepSpeedEngine", "LohanEngine")
    assert lohan["num_parameters"] == tiny_llama(tied=True, vocab_size=129).num_parameters()  # D60; plain says 448
    assert len(lohan["log"]) == len(plain["log"]) >= 8
    for ours, theirs in zip(losses_of(lohan["log"]), losses_of(plain["log"])):
        for a, b in zip(ours, theirs):
            assert a == b or a == pytest.approx(b, rel=2e-6), (ours, theirs)


def test_trainer_resume_is_bit_identical(trainer_runs):
    tmp_path, jobs = trainer_runs
    straight, resumed = report(jobs["lohan"]), report(jobs["resumed"])
    assert losses_of(resumed["log"], first_step=3) == losses_of(straight["log"], first_step=3)
    from safetensors.torch import load_file
    a, b = (load_file(Path(jobs[name]["out"]) / "final" / "model.safetensors") for name in ("lohan", "resumed"))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_training_again_is_refused_and_harms_nothing(trainer_runs):
    _, jobs = trainer_runs
    out = Path(jobs["lohan"]["out"])
    second = json.loads((out / "second.json").read_text())
    assert second["refusal"].startswith("StepError: this Trainer has trained already")
    assert len(set(second["losses"])) == 1 and second["losses"][0] == report(jobs["lohan"])["log"][-2]["eval_loss"]
    assert (out / "after" / "model.safetensors").read_bytes() == (out / "final" / "model.safetensors").read_bytes()


def test_saved_model_is_complete_and_loads_in_plain_transformers(trainer_runs):
    """D71, D73: full weights by default, no placeholder file, the folder of a checkpoint too."""
    _, jobs = trainer_runs
    final, last = Path(jobs["lohan"]["out"]) / "final", Path(jobs["lohan"]["out"]) / "checkpoint-6"
    assert torch.equal(logits_of(final), logits_of(last))
    weights = final / "model.safetensors"
    assert weights.stat().st_size > 4 * tiny_llama(tied=True, vocab_size=129).num_parameters()
    assert not list(final.glob("global_step*"))


def test_nothing_is_left_on_the_ssd(trainer_runs):
    assert list((trainer_runs[0] / "ssd").iterdir()) == []


@pytest.mark.parametrize("in_code", [True, False])
def test_accelerate(tmp_path, in_code):
    """The plugin in code, and `accelerate launch` with a config file; against the same loop in plain torch.

    One with tied embeddings, one without: what is saved gives the same logits in plain transformers (D71)."""
    make = tiny_gpt2 if in_code else functools.partial(tiny_llama, tied=False, vocab_size=129)
    model = save_model(tmp_path, make())
    config = ds_config(tmp_path)
    job = {"model": model, "ds_config": config, "out": str(tmp_path / "out"), "in_code": in_code}
    if in_code:
        command = [sys.executable, JOBS / "accelerate_job.py"]
    else:
        (tmp_path / "ds.json").write_text(json.dumps({**config, "train_micro_batch_size_per_gpu": 2,
                                                      "gradient_accumulation_steps": 2, "gradient_clipping": 1.0}))
        command = [sys.executable, "-m", "accelerate.commands.launch", "--use_deepspeed", "--num_processes", "1",
                   "--main_process_port", free_port(), "--deepspeed_config_file", tmp_path / "ds.json",
                   JOBS / "accelerate_job.py"]
    run(command, job)
    got = report(job)
    assert got["engine"] == "LohanEngine"
    assert got["losses"] == pytest.approx(plain_losses(make()), rel=1e-5)
    assert torch.equal(logits_of(tmp_path / "out" / "final"), torch.load(tmp_path / "out" / "logits.pt"))


WITHOUT_CONFIG = """
import json, sys, torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from lohan_ds.testing.harness import init_one_rank
from lohan_ds.testing.models import OddModel, lm_batch
init_one_rank()
accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=json.loads(sys.argv[1])))
model = OddModel()
engine, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
accelerator.backward(engine(**lm_batch(131)))
optimizer.step()
print("RESULT", type(engine).__name__, engine.get_global_grad_norm())
"""


def test_automatic_bucket_sizes_need_no_hidden_size(tmp_path):
    """D08: what lohan ignores is not worked out from a config that a plain module has not."""
    config = {**ds_config(tmp_path), "train_micro_batch_size_per_gpu": 2, "train_batch_size": 2,
              "gradient_accumulation_steps": 1}
    done = subprocess.run([sys.executable, "-c", WITHOUT_CONFIG, json.dumps(config)], env=fresh_environment(),
                          capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    name, norm = done.stdout.split("RESULT ")[1].split()[:2]
    assert name == "LohanEngine" and float(norm) > 0


def plain_losses(model) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    ids = [torch.randint(0, 129, (12,), generator=torch.Generator().manual_seed(i)) for i in range(16)]
    losses = []
    for step, start in enumerate(range(0, 16, 2)):
        batch = torch.stack(ids[start:start + 2])
        loss = model(input_ids=batch, labels=batch).loss
        (loss / 2).backward()
        losses.append(loss.item())
        if step % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return losses


def test_a_model_that_does_not_fit_is_refused_before_its_weights_are_loaded(tmp_path):
    """D14: table of needed against available, and the cheapest change; the weight file is never opened."""
    model = save_model(tmp_path, tiny_llama(vocab_size=129))
    (tmp_path / "model" / "model.safetensors").write_bytes(b"not opened")
    config = ds_config(tmp_path, host_memory=300_000, prefetch_depth=2)
    job = {"model": model, "ds_config": config, "out": str(tmp_path / "out")}
    done = run([sys.executable, JOBS / "trainer_job.py"], job, check=False)
    assert done.returncode != 0
    last = done.stderr.strip()
    assert "CapacityError" in last and "MISSING" in last and "lohan.host_memory" in last, last[-3000:]
    assert "SafetensorError" not in last


@pytest.mark.parametrize("broken, message", [
    ({"ssd_paths": ["/no/such/place"]}, "lohan.ssd_paths"),
    ({"optimizer_tier": "ssd", "ssd_paths": []}, "lohan.ssd_paths"),
    ({"host_memroy": "1GB"}, "did you mean `host_memory`"),
])
def test_a_bad_section_is_refused_while_trainer_reads_the_json(tmp_path, broken, message):
    """D06: before a model exists, naming the key."""
    from transformers.integrations import HfDeepSpeedConfig

    from lohan_ds.errors import ConfigError
    with pytest.raises(ConfigError, match=message):
        HfDeepSpeedConfig(ds_config(tmp_path, **broken))


STEP_0 = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.integrations import HfDeepSpeedConfig
import deepspeed
from lohan_ds.testing.harness import init_one_rank
ids = torch.arange(24).view(2, 12) % 97
result = {}
plain = {f: AutoModelForSeq2SeqLM if "t5" in f else AutoModelForCausalLM for f in sys.argv[2:]}
expected = {f: cls.from_pretrained(f)(input_ids=ids, labels=ids).loss.item() for f, cls in plain.items()}
config = json.loads(sys.argv[1])
init_one_rank()
for folder, cls in plain.items():
    keep = HfDeepSpeedConfig(config)
    model = cls.from_pretrained(folder)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.train(False)
    result[folder] = [expected[folder], engine(input_ids=ids, labels=ids).loss.item(), type(engine).__name__]
    engine.destroy()
print("RESULT", json.dumps(result))
"""


def test_step_0_loss_of_three_architectures_is_plain_hf(tmp_path):
    """D41: from_pretrained under our config loads the same weights."""
    from transformers import T5Config, T5ForConditionalGeneration
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=129, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                                             decoder_start_token_id=0, pad_token_id=0))
    folders = []
    for name, model in {"llama": tiny_llama(tied=False, vocab_size=129), "gpt2": tiny_gpt2(), "t5": t5}.items():
        model.eval().save_pretrained(tmp_path / name)
        folders.append(str(tmp_path / name))
    (tmp_path / "ssd").mkdir()
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3},
              "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
              "lohan": {"ssd_paths": [str(tmp_path / "ssd")], "param_tier": "ssd"}}
    done = subprocess.run([sys.executable, "-c", STEP_0, json.dumps(config), *folders], env=fresh_environment(),
                          capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    for folder, (plain, ours, engine) in json.loads(line.removeprefix("RESULT")).items():
        assert engine == "LohanEngine" and ours == plain, folder


def test_an_empty_section_is_read_by_trainer():
    from transformers.integrations import HfDeepSpeedConfig

    from lohan_ds.errors import ConfigError
    assert HfDeepSpeedConfig({**AUTO, "lohan": {}}).config["lohan"]["enabled"] is True
    with pytest.raises(ConfigError, match="offload_optimizer.ratio"):
        HfDeepSpeedConfig({**AUTO, "lohan": {}, "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}})
