"""torch's fused Adam as a stand-in for the native operator, where it gives the same bits.

[Note: bits that do not depend on the cut]
torch's fused CPU kernel computes whole vectors and then the last few elements one by one, and the two round
differently. Here the rest after the last multiple of `_LANE_NUMEL` elements goes through a zero-padded scratch, so
every element goes through the vector code. Alignment and threads do not matter: the kernel loads unaligned, and its
threads cut at whole vectors.
"""
from __future__ import annotations

import functools

import torch
from torch import Tensor

from .cpu_adam_twin import AdamScalars, AdamStep, update_twin_

_LANE_NUMEL = 32               # elements; a multiple of every vector width (AVX2 8, AVX-512 16, NEON 4, SVE 8)
PIECE_NUMEL = 1024 * 1024     # elements upcast and updated at a time
_SAMPLE_NUMEL = 4096           # elements; kernels that round differently differ in most of them


@functools.cache
def fused_gives_same_bits() -> bool:
    """Whether torch's kernel rounds as [Note: the formula] says, tried on a sample of each of its branches."""
    generator = torch.Generator().manual_seed(0)
    for beta1, decoupled in ((0.9, True), (0.9, False), (0.3, True)):
        at = AdamStep(lr=1e-3, beta1=beta1, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=decoupled, step=7,
                      coefficient=1.0)
        want = list(torch.randn(4, _SAMPLE_NUMEL, generator=generator))   # master, grad, exp_avg, exp_avg_sq
        want[3].square_()
        got = [array.clone() for array in want]
        update_twin_(*want, AdamScalars.of(at))
        _fused_(*got, at)
        if not all(torch.equal(x, y) for x, y in zip(got, want)):
            return False
    return True


def update_fused_(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, at: AdamStep,
                  scratch: Tensor | None = None) -> None:
    """As `update_twin_`. scratch: (any,) fp32, overwritten; allocated when needed and not long enough."""
    numel = master.numel()
    needs_scratch = grad.dtype != torch.float32 or at.coefficient != 1.0
    piece_numel = PIECE_NUMEL if needs_scratch else numel
    if needs_scratch and (scratch is None or scratch.numel() < min(numel, piece_numel)):
        scratch = torch.empty(min(numel, piece_numel), dtype=torch.float32)
    for start in range(0, numel, piece_numel or 1):
        end = min(start + piece_numel, numel)
        piece = grad[start:end]
        if needs_scratch:
            piece = scratch[:end - start].copy_(piece).mul_(at.coefficient)
        _update_piece_(master[start:end], piece, exp_avg[start:end], exp_avg_sq[start:end], at)


def _update_piece_(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, at: AdamStep) -> None:
    """All (numel,) fp32. See [Note: bits that do not depend on the cut] for the rest."""
    numel = master.numel()
    body = numel // _LANE_NUMEL * _LANE_NUMEL
    if body:
        _fused_(master[:body], grad[:body], exp_avg[:body], exp_avg_sq[:body], at)
    if body == numel:
        return
    rest = numel - body
    padded = torch.zeros(4, _LANE_NUMEL)                  # master, grad, exp_avg, exp_avg_sq
    for row, tensor in zip(padded, (master, grad, exp_avg, exp_avg_sq)):
        row[:rest].copy_(tensor[body:])
    _fused_(*padded, at)
    for row, tensor in ((padded[0], master), (padded[2], exp_avg), (padded[3], exp_avg_sq)):
        tensor[body:].copy_(row[:rest])


def _fused_(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, at: AdamStep) -> None:
    fused = torch._fused_adamw_ if at.decoupled else torch._fused_adam_
    fused([master], [grad], [exp_avg], [exp_avg_sq], [], [torch.tensor(float(at.step))], lr=at.lr, beta1=at.beta1,
          beta2=at.beta2, weight_decay=at.weight_decay, eps=at.eps, amsgrad=False, maximize=False)
