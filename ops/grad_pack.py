"""A block's gradients into one flat buffer on their device, with their sums of squares: the CUDA operator, one launch.

The sums are those of grad_accumulate.py, bit for bit, in [Note: the order of the sum]. So they are the check for
values that are not finite as well: a segment's sum is finite exactly if all its elements are.
"""
from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from .arrays import DTYPES
from .grad_accumulate import SEGMENT_NUMEL, segment_sums
from .loader import native


def can_pack(device: torch.device) -> bool:
    """Whether `pack` works on this device. On an NVIDIA GPU it needs the operator, which the first call may compile: if
    it cannot be had, that is said once."""
    return device.type == "cpu" or (device.type == "cuda" and native("grad_pack") is not None)


def num_segments(numel: int) -> int:
    """Sums of squares that a gradient of `numel` elements has."""
    return -(-numel // SEGMENT_NUMEL)


def pack(grads: Sequence[Tensor], offsets: Sequence[int], out: Tensor | None, scale: float = 1.0) -> Tensor:
    """For each of `grads`, out[offset:offset + numel] = grad * scale, rounded to its dtype. Returns sums of squares of
    what was written: (all their segments,) fp64, on their device, those of the first gradient first.

    grads: (numel,) each, fp32, bf16 or fp16, all alike, contiguous, on one device for which `can_pack` is true. out:
    (any numel,) of the same dtype and device, apart from them; without it only the sums are computed. What lies between
    the gradients in `out` is left as it is. A scale of 1.0 leaves every bit as it is. ValueError for anything else.

    On a GPU it is queued on the current stream, as any operation of torch; the caller may drop `grads` at once.
    """
    _check(grads, offsets, out)
    device = grads[0].device if grads else torch.device("cpu")
    if device.type == "cuda":
        return pack_native(native("grad_pack"), grads, offsets, out, scale)
    return pack_twin(grads, offsets, out, scale)


def pack_native(module: ModuleType, grads: Sequence[Tensor], offsets: Sequence[int], out: Tensor | None,
                scale: float) -> Tensor:
    """By the operator, arguments checked already."""
    device = grads[0].device
    sums = torch.empty(sum(num_segments(grad.numel()) for grad in grads), dtype=torch.float64, device=device)
    used = [(grad, offset) for grad, offset in zip(grads, offsets) if grad.numel()]
    with torch.cuda.device(device):
        module.pack([grad.data_ptr() for grad, _ in used], [grad.numel() for grad, _ in used],
                    [offset for _, offset in used], 0 if out is None else out.data_ptr(), sums.data_ptr(),
                    DTYPES[grads[0].dtype], scale, torch.cuda.current_stream(device).cuda_stream)
    return sums


def pack_twin(grads: Sequence[Tensor], offsets: Sequence[int], out: Tensor | None, scale: float) -> Tensor:
    """By torch, on any device, arguments checked already."""
    sums = []
    with torch.no_grad():
        for grad, offset in zip(grads, offsets):
            if scale != 1.0:
                grad = (grad.float() * scale).to(grad.dtype)
            if out is not None:
                out[offset:offset + grad.numel()].copy_(grad)
            sums.append(segment_sums(grad))
    return torch.cat(sums) if sums else torch.empty(0, dtype=torch.float64)


def _check(grads: Sequence[Tensor], offsets: Sequence[int], out: Tensor | None) -> None:
    if len(grads) != len(offsets):
        raise ValueError(f"got {len(grads)} gradients and {len(offsets)} offsets")
    for index, (grad, offset) in enumerate(zip(grads, offsets)):
        like = grads[0] if out is None else out
        if (grad.dim() != 1 or not grad.is_contiguous() or grad.dtype not in DTYPES or grad.dtype != like.dtype
                or grad.device != like.device):
            raise ValueError(f"gradient {index}: got {tuple(grad.shape)} {grad.dtype} on {grad.device}, strides "
                             f"{grad.stride()}; needed (numel,) {like.dtype} on {like.device}, contiguous, one of "
                             f"{tuple(DTYPES)}")
        if out is not None and not 0 <= offset <= out.numel() - grad.numel():
            raise ValueError(f"gradient {index}: {grad.numel()} elements at {offset} are not inside of the "
                             f"{out.numel()} of the buffer")
    if out is not None and (out.dim() != 1 or not out.is_contiguous()):
        raise ValueError(f"out: got {tuple(out.shape)}, strides {out.stride()}; needed (numel,), contiguous")
