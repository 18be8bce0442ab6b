"""An unchanged script under the `deepspeed` launcher: on, off by the environment, off without the section."""
from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from integration_tests.doubles import fresh_environment

JOB = Path(__file__).parent / "jobs" / "plain_job.py"
CONFIG = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.5,
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
          "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}}}


def run(config_path, *arguments, launcher=True, **env) -> dict:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--master_port", port, JOB,
               "--deepspeed", "--deepspeed_config", config_path] if launcher else \
              [sys.executable, JOB, "--deepspeed", "--deepspeed_config", config_path]
    single = {} if launcher else {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                                  "MASTER_PORT": port}
    done = subprocess.run([*map(str, command), *arguments], capture_output=True, text=True, timeout=250,
                          env=fresh_environment(**single, **env))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if "REPORT" in line)
    return json.loads(line.split("REPORT", 1)[1])


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launcher")
    (folder / "ssd").mkdir()
    with_section = {**CONFIG, "lohan": {"ssd_paths": str(folder / "ssd"), "param_tier": "ssd", "chunk_bytes": "24KiB"}}
    (folder / "lohan.json").write_text(json.dumps(with_section))
    (folder / "plain.json").write_text(json.dumps({**CONFIG, "zero_optimization": {"stage": 3}}))
    return folder


@pytest.fixture(scope="module")
def plain(configs):
    return run(configs / "plain.json", launcher=False)


def test_the_section_is_enough(configs, plain):
    ours = run(configs / "lohan.json")
    assert (ours["engine"], ours["optimizer"]) == ("LohanEngine", "LohanOptimizer")
    assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert ours["total"] == pytest.approx(plain["total"], rel=1e-5) and ours["lr"] == plain["lr"]
    assert list((configs / "ssd").iterdir()) == []


def test_zero_init_gives_the_same_numbers(configs):
    """`deepspeed.zero.Init` with our config: on the host, and torch's own F.linear stays."""
    direct = run(configs / "lohan.json", launcher=False)
    under_init = run(configs / "lohan.json", "--zero-init", launcher=False)
    assert under_init == direct and under_init["engine"] == "LohanEngine"


def test_without_the_section_deepspeed_is_itself(plain, configs):
    assert plain["engine"] == "DeepSpeedEngine" and plain["optimizer"] == "DeepSpeedZeroOptimizer_Stage3"
    assert run(configs / "plain.json", launcher=False, LOHAN_DS_AUTOLOAD="0") == plain


def test_the_environment_switches_the_automatic_way_off(configs):
    """Plain DeepSpeed then ignores the section, and the stage is what the JSON says: 0."""
    off = run(configs / "lohan.json", launcher=False, LOHAN_DS_AUTOLOAD="0")
    assert off["engine"] == "DeepSpeedEngine"


def test_an_empty_section_is_a_section(configs, plain):
    (configs / "empty.json").write_text(json.dumps({**CONFIG, "lohan": {}}))
    ours = run(configs / "empty.json", launcher=False)
    assert ours["engine"] == "LohanEngine" and ours["losses"] == pytest.approx(plain["losses"], rel=1e-5)


def test_a_disabled_section_is_none(configs, plain):
    disabled = {**CONFIG, "zero_optimization": {"stage": 3}, "lohan": {"enabled": False, "nonsense": 1}}
    (configs / "disabled.json").write_text(json.dumps(disabled))
    assert run(configs / "disabled.json", launcher=False) == plain
