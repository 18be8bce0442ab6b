"""The reference that the native Adam equals bit for bit: one torch call per operation, slow, on any machine.

[Note: the formula]
Per element, in fp32, each operation rounded to the nearest; `fma(x, y, z)` is x * y + z rounded once:

    g = coefficient * fp32(grad)                         Adam only: g = fma(l2, master, g)
    exp_avg = fma(avg_weight, g - exp_avg, exp_avg)      avg_weight >= 1/2: fma(avg_weight - 1, g - exp_avg, g)
    exp_avg_sq = fma(sq_weight * g, g, sq_decay * exp_avg_sq)
    master = decay * master - (step_size * exp_avg) / (sqrt(exp_avg_sq) / sq_correction + eps)

This is how torch's fused kernel rounds on x86, where the compiler made those fma: over 100 steps the two agree to the
last bit (measured on AVX2). Versions of Adam without fma differ from it by up to 7e-6 max(|p|, lr) in single elements.
Where an input is not finite the result is as IEEE says, except for the payload of a NaN.

[Note: fma in fp64]
The product of two fp32 is exact in fp64, the sum is not, and rounding it to fp64 and then to fp32 is not one rounding:
once in 2^29 times the first ends half way between two fp32 and loses the side. So where the fp64 sum is not exact, the
one of its two neighbours with an odd last bit is taken, which is never half way and keeps the side.

[Note: square roots]
torch's CPU square root comes from MKL and is 1 ulp off in a fifth of all fp32. It is right to 1 ulp in fp64 too, and no
fp32 has a root closer than 4 fp64 ulp to half way between two fp32, so the fp64 root rounds to the right fp32.
"""
from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import torch
from torch import Tensor

_PIECE_NUMEL = 64 * 1024       # elements: 3 MiB of scratch, and enough for torch to use threads
_HALF_WAY_MASK = (1 << 28) - 1   # last bits of an fp64: all zero half way between two fp32, subnormal ones too


class AdamStep(NamedTuple):
    """What the user set, and where we are. All exact: nothing is rounded to fp32 yet."""
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool           # True: AdamW; False: weight_decay is added to the gradient (L2)
    step: int                 # the count after this update: 1 for the first
    coefficient: float        # what the gradient is multiplied by


class AdamScalars(NamedTuple):
    """What the arrays are computed with: each worked out in fp64, then rounded to fp32 once."""
    coefficient: float
    decay: float              # 1 - lr * weight_decay of AdamW, else 1
    l2: float                 # weight_decay of Adam, else 0
    avg_weight: float         # 1 - beta1
    sq_decay: float           # beta2
    sq_weight: float          # 1 - beta2
    sq_correction: float      # sqrt(1 - beta2 ** step)
    eps: float
    step_size: float          # lr / (1 - beta1 ** step)

    @staticmethod
    def of(at: AdamStep) -> AdamScalars:
        exact = (at.coefficient, 1 - at.lr * at.weight_decay if at.decoupled else 1.0,
                 0.0 if at.decoupled else at.weight_decay, 1 - at.beta1, at.beta2, 1 - at.beta2,
                 math.sqrt(1 - at.beta2 ** at.step), at.eps, at.lr / (1 - at.beta1 ** at.step))
        return AdamScalars(*(ctypes.c_float * len(exact))(*exact))


class _Scratch:
    """(numel,) arrays that one call computes in."""

    def __init__(self, numel: int):
        self.grad, self.first, self.second = torch.empty(3, numel)
        self.product, self.total, self.error, self.back = torch.empty(4, numel, dtype=torch.float64)
        self.flags = torch.empty(numel, dtype=torch.bool)

    def cut(self, numel: int) -> _Scratch:
        """The first `numel` elements of each."""
        piece = _Scratch.__new__(_Scratch)
        piece.__dict__.update({name: array[:numel] for name, array in self.__dict__.items()})
        return piece


def update_twin_(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, s: AdamScalars) -> None:
    """master, exp_avg, exp_avg_sq: (numel,) fp32, updated. grad: (numel,) fp32, bf16 or fp16."""
    numel = master.numel()
    scratch = _Scratch(min(numel, _PIECE_NUMEL))
    for start in range(0, numel, _PIECE_NUMEL):
        end = min(start + _PIECE_NUMEL, numel)
        _update_piece_(master[start:end], grad[start:end], exp_avg[start:end], exp_avg_sq[start:end], s,
                       scratch.cut(end - start))


def _update_piece_(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, s: AdamScalars,
                   scratch: _Scratch) -> None:
    """All (numel,). See [Note: the formula]."""
    first, second = scratch.first, scratch.second
    g = scratch.grad.copy_(grad).mul_(s.coefficient)
    if s.l2:
        _fma(master, s.l2, g, scratch, out=g)
    torch.sub(g, exp_avg, out=first)
    if s.avg_weight < 0.5:
        _fma(first, s.avg_weight, exp_avg, scratch, out=exp_avg)
    else:
        _fma(first, s.avg_weight - 1, g, scratch, out=exp_avg)
    torch.mul(g, s.sq_weight, out=first)
    torch.mul(exp_avg_sq, s.sq_decay, out=second)
    _fma(first, g, second, scratch, out=exp_avg_sq)
    denominator = first.copy_(scratch.total.copy_(exp_avg_sq).sqrt_())
    denominator.div_(s.sq_correction).add_(s.eps)
    torch.mul(exp_avg, s.step_size, out=second)
    master.mul_(s.decay).sub_(second.div_(denominator))


def _fma(x: Tensor, y: Tensor | float, z: Tensor, scratch: _Scratch, out: Tensor) -> None:
    """out = x * y + z, rounded once. All (numel,) fp32; `out` may be any of the others. See [Note: fma in fp64]."""
    product = scratch.product.copy_(x).mul_(y)
    total = scratch.total.copy_(z).add_(product)
    last_bits = torch.bitwise_and(total.view(torch.int64), _HALF_WAY_MASK, out=scratch.error.view(torch.int64))
    if torch.eq(last_bits, 0, out=scratch.flags).any():
        error = torch.sub(total, product, out=scratch.error)
        torch.sub(total, error, out=scratch.back).sub_(product).neg_()
        error.neg_().add_(z).add_(scratch.back)            # total + error is the exact sum
        toward_zero = torch.lt(scratch.back.copy_(error).mul_(total), 0, out=scratch.flags)
        bits = total.view(torch.int64).add_(toward_zero, alpha=-1)
        bits.bitwise_or_(torch.gt(error.abs_(), 0, out=scratch.flags))
    out.copy_(total)
