"""Save and resume: identical bits afterwards, files that DeepSpeed's own tools and plain torch read."""
from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from lohan_ds.errors import StoreError
from lohan_ds.testing.harness import ds_config, engine_for, engine_state
from lohan_ds.testing.models import OddModel, lm_batch, loss_of, tiny_llama, vocab_of
from lohan_ds.testing.twin import assert_same_bits

WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 8}}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}}


def section(tier: str, path) -> dict:
    tiers = {"param_tier": tier, "optimizer_tier": tier, "chunk_bytes": 60_000}
    return {**tiers, "ssd_paths": [str(path)]} if tier == "ssd" else tiers


def config_for(tier, path, dtype, accumulation=2):
    return ds_config(section(tier, path), dtype=dtype, clip=1.0, accumulation=accumulation, optimizer=ADAMW,
                     scheduler=WARMUP)


def train(engine, first_step: int, num_steps: int, accumulation: int = 2) -> list[float]:
    losses = []
    for step in range(first_step, first_step + num_steps):
        for micro in range(accumulation):
            batch = lm_batch(vocab_of(engine.module), 2, 12, seed=100 * step + micro)
            loss = loss_of(engine, batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("tier", ["host", "ssd"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_resume_continues_with_the_same_bits(tmp_path, tier, dtype):
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    with engine_for(tiny_llama(tied=True), config_for(tier, ssd, dtype)) as engine:
        train(engine, 0, 3)
        engine.save_checkpoint(tmp_path / "ckpt", client_state={"epoch": 7})
        straight = train(engine, 3, 3)
        expected = engine_state(engine)
    other_model = tiny_llama(tied=True, seed=99)  # other initial weights: all must come from the checkpoint
    with engine_for(other_model, config_for(tier, ssd, dtype)) as engine:
        path, client_state = engine.load_checkpoint(tmp_path / "ckpt")
        assert path is not None and client_state["epoch"] == 7 and engine.global_steps == 3
        assert train(engine, 3, 3) == straight
        assert_same_bits(engine_state(engine), expected)
    assert list(ssd.iterdir()) == []


def test_a_checkpoint_moves_between_tiers_and_update_modes(tmp_path):
    with engine_for(OddModel(), config_for("host", tmp_path, "bf16")) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "ckpt")
        straight = train(engine, 2, 2)
    config = config_for("ssd", tmp_path, "bf16")
    config["lohan"].update(update="serial", chunk_bytes=24 * 1024)
    with engine_for(OddModel(seed=5), config) as engine:
        engine.load_checkpoint(tmp_path / "ckpt")
        assert train(engine, 2, 2) == straight


def test_frozen_parameters_and_buffers_come_back(tmp_path):
    def frozen_model(seed):
        model = tiny_llama(tied=False, seed=seed)
        model.register_buffer("counter", torch.tensor([float(seed)]))
        for param in model.model.layers[0].parameters():
            param.requires_grad_(False)
        return model

    with engine_for(frozen_model(1), config_for("ssd", tmp_path, "fp32")) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "ckpt")
        expected = engine_state(engine)
    with engine_for(frozen_model(2), config_for("ssd", tmp_path, "fp32")) as engine:
        engine.load_checkpoint(tmp_path / "ckpt")
        assert_same_bits(engine_state(engine), expected)
        assert engine.module.counter.item() == 1.0


def test_weights_alone_can_be_loaded(tmp_path):
    with engine_for(tiny_llama(), config_for("ssd", tmp_path, "fp32")) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "ckpt")
        expected = {name: entry["master"] for name, entry in engine_state(engine).items()}
    with engine_for(tiny_llama(seed=3), config_for("ssd", tmp_path, "fp32")) as engine:
        engine.load_checkpoint(tmp_path / "ckpt", load_optimizer_states=False, load_lr_scheduler_states=False)
        state = engine_state(engine)
        assert all(torch.equal(state[name]["master"], expected[name]) for name in expected)
        assert all(entry["step"] == 0 for entry in state.values())


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path):
    with engine_for(tiny_llama(), config_for("host", tmp_path, "fp32")) as engine:
        engine.save_checkpoint(tmp_path / "ckpt")
    with engine_for(tiny_llama(num_hidden_layers=2), config_for("host", tmp_path, "fp32")) as engine:
        with pytest.raises(StoreError, match="trained parameters.*first difference"):
            engine.load_checkpoint(tmp_path / "ckpt")


def shorten(folder, pattern, *keys):
    """The tensor under these keys in the one file like that becomes one of 3 elements."""
    file, = folder.glob(f"*/{pattern}")
    saved = torch.load(file, weights_only=False)
    holder = saved
    for key in keys[:-1]:
        holder = holder[key]
    holder[keys[-1]] = torch.zeros(3)
    torch.save(saved, file)


DAMAGES = {"master": ("*optim_states.pt", "optimizer_state_dict", "fp32_flat_groups", 7),
           "exp_avg_sq": ("*optim_states.pt", "optimizer_state_dict", "optimizer_state_dict", "state", 7, "exp_avg_sq"),
           "frozen": ("*model_states.pt", "frozen_param_fragments", "model.norm.weight"),
           "buffer": ("*model_states.pt", "module", "counter")}


@pytest.mark.parametrize("damage", [*DAMAGES, "precision"])
def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path, damage):
    def make_model():
        model = tiny_llama()
        model.register_buffer("counter", torch.tensor([1.0]))
        for param in (model.model.layers[0].mlp.up_proj.weight, model.model.norm.weight):
            param.requires_grad_(False)
        return model

    dtype = "bf16" if damage == "precision" else "fp32"
    with engine_for(make_model(), config_for("host", tmp_path, dtype, accumulation=1)) as engine:
        train(engine, 0, 1, accumulation=1)
        engine.save_checkpoint(tmp_path / "ckpt")
    message = "no optimizer state of a torch.float32 run"
    if damage in DAMAGES:
        shorten(tmp_path / "ckpt", *DAMAGES[damage])
        message = "got 3 elements, needed"
    with engine_for(make_model(), config_for("host", tmp_path, "fp32", accumulation=1)) as engine:
        train(engine, 0, 2, accumulation=1)
        before, rate = engine_state(engine), engine.get_lr()
        with pytest.raises(StoreError, match=message):
            engine.load_checkpoint(tmp_path / "ckpt")
        assert (engine.global_steps, engine.get_lr()) == (2, rate)
        assert_same_bits(engine_state(engine), before)


@pytest.mark.parametrize("tied", [True, False])
def test_zero_to_fp32_reads_our_checkpoint(tmp_path, tied):
    """DeepSpeed's own recovery script, in a process of its own (D71)."""
    model = tiny_llama(tied=tied)
    with engine_for(model, config_for("ssd", tmp_path, "bf16")) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "ckpt")
        state = engine_state(engine)
    subprocess.run([sys.executable, "zero_to_fp32.py", ".", "fp32.bin"], cwd=tmp_path / "ckpt", check=True,
                   capture_output=True)
    file, = (tmp_path / "ckpt" / "fp32.bin").glob("*.bin")
    recovered = torch.load(file)
    for name, entry in state.items():
        assert torch.equal(recovered[name], entry["master"]), name
    assert ("lm_head.weight" in recovered) and (not tied or torch.equal(recovered["lm_head.weight"],
                                                                      recovered["model.embed_tokens.weight"]))


def test_save_16bit_model_writes_every_weight(tmp_path):
    with engine_for(tiny_llama(tied=True), config_for("ssd", tmp_path, "bf16")) as engine:
        train(engine, 0, 2)
        assert engine.save_16bit_model(tmp_path / "weights")
        state = engine_state(engine)
    saved = torch.load(tmp_path / "weights" / "pytorch_model.bin")
    assert all(torch.equal(saved[name], entry["param"]) for name, entry in state.items())
    assert torch.equal(saved["lm_head.weight"], saved["model.embed_tokens.weight"])
    plain = tiny_llama(tied=True, seed=4)
    assert not plain.load_state_dict(saved, strict=False).missing_keys


def test_loading_forgets_gradients_that_wait_for_their_step(tmp_path):
    with engine_for(tiny_llama(), config_for("ssd", tmp_path, "fp32", accumulation=1)) as engine:
        train(engine, 0, 1, accumulation=1)
        engine.save_checkpoint(tmp_path / "ckpt")
        straight = train(engine, 1, 2, accumulation=1)
        engine.load_checkpoint(tmp_path / "ckpt")
        engine.backward(loss_of(engine, lm_batch(vocab_of(engine.module), 2, 12, seed=7)))
        engine.load_checkpoint(tmp_path / "ckpt")
        assert train(engine, 1, 2, accumulation=1) == straight


def test_saving_takes_no_room_on_the_ssds(tmp_path, monkeypatch):
    """`ssd_space` is not exceeded by what a checkpoint passes through: that lies beside the checkpoint."""
    import tempfile
    made = []
    mkstemp = tempfile.mkstemp

    def recording(*args, **kwargs):
        made.extend([kwargs["dir"]] if kwargs["prefix"] == "export-" else [])
        return mkstemp(*args, **kwargs)

    monkeypatch.setattr(tempfile, "mkstemp", recording)
    (tmp_path / "ssd").mkdir()
    with engine_for(tiny_llama(), config_for("ssd", tmp_path / "ssd", "fp32")) as engine:
        engine.save_checkpoint(tmp_path / "ckpt", tag="here")
    assert made == [str(tmp_path / "ckpt" / "here~new")]   # its name while it is written
    assert not list((tmp_path / "ckpt" / "here").glob("export-*"))
