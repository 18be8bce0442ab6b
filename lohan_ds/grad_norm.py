"""The global gradient norm, in bits that depend on nothing but the gradients.

[Note: segments]
Squares are summed in fp64 per segment of 16,384 elements, counted from the parameter's own start, and the segments are
combined by `math.fsum`, whose result does not depend on the order. torch splits a sum over threads only from 32,768
elements on, so the sum of one segment does not depend on the thread count (65,536 would). The squares of bf16, fp16
and fp32 values are exact in fp64 (fp32: 48 bits).
"""
from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

SEGMENT_NUMEL = 16_384               # elements
_BLOCK_NUMEL = 64 * SEGMENT_NUMEL    # elements upcast at a time: 8 MiB of fp64


def sum_of_squares(flat: Tensor) -> list[float]:
    """The fp64 sum of squares of each segment of one parameter's gradient.

    flat: (numel,) fp32, bf16 or fp16, CPU, starting at the parameter's first element; or a piece of it that starts at
    a multiple of SEGMENT_NUMEL elements and gives the same numbers as the whole does there. Needs 8 MiB at most.
    """
    assert flat.dim() == 1 and flat.is_floating_point(), (flat.shape, flat.dtype)
    numel = flat.numel()
    parts: list[float] = []
    with torch.no_grad():
        block = torch.empty(min(numel, _BLOCK_NUMEL), dtype=torch.float64)
        for start in range(0, numel, _BLOCK_NUMEL):
            piece = flat[start:start + _BLOCK_NUMEL]
            squares = block[:piece.numel()]
            squares.copy_(piece).mul_(squares)
            whole = piece.numel() // SEGMENT_NUMEL * SEGMENT_NUMEL
            if whole:
                parts += squares[:whole].view(-1, SEGMENT_NUMEL).sum(dim=1).tolist()
            if whole < piece.numel():
                parts.append(squares[whole:].sum().item())
    return parts


def global_norm(parts: Iterable[float]) -> float:
    """The 2-norm from the sums of squares of all segments, in any order. nan or inf if a part is; never raises."""
    parts = list(parts)
    try:
        return math.sqrt(math.fsum(parts))
    except OverflowError:             # finite parts, infinite sum
        return math.inf
    except ValueError:                # a part was negative infinity or negative: not a sum of squares
        return math.nan


def clip_coefficient(norm: float, clip: float, loss_scale: float = 1.0) -> float:
    """What every gradient is multiplied by, by DeepSpeed's formula; exactly 1.0 when nothing is to be scaled.

    norm: of the gradients as they are, still times `loss_scale`. clip: largest norm of the unscaled gradients; zero or
    less is off. The caller skips the step when `norm` is not finite (0.0 or nan is returned then).
    """
    combined_scale = loss_scale
    if clip > 0.0:
        excess = (norm / loss_scale + 1e-6) / clip
        if not excess <= 1.0:         # also nan
            combined_scale = excess * loss_scale
    return 1.0 / combined_scale
