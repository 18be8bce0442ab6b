"""The global gradient norm, in bits that depend on nothing but the gradients.

[Note: segments]
Squares are summed in fp64 per segment of 16,384 elements, counted from the parameter's own start, in an order that
ops/grad_accumulate.py fixes, and the segments are combined by `math.fsum`, whose result does not depend on the order.
The squares of bf16, fp16 and fp32 values are exact in fp64 (fp32: 48 bits). A segment's sum is finite exactly if all
its elements are.
"""
from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from lohan_ds.ops.grad_accumulate import SEGMENT_NUMEL, accumulate_, sums_of_squares

__all__ = ["SEGMENT_NUMEL", "accumulate_", "clip_coefficient", "global_norm", "sum_of_squares"]


def sum_of_squares(flat: Tensor, num_threads: int | None = None) -> list[float]:
    """The fp64 sum of squares of each segment of one parameter's gradient.

    flat: (numel,) fp32, bf16 or fp16, CPU, starting at the parameter's first element; or a piece of it that starts at
    a multiple of SEGMENT_NUMEL elements and gives the same numbers as the whole does there. `accumulate_` gives the
    same numbers while it takes a gradient into a buffer. num_threads: torch's number when not given.
    """
    return sums_of_squares(flat, num_threads)


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
