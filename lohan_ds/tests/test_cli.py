"""The `lohan` command: what it prints and how it exits. The runs themselves are tested in test_parity.py."""
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from lohan_ds import cli
from lohan_ds.testing import models, parity

FAST = [parity.Case("odd", "host", "serial", "off", 1, "fp32", 2),
        parity.Case("odd", "ssd", "deferred", "always", 1, "fp32", 2)]


@pytest.fixture
def lohan(monkeypatch):
    """Runs `lohan` in this process, with two fast cases as the quick matrix."""
    threads = torch.get_num_threads()
    monkeypatch.setattr(parity, "quick_matrix", lambda steps, **values: FAST)
    yield lambda *words: CliRunner().invoke(cli.app, list(words))
    torch.set_num_threads(threads)


def test_help_names_the_command_and_hides_the_self_check(lohan):
    assert "verify" in lohan("--help").output
    result = lohan("verify", "--help")
    assert result.exit_code == 0
    assert "flip-bit" not in result.output


def test_equal_bits_exit_0_with_a_table(lohan):
    result = lohan("verify")
    assert result.exit_code == 0, result.output
    assert "bits equal" in result.output and result.output.count("yes") == 2
    assert "All 2 runs have the same bits" in result.output


def test_one_flipped_bit_exits_1_and_is_named(lohan):
    result = lohan("verify", "--flip-bit")
    assert result.exit_code == 1, result.output
    assert result.output.count("no") >= 2 and "yes" not in result.output
    assert "2 of 2 runs differ" in result.output
    assert "First: odd, host, serial, clip off, accumulation 1, fp32, 2 steps: " in result.output


def test_given_ssd_paths_are_used_and_left_clean(lohan, tmp_path, monkeypatch):
    seen = []
    run_cases = parity.run_cases
    monkeypatch.setattr(parity, "run_cases", lambda cases, paths, **more: seen.append(paths) or
                        run_cases(cases, paths, **more))
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    assert lohan("verify", *(f"--ssd-path={folder}" for folder in folders)).exit_code == 0
    assert seen == [[str(folder) for folder in folders]]
    assert [file for folder in folders for file in folder.iterdir()] == []


def test_unusable_ssd_path_exits_2_and_says_so(lohan, tmp_path):
    result = lohan("verify", "--ssd-path", str(tmp_path / "none"))
    assert result.exit_code == 2
    assert "does not exist" in result.output


def test_first_layers_of_a_hugging_face_model(lohan, tmp_path, monkeypatch):
    case = parity.Case("folder", "ssd", "deferred", "always", 1, "bf16", 2)
    monkeypatch.setattr(parity, "quick_matrix", lambda steps, **values: [case])
    folder = tmp_path / "folder"
    models.tiny_llama().save_pretrained(folder)
    result = lohan("verify", "--model", str(folder), "--layers", "2")
    assert result.exit_code == 0, result.output
    model = parity.load_model(str(folder), 2)
    whole = models.tiny_llama().state_dict()
    assert len(model.model.layers) == 2
    assert all(torch.equal(value, whole[name]) for name, value in model.state_dict().items())
    assert lohan("verify", "--model", str(folder), "--layers", "4").exit_code == 2


def test_layers_without_model_is_refused(lohan):
    assert lohan("verify", "--layers", "1").exit_code == 2


def test_as_a_command_it_prints_nothing_but_its_own_lines(tmp_path):
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.getcwd(), "CC": "none", "CXX": "none",
           "LOHAN_DS_NATIVE_OPS": "0"}   # else it says that there is no compiler
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "DS_ACCELERATOR"):
        env.pop(name, None)
    code = ("from lohan_ds import cli; from lohan_ds.testing import parity\n"
            "parity.full_matrix = lambda steps, **values: [parity.Case('odd', 'host', 'serial', 'off', 1, 'fp32', 1)]\n"
            "cli.main()")
    env["TORCH_EXTENSIONS_DIR"] = str(tmp_path)   # nothing may be compiled
    done = subprocess.run([sys.executable, "-c", code, "verify", "--full"], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["model", "tier", "update", "clip", "accum.", "dtype", "eager", "bits", "equal",
                                "seconds"]
    assert lines[-1] == "All 1 runs have the same bits as training in memory."
    assert len(lines) == 4 and done.stderr == ""
    assert list(tmp_path.iterdir()) == []
