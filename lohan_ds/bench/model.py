"""The model and the tokens of a case: the same bits in the process of every side."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lohan_ds.bench.case import SIZES, Case
from lohan_ds.testing.models import lm_batch



def make_model(case: Case) -> nn.Module:
    """In fp32, on the CPU, in training mode, with activation checkpointing; with "bf16" every weight and buffer is one
    that bf16 can hold. Needs transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM
    size = SIZES[case.size]
    config = LlamaConfig(vocab_size=size.vocab, hidden_size=size.hidden, intermediate_size=size.intermediate,
                         num_hidden_layers=size.num_layers, num_attention_heads=size.num_heads,
                         num_key_value_heads=size.num_heads, max_position_embeddings=case.seq,
                         tie_word_embeddings=False, use_cache=False, attention_dropout=0.0,
                         attn_implementation="sdpa", pad_token_id=None, bos_token_id=1, eos_token_id=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).float().train()
    if case.dtype == "bf16":
        for tensor in [*model.parameters(), *model.buffers()]:   # some sides cast the buffers too
            if tensor.is_floating_point():
                tensor.data.copy_(tensor.data.bfloat16())
        if case.fp32_gemms:
            compute_in_fp32(model)
    model.activation_checkpointing_enable({"use_reentrant": False})
    return model


def compute_in_fp32(model: nn.Module) -> None:
    """Weights of any dtype; activations, and all that is computed with them, in fp32."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = _Fp32Linear(module)
        elif isinstance(module, nn.Embedding):
            module.register_forward_hook(lambda module, inputs, output: output.float())


class _Fp32Linear:
    def __init__(self, linear: nn.Linear):
        self.linear = linear

    def __call__(self, x: Tensor) -> Tensor:
        bias = self.linear.bias
        return F.linear(x, self.linear.weight.float(), None if bias is None else bias.float())


def count_params(case: Case) -> int:
    size = SIZES[case.size]
    layer = 4 * size.hidden ** 2 + 3 * size.hidden * size.intermediate + 2 * size.hidden
    return size.num_layers * layer + 2 * size.vocab * size.hidden + size.hidden


def make_batch(case: Case) -> dict[str, Tensor]:
    """input_ids and labels, the same random (batch, seq) int64 tensor. Every step trains on it: the loss falls fast, so
    that an update that is wrong or missing shows in the next one."""
    return lm_batch(SIZES[case.size].vocab, case.batch, case.seq)
