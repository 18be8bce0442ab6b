"""The one Adam: an exact in-place update of flat fp32 arrays on the CPU, in plain torch. No threads, no storage.

[Note: bits that do not depend on the cut]
torch's fused CPU kernel computes whole vectors and then the last few elements one by one, and the two round
differently (measured on AVX2: 0.7 % of `exp_avg_sq` in pieces of 1..130 elements, 1 ulp). So an element's bits would
depend on whether the array it is updated in is padded, and a parameter of 7 elements would differ between the
in-memory twin (7 alone) and a block (7 and padding). Here the rest after the last multiple of `LANE_NUMEL` elements
goes through a zero-padded scratch, so every element goes through the vector code. Alignment and threads do not matter:
the kernel loads unaligned, and its threads cut at whole vectors.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lohan_ds.errors import ConfigError

LANE_NUMEL = 32               # elements; a multiple of every vector width (AVX2 8, AVX-512 16, NEON 4, SVE 8)
PIECE_NUMEL = 1024 * 1024     # elements upcast and updated at a time: 4 MiB of scratch, which stays in the cache

_UNSUPPORTED = ("amsgrad", "maximize", "differentiable", "capturable")


@dataclass(frozen=True)
class AdamHyper:
    """The hyper-parameters of one optimizer group at one step."""
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool           # True: AdamW; False: weight_decay is added to the gradient (L2)


def adam_update_(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int, hyper: AdamHyper,
                 coefficient: float = 1.0, scratch: Tensor | None = None) -> None:
    """One Adam step, in place on `master`, `exp_avg` and `exp_avg_sq`; `grad` is only read.

    master, exp_avg, exp_avg_sq: (numel,) fp32, CPU, contiguous. grad: (numel,) fp32, bf16 or fp16, CPU, contiguous.
    step: the count after this update, 1 for the first. coefficient: what the gradient is multiplied by, as an fp32
    scalar after the upcast; exactly 1.0 leaves it alone. scratch: (>= min(numel, PIECE_NUMEL),) fp32, overwritten;
    allocated when needed and not given.

    The result has the same bits however the arrays are cut and with any thread count; see the note on top.
    Blocks for the whole computation; may be called from any thread, but never twice at once with one scratch.
    """
    numel = master.numel()
    assert step >= 1, step
    for tensor in (master, exp_avg, exp_avg_sq):
        assert tensor.shape == (numel,) and tensor.dtype == torch.float32 and tensor.is_contiguous()
    assert grad.shape == (numel,) and grad.is_floating_point() and grad.is_contiguous()
    needs_scratch = grad.dtype != torch.float32 or coefficient != 1.0
    piece_numel = PIECE_NUMEL if needs_scratch else numel
    if needs_scratch and scratch is None:
        scratch = torch.empty(min(numel, piece_numel), dtype=torch.float32)
    with torch.no_grad():
        for start in range(0, numel, piece_numel or 1):
            end = min(start + piece_numel, numel)
            piece = grad[start:end]
            if needs_scratch:
                piece = _scaled_fp32(piece, coefficient, scratch[:end - start])
            _update_piece_(master[start:end], piece, exp_avg[start:end], exp_avg_sq[start:end], step, hyper)


def check_supported(group: Mapping[str, Any]) -> None:
    """Raises ConfigError if an optimizer group asks for an Adam other than the plain one; called at set-up."""
    for key in _UNSUPPORTED:
        if group.get(key):
            raise ConfigError(f"optimizer.params.{key}: got {group[key]!r}, but out-of-core Adam supports only False")
    if group.get("bias_correction", True) is not True:
        raise ConfigError(f"optimizer.params.bias_correction: got {group['bias_correction']!r}, but out-of-core Adam "
                          "always corrects the bias; remove the key")
    for key in ("lr", "betas", "eps", "weight_decay"):
        if key not in group:
            raise ConfigError(f"optimizer.params.{key}: missing from an optimizer group with keys {sorted(group)}; "
                              "out-of-core training needs Adam or AdamW")


def hyper_from_group(group: Mapping[str, Any], decoupled: bool) -> AdamHyper:
    """Reads a `torch.optim`-like group as it is now; `lr` and the others may be one-element tensors."""
    beta1, beta2 = group["betas"]
    return AdamHyper(lr=float(group["lr"]), beta1=float(beta1), beta2=float(beta2), eps=float(group["eps"]),
                     weight_decay=float(group["weight_decay"]), decoupled=decoupled)


def _scaled_fp32(grad: Tensor, coefficient: float, out: Tensor) -> Tensor:
    """`grad` upcast and multiplied into `out` (fp32), which is returned. fp32 is multiplied without a copy first."""
    if coefficient == 1.0:
        return out.copy_(grad)
    if grad.dtype == torch.float32:
        return torch.mul(grad, coefficient, out=out)
    return out.copy_(grad).mul_(coefficient)


def _update_piece_(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int,
                   hyper: AdamHyper) -> None:
    """All (numel,) fp32. See [Note: bits that do not depend on the cut] for the rest."""
    numel = master.numel()
    body = numel // LANE_NUMEL * LANE_NUMEL
    if body == numel:
        _fused_(master, grad, exp_avg, exp_avg_sq, step, hyper)
        return
    if body:
        _fused_(master[:body], grad[:body], exp_avg[:body], exp_avg_sq[:body], step, hyper)
    rest = numel - body
    padded = torch.zeros(4, LANE_NUMEL)                  # master, grad, exp_avg, exp_avg_sq
    for row, tensor in zip(padded, (master, grad, exp_avg, exp_avg_sq)):
        row[:rest].copy_(tensor[body:])
    _fused_(*padded, step, hyper)
    for row, tensor in ((padded[0], master), (padded[2], exp_avg), (padded[3], exp_avg_sq)):
        tensor[body:].copy_(row[:rest])


def _fused_(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int, hyper: AdamHyper) -> None:
    fused = torch._fused_adamw_ if hyper.decoupled else torch._fused_adam_
    fused([master], [grad], [exp_avg], [exp_avg_sq], [], [torch.tensor(float(step))], lr=hyper.lr, beta1=hyper.beta1,
          beta2=hyper.beta2, weight_decay=hyper.weight_decay, eps=hyper.eps, amsgrad=False, maximize=False)
