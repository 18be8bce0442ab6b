"""One step of Adam or AdamW on flat fp32 arrays on the CPU, by whatever is fastest here and gives the same bits.

The native operator; without it torch's fused kernel, if that gives the same bits on this machine; without that the
twin. cpu_adam_twin.py says what is computed.
"""
from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from .arrays import DTYPES, INSTRUCTION_SETS, check_apart, check_flat
from .cpu_adam_fused import PIECE_NUMEL, fused_gives_same_bits, update_fused_
from .cpu_adam_twin import AdamScalars, AdamStep, update_twin_
from .loader import native

__all__ = ["PIECE_NUMEL", "AdamScalars", "AdamStep", "update_", "update_native_"]


def update_(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, at: AdamStep, out: Tensor | None = None,
            num_threads: int | None = None, scratch: Tensor | None = None) -> None:
    """In place on `master`, `exp_avg` and `exp_avg_sq`; `grad` is only read; `out` is `master` rounded to 16 bits.

    master, exp_avg, exp_avg_sq: (numel,) fp32. grad: (numel,) fp32, bf16 or fp16. out: (numel,) bf16 or fp16. All on
    the CPU, contiguous, and apart: ValueError otherwise. num_threads: of this call; torch's number when not given.
    scratch: (any,) fp32, overwritten; spares an allocation where the native operator is missing, if it has
    min(numel, PIECE_NUMEL) elements.

    Any thread may call it, several at once on different arrays. It blocks for the whole computation, without the GIL.
    """
    arrays = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    numel = master.numel()
    check_flat(numel, (torch.float32,), **arrays)
    check_flat(numel, tuple(DTYPES), grad=grad)
    if out is not None:
        check_flat(numel, (torch.bfloat16, torch.float16), out=out)
        arrays["out"] = out
    check_apart(grad=grad, **arrays)
    module = native("cpu_adam")
    if module is not None:
        update_native_(module, master, grad, exp_avg, exp_avg_sq, AdamScalars.of(at), out,
                       torch.get_num_threads() if num_threads is None else num_threads)
        return
    with torch.no_grad():
        if fused_gives_same_bits():
            update_fused_(master, grad, exp_avg, exp_avg_sq, at, scratch)
        else:
            update_twin_(master, grad, exp_avg, exp_avg_sq, AdamScalars.of(at))
        if out is not None:
            out.copy_(master)


def update_native_(module: ModuleType, master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor,
                   scalars: AdamScalars, out: Tensor | None, num_threads: int,
                   instruction_set: str = "best") -> None:
    """`update_` by the operator, arguments checked already. ValueError if the processor lacks `instruction_set`."""
    out_address, out_dtype = (0, 0) if out is None else (out.data_ptr(), DTYPES[out.dtype])
    module.update(master.data_ptr(), grad.data_ptr(), DTYPES[grad.dtype], exp_avg.data_ptr(), exp_avg_sq.data_ptr(),
                  out_address, out_dtype, master.numel(), *scalars, num_threads, INSTRUCTION_SETS[instruction_set])
