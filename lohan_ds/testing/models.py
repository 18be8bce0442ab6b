"""Tiny models that run everywhere, each with a trait that has broken offloaders. All take a batch of `lm_batch`.

Shapes: B batch, T sequence, V vocabulary, H hidden. `seed` sets the initial weights without touching the global
generator. No dropout.
"""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lohan_ds.runtime.tiled_loss import tiled_cross_entropy


def lm_batch(vocab: int, batch: int = 2, seq: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """Random tokens: input_ids and labels, the same (batch, seq) int64 tensor, as Hugging Face models want them."""
    generator = torch.Generator().manual_seed(seed)
    ids_BT = torch.randint(vocab, (batch, seq), generator=generator)
    return {"input_ids": ids_BT, "labels": ids_BT.clone()}


def loss_of(model: Any, batch: dict[str, Any]) -> Tensor:
    """The scalar loss of any of these models, of a Hugging Face causal LM, or of an engine around one."""
    output = model(**batch)
    if isinstance(output, Tensor):
        return output
    return output["loss"] if isinstance(output, dict) else output.loss


def tiled_loss_of(model: nn.Module, batch: dict[str, Tensor], tile_tokens: int) -> Tensor:
    """`loss_of` a Hugging Face causal LM in memory, in tiles, without any help of the model's own forward."""
    hidden_BTH = model.base_model(input_ids=batch["input_ids"])[0]
    shifted_BT = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    head = model.get_output_embeddings()
    return tiled_cross_entropy(hidden_BTH.flatten(0, 1), head.weight, shifted_BT.flatten(), tile_tokens, head.bias)


def vocab_of(model: nn.Module) -> int:
    """V of any of these models."""
    return model.vocab_size if hasattr(model, "vocab_size") else model.config.vocab_size


def tiny_llama(tied: bool = False, seed: int = 0, **over: Any) -> nn.Module:
    """Llama with 3 layers, H 64, V 257 and grouped-query attention; `over` goes to LlamaConfig."""
    from transformers import LlamaConfig, LlamaForCausalLM
    config = dict(vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
                  num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied, use_cache=False,
                  attention_dropout=0.0, attn_implementation="eager", pad_token_id=None, bos_token_id=1, eos_token_id=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**{**config, **over}))


def tiny_gpt2(seed: int = 0, **over: Any) -> nn.Module:
    """GPT-2 with 2 layers, H 32, V 129: Conv1D weights, biases everywhere, learned positions, tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel
    config = dict(vocab_size=129, n_embd=32, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
                  attn_pdrop=0.0, use_cache=False, attn_implementation="eager", bos_token_id=1, eos_token_id=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(GPT2Config(**{**config, **over}))


class OddModel(nn.Module):
    """No dimension is a multiple of anything: H 33, inner width 7, and a parameter of one element."""

    def __init__(self, vocab: int = 131, num_layers: int = 3, hidden: int = 33, seed: int = 0):
        super().__init__()
        self.vocab_size = vocab
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(vocab, hidden)
            self.layers = nn.ModuleList(OddLayer(hidden) for _ in range(num_layers))
            self.norm = nn.LayerNorm(hidden)
            self.head = nn.Linear(hidden, vocab, bias=False)
            self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x_BTH = self.embed(input_ids)
        for layer in self.layers:
            x_BTH = layer(x_BTH)
        return _next_token_loss(self.head(self.norm(x_BTH)) * self.temperature, labels)


class OddLayer(nn.Module):
    def __init__(self, hidden: int, inner: int = 7):
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.down = nn.Linear(hidden, inner)
        self.up = nn.Linear(inner, hidden)

    def forward(self, x_BTH: Tensor) -> Tensor:
        return x_BTH + self.up(F.gelu(self.down(self.norm(x_BTH))))


class AttentionLayer(nn.Module):
    """A plain transformer layer with causal attention."""

    def __init__(self, hidden: int, num_heads: int = 2):
        super().__init__()
        self.num_heads = num_heads
        self.norm1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.norm2 = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(2 * hidden, hidden)

    def forward(self, x_BTH: Tensor) -> Tensor:
        size_b, size_t, hidden = x_BTH.shape
        heads = self.qkv(self.norm1(x_BTH)).view(size_b, size_t, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x_BTH = x_BTH + self.out(mixed.transpose(1, 2).reshape(size_b, size_t, hidden))
        return x_BTH + self.down(F.gelu(self.up(self.norm2(x_BTH))))


class AlbertLike(nn.Module):
    """One layer used six times, and an embedding that is also the head: each updates after its last contribution."""

    def __init__(self, vocab: int = 128, hidden: int = 32, num_uses: int = 6, seed: int = 0):
        super().__init__()
        self.vocab_size = vocab
        self.num_uses = num_uses
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(vocab, hidden)
            nn.init.normal_(self.embed.weight, std=0.1)
            self.layer = AttentionLayer(hidden)
            self.norm = nn.LayerNorm(hidden)
            self.head = nn.Linear(hidden, vocab, bias=False)
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x_BTH = self.embed(input_ids)
        for _ in range(self.num_uses):
            x_BTH = self.layer(x_BTH)
        return _next_token_loss(self.head(self.norm(x_BTH)), labels)


class BranchModel(nn.Module):
    """`branch` runs only when the batch says use_branch=True; `unused` is never used."""

    def __init__(self, vocab: int = 128, hidden: int = 32, num_layers: int = 2, seed: int = 0):
        super().__init__()
        self.vocab_size = vocab
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(vocab, hidden)
            self.layers = nn.ModuleList(AttentionLayer(hidden) for _ in range(num_layers))
            self.branch = AttentionLayer(hidden)
            self.unused = nn.Parameter(torch.randn(hidden))
            self.head = nn.Linear(hidden, vocab)

    def forward(self, input_ids: Tensor, labels: Tensor, use_branch: bool = False) -> Tensor:
        x_BTH = self.embed(input_ids)
        for layer in self.layers:
            x_BTH = layer(x_BTH)
        if use_branch:
            x_BTH = self.branch(x_BTH)
        return _next_token_loss(self.head(x_BTH), labels)


def _next_token_loss(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV[:, :-1].float().flatten(0, 1), labels_BT[:, 1:].flatten())
