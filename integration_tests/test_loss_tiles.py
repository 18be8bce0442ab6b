"""Head and loss in tiles inside engines: the same bits as the twin that tiles alike, and nobody's script changes."""
from __future__ import annotations

import logging

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from integration_tests.doubles import LR, engine_config, make_batches, train_engine, use_doubles
from lohan_ds.errors import ConfigError, StepError
from lohan_ds.runtime.lazy_logits import LazyLogits
from lohan_ds.testing.delayed_streams import DelayedStreams
from lohan_ds.testing.harness import engine_for, engine_state
from lohan_ds.testing.models import OddModel, lm_batch, tiled_loss_of, tiny_gpt2, tiny_llama, vocab_of
from lohan_ds.testing.parity import Case, run_cases
from lohan_ds.testing.twin import Twin, assert_same_bits

TILE = 7
CASES = [
    Case("llama tied", "ssd", "serial", "always", 3, "fp32", 3, 8, "recompute"),
    Case("llama tied", "ssd", "deferred", "always", 3, "fp32", 3, 8, "host"),
    Case("llama tied", "ssd", "eager", "never", 1, "bf16", 4, 5, "keep"),
    Case("llama untied", "ssd", "deferred", "alternating", 3, "bf16", 4, 7, "ssd"),
    Case("llama untied", "ssd", "eager", "alternating", 3, "bf16", 4, 7, "recompute"),
    Case("llama untied", "mixed", "serial", "off", 1, "fp32", 3, 512, "keep"),
    Case("gpt2", "ssd", "eager", "last", 3, "fp32", 4, 11, "recompute"),
    Case("gpt2", "ssd", "serial", "off", 1, "bf16", 3, 1, "host"),
    Case("gpt2", "host", "deferred", "always", 1, "fp32", 3, 11, "keep"),
]


class Rows(TorchDispatchMode):
    """The most rows of a tensor that is as wide as the vocabulary."""

    def __init__(self, vocabulary_size):
        super().__init__()
        self.vocabulary_size, self.most = vocabulary_size, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape[-1:] == (self.vocabulary_size,) and not out.is_meta:
            self.most = max(self.most, out.numel() // self.vocabulary_size)
        return out


def twin_state(model, batches, tile_tokens=TILE):
    twin = Twin(model.train(), None, accumulation=len(batches[0]), loss_tile_tokens=tile_tokens, **LR)
    for step in batches:
        for batch in step:
            twin.micro_step(batch)
        twin.step()
    return twin.state()


def test_tiled_runs_equal_the_twin_that_tiles_alike(tmp_path):
    results = list(run_cases(CASES, [str(tmp_path)]))
    wrong = [f"{result.case}: {result.first_difference}" for result in results if not result.same]
    assert len(results) == len(CASES) and not wrong, "\n".join(wrong)


@pytest.mark.parametrize("prefetch_depth", [0, 2])
@pytest.mark.parametrize("make", [lambda: tiny_llama(tied=True), tiny_gpt2], ids=["llama", "gpt2"])
def test_weights_are_there_when_tiles_compute_and_copies_take_their_time(tmp_path, monkeypatch, make, prefetch_depth):
    """What a double has not copied yet is NaN."""
    use_doubles(monkeypatch, streams=DelayedStreams(1, 0.0005))
    batches = make_batches(make(), num_steps=3, accumulation=2)
    config = engine_config(tmp_path, accumulation=2, loss_tile_tokens=TILE, prefetch_depth=prefetch_depth)
    with engine_for(make(), config) as engine:
        train_engine(engine, batches)
        state = engine_state(engine)
    assert_same_bits(state, twin_state(make(), batches))


def test_no_tensor_of_a_step_holds_the_logits(tmp_path):
    def make():
        return tiny_llama(vocab_size=1031, hidden_size=32)

    most = {}
    for tile_tokens in (0, TILE):
        with engine_for(make(), engine_config(tmp_path, loss_tile_tokens=tile_tokens)) as engine, Rows(1031) as rows:
            train_engine(engine, [[lm_batch(1031, batch=2, seq=64)]])
            most[tile_tokens] = rows.most
    assert most == {0: 128, TILE: 32}   # 32: the head's gradient, transposed


def test_looking_at_logits_changes_nothing_and_ends_with_the_step(tmp_path):
    batches = make_batches(tiny_llama(), num_steps=3)
    config = engine_config(tmp_path, loss_tile_tokens=TILE, prefetch_depth=0, update="deferred")
    with engine_for(tiny_llama(), config) as engine:
        reference = tiny_llama()
        for step, (batch,) in enumerate(batches):
            output = engine(**batch)
            if step == 0:   # before backward, its values those of plain torch
                assert torch.equal(output.logits.argmax(-1), reference(**batch).logits.argmax(-1))
            engine.backward(output.loss)
            if step == 1:   # after it
                assert output.logits.float().isfinite().all()
            engine.step()
            if step == 2:
                with pytest.raises(StepError, match="look at them before"):
                    output.logits.sum()
        state = engine_state(engine)
    assert_same_bits(state, twin_state(tiny_llama(), batches))


def test_evaluation_and_generation_are_as_ever(tmp_path):
    batch = lm_batch(257, seed=5)
    plain = tiny_llama().eval()
    with torch.no_grad():
        expected = plain(**batch)
    with engine_for(tiny_llama(), engine_config(tmp_path, loss_tile_tokens=TILE)) as engine:
        engine.eval()
        with torch.no_grad():
            output = engine(**batch)
        assert type(output.logits) is torch.Tensor and torch.equal(output.logits, expected.logits)
        assert torch.equal(output.loss, expected.loss)
        generated = [model.generate(batch["input_ids"][:, :4], max_new_tokens=3, do_sample=False)
                     for model in (engine.module, plain)]
        assert torch.equal(*generated)


def test_by_default_a_batch_is_tiled_when_its_logits_are_large(tmp_path):
    """1/16 of 2 MB are 131,072 bytes: 42 tokens of 257 fp32 logits, three times."""
    for device_memory, expected in (("2MB", [torch.Tensor, LazyLogits]), (None, [torch.Tensor, torch.Tensor])):
        with engine_for(tiny_llama(), engine_config(tmp_path, device_memory=device_memory)) as engine:
            outputs = [engine(**lm_batch(257, batch=2, seq=seq)) for seq in (20, 22)]
            assert [type(output.logits) for output in outputs] == expected
            engine.backward(outputs[-1].loss)


def test_a_model_without_such_a_head(tmp_path, caplog):
    with pytest.raises(ConfigError, match="lohan.loss_tile_tokens: got 7, but OddModel is no Hugging Face model"):
        with engine_for(OddModel(), engine_config(tmp_path, loss_tile_tokens=TILE)):
            pass
    assert list(tmp_path.iterdir()) == []
    model = tiny_llama(tied=True)   # its head computes something else, too
    model.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.Identity())
    with caplog.at_level(logging.WARNING), engine_for(model, engine_config(tmp_path, device_memory="64kB")) as engine:
        train_engine(engine, make_batches(model, 1))
    said = [record.message for record in caplog.records if "logits" in record.message]
    assert said == ["logits will be whole, not in tiles: the head of LlamaForCausalLM is a "
                    "torch.nn.modules.container.Sequential, not an nn.Linear as torch has it"]


def test_adapters_around_a_frozen_head(tmp_path):
    from peft import LoraConfig, get_peft_model

    def make():
        torch.manual_seed(0)
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
        return get_peft_model(tiny_llama(), lora).train()

    batches = make_batches(tiny_llama(), num_steps=3)
    with engine_for(make(), engine_config(tmp_path, loss_tile_tokens=TILE)) as engine:
        assert type(engine(**batches[0][0]).logits) is LazyLogits
        train_engine(engine, batches)
        state = engine_state(engine)
    model = make()
    twin = Twin(model, None, **LR)
    for (batch,) in batches:
        twin.micro_step(batch, lambda model, batch: tiled_loss_of(model.get_base_model(), batch, TILE))
        twin.step()
    assert_same_bits(state, twin.state())


def test_an_exception_between_head_and_loss_ends_the_step_under_way(tmp_path):
    batches = make_batches(tiny_llama(), num_steps=2)
    with engine_for(tiny_llama(), engine_config(tmp_path, loss_tile_tokens=TILE)) as engine:
        train_engine(engine, batches[:1])
        own = engine.module.loss_function
        engine.module.loss_function = lambda logits, **kwargs: 1 / 0
        with pytest.raises(ZeroDivisionError):
            engine(**batches[1][0])
        engine.module.loss_function = own
        train_engine(engine, batches[1:])
        state = engine_state(engine)
    assert_same_bits(state, twin_state(tiny_llama(), batches))


def test_after_the_run_the_model_is_as_it_was(tmp_path):
    model = tiny_llama()
    with engine_for(model, engine_config(tmp_path, loss_tile_tokens=TILE)) as engine:
        train_engine(engine, make_batches(model, 1))
        assert vocab_of(model) == 257
    assert "forward" not in vars(model) and "forward" not in vars(model.lm_head)
