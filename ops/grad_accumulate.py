"""A gradient into the buffer that holds it, and its sums of squares: one pass by the native operator, else in torch.

[Note: the order of the sum]
Sums of squares are in fp64, where the square of an fp32, bf16 or fp16 value is exact. A segment, `SEGMENT_NUMEL`
elements or what is left, counts as 16 rows of 1,024, filled up with zeros. A row is folded: its second half is added to
its first until one number is left; then the 16 numbers are folded alike. So a sum has the same bits in any loop that
does these additions, with any number of elements at once, and it is finite exactly if all its elements are: the squares
of 16,384 fp32 cannot overflow.
"""
from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from .arrays import DTYPES, INSTRUCTION_SETS, check_apart, check_flat
from .loader import native

_ROW_NUMEL = 1024
SEGMENT_NUMEL = 16 * _ROW_NUMEL         # elements
_BLOCK_NUMEL = 16 * SEGMENT_NUMEL       # elements that the twin upcasts at a time: 2 MiB of fp64


def accumulate_(target: Tensor, grad: Tensor, add: bool, sums: bool = True,
                num_threads: int | None = None) -> list[float] | None:
    """target += grad if `add`, else target = grad; returns the sums of squares of the new `target`, or None.

    target: (numel,) fp32, or of grad's dtype if not `add`. grad: (numel,) fp32, bf16 or fp16. Both on the CPU,
    contiguous, and apart: ValueError otherwise. The sums: fp64, one per segment; a sum that is not finite says that
    its segment is not. num_threads: of this call; torch's number when not given.

    Any thread may call it, several at once on different arrays. It blocks, without the GIL.
    """
    check_flat(grad.numel(), tuple(DTYPES), grad=grad)
    check_flat(grad.numel(), (torch.float32,) if add else (torch.float32, grad.dtype), target=target)
    check_apart(target=target, grad=grad)
    module = native("grad_accumulate")
    if module is not None:
        return accumulate_native_(module, target, grad, add, sums, num_threads)
    return accumulate_twin_(target, grad, add, sums)


def sums_of_squares(grad: Tensor, num_threads: int | None = None) -> list[float]:
    """As `accumulate_` returns them, of `grad` as it is."""
    check_flat(grad.numel(), tuple(DTYPES), grad=grad)
    module = native("grad_accumulate")
    if module is not None:
        return accumulate_native_(module, None, grad, False, True, num_threads)
    return sums_of_squares_twin(grad)


def accumulate_native_(module: ModuleType, target: Tensor | None, grad: Tensor, add: bool, sums: bool,
                       num_threads: int | None, instruction_set: str = "best") -> list[float] | None:
    """By the operator, arguments checked already; without `target` only the sums."""
    parts = torch.empty(-(-grad.numel() // SEGMENT_NUMEL) if sums else 0, dtype=torch.float64)
    target_address, target_dtype = (0, 0) if target is None else (target.data_ptr(), DTYPES[target.dtype])
    module.accumulate(target_address, target_dtype, grad.data_ptr(), DTYPES[grad.dtype],
                      parts.data_ptr() if sums else 0, grad.numel(), add,
                      torch.get_num_threads() if num_threads is None else num_threads,
                      INSTRUCTION_SETS[instruction_set])
    return parts.tolist() if sums else None


def accumulate_twin_(target: Tensor, grad: Tensor, add: bool, sums: bool) -> list[float] | None:
    """By torch, arguments checked already."""
    with torch.no_grad():
        target.add_(grad) if add else target.copy_(grad)
    return sums_of_squares_twin(target) if sums else None


def sums_of_squares_twin(flat: Tensor) -> list[float]:
    """flat: (numel,) fp32, bf16 or fp16. By torch."""
    return segment_sums(flat).tolist()


def segment_sums(flat: Tensor) -> Tensor:
    """(segments,) fp64, on the device of `flat`, as `sums_of_squares_twin`."""
    parts = [torch.empty(0, dtype=torch.float64, device=flat.device)]
    with torch.no_grad():
        for piece in flat.split(_BLOCK_NUMEL):
            num_segments = -(-piece.numel() // SEGMENT_NUMEL)
            squares = torch.zeros(num_segments * SEGMENT_NUMEL, dtype=torch.float64, device=flat.device)
            squares[:piece.numel()].copy_(piece).square_()
            rows = _folded(squares.view(-1, _ROW_NUMEL))
            parts.append(_folded(rows.view(-1, SEGMENT_NUMEL // _ROW_NUMEL)))
    return torch.cat(parts)


def _folded(rows: Tensor) -> Tensor:
    """rows: (n, width) fp64, overwritten; width a power of two. Returns (n,): the sum of each row, by folding."""
    while (half := rows.shape[1] // 2):
        rows = rows[:, :half].add_(rows[:, half:])
    return rows[:, 0].contiguous()
