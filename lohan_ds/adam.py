"""The one Adam: an exact in-place update of flat fp32 arrays on the CPU. No storage, and no thread outlives a call.

Which operations give the result, and in which order they round, is said in ops/cpu_adam_twin.py; every way to compute
it gives the same bits, so it depends neither on the cut nor on threads, the processor or whether there is a compiler.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lohan_ds.errors import ConfigError
from lohan_ds.ops.cpu_adam import PIECE_NUMEL, AdamStep, update_

__all__ = ["PIECE_NUMEL", "AdamHyper", "adam_update_", "check_supported", "hyper_from_group"]

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
                 coefficient: float = 1.0, scratch: Tensor | None = None, out: Tensor | None = None,
                 num_threads: int | None = None) -> None:
    """One Adam step, in place on `master`, `exp_avg` and `exp_avg_sq`; `grad` is only read.

    master, exp_avg, exp_avg_sq: (numel,) fp32. grad: (numel,) fp32, bf16 or fp16. out: (numel,) bf16 or fp16, becomes
    `master` rounded to the nearest. All on the CPU, contiguous, and none overlaps another: ValueError otherwise.
    step: the count after this update, 1 for the first. coefficient: what the gradient is multiplied by, as an fp32
    scalar after the upcast; exactly 1.0 leaves it alone. scratch: (>= min(numel, PIECE_NUMEL),) fp32, overwritten;
    only used without the native operator, allocated then when not given. num_threads: torch's number when not given.

    The result has the same bits however the arrays are cut and with any thread count.
    Blocks for the whole computation; may be called from any thread, but never twice at once with one scratch. The first
    call of a process may compile the operator, which takes seconds.
    """
    assert step >= 1, step
    at = AdamStep(hyper.lr, hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay, hyper.decoupled, step, coefficient)
    update_(master, grad, exp_avg, exp_avg_sq, at, out, num_threads, scratch)


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
