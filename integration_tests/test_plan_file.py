"""Engines that carry out a plan file: every tier and kind of activation mixed, the same bits as the twin, and exactly
the places that the file says."""
from __future__ import annotations

import json

import pytest
import torch

from integration_tests.doubles import make_batches, step_alike
from lohan_ds.errors import CapacityError, ConfigError
from lohan_ds.model_blocks import split_into_blocks
from lohan_ds.planner.plan_file import BlockEntry, PlanFile, block_names, dump_plan
from lohan_ds.testing.harness import DTYPES, ds_config, engine_for, engine_state
from lohan_ds.testing.models import loss_of, tiny_llama
from lohan_ds.testing.twin import Twin, assert_same_bits
from lohan_ds.tests.planner_cases import machine

LR = {"lr": 1e-2, "weight_decay": 0.0}
CHUNK_NUMEL = 2048
LAYERS = [f"model.layers.{index}" for index in range(3)]


def mixed_plan(dtype="bf16", **changes) -> dict:
    """Blocks on both tiers in turn; one layer keeps all, one swaps, one recomputes what another keeps or swaps."""
    model = tiny_llama(tied=True).to(DTYPES[dtype])
    blocks = split_into_blocks(model, lambda p: 0, CHUNK_NUMEL).blocks
    tiers = ("host", "ssd")
    entries = {name: BlockEntry(parameters=tiers[(index // 2) % 2], optimizer_state=tiers[index % 2],
                                numel=block.numel, dtype=block.dtype)
               for index, (name, block) in enumerate(zip(block_names(blocks), blocks))}
    assert len({(entry.parameters, entry.optimizer_state) for entry in entries.values()}) == 4

    def items(**policies):
        return {name.replace("__", "."): {"policy": policy, "nbytes": 50_000} for name, policy in policies.items()}

    activations = [
        {"units": [LAYERS[0]], "items": items(input="ssd", self_attn__v_proj="ssd", mlp__up_proj="ssd", mlp="keep")},
        {"units": [LAYERS[2]], "items": items(input="keep", self_attn="recompute", mlp="recompute",
                                              mlp__gate_proj="ssd", mlp__up_proj="keep")}]
    file = PlanFile(model="tiny", hardware=machine(), micro_batch=2, accumulation=2, sequence_length=16,
                    update="deferred", prefetch_depth=1, chunk_bytes=12 * CHUNK_NUMEL, blocks=entries,
                    activations=activations, running_unit_bytes=10**6)
    return {**json.loads(dump_plan(file)), **changes}


def config_of(tmp_path, plan: dict, dtype="bf16", **section) -> dict:
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    ssd = {} if section.pop("without_ssd", False) else {"ssd_paths": [str(tmp_path)]}
    return ds_config({"plan": str(tmp_path / "plan.json"), **ssd, **section}, dtype=dtype, clip=1.0, accumulation=2,
                     optimizer={"type": "AdamW", "params": LR})


@pytest.mark.parametrize(("dtype", "update", "read_ahead"), [
    ("bf16", "deferred", None), ("bf16", "eager", 0), ("fp32", "auto", None), ("fp32", "serial", 0)])
def test_a_mixed_plan_gives_the_twins_bits(tmp_path, dtype, update, read_ahead):
    plan = mixed_plan(dtype, update=update, read_ahead_chunks=read_ahead)
    model = tiny_llama(tied=True)
    twin = Twin(tiny_llama(tied=True), None, DTYPES[dtype], 1.0, 2, **LR)
    with engine_for(model, config_of(tmp_path, plan, dtype), model_parameters=model.parameters()) as engine:
        carried_out = engine.offload.plan
        assert carried_out.param_tier == tuple(entry["parameters"] for entry in plan["blocks"].values())
        assert carried_out.state_tier == tuple(entry["optimizer_state"] for entry in plan["blocks"].values())
        assert (carried_out.update, carried_out.prefetch_depth, carried_out.chunk_numel) == (update, 1, CHUNK_NUMEL)
        for step in range(3):
            step_alike(engine, twin, make_batches(model, 1, 2, seed=step)[0])
        assert_same_bits(engine_state(engine), twin.state())
        stats = engine.lohan_stats()
    assert stats[f"{LAYERS[0]}: bytes_out"] and stats[f"{LAYERS[2]}: bytes_out"] and stats["reruns"]
    assert f"{LAYERS[1]}: bytes_out" not in stats
    assert stats["ssd_bytes"] == sum(
        entry["numel"] * ((2 if dtype == "bf16" else 4) * (entry["parameters"] == "ssd")
                          + (12 if dtype == "bf16" else 8) * (entry["optimizer_state"] == "ssd"))
        for entry in plan["blocks"].values()) * (2 if update in ("eager", "auto") else 1)
    twin.close()


def test_drives_of_different_speed_give_the_twins_bits_and_hold_their_shares(tmp_path):
    plan = mixed_plan(update="eager", stripe=[1, 0, 1])
    for entry in plan["blocks"].values():
        entry.update(parameters="ssd", optimizer_state="ssd")
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
    model, twin = tiny_llama(tied=True), Twin(tiny_llama(tied=True), None, torch.bfloat16, 1.0, 2, **LR)
    config = config_of(tmp_path, plan, ssd_paths=list(map(str, paths)))
    with engine_for(model, config, model_parameters=model.parameters()) as engine:
        for step in range(2):
            step_alike(engine, twin, make_batches(model, 1, 2, seed=step)[0])
        assert_same_bits(engine_state(engine), twin.state())
        for kind in ("block-*", "act-*"):
            one, two = (sum(file.stat().st_size for file in path.rglob(kind)) for path in paths)
            assert two == pytest.approx(2 * one, rel=0.25), kind   # of few chunks; the last of a block is smaller
        assert engine.lohan_stats()[f"{LAYERS[0]}: bytes_out"]
    twin.close()


@pytest.mark.parametrize(("section", "change", "error", "message"), [
    ({"run_name": "tuning"}, {}, ConfigError, "is kept on the host, which does not survive a crash"),
    ({"without_ssd": True}, {}, ConfigError, "lohan.ssd_paths: missing, and lohan.plan .* keeps things on the SSD"),
    ({"host_memory": "1MB"}, {}, CapacityError, "the plan does not fit: host needs .*\n(.*\n)*Edit lohan.plan"),
    ({}, {"micro_batch": 4}, ConfigError, "train_micro_batch_size_per_gpu 4, this run has 2"),
    ({}, {"blocks": {}}, ConfigError, "the plan is for another model: no place for blocks model.embed_tokens, "),
    ({"update": "serial"}, {}, ConfigError, "lohan.update: lohan.plan is .*, and that file decides it"),
])
def test_what_cannot_be_carried_out_is_refused(tmp_path, section, change, error, message):
    with pytest.raises(error, match=message):
        with engine_for(tiny_llama(tied=True), config_of(tmp_path, mixed_plan(**change), **section),
                        model_parameters=tiny_llama().parameters()):
            pass


@pytest.mark.parametrize(("durability", "update"), [(None, "deferred"), ("in_place", "deferred"), (None, "eager")])
def test_a_run_with_a_name_carries_out_a_plan_that_is_all_on_ssd(tmp_path, durability, update):
    plan = mixed_plan(update=update)
    for entry in plan["blocks"].values():
        entry.update(parameters="ssd", optimizer_state="ssd")
    model = tiny_llama(tied=True)
    more = {"durability": durability} if durability else {}
    paths = [tmp_path / name for name in "ab"]
    for path in paths:
        path.mkdir()
    more["ssd_paths"] = list(map(str, paths))
    for first_step, stripe in enumerate(([0, 0, 1], [0, 1])):   # it stays as it was begun
        config = config_of(tmp_path, {**plan, "stripe": stripe}, run_name="tuning", **more)
        with engine_for(model, config, model_parameters=model.parameters()) as engine:
            assert engine.offload.plan.stripe == (0, 0, 1)
            assert engine.offload.plan.durability == (durability or "shadow") and engine.global_steps == first_step
            for batch in make_batches(model, 1, 2)[0]:
                engine.backward(loss_of(engine, batch))
                engine.step()
        model = tiny_llama(tied=True)
    with pytest.raises(ConfigError, match="was begun with chunk_bytes 24576, the plan has 49152; keep that"):
        with engine_for(model, config_of(tmp_path, {**plan, "chunk_bytes": 49152}, run_name="tuning", **more),
                        model_parameters=model.parameters()):
            pass


def test_what_lohan_plan_saves_the_engine_runs(tmp_path):
    """From a model's config to steps of training, on a machine with too little memory for the whole."""
    from typer.testing import CliRunner

    from lohan_ds import cli
    from lohan_ds.profiler.hardware_file import save_profile
    model = tiny_llama(tied=True, hidden_size=128, intermediate_size=256, num_hidden_layers=6)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path)
    save_profile(machine(unified=True, host_bytes=22 * 10**6, h2d_bytes_per_s=float("inf"),
                         d2h_bytes_per_s=float("inf")), tmp_path / "machine.json")
    words = ["plan", "--model", tmp_path, "--hardware", tmp_path / "machine.json", "--seq", 16, "--micro-batch", 2,
             "--accumulation", 2, "--dtype", "fp32", "--save-plan", tmp_path / "saved.json"]
    result = CliRunner().invoke(cli.app, list(map(str, words)))
    assert result.exit_code == 0, result.output
    plan = json.loads((tmp_path / "saved.json").read_text())
    twin = Twin(tiny_llama(tied=True, hidden_size=128, intermediate_size=256, num_hidden_layers=6), None,
                torch.float32, 1.0, 2, **LR)
    with engine_for(model, config_of(tmp_path, plan, "fp32", host_memory="22MB"),
                    model_parameters=model.parameters()) as engine:
        assert set(engine.offload.plan.state_tier) == {"host", "ssd"}, plan
        for batch in make_batches(model, 1, 2)[0]:
            theirs = twin.micro_step(batch)
            loss = loss_of(engine, batch)
            engine.backward(loss)
            assert loss.item() == theirs
            engine.step()
        twin.step()
        assert_same_bits(engine_state(engine), twin.state())
    twin.close()
