"""Unmodified language models that compute head and loss in tiles: same results, no logits, and no surprises."""
from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lohan_ds.errors import ConfigError, StepError
from lohan_ds.plan import LossTiles, loss_tiles
from lohan_ds.runtime.lazy_logits import LazyLogits
from lohan_ds.runtime.tiled_head import TiledHead, UnknownHead, find_head
from lohan_ds.testing.models import OddModel, lm_batch, tiled_loss_of, tiny_gpt2, tiny_llama

VOCAB, TILE = 1031, 5
TINY = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, head_dim=16, use_cache=False, attn_implementation="eager", pad_token_id=None,
            bos_token_id=1, eos_token_id=2)


def of_family(name: str, **over):
    import transformers
    config = getattr(transformers, f"{name}Config")(**{**TINY, **over})
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def tiny_t5():
    from transformers import T5Config, T5ForConditionalGeneration
    torch.manual_seed(0)
    return T5ForConditionalGeneration(T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=2, dropout_rate=0.0, use_cache=False,
        decoder_start_token_id=0, pad_token_id=0))


FAMILIES = {
    "llama": lambda: of_family("Llama"),
    "llama tied": lambda: of_family("Llama", tie_word_embeddings=True),
    "gpt2": lambda: tiny_gpt2(vocab_size=VOCAB),
    "qwen3": lambda: of_family("Qwen3"),
    "mixtral": lambda: of_family("Mixtral", num_local_experts=2, output_router_logits=True),      # another loss on top
    "gemma2": lambda: of_family("Gemma2", final_logit_softcapping=3.0, sliding_window=8),      # logits / 3, tanh, * 3
    "granite": lambda: of_family("Granite", logits_scaling=2.0),
    "cohere": lambda: of_family("Cohere", logit_scale=0.25),
    "mamba": lambda: of_family("Mamba", state_size=4),                                                      # .float()
    "t5": tiny_t5,                                                                       # nn.CrossEntropyLoss of views
}


class Largest(TorchDispatchMode):
    """The most rows of a tensor that is as wide as the vocabulary and has memory."""
    rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(leaf, torch.Tensor) and leaf.shape[-1:] == (VOCAB,) and not leaf.is_meta:
                self.rows = max(self.rows, leaf.numel() // VOCAB)
        return out


def batch_of(seed: int = 0, **more):
    batch = lm_batch(VOCAB, batch=2, seq=24, seed=seed)
    batch["labels"][:, 3:6] = -100
    return {**batch, **more}


def tiled(model, tile_tokens: int = TILE, whole_logits_bytes: int = 0) -> TiledHead:
    head = TiledHead(model, LossTiles(tile_tokens, whole_logits_bytes))
    head.attach()
    return head


def gradients(model, loss):
    params = dict(model.named_parameters())
    return dict(zip(params, torch.autograd.grad(loss, list(params.values()), allow_unused=True)))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_of_a_family_and_its_gradients(name):
    model, batch = FAMILIES[name]().train(), batch_of()
    with Largest() as largest:
        expected = model(**batch).loss
        theirs = gradients(model, expected)
    assert largest.rows >= 48
    tiled(model)
    with Largest() as largest:
        output = model(**batch)
        ours = gradients(model, output.loss)
    width = model.get_output_embeddings().in_features
    assert TILE <= largest.rows <= max(TILE, width) < 48   # the head's gradient may be transposed
    assert type(output.logits) is LazyLogits
    torch.testing.assert_close(output.loss, expected, rtol=1e-6, atol=0)
    for param, grad in theirs.items():
        if grad is not None:
            torch.testing.assert_close(ours[param], grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("num_items", [17, torch.tensor(17)])
def test_the_number_of_items_of_a_whole_step_divides(num_items):
    model = tiny_llama(vocab_size=VOCAB)
    expected = model(**batch_of(), num_items_in_batch=num_items).loss
    tiled(model)
    torch.testing.assert_close(model(**batch_of(), num_items_in_batch=num_items).loss, expected, rtol=1e-6, atol=0)


def test_bits_are_those_of_tiles_made_by_hand():
    for make in (FAMILIES["llama tied"], FAMILIES["gpt2"]):
        model, batch = make(), batch_of()
        by_hand = tiled_loss_of(model, batch, TILE)
        theirs = gradients(model, by_hand)
        tiled(model)
        loss = model(**batch).loss
        ours = gradients(model, loss)
        assert torch.equal(loss, by_hand) and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_labels_by_position_and_output_as_a_tuple():
    model, batch = tiny_gpt2(vocab_size=VOCAB), batch_of()
    expected = tiled_loss_of(model, batch, TILE)
    tiled(model)
    names = ["input_ids", "cache", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds",
             "encoder_hidden_states", "encoder_attention_mask", "labels"]
    loss, logits, *_ = model(*(batch.get(name) for name in names), return_dict=False)
    assert torch.equal(loss, expected) and type(logits) is LazyLogits


def test_without_labels_or_gradients_nothing_changes():
    plain, model = tiny_llama(vocab_size=VOCAB), tiny_llama(vocab_size=VOCAB)
    tiled(model)
    batch = batch_of()
    calls = [lambda m: m(input_ids=batch["input_ids"]),
             lambda m: torch.no_grad()(m)(**batch), lambda m: torch.inference_mode()(m)(**batch)]
    for call in calls:
        ours, theirs = call(model), call(plain)
        assert type(ours.logits) is torch.Tensor and torch.equal(ours.logits, theirs.logits)
        assert theirs.loss is None or torch.equal(ours.loss, theirs.loss)
    generated = [m.generate(batch["input_ids"][:, :4], max_new_tokens=4, do_sample=False) for m in (model, plain)]
    assert torch.equal(*generated)


# -- what the user gets as outputs.logits --------------------------------------------------------------------------

def test_logits_are_there_when_looked_at():
    model, batch = FAMILIES["gemma2"](), batch_of()
    expected = model(**batch).logits.detach()
    tiled(model)
    logits = model(**batch).logits
    assert (logits.shape, logits.dtype, logits.dim(), len(logits)) == (expected.shape, expected.dtype, 3, 2)
    with Largest() as largest:
        assert "computed when looked at" in repr(logits)
    assert largest.rows == 0
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert torch.equal(logits[:, -1], expected[:, -1]) and torch.equal(torch.cat([logits, logits])[2:], expected)
    assert logits.detach().numpy().shape == tuple(expected.shape)
    assert torch.equal(F.log_softmax(logits, -1), F.log_softmax(expected, -1))


@pytest.mark.parametrize("freeze", [False, True])
def test_a_loss_of_ones_own_from_logits_is_refused(freeze):
    model = tiny_llama(vocab_size=VOCAB)
    model.model.requires_grad_(not freeze)
    tiled(model)
    output = model(**batch_of())
    with pytest.raises(StepError, match="lohan.loss_tile_tokens 0"):
        (output.loss + output.logits.softmax(-1).max()).backward()


def test_logits_of_other_weights_are_refused():
    model, version = tiny_llama(vocab_size=VOCAB), [0]
    head = TiledHead(model, LossTiles(TILE))
    head.attach(weights_version=lambda: version[0])
    early, late = model(**batch_of()).logits, model(**batch_of()).logits
    expected = early.detach()
    version[0] += 1
    with pytest.raises(StepError, match="look at them before"):
        late.sum()
    assert torch.equal(early.detach(), expected), "what was computed once stays"


# -- models that cannot ----------------------------------------------------------------------------------------------

class Counting(type(tiny_llama())):
    """Its forward looks at all logits."""

    def forward(self, input_ids, labels=None, **kwargs):
        output = super().forward(input_ids, **kwargs)
        if labels is not None:
            logits = output.logits.roll(1, 0).roll(-1, 0)
            output.loss = self.loss_function(logits, labels, VOCAB)
        return output


def counting():
    return Counting(tiny_llama(vocab_size=VOCAB).config)


def test_a_forward_that_needs_all_logits_has_them_and_it_is_said_once(caplog):
    torch.manual_seed(0)
    model, batch = counting(), batch_of()
    expected = model(**batch).loss
    theirs = gradients(model, expected)
    tiled(model, whole_logits_bytes=1)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            loss = model(**batch).loss
            ours = gradients(model, loss)
            assert torch.equal(loss, expected) and all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert [record.message for record in caplog.records if record.name.startswith("lohan_ds")] == [
        "Counting needs all logits for roll in its forward, so they cannot be computed in tiles: leave room for them"]


def test_it_is_an_error_where_the_user_asked_for_tiles():
    model = counting()
    tiled(model)
    with pytest.raises(ConfigError, match="loss_tile_tokens: got 5, but Counting needs all logits for roll"):
        model(**batch_of())
    assert type(model(input_ids=batch_of()["input_ids"]).logits) is torch.Tensor, "it can be used after that"


@pytest.mark.parametrize("options", [{"weight": torch.ones(VOCAB)}, {"label_smoothing": 0.1}, {"reduction": "none"}])
def test_other_cross_entropies_have_all_logits(options):
    model, batch = tiny_llama(vocab_size=VOCAB), batch_of()
    model.loss_function = lambda logits, labels, vocab_size: F.cross_entropy(
        logits.view(-1, vocab_size), labels.view(-1), **options).mean()
    expected = model(**batch).loss
    tiled(model, whole_logits_bytes=1)
    assert torch.equal(model(**batch).loss, expected)


def test_slices_and_views_stay_in_tiles_and_others_do_not():
    def loss(logits, labels, vocab_size):
        shifted = logits[..., :-1, :].contiguous().to(torch.float32)
        return F.cross_entropy(shifted.reshape(-1, shifted.size(-1)), labels[..., 1:].flatten())

    model, batch = tiny_llama(vocab_size=VOCAB), batch_of()
    model.loss_function = loss
    expected = model(**batch).loss
    tiled(model)
    torch.testing.assert_close(model(**batch).loss, expected, rtol=1e-6, atol=0)
    for view in (lambda x: x.flatten(0, 1), lambda x: x.view(48, -1), lambda x: torch.reshape(x, (-1, VOCAB)),
                 lambda x: x.view(6, -1, VOCAB).flatten(-3, -2)[:], lambda x: x[:, :][0:2].reshape([48, VOCAB])):
        model.loss_function = lambda logits, labels, vocab_size, view=view: F.cross_entropy(view(logits),
                                                                                            labels.view(-1))
        model(**batch)
    for view in (lambda x: x.view(VOCAB, -1), lambda x: x.flatten(1, 2), lambda x: x.flatten(), lambda x: x.view(-1)):
        model.loss_function = lambda logits, labels, vocab_size, view=view: view(logits).sum()
        with pytest.raises(ConfigError, match="view|flatten"):
            model(**batch)
    for index in (batch["labels"] > 0, (..., slice(0, 5)), (0, 0, 0), (None, 0)):
        model.loss_function = lambda logits, labels, vocab_size, index=index: logits[index].sum()
        with pytest.raises(ConfigError, match="__getitem__"):
            model(**batch)


def test_which_heads_are_known():
    assert find_head(tiny_gpt2())[1].out_features == 129
    with pytest.raises(UnknownHead, match="OddModel is no Hugging Face model") as no_head:
        find_head(OddModel())
    model = tiny_llama()
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(UnknownHead, match="head of LlamaForCausalLM is a torch.nn.+Sequential,") as other:
        find_head(model)
    assert no_head.value.head is None and other.value.head is model.lm_head
    model = tiny_llama()
    model.lm_head.forward = lambda hidden: hidden
    with pytest.raises(UnknownHead, match="not an nn.Linear as torch has it"):
        find_head(model)


# -- coming and going ------------------------------------------------------------------------------------------------

def test_a_copy_uses_its_own_weights_and_detach_leaves_no_trace():
    model, batch = tiny_llama(vocab_size=VOCAB), batch_of()
    head = tiled(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.mul_(2)
    assert torch.equal(copied(**batch).loss, tiled_loss_of(copied, batch, TILE))
    assert torch.equal(model(**batch).loss, tiled_loss_of(model, batch, TILE))
    head.detach()
    assert "forward" not in vars(model) and "forward" not in vars(model.lm_head)
    assert type(model(**batch).logits) is torch.Tensor


def test_trainer_still_sees_what_the_forward_takes():
    import inspect
    model = tiny_llama(vocab_size=VOCAB)
    names = list(inspect.signature(model.forward).parameters)
    tiled(model)
    assert list(inspect.signature(model.forward).parameters) == names and "labels" in names


def test_an_exception_in_a_forward_ends_its_call():
    model, batch = tiny_llama(vocab_size=VOCAB), batch_of()
    tiled(model)
    model.loss_function = lambda **kwargs: 1 / 0
    with pytest.raises(ZeroDivisionError):
        model(**batch)
    assert type(model.lm_head(torch.zeros(2, 64))) is torch.Tensor


# -- when ------------------------------------------------------------------------------------------------------------

def test_small_batches_are_whole_by_default():
    model = tiny_llama(vocab_size=VOCAB)
    bytes_per_token = VOCAB * (4 + 4 + 4)
    tiled(model, whole_logits_bytes=48 * bytes_per_token)
    assert type(model(**batch_of()).logits) is torch.Tensor
    longer = lm_batch(VOCAB, batch=1, seq=49)
    assert type(model(**longer).logits) is LazyLogits


def test_the_decision():
    asked = loss_tiles(64, 0, 1000, 8, 2, trains_head=True)
    assert (asked.tile_tokens, asked.is_automatic, asked.apply_to(1, 1, 2)) == (64, False, True)
    assert asked.workspace_bytes == 64 * 1000 * 10 + 1000 * 8 * 4
    assert loss_tiles(64, 0, 1000, 8, 2, trains_head=False).workspace_bytes == 64 * 1000 * 10
    automatic = loss_tiles(None, 16 << 30, 1000, 8, 2, trains_head=True)
    assert automatic.is_automatic and automatic.whole_logits_bytes == 1 << 30
    most = (1 << 30) // (1000 * 10)
    assert not automatic.apply_to(most, 1000, 2) and automatic.apply_to(most + 1, 1000, 2)
