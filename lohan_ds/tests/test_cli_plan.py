"""The command `lohan plan`: from a model's config and a machine to a page, without running or loading anything."""
from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from lohan_ds import cli
from lohan_ds.profiler import hardware
from lohan_ds.tests.planner_cases import machine

BOX = "rtx4090-128gb-2ssd"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with nothing but a config: 1.1 B parameters."""
    from transformers import LlamaConfig
    folder = tmp_path_factory.mktemp("llama")
    LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
                num_key_value_heads=4, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def profiled(llama):
    """The same model as a profile file, of 4 sequences of 512 tokens."""
    path = llama / "profile.json"
    result = plan("--model", llama, "--hardware", BOX, "--micro-batch", 4, "--seq", 512, "--save-model-profile", path)
    assert result.exit_code == 0, result.output
    return path


def plan(*words):
    return CliRunner().invoke(cli.app, ["plan", *map(str, words)])


def page(*words, exit_code=0):
    result = plan("--json", *words)
    assert result.exit_code == exit_code, result.output
    return json.loads(result.stdout)


def test_page_of_a_llama(llama):
    result = plan("--model", llama / "config.json", "--hardware", f"{BOX}.json", "--seq", 2048, "--micro-batch", 8)
    assert result.exit_code == 0, result.output
    for part in ("LlamaForCausalLM from", "1.1 B parameters", f"on {BOX}", "FITS", "8 x 2048 = 16384 tokens",
                 "LlamaDecoderLayer: ", "Attention: fused kernel on cuda"):
        assert part in result.stdout, result.stdout


def test_sequences_longer_than_the_models_are_noted(llama):
    notes = page("--model", llama, "--hardware", BOX, "--seq", 4096)["notes"]
    assert "The model is made for at most 2048 tokens per sequence." in notes


def test_head_and_loss_are_planned_as_the_run_decides(llama):
    """Tiles where logits are large; what they take and save is said, and the larger batch fits."""
    words = ("--model", llama, "--hardware", BOX, "--seq", 2048, "--micro-batch", 32)
    for more, said, exit_code in (((), "in tiles of 512 tokens, 425.98 MB", 0),
                                  (("--loss-tile-tokens", 64), "in tiles of 64 tokens, 282.62 MB", 0),
                                  (("--loss-tile-tokens", 0), "all logits at once, 20.97 GB with their gradient", 1)):
        notes = page(*words, *more, exit_code=exit_code)["notes"]
        assert any(note.startswith(f"Head and loss: {said}") for note in notes), notes
    assert any("Head and loss: all logits at once, 327.68 MB" in n for n in page("--model", llama, "--hardware", BOX)[
        "notes"])


def test_models_without_tokens_are_noted(tmp_path):
    from transformers import ViTConfig
    ViTConfig(architectures=["ViTForImageClassification"]).save_pretrained(tmp_path)
    assert any("takes no tokens" in note for note in page("--model", tmp_path, "--hardware", BOX)["notes"])


def test_model_profile_gives_the_same_page(llama, profiled):
    for more in ((), ("--accumulation", 2, "--no-clipping")):
        words = ("--hardware", BOX, *more)
        assert (page("--model-profile", profiled, *words)
                == page("--model", llama, "--micro-batch", 4, "--seq", 512, *words))


def test_175b_fits_with_enough_memory_and_says_what_is_missing_without(tmp_path):
    from transformers import GPT2Config
    GPT2Config(n_layer=96, n_head=96, n_embd=12288, n_positions=1024,
               architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    words = ("--model", tmp_path, "--save-model-profile", tmp_path / "profile.json")
    large = page(*words, "--hardware", "rtx4090-768gb-12ssd")
    assert large["fits"] and large["model"]["num_parameters"] == pytest.approx(174.6e9, rel=0.01)
    assert set(large["plan"]["params"]) <= {"host", "ssd"}
    words = ("--model-profile", tmp_path / "profile.json", "--hardware", BOX)
    host = next(tier for tier in page(*words, exit_code=1)["tiers"] if tier["tier"] == "host")
    gigabytes = f"{host['missing_bytes'] / 1e9:.2f} GB"
    result = plan(*words)
    assert result.exit_code == 1 and host["missing_bytes"] > 200 * 10**9   # 2 bytes of gradient per parameter are held
    text = " ".join(result.stdout.split())
    assert f"DOES NOT FIT missing: host lacks {gigabytes} ({host['missing_bytes']} bytes)" in text
    assert f"the cheapest change that would fit: {gigabytes} more host memory; then " in text
    assert page(*words, "--host-memory", host["used_bytes"])["fits"]
    assert not page(*words, "--host-memory", host["used_bytes"] - 2**20, exit_code=1)["fits"]


def test_more_memory_is_never_slower(profiled):
    words = ("--model-profile", profiled, "--hardware", BOX, "--micro-batch", 32)
    for flag, sizes in (("--host-memory", ("6GB", "16GB", "64GiB")), ("--device-memory", ("11GB", "40GB"))):
        speeds = [page(*words, flag, size)["plan"]["tokens_per_s"] for size in sizes]
        assert all(more >= less * 0.995 for less, more in zip(speeds, speeds[1:])), (flag, speeds)


def test_tbw_is_of_one_drive(profiled):
    words = ("--model-profile", profiled, "--hardware", BOX, "--host-memory", "6GB")
    once, twice = (page(*words, "--tbw", tbw)["plan"]["ssd"] for tbw in (600, 1200))
    assert once["rated_write_bytes"] == 2 * 600 * 10**12
    assert once["life_steps"] == once["rated_write_bytes"] / once["write_bytes_per_step"]
    assert twice["life_days"] == pytest.approx(2 * once["life_days"])


def test_this_machine_is_measured_and_lohan_leaves_some_of_it(profiled, tmp_path, monkeypatch):
    asked = []

    def measure(ssd_paths, dtype, progress):
        asked.append((ssd_paths, dtype))
        progress("something")
        print("a library's remark")
        return machine(host_bytes=10**11, device_bytes=10**11, ssd_bytes=10**12), SimpleNamespace(made_at_s=0), None

    monkeypatch.setattr(hardware, "profile_hardware", measure)
    result = plan("--model-profile", profiled, "--ssd-path", tmp_path, "--json")
    assert result.exit_code == 0 and asked == [([str(tmp_path)], "bfloat16")]
    assert "measuring: something" in result.stderr
    found = json.loads(result.stdout)
    assert found["hardware"]["profile"]["host_bytes"] == 90 * 10**9 and found["hardware"]["num_ssds"] == 1
    assert any("measured at 19" in note for note in found["notes"])
    exact = page("--model-profile", profiled, "--host-memory", "50GB")
    assert exact["hardware"]["profile"]["host_bytes"] == 50 * 10**9


def test_measured_hardware_file_of_shared_memory_is_read(profiled, tmp_path):
    from lohan_ds.profiler.hardware_file import save_profile
    hardware = machine(unified=True, h2d_bytes_per_s=float("inf"), d2h_bytes_per_s=float("inf"), host_bytes=10**11)
    save_profile(hardware, tmp_path / "here.json")
    found = page("--model-profile", profiled, "--hardware", tmp_path / "here.json")
    assert [tier["tier"] for tier in found["tiers"]] == ["host", "ssd"]
    assert "The model was profiled for cuda." in found["notes"]


@pytest.mark.parametrize(("words", "message"), [
    ((), "--model or --model-profile"),
    (("--model", "/none"), "'/none' does not exist"),
    (("--model", "/", "--hardware", BOX), "there is no such file; name a model folder with a config.json"),
    (("--model", "/", "--hardware", "cray-1"), "no machine of that name; there are"),
    (("--model", "/", "--hardware", BOX, "--host-memory", "much"), "--host-memory: must be a number of bytes"),
    (("--model", "/", "--hardware", BOX, "--ssd-path", "/tmp"), "is of this machine"),
    (("--model-profile", "/none"), "/none: cannot be read"),
    (("--model-profile", "{profiled}", "--hardware", BOX, "--seq", "7"), "is of 512 tokens per sequence"),
    (("--model-profile", "{profiled}", "--hardware", BOX, "--dtype", "fp32"), "is of bfloat16"),
    (("--model-profile", "{profiled}", "--hardware", BOX, "--plot", "/none/a.png"), ""),
])
def test_what_is_wrong_is_said_with_status_2(profiled, words, message):
    result = plan(*(str(profiled) if word == "{profiled}" else word for word in words))
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(("change", "message"), [
    ({"format": 2}, "format"), ({"other": 1}, "other"), ({"name": 3}, "name"), ({"profile": {}}, "profile.size")])
def test_wrong_model_profile_is_named(profiled, tmp_path, change, message):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps({**json.loads(profiled.read_text()), **change}))
    result = plan("--model-profile", path, "--hardware", BOX)
    assert result.exit_code == 2 and f"wrong.json: is not a model profile: {message}" in result.output, result.output


def test_model_profile_must_agree_with_itself(profiled, tmp_path):
    content = json.loads(profiled.read_text())
    content["profile"]["size"]["units"][0] = [999]
    (tmp_path / "wrong.json").write_text(json.dumps(content))
    assert "must name blocks that there are" in plan("--model-profile", tmp_path / "wrong.json").output


def test_plan_is_saved_as_the_page_says(profiled, tmp_path):
    from lohan_ds.planner.plan_file import load_plan
    words = ("--model-profile", profiled, "--hardware", BOX, "--host-memory", "8GB", "--device-memory", "5GB")
    found = page(*words, "--save-plan", tmp_path / "plan.json")["plan"]
    saved = load_plan(tmp_path / "plan.json")
    assert saved.is_as_planned and saved.predicted.step_s == found["step_s"] and saved.update == found["update"]
    for where, shares in (("parameters", found["params"]), ("optimizer_state", found["states"])):
        tiers = [getattr(block, where) for block in saved.blocks.values()]
        assert {tier: tiers.count(tier) for tier in set(tiers)} == {t: s["num_blocks"] for t, s in shares.items()}
    assert (saved.micro_batch, saved.sequence_length) == (4, 512)


def test_no_plan_is_saved_where_nothing_fits(profiled, tmp_path):
    words = ("--model-profile", profiled, "--hardware", BOX, "--save-plan", tmp_path / "plan.json")
    result = plan(*words, "--host-memory", "1GB")
    assert result.exit_code == 1 and "plan.json is not written: nothing fits" in " ".join(result.output.split())
    assert not (tmp_path / "plan.json").exists()
    result = plan(*words, "--device-parameters")
    assert result.exit_code == 2 and "--device-parameters yet" in " ".join(result.output.replace("│", " ").split())


def test_picture(profiled, tmp_path):
    pytest.importorskip("matplotlib")
    assert plan("--model-profile", profiled, "--hardware", BOX, "--plot", tmp_path / "a.png").exit_code == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_picture_without_matplotlib_says_what_to_install(profiled, monkeypatch):
    real_import = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "matplotlib":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    result = plan("--model-profile", profiled, "--hardware", BOX, "--plot", "a.png")
    assert result.exit_code == 2 and 'pip install "lohan_ds[plot]"' in result.output


@pytest.mark.parametrize(("source", "absent"), [
    ("--model", ("deepspeed", "transformers.trainer", "matplotlib")),
    ("--model-profile", ("deepspeed", "transformers", "torch", "matplotlib"))])
def test_as_a_command_it_imports_only_what_it_needs(llama, profiled, source, absent):
    code = ("import sys; from lohan_ds.cli import app\n"
            "try: app()\nexcept SystemExit as end: assert not end.code\n"
            f"print([name for name in {absent!r} if name in sys.modules], file=sys.stderr)")
    done = subprocess.run([sys.executable, "-c", code, "plan", source, llama if source == "--model" else profiled,
                           "--hardware", BOX, "--json"], env={**os.environ, "PYTHONPATH": os.getcwd()},
                          capture_output=True, text=True)
    assert json.loads(done.stdout)["fits"], done.stderr
    assert done.stderr.splitlines() == ["[]"]
