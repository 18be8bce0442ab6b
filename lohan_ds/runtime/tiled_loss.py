"""`tiled_cross_entropy`: head and loss of a language model over a few tokens at a time; logits never exist whole.

With a vocabulary of 150,000 the fp32 logits of 8,192 tokens are 4.9 GB, and their gradient as much again; in tiles of
512 tokens each is 0.3 GB. Backward computes the logits of each tile again, a third more work for the head.

[Note: exactness]
Not bit-equal with the loss over all logits at once: a product of fewer rows may use another kernel, and sums over
tokens (the loss, the head's gradient) are taken tile by tile. What differs is rounding: the loss is summed in fp32, the
head's gradient in fp32 and rounded once to the weight's dtype. Each token's logits and the gradient of its hidden state
do not depend on the tiles but for the kernel. Bits depend on `tile_tokens` and on nothing else in a plan, so the twin
of a run that tiles must tile alike.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def tiled_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, tile_tokens: int, bias: Tensor | None = None,
                        ignore_index: int = -100, num_items: int | None = None) -> Tensor:
    """Mean cross entropy of `hidden @ weight.T + bias` against `labels`, a scalar in fp32.

    hidden: (tokens, H); weight: (V, H) and bias: (V,), of its dtype; labels: (tokens,) int64, already shifted.
    `num_items`: what the sum is divided by; by default the labels that are not `ignore_index`. Backward may be called
    once per forward and as often as the graph is retained; there is no gradient of the gradient. ValueError for shapes
    that do not belong together.
    """
    tokens, width = hidden.shape
    if labels.shape != (tokens,) or weight.shape[1] != width or tile_tokens < 1:
        raise ValueError(f"tiled loss: hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels "
                         f"{tuple(labels.shape)}, tiles of {tile_tokens} tokens")
    count = (labels != ignore_index).sum() if num_items is None else num_items
    return _TiledCrossEntropy.apply(hidden, weight, bias, labels, tile_tokens, ignore_index) / count


def _tile_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, ignore_index: int) -> Tensor:
    """Sum over one tile, fp32."""
    return F.cross_entropy(F.linear(hidden, weight, bias).float(), labels, reduction="sum", ignore_index=ignore_index)


class _TiledCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, tile_tokens, ignore_index):
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.tile_tokens, ctx.ignore_index = tile_tokens, ignore_index
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for hidden_tile, labels_tile in zip(hidden.split(tile_tokens), labels.split(tile_tokens)):
            total += _tile_loss(hidden_tile, weight, bias, labels_tile, ignore_index)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        hidden, weight, bias, labels = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if needs_weight else None
        grad_bias = torch.zeros(bias.shape, dtype=torch.float32, device=bias.device) if needs_bias else None
        for start in range(0, len(hidden), ctx.tile_tokens):
            tile = slice(start, start + ctx.tile_tokens)
            logits = F.linear(hidden[tile], weight, bias)
            logits_fp32 = logits.float().detach().requires_grad_()
            with torch.enable_grad():
                loss = F.cross_entropy(logits_fp32, labels[tile], reduction="sum", ignore_index=ctx.ignore_index)
            grad_logits = (torch.autograd.grad(loss, logits_fp32)[0] * grad).to(hidden.dtype)   # (tile, V)
            if needs_hidden:
                grad_hidden[tile] = grad_logits @ weight
            if needs_weight:
                grad_weight += grad_logits.t() @ hidden[tile]
            if needs_bias:
                grad_bias += grad_logits.sum(0, dtype=torch.float32)
        return (grad_hidden, grad_weight.to(weight.dtype) if needs_weight else None,
                grad_bias.to(bias.dtype) if needs_bias else None, None, None, None)
