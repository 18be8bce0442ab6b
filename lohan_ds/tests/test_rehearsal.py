"""A rehearsal moves, computes and updates exactly what the planner counts, in every update order. Tiny and quick."""
from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
from typer.testing import CliRunner

from lohan_ds import cli
from lohan_ds.errors import ConfigError
from lohan_ds.planner.program import solve
from lohan_ds.planner.solution import Batch, Choices
from lohan_ds.rehearsal.offload_plan import rehearsed_plan
from lohan_ds.rehearsal.rehearsal import rehearse
from lohan_ds.rehearsal.report import RehearsalReport, mode_report, report_text
from lohan_ds.rehearsal.scale import Scale
from lohan_ds.tests.planner_cases import MB, machine, small_model

ON_SSD = {"param_tiers": ("ssd",), "state_tiers": ("ssd",)}
ON_HOST = {"param_tiers": ("host",), "state_tiers": ("host",)}
NUM_UNITS = 4
# Not moved, though the planner counts it: the last unit's backward follows at once, so it stays; and an activation
# whose backward comes while it is still on its way out.
LAST_UNIT_BYTES = 2 * 500 * 2048


def planned(update, activation_tiers=("keep",), accumulation=1, tiers=ON_SSD, hardware=None):
    """A model of 4 MB of parameters, of which a step takes a tenth of a second; the machine; and the plan."""
    model, hardware = small_model(NUM_UNITS), hardware or machine()
    choices = Choices((Batch(2, accumulation),), (update,), (2,), activation_tiers=activation_tiers, **tiers)
    return model, hardware, solve(model, hardware, choices)


def rehearsed(update, *args, scale=Scale(0.5, 10.0), num_ssds=2, num_steps=1, **kwargs):
    model, hardware, solution = planned(update, *args, **kwargs)
    return solution, rehearse(model, hardware, num_ssds, solution, scale, num_steps)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("update", ["serial", "barrier", "deferred", "eager"])
def test_it_moves_and_computes_what_the_planner_counts(update):
    solution, figures = rehearsed(update, ("ssd", "recompute"), num_steps=3)
    counted = solution.step_traffic
    assert counted.param_h2d_bytes - LAST_UNIT_BYTES <= figures.nbytes["h2d"] <= 1.02 * counted.h2d_bytes   # of padding
    assert figures.nbytes["d2h"] == pytest.approx(counted.d2h_bytes, rel=0.02)
    assert figures.nbytes["ssd_write"] == pytest.approx(counted.ssd_write_bytes, rel=0.1)   # steps overlap at the edges
    assert counted.state_read_bytes * 0.9 < figures.nbytes["ssd_read"] < counted.ssd_read_bytes * 1.1
    compute_s = counted.flops / 1e13
    assert figures.busy_s["device"] == pytest.approx(compute_s, rel=0.01)
    assert figures.step_s >= max(figures.busy_s.values()) * 0.99
    assert figures.forward_s + figures.backward_s + figures.after_backward_s == pytest.approx(figures.step_s)
    assert figures.kept_activation_bytes == 0 and figures.num_steps == 3
    assert 0 <= figures.unpaced_s < figures.step_s


@pytest.mark.timeout(60)
def test_activations_of_the_host_tier_and_accumulation():
    solution, figures = rehearsed("deferred", ("host",), accumulation=2, tiers=ON_HOST)
    counted = solution.step_traffic
    assert counted.activation_h2d_bytes > 0
    assert counted.param_h2d_bytes - 2 * LAST_UNIT_BYTES < figures.nbytes["h2d"] <= 1.02 * counted.h2d_bytes
    assert figures.nbytes["d2h"] == pytest.approx(counted.d2h_bytes, rel=0.02)
    assert figures.nbytes["ssd_read"] == figures.nbytes["ssd_write"] == 0
    assert figures.busy_s["device"] == pytest.approx(counted.flops / 1e13, rel=0.01)


@pytest.mark.timeout(60)
def test_drives_are_as_fast_as_their_share_of_the_stripe():
    _, figures = rehearsed("serial", hardware=machine(num_ssds=2, ssd_stripe=(1, 0, 1, 1)), scale=Scale(1.0, 10.0))
    assert figures.busiest_drive_s < 1.15 * figures.busy_s["ssd"]   # the mean of both; as fast as each other it is 1.5


@pytest.mark.timeout(60)
def test_a_slower_link_is_waited_for_longer():
    fast = rehearsed("serial", tiers=ON_HOST)
    slow = rehearsed("serial", tiers=ON_HOST, hardware=machine(h2d_bytes_per_s=2e8))
    assert slow[1].copy_wait_s > fast[1].copy_wait_s


def test_the_plan_has_space_for_every_item_at_its_scale():
    model, hardware, solution = planned("eager", ("ssd",))
    small = Scale(1 / 16, 1.0).model(model)
    plan = rehearsed_plan(solution, model, hardware, small)
    assert plan.activations.ssd_bytes >= sum(item.nbytes for unit in small.units for item in unit.items)
    assert 0 < plan.activations.buffer_bytes <= 4 * MB / 16 + 4096
    assert plan.shadow and plan.update == "eager" and set(plan.state_tier) == {"ssd"}
    assert plan.chunk_numel == small.size.blocks[0].chunk_numel


def test_lohans_order_is_the_eager_one_with_another_protocol():
    model, hardware, solution = planned("barrier")
    plan = rehearsed_plan(solution, model, hardware, Scale(1 / 16, 1.0).model(model))
    assert plan.update == "eager" and plan.shadow


def test_a_device_without_memory_of_its_own_is_refused():
    model, hardware, solution = planned("deferred")
    with pytest.raises(ConfigError, match="train a few steps"):
        rehearse(model, replace(hardware, unified=True), 1, solution, Scale(1, 1), 1)


@pytest.mark.timeout(60)
def test_report_tells_predicted_from_rehearsed(tmp_path):
    model, hardware, solution = planned("deferred")
    trace = tmp_path / "trace.json"
    figures = rehearse(model, hardware, 1, solution, Scale(0.25, 5.0), 1, str(tmp_path), str(trace))
    mode = mode_report(solution, hardware, figures)
    assert set(mode.predicted.phases_s) == {"forward", "backward"}
    assert mode.error == pytest.approx(solution.step_s / figures.step_s - 1)
    report = RehearsalReport("tiny", "box", "", 1, 2, 1, 8, 0.25, 5.0, (mode,), {"eager": "ssd lacks 1 GB"})
    text = report_text(report)
    for part in ("tiny on box", "1/4 of the bytes", "5 times the seconds", "update deferred", "SSD written",
                 "activation", "neither paced nor slept", "update eager does not fit: ssd lacks 1 GB"):
        assert part in " ".join(text.split()), text
    assert max(map(len, text.splitlines())) <= 100
    assert json.loads(json.dumps(asdict(report)))["modes"][0]["rehearsed"]["step_s"] == figures.step_s
    assert {event["cat"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"} >= {
        "compute", "h2d", "d2h", "ssd_read", "ssd_write", "cpu_update", "phase"}


# -- the command -------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with nothing but a config: 13M parameters."""
    from transformers import LlamaConfig
    folder = tmp_path_factory.mktemp("llama")
    LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4, vocab_size=1000,
                num_key_value_heads=4, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return folder


def command(llama, *words):
    return CliRunner().invoke(cli.app, ["rehearse", "--hardware", "rtx4090-128gb-2ssd", "--model", str(llama),
                                        "--steps", "1", "--seq", "64", *map(str, words)])


@pytest.mark.timeout(120)
def test_command_rehearses_the_modes_asked_for(llama, tmp_path):
    result = command(llama, "--modes", "deferred,serial", "--bytes-scale", 0.2, "--seconds-scale", 50, "--json",
                     "--trace", tmp_path, "--scratch", tmp_path)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [mode["update"] for mode in report["modes"]] == ["deferred", "serial"]
    assert report["bytes_scale"] == 0.2 and report["num_ssds"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rehearsal_deferred.json", "rehearsal_serial.json"]


@pytest.mark.parametrize("words,expected,exit_code", [
    (("--modes", "eager,sometimes"), "must be some of", 2),
    (("--modes", "eager,eager"), "each once", 2),
    (("--model-profile", "x.json"), "name a model with either", 2),
    (("--hardware", "no-such-box"), "no machine of that name", 2),
    (("--device-memory", "4MB"), "does not fit", 1),
])
def test_command_says_what_is_wrong(words, expected, exit_code, llama):
    result = command(llama, *words)
    assert result.exit_code == exit_code, result.output
    assert expected in " ".join(result.output.split())
