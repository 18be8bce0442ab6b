"""`tiled_cross_entropy`: head and loss of a language model over a few tokens at a time; logits never exist whole.

With a vocabulary of 150,000 the fp32 logits of 8,192 tokens are 4.9 GB, and their gradient as much again; in tiles of
512 tokens each is 0.3 GB. Backward computes the logits of each tile again, a third more work for the head, and sums the
head's gradient in fp32, 4 bytes for each of its elements.

[Note: exactness]
Not bit-equal with the loss over all logits at once: a product of fewer rows may use another kernel, and sums over
tokens (the loss, the head's gradient) are taken tile by tile. What differs is rounding: the loss is summed in fp32, the
head's gradient in fp32 and rounded once to the weight's dtype. Each token's logits and the gradient of its hidden state
do not depend on the tiles but for the kernel. Bits depend on `tile_tokens` and on nothing else in a plan, so the twin
of a run that tiles must tile alike.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

REDUCTIONS = ("mean", "sum")


def tiled_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, tile_tokens: int, bias: Tensor | None = None,
                        ignore_index: int = -100, reduction: str = "mean",
                        transform: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Cross entropy of `hidden @ weight.T + bias` against `labels`, a scalar in fp32.

    hidden: (tokens, H); weight: (V, H) and bias: (V,), of its dtype; labels: (tokens,) int64, already shifted.
    reduction: "sum", or "mean" over the labels that are not `ignore_index`. transform: what happens to logits before
    the loss, element by element. Backward may be called once per forward and as often as the graph is retained; there
    is no gradient of the gradient. ValueError for shapes that do not belong together.
    """
    tokens, width = hidden.shape
    if labels.shape != (tokens,) or weight.shape[1] != width or tile_tokens < 1 or reduction not in REDUCTIONS:
        raise ValueError(f"tiled loss: hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, labels "
                         f"{tuple(labels.shape)}, tiles of {tile_tokens} tokens, reduction {reduction!r}")
    total = _TiledCrossEntropy.apply(hidden, weight, bias, labels, tile_tokens, ignore_index, transform)
    return total / (labels != ignore_index).sum() if reduction == "mean" else total


def _tile_loss(logits: Tensor, labels: Tensor, ignore_index: int,
               transform: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Sum over one tile, fp32. logits: (tile, V)."""
    logits = logits if transform is None else transform(logits)
    return F.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=ignore_index)


class _TiledCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, tile_tokens, ignore_index, transform):
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.tile_tokens, ctx.ignore_index, ctx.transform = tile_tokens, ignore_index, transform
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for hidden_tile, labels_tile in zip(hidden.split(tile_tokens), labels.split(tile_tokens)):
            total += _tile_loss(F.linear(hidden_tile, weight, bias), labels_tile, ignore_index, transform)
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
            logits = F.linear(hidden[tile], weight, bias).detach().requires_grad_()
            with torch.enable_grad():
                loss = _tile_loss(logits, labels[tile], ctx.ignore_index, ctx.transform)
            grad_logits, = torch.autograd.grad(loss, logits, grad)   # (tile, V), dtype of the logits
            if needs_hidden:
                grad_hidden[tile] = grad_logits @ weight
            if needs_weight:
                grad_weight += grad_logits.t() @ hidden[tile]
            if needs_bias:
                grad_bias += grad_logits.sum(0, dtype=torch.float32)
        return (grad_hidden, grad_weight.to(weight.dtype) if needs_weight else None,
                grad_bias.to(bias.dtype) if needs_bias else None, None, None, None, None)
