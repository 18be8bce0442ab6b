"""The plan that an engine makes by itself: by rates where this machine was measured, block by block and item by item;
by bytes alone where it was not, or where somebody forced it."""
from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from integration_tests.doubles import make_batches, step_alike
from lohan_ds.profiler import hardware
from lohan_ds.testing.harness import ds_config, engine_for, engine_state
from lohan_ds.testing.models import OddModel, tiny_llama
from lohan_ds.testing.twin import Twin, assert_same_bits
from lohan_ds.tests.planner_cases import machine

LR = {"lr": 1e-2, "weight_decay": 0.0}
UNIFIED = machine(unified=True, h2d_bytes_per_s=float("inf"), d2h_bytes_per_s=float("inf"))


def six_layers():
    return tiny_llama(tied=True, hidden_size=128, intermediate_size=256, num_hidden_layers=6)


def config_of(tmp_path, **section):
    return ds_config({"ssd_paths": [str(tmp_path)], **section}, dtype="fp32", clip=1.0,
                     optimizer={"type": "AdamW", "params": LR})


@pytest.fixture
def measured(monkeypatch):
    """This machine, as if it had been measured; the calls that asked for it."""
    asked = []

    def cached(ssd_paths, dtype, device):
        asked.append((tuple(ssd_paths), dtype, device.type))
        return UNIFIED

    monkeypatch.setattr(hardware, "cached_profile", cached)
    return asked


def check_bits(engine, make_model, steps=2):
    twin = Twin(make_model(), None, torch.float32, 1.0, 1, **LR)
    for step in range(steps):
        step_alike(engine, twin, make_batches(twin.model, 1, seed=step)[0])
    assert_same_bits(engine_state(engine), twin.state())
    twin.close()


def test_blocks_are_placed_one_by_one_and_items_where_the_length_is_known(tmp_path, measured, capsys):
    model = six_layers()
    config = config_of(tmp_path, host_memory="20MB", sequence_length=16)
    with engine_for(model, config, model_parameters=model.parameters()) as engine:
        plan, file = engine.offload.plan, engine.offload.run_plan.file
        assert measured == [((str(tmp_path),), "float32", "cpu")]
        assert set(plan.state_tier) == {"host", "ssd"} and plan.activations.device_bytes > 0
        assert (file.micro_batch, file.sequence_length) == (2, 16) and file.is_as_planned
        assert file.hardware == replace(UNIFIED, host_bytes=20 * 10**6, device_bytes=20 * 10**6,
                                        ssd_bytes=file.hardware.ssd_bytes)
        assert engine.offload.run_plan.remark == ""
        page = capsys.readouterr().out
        assert "FITS" in page and "what if" in page
        check_bits(engine, six_layers)


@pytest.mark.parametrize(("section", "remark"), [
    ({}, "activations are not planned: lohan.sequence_length is not given"),
    ({"sequence_length": 16}, "activations are not planned: OddModel is no model of transformers")])
def test_without_activations_half_of_a_shared_memory_is_left_to_them(tmp_path, measured, section, remark):
    """2.4 MB of state, more than the host has beside the rest."""
    def make():
        return OddModel(hidden=512, vocab=257)

    model = make()
    with engine_for(model, config_of(tmp_path, host_memory="6MB", chunk_bytes="24KiB", **section),
                    model_parameters=model.parameters()) as engine:
        plan, file = engine.offload.plan, engine.offload.run_plan.file
        assert engine.offload.run_plan.remark.startswith(remark)
        assert file.micro_batch is None and file.activations == () and plan.activations.device_bytes == 0
        assert file.hardware.host_bytes == 6 * 10**6 // 2
        assert set(plan.state_tier + plan.param_tier) == {"host", "ssd"}
        check_bits(engine, make)


@pytest.mark.parametrize("section", [{"optimizer_tier": "ssd"}, {"activations": "recompute"}, {"run_name": "tuning"},
                                     {"host_memory": "1GB"}])
def test_what_is_forced_or_fits_in_host_memory_is_as_it_was(tmp_path, measured, section):
    model = tiny_llama(tied=True)
    with engine_for(model, config_of(tmp_path, **section), model_parameters=model.parameters()) as engine:
        assert engine.offload.run_plan.file is None and not engine.offload.run_plan.remark and not measured
        assert len(set(engine.offload.plan.state_tier)) == 1


def test_a_machine_that_was_not_measured_is_said_with_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = six_layers()
    with engine_for(model, config_of(tmp_path, host_memory="16MB"), model_parameters=model.parameters()) as engine:
        assert set(engine.offload.plan.state_tier) == {"ssd"} and engine.offload.run_plan.file is None
    assert f"block by block: lohan profile --ssd-path {tmp_path}\n" in capsys.readouterr().out


def test_prediction_comparison_and_a_new_plan_while_training(tmp_path, measured, monkeypatch, capsys):
    """The rates are not this machine's, so the plan is made again; what it then recomputes gives the same bits."""
    from lohan_ds import plan_check
    from lohan_ds.planner import automatic, rate_watch
    for module in (rate_watch, plan_check):
        monkeypatch.setattr(module, "NUM_STEPS", 2)
    monkeypatch.setattr(rate_watch, "LEAST_BUSY_SHARE", 1e-6)
    made = []

    def other_plan(file, hardware, profile):
        """Whatever the rates: one item of each layer otherwise. Only once."""
        if made:
            return None
        units = []
        for unit in file.activations:
            items = dict(unit.items)
            if "mlp.up_proj" in items:
                policy = "keep" if items["mlp.up_proj"].policy == "recompute" else "recompute"
                items["mlp.up_proj"] = items["mlp.up_proj"].model_copy(update={"policy": policy})
            units.append(unit.model_copy(update={"items": items}))
        made.append(file.model_copy(update={"activations": tuple(units)}))
        return made[0]

    monkeypatch.setattr(automatic, "plan_at_rates", other_plan)
    model = six_layers()
    config = config_of(tmp_path, host_memory="17300KB", sequence_length=16)
    with engine_for(model, config, model_parameters=model.parameters()) as engine:
        swapper = engine.offload.swapper
        assert swapper is not None and "recompute" in swapper.table(), engine.offload.plan
        before = swapper.table()
        check_bits(engine, six_layers, steps=7)
        assert engine.offload.plan_check.file is made[0] and swapper.table() != before
        assert engine.lohan_comparison() == [] or engine.lohan_comparison()[0].what == "step"
    said = capsys.readouterr().out
    assert "tokens/s\nphase" in said and "lohan plan, predicted against measured\nsteps " in said
    assert "of the rate that was planned with\nthe plan so far:" in said
    assert "lohan plan: from the next step on the new plan holds" in said
