"""Head and loss in tiles: the same up to rounding, and no tensor as large as all logits."""
from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lohan_ds.runtime.tiled_loss import tiled_cross_entropy

TOKENS, HIDDEN, VOCAB = 37, 16, 101


def whole(hidden, weight, labels, bias=None, num_items=None):
    logits = F.linear(hidden, weight, bias).float()
    total = F.cross_entropy(logits, labels, reduction="sum")
    return total / (num_items if num_items is not None else (labels != -100).sum())


def inputs(dtype=torch.float32, with_bias=False):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(VOCAB, generator=generator).to(dtype).requires_grad_() if with_bias else None
    labels = torch.randint(VOCAB, (TOKENS,), generator=generator)
    labels[::5] = -100
    return hidden, weight, bias, labels


@pytest.mark.parametrize("tile_tokens", [1, 7, 16, TOKENS, 1000])
@pytest.mark.parametrize("with_bias", [True, False])
def test_loss_and_gradients_are_those_of_all_logits(tile_tokens, with_bias):
    hidden, weight, bias, labels = inputs(with_bias=with_bias)
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    expected = whole(hidden, weight, labels, bias)
    theirs = torch.autograd.grad(3 * expected, leaves)
    loss = tiled_cross_entropy(hidden, weight, labels, tile_tokens, bias)
    ours = torch.autograd.grad(3 * loss, leaves)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


def test_in_bf16_the_weight_gradient_is_rounded_once():
    hidden, weight, _, labels = inputs(torch.bfloat16)
    exact = torch.autograd.grad(whole(hidden.float(), weight.float(), labels), weight)[0].float()
    tiled = torch.autograd.grad(tiled_cross_entropy(hidden, weight, labels, 4), weight)[0].float()
    untiled = torch.autograd.grad(whole(hidden, weight, labels), weight)[0].float()
    assert (tiled - exact).norm() <= 2 * (untiled - exact).norm()


def test_no_tensor_is_as_large_as_the_logits():
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for leaf in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(leaf, torch.Tensor):
                    Largest.numel = max(Largest.numel, leaf.numel())
            return out

    hidden, weight, _, labels = inputs()
    with Largest():
        tiled_cross_entropy(hidden, weight, labels, 8).backward()
    assert Largest.numel <= max(8 * VOCAB, VOCAB * HIDDEN) < TOKENS * VOCAB


def test_sum_frozen_head_and_bits_by_tile_size():
    hidden, weight, _, labels = inputs()
    weight.requires_grad_(False)
    loss = tiled_cross_entropy(hidden, weight, labels, 8, reduction="sum")
    torch.testing.assert_close(loss, whole(hidden, weight, labels, num_items=1), rtol=1e-6, atol=0)
    loss.backward()
    assert weight.grad is None
    again = tiled_cross_entropy(hidden, weight, labels, 8, reduction="sum")
    assert torch.equal(loss, again)
    with pytest.raises(ValueError, match="tiles of 0"):
        tiled_cross_entropy(hidden, weight, labels, 0)
    with pytest.raises(ValueError, match="reduction 'none'"):
        tiled_cross_entropy(hidden, weight, labels, 8, reduction="none")


def test_what_happens_to_logits_before_the_loss():
    def cap(logits):
        return torch.tanh(logits / 3) * 3

    hidden, weight, _, labels = inputs()
    expected = F.cross_entropy(cap(F.linear(hidden, weight)), labels)
    theirs = torch.autograd.grad(expected, (hidden, weight))
    loss = tiled_cross_entropy(hidden, weight, labels, 8, transform=cap)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for mine, other in zip(torch.autograd.grad(loss, (hidden, weight)), theirs):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
