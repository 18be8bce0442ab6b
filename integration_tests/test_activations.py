"""Activations kept, swapped and recomputed in engines, compared with the twin bit for bit.

What has broken other offloaders: swapping that is switched on and does nothing, a budget that has two visible effects,
staging buffers that need more memory than they save, buffers that change their dtype, gradient checkpointing with
frozen parameters and LoRA, backward before the copy is over, evicted layers that somebody still looks at.
"""
from __future__ import annotations

import contextlib
import gc
import logging
import time
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from integration_tests.doubles import engine_config, make_batches, train_engine, train_twin, use_doubles
from lohan_ds.errors import StepError
from lohan_ds.memory.pinned_pool import PAGE_BYTES
from lohan_ds.testing.delayed_streams import DelayedStreams
from lohan_ds.testing.harness import DTYPES, ds_config, engine_for, engine_state
from lohan_ds.testing.models import BranchModel, OddModel, lm_batch, loss_of, tiny_gpt2, tiny_llama, vocab_of
from lohan_ds.testing.swapping import attach_swapper, unit_names
from lohan_ds.testing.twin import Twin, assert_same_bits

LR = {"lr": 1e-2, "weight_decay": 0.0}
MODELS = {
    "llama": lambda: tiny_llama(tied=True, attention_dropout=0.1),
    "gpt2": lambda: tiny_gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1),
    "odd": OddModel,
}
SELECTIVE = {"llama": {"": "recompute", "input": "swap_ssd", "self_attn.v_proj": "swap_ssd", "mlp.up_proj": "keep"},
             "gpt2": {"": "recompute", "input": "swap_ssd", "attn": "swap_ssd", "mlp.c_fc": "swap_host"},
             "odd": {"": "recompute", "input": "swap_host", "down": "swap_ssd"}}


def layers_of(model: nn.Module) -> list[str]:
    return [name for name in unit_names(model) if name.split(".")[-1].isdigit()]


class Pair:
    """An engine with a swapper, and its twin, fed alike."""

    def __init__(self, engine: Any, twin: Twin, swapper: Any, host_bytes: int):
        self.engine, self.twin, self.swapper = engine, twin, swapper
        self.host_bytes = host_bytes   # that the swapper has taken

    def step(self, batches: list, seed: int = 0) -> None:
        """One step; a micro-step for each batch."""
        for micro, batch in enumerate(batches):
            torch.manual_seed(100 * seed + micro)
            theirs = self.twin.micro_step(batch)
            torch.manual_seed(100 * seed + micro)
            loss = loss_of(self.engine, batch)
            self.engine.backward(loss)
            assert loss.item() == theirs
            del loss
            self.engine.step()
        self.twin.step()

    def check(self) -> None:
        assert_same_bits(engine_state(self.engine), self.twin.state())

    def wait_at_rest(self) -> None:
        deadline = time.monotonic() + 5
        while self.swapper.held() and time.monotonic() < deadline:
            time.sleep(0.002)
        assert not self.swapper.held()


@contextlib.contextmanager
def pair_of(tmp_path, make_model, policies, *, dtype: str = "fp32", accumulation: int = 1, prepare=lambda model: None,
            tier: str = "ssd", **sizes: int):
    """`prepare(model)` is done to the engine's model only."""
    model, twin_model = make_model(), make_model()
    prepare(model)
    of_units = policies(model) if callable(policies) else policies
    twin = Twin(twin_model, None, DTYPES[dtype], 1.0, accumulation, **LR)
    section = {"param_tier": tier, "optimizer_tier": tier, "chunk_bytes": "24KiB", "ssd_paths": [str(tmp_path)]}
    config = ds_config(section, dtype=dtype, clip=1.0, accumulation=accumulation,
                       optimizer={"type": "AdamW", "params": LR})
    with engine_for(model, config, model_parameters=[p for p in model.parameters() if p.requires_grad]) as engine:
        before_bytes = engine.offload.budget.used_bytes
        swapper = attach_swapper(engine, of_units, [tmp_path], **sizes)
        yield Pair(engine, twin, swapper, engine.offload.budget.used_bytes - before_bytes)
    twin.close()


# -- same bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("policy", ["swap", "recompute", "selective"])
def test_training_is_the_same(tmp_path, monkeypatch, kind, policy):
    """Parameters on SSD, delayed copies, two micro-steps, dropout."""
    use_doubles(monkeypatch, streams=DelayedStreams(1, 0.0005))
    policies = {"swap": {"": "swap_host", "input": "swap_ssd"}, "recompute": {"": "recompute", "input": "swap_host"},
                "selective": SELECTIVE[kind]}[policy]
    make = MODELS[kind]
    with pair_of(tmp_path, make, lambda model: {name: policies for name in layers_of(model)}, dtype="bf16",
                 accumulation=2) as pair:
        vocab = vocab_of(pair.engine.module)
        for step in range(2):
            pair.step([lm_batch(vocab, seed=10 * step + micro) for micro in range(2)], step)
        pair.check()
        stats = pair.swapper.stats()
        assert sum(count for key, count in stats.items() if key.endswith("_bytes_out") and "swap" in key) > 0
        pair.wait_at_rest()


# -- LoRA and frozen parameters ----------------------------------------------------------------------------------------


def lora_llama(**config: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1, "init_lora_weights": False}
        return get_peft_model(tiny_llama(), LoraConfig(**{**options, **config}))


@pytest.mark.parametrize("theirs", [None, True, False])
@pytest.mark.parametrize("ours", [{}, {"": "recompute", "input": "swap_ssd"}])
def test_checkpointing_of_lora_layers_both_ways_at_once(tmp_path, theirs, ours):
    """Frozen and LoRA parameters under gradient checkpointing, ours, Hugging Face's (re-entrant or not), both."""
    def prepare(model):
        if theirs is not None:
            model.enable_input_require_grads()
            model.base_model.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": theirs})

    with pair_of(tmp_path, lora_llama, lambda model: {name: ours for name in layers_of(model)},
                 prepare=prepare) as pair:
        for step in range(2):
            pair.step([lm_batch(257, seed=step)], step)
        pair.check()
        assert bool(pair.swapper.stats().get("reruns")) == (bool(ours) and theirs is None)
        pair.wait_at_rest()


def test_adapters_behind_frozen_layers_get_their_gradients(tmp_path):
    """LoRA in the last layer only, everything before it frozen, all layers recomputed: exact, and no warnings."""
    def make():
        return lora_llama(layers_to_transform=[2])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        with pair_of(tmp_path, make, lambda model: {name: {"": "recompute"} for name in layers_of(model)}) as pair:
            before = {name: p.detach().clone() for name, p in pair.twin.model.named_parameters() if p.requires_grad}
            assert before and all(".layers.2." in name for name in before)
            for step in range(2):
                pair.step([lm_batch(257, seed=step)], step)
            pair.check()
            after = dict(pair.twin.model.named_parameters())
            assert all(not torch.equal(after[name], value) for name, value in before.items())
            assert pair.swapper.stats()["reruns"] == 2, "layers without gradients save nothing"


def test_frozen_embeddings(tmp_path):
    def make():
        model = tiny_gpt2(resid_pdrop=0.1)
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
        model.transformer.wte.requires_grad_(False)
        model.transformer.wpe.requires_grad_(False)
        return model

    with pair_of(tmp_path, make, {"*": {"": "recompute"}, "transformer.h.1": {"": "swap_ssd"}}) as pair:
        pair.step([lm_batch(129)])
        pair.check()


# -- it does something, and what it says -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_swapping_that_is_switched_on_shows_in_every_layer(tmp_path, kind):
    """Hugging Face models call no activation API: counters of every layer move all the same, and the table names it."""
    with pair_of(tmp_path, MODELS[kind], lambda model: {name: {"": "swap_ssd"} for name in layers_of(model)}) as pair:
        layers = layers_of(pair.engine.module)
        per_layer: list[dict[str, int]] = []
        for step in range(2):
            pair.step([lm_batch(vocab_of(pair.engine.module), seed=step)], step)
            stats = pair.swapper.stats()
            per_layer.append({name: stats[f"{name}: bytes_out"] for name in layers})
        assert all(per_layer[0][name] > 10_000 for name in layers)
        assert all(per_layer[1][name] == 2 * per_layer[0][name] for name in layers)
        assert [line.split(":")[0] for line in pair.swapper.table().splitlines()] == layers
        assert pair.engine.offload.io.bytes_written > 0


def test_models_without_a_config_and_encoder_decoders(tmp_path):
    """Nothing depends on config fields: a T5 (encoder output shared by all decoder layers) and a plain module."""
    def t5():
        from transformers import T5Config, T5ForConditionalGeneration
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return T5ForConditionalGeneration(T5Config(
                vocab_size=131, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4,
                dropout_rate=0.1, decoder_start_token_id=0, use_cache=False))

    selective = {"": "recompute", "input": "swap_ssd", "layer.0": "swap_ssd"}
    with pair_of(tmp_path, t5, lambda model: {name: selective for name in unit_names(model)
                                              if ".block." in name}) as pair:
        pair.step([lm_batch(131)])
        pair.check()
        assert pair.swapper.stats()["reruns"] == 4
    recompute = {"": "recompute", "input": "swap_ssd"}
    policies = {"layers.0": recompute, "layers.1": recompute, "branch.qkv": recompute, "branch.up": {"": "swap_ssd"}}
    with pair_of(tmp_path, BranchModel, policies) as pair:
        pair.step([{**lm_batch(128), "use_branch": True}])
        pair.step([lm_batch(128, seed=1)], 1)
        pair.check()
        pair.wait_at_rest()


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_host_memory_is_what_the_plan_gives(tmp_path):
    """SSD tier with a small host budget: buffers are counted, few, and independent of the largest layer."""
    sizes = {"num_buffers": 2, "buffer_bytes": 4 * PAGE_BYTES, "host_bytes": 0}
    with pair_of(tmp_path, MODELS["llama"], {"*": {"": "swap_ssd"}}, tier="host", **sizes) as pair:
        assert pair.host_bytes == 2 * 4 * PAGE_BYTES
        pair.step([lm_batch(257, batch=4, seq=32)])
        pair.check()
        spill = pair.swapper._table._tiers["swap_ssd"].spill
        assert 0 < spill.peak_bytes <= spill.nbytes and spill.nbytes == 8 << 20
        assert pair.swapper.stats()["swap_ssd_bytes_out"] > 20 * 2 * 4 * PAGE_BYTES


def test_measured_bytes_follow_the_budget(tmp_path, monkeypatch):
    """A sweep of the host budget in six steps: bytes swapped rise with it, within one layer's size."""
    swapped = []
    for num_pages in (4, 16, 32, 64, 96, 128):
        use_doubles(monkeypatch, streams=DelayedStreams(0, 0.0))
        policies = {f"transformer.h.{layer}": {"": "swap_host"} for layer in range(2)}
        with pair_of(tmp_path, MODELS["gpt2"], policies, tier="host", host_bytes=num_pages * PAGE_BYTES,
                     smallest_swap_bytes=PAGE_BYTES) as pair:
            pair.step([lm_batch(129, batch=4, seq=16)])
            pair.check()
            tier = pair.swapper._table._tiers["swap_host"]
            swapped.append(tier.peak_bytes)
            layer_bytes = max(pair.swapper.stats().get(f"{name}: bytes_out", 0) for name in policies)
            assert num_pages * PAGE_BYTES - layer_bytes <= tier.peak_bytes <= num_pages * PAGE_BYTES \
                or not pair.swapper.stats().get("unplanned_kept_bytes")
    assert swapped == sorted(swapped) and len(set(swapped)) >= 5, swapped


# -- precision ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [{"": "swap_ssd"}, {"": "recompute", "input": "swap_ssd"}])
def test_buffers_keep_dtype_and_values_also_at_long_positions(tmp_path, policy):
    """Rotary frequencies stay fp32 in a bf16 model; the loss at position 4000 is the twin's."""
    def make():
        return tiny_llama(num_hidden_layers=1, max_position_embeddings=4096, attn_implementation="sdpa")

    with pair_of(tmp_path, make, {"*": policy}, dtype="bf16") as pair:
        before = {name: buffer.clone() for name, buffer in pair.engine.module.named_buffers()}
        assert any("inv_freq" in name for name in before)
        position_ids = torch.arange(3990, 4010)[None]
        for step in range(2):
            pair.step([{**lm_batch(257, batch=1, seq=20, seed=step), "position_ids": position_ids}], step)
        pair.check()
        for name, buffer in pair.engine.module.named_buffers():
            assert buffer.dtype == before[name].dtype == torch.float32 and torch.equal(buffer, before[name])


# -- order, memory, failures -------------------------------------------------------------------------------------------


def test_backward_right_after_forward_on_slow_copies(tmp_path, monkeypatch):
    """One layer, so that backward starts at once, copies that take up to 20 ms: exact every time."""
    use_doubles(monkeypatch, streams=DelayedStreams(3, 0.02))
    with pair_of(tmp_path, lambda: tiny_gpt2(n_layer=1), {"transformer.h.0": {"": "swap_host"}}, tier="host") as pair:
        for step in range(4):
            pair.step([lm_batch(129, seed=step)], step)
        pair.check()


def test_references_of_the_user_stay_valid_and_swapped_memory_is_free(tmp_path):
    """Hidden states, parameters and gradients held over steps; weak references of what was swapped die."""
    gc.collect()
    gc.disable()
    try:
        with pair_of(tmp_path, MODELS["llama"], {"*": {"": "swap_ssd"}}) as pair:
            model = pair.engine.module
            watched: list[StorageWeakRef] = []
            held: list[Tensor] = []
            model.model.layers[1].mlp.act_fn.register_forward_hook(
                lambda module, args, out: watched.append(StorageWeakRef(out.untyped_storage())))
            model.model.layers[1].register_forward_hook(lambda module, args, out: held.append(out))
            weight = model.model.layers[1].mlp.up_proj.weight
            blocks: list[StorageWeakRef] = []
            model.model.layers[0].mlp.up_proj.register_forward_hook(
                lambda module, args, out: blocks.append(StorageWeakRef(module.weight.untyped_storage())))
            batch = lm_batch(257)
            loss = loss_of(pair.engine, batch)
            copies = [held[0].detach().clone(), weight.detach().clone()]
            deadline = time.monotonic() + 5
            while not watched[0].expired() and time.monotonic() < deadline:
                time.sleep(0.002)
            assert watched[0].expired()
            pair.engine.offload.streamer.release_all()
            pair.engine.offload.streamer.buffers.clear()
            assert blocks[0].expired(), "the graph holds no weights either"
            pair.engine.backward(loss)
            del loss
            assert torch.equal(held[0], copies[0]) and torch.equal(weight.detach(), copies[1])
            pair.engine.step()
            loss = loss_of(pair.engine, lm_batch(257, seed=2))
            pair.engine.backward(loss)
            assert torch.equal(held[0].detach(), copies[0]), "of the step before"
    finally:
        gc.enable()


def test_a_forward_without_backward_leaks_nothing(tmp_path):
    """Also where nothing is swapped: an operation that saves its own result (softmax) must not keep itself alive."""
    gc.collect()
    gc.disable()
    try:
        section = {"param_tier": "host", "optimizer_tier": "host"}
        with engine_for(tiny_llama(), ds_config(section, optimizer={"type": "AdamW", "params": LR})) as engine:
            watched: list[StorageWeakRef] = []
            engine.module.model.layers[1].input_layernorm.register_forward_hook(
                lambda module, args, out: watched.append(StorageWeakRef(out.untyped_storage())))
            loss_of(engine, lm_batch(257))
            assert watched[0].expired()
    finally:
        gc.enable()


@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_after_an_exception_training_goes_on_as_if_nothing_had_been(tmp_path, moment):
    policies = {"": "recompute", "input": "swap_ssd", "attn": "swap_ssd"}

    def explode(*_):
        raise ZeroDivisionError

    with pair_of(tmp_path, MODELS["gpt2"], lambda model: {name: policies for name in layers_of(model)}) as pair:
        pair.step([lm_batch(129)])
        layer = pair.engine.module.transformer.h[1 if moment == "forward" else 0]
        kept = loss_of(pair.engine, lm_batch(129, seed=7))
        handle = layer.mlp.register_forward_pre_hook(explode)
        with pytest.raises(ZeroDivisionError):
            if moment == "forward":
                loss_of(pair.engine, lm_batch(129, seed=8))
            else:
                pair.engine.backward(kept)   # the second run of the layer's forward
        handle.remove()
        if moment == "forward":
            with pytest.raises(StepError):
                pair.engine.backward(kept)
        del kept
        pair.wait_at_rest()
        pair.step([lm_batch(129, seed=1)], 1)
        pair.check()
        pair.wait_at_rest()


def test_a_loss_that_is_kept_is_named(tmp_path, caplog):
    losses = []
    with pair_of(tmp_path, MODELS["odd"], {"layers.1": {"down": "swap_ssd"}}) as pair:
        for seed in range(2):
            losses.append(loss_of(pair.engine, lm_batch(131, seed=seed)))
        pair.engine.backward(losses[0])
        with caplog.at_level(logging.WARNING):
            pair.engine.step()
        said = [record.message for record in caplog.records if "still swapped out" in record.message]
        assert len(said) == 1 and "layers.1" in said[0] and "down" in said[0]


def test_evaluation_between_steps(tmp_path):
    with pair_of(tmp_path, MODELS["gpt2"], {"*": {"": "swap_ssd"}, "transformer.h.0": {"": "recompute"}}) as pair:
        for step in range(2):
            pair.step([lm_batch(129, seed=step)], step)
            out_bytes = pair.swapper.stats()["swap_ssd_bytes_out"]
            with torch.no_grad():
                torch.manual_seed(0)
                ours = loss_of(pair.engine, lm_batch(129, seed=5)).item()
                torch.manual_seed(0)
                assert ours == loss_of(pair.twin.model, lm_batch(129, seed=5)).item()
            assert pair.swapper.stats()["swap_ssd_bytes_out"] == out_bytes
        pair.check()


@pytest.mark.parametrize("activations", ["keep", "recompute", "host", "ssd"])
@pytest.mark.parametrize("param_tier", ["host", "ssd"])
def test_chosen_by_the_config(tmp_path, activations, param_tier):
    """The twin's bits, with clipping and accumulation; nothing is left on the SSD."""
    torch.manual_seed(0)
    section = {"param_tier": param_tier, "optimizer_tier": "ssd", "activations": activations}
    if activations in ("host", "ssd"):
        section["activation_space"] = "4MB"
    model = tiny_llama()
    batches = make_batches(model, 3, 2)
    with engine_for(model, engine_config(tmp_path, "bf16", 1.0, 2, **section)) as engine:
        train_engine(engine, batches)
        state, stats = engine_state(engine), engine.lohan_stats()
    torch.manual_seed(0)
    assert_same_bits(state, train_twin(tiny_llama(), batches, "bf16", 1.0))
    moved = sum(value for key, value in stats.items() if "swap_ssd" in key)
    assert (moved > 0) == (activations == "ssd"), stats
    assert list(tmp_path.iterdir()) == []
