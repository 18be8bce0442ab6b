"""What the bindings take: addresses of checked tensors, and numbers for dtypes and instruction sets."""
from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}          # as Dtype in csrc/common/dtypes.h
INSTRUCTION_SETS = {"best": -1, "scalar": 0, "avx2": 1, "avx512": 2}      # as Isa in csrc/common/isa.h


def check_flat(numel: int, dtypes: tuple[torch.dtype, ...], **arrays: Tensor) -> None:
    """ValueError unless each is (numel,), of one of `dtypes`, contiguous and on the CPU."""
    for name, array in arrays.items():
        if array.shape != (numel,) or array.dtype not in dtypes or not array.is_cpu or not array.is_contiguous():
            raise ValueError(f"{name}: got {tuple(array.shape)} {array.dtype} on {array.device}, strides "
                             f"{array.stride()}; needed ({numel},) of {dtypes} on the CPU, contiguous")


def check_apart(**arrays: Tensor) -> None:
    """ValueError if two of them share bytes."""
    spans = sorted([(array.data_ptr(), array.nbytes, name) for name, array in arrays.items() if array.numel()])
    for (start, nbytes, name), (next_start, _, other) in zip(spans, spans[1:]):
        if next_start < start + nbytes:
            raise ValueError(f"{name} and {other} overlap by {start + nbytes - next_start} bytes; they must be apart")


def present_instruction_sets(native: ModuleType) -> list[str]:
    """Those of `INSTRUCTION_SETS` that this processor has, without "best"."""
    return [name for name, number in INSTRUCTION_SETS.items() if number >= 0 and native.is_present(number)]
