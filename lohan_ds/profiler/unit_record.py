"""What is written down while a model runs: `Section`, `UnitRecord`, `UnitTally`.

A record is what one call of a unit costs, and enough of its outputs to stand in for a call that is alike.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec


class ItemRecord(NamedTuple):
    """One storage saved inside the unit. `output`: its place among the outputs if it is one."""
    name: str
    nbytes: int
    flops: int
    output: int | None


class TensorOutput(NamedTuple):
    """A tensor among the outputs, on meta. `made_in` is the name of its item if somebody outside saves it."""
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    made_in: str
    flops_if_saved: int


class InputOutput(NamedTuple):
    """An output that is one of the inputs, by its place among their leaves."""
    place: int


class UnitRecord(NamedTuple):
    forward_flops: int
    items: tuple[ItemRecord, ...]        # without the input
    saved_inputs: frozenset[int]         # places of input tensors that are kept for backward
    output_bytes: int
    workspace_bytes: int
    structure: TreeSpec                  # of the outputs
    outputs: tuple[TensorOutput | InputOutput | Any, ...]   # Any: a plain value
    can_stand_in: bool                   # every output is one of the above


@dataclass
class UnitTally:
    """What one unit costs, all its calls together. The items are in the ledger."""
    forward_flops: int = 0
    output_bytes: int = 0
    workspace_bytes: int = 0


@dataclass
class Section:
    """A stretch of the forward: one call of a unit, or what runs outside of units until the next call."""
    number: int
    unit: int | None                     # whom it counts for; None: outside, and no unit has been called yet
    inputs: Sequence[Any] | None         # leaves of the call's arguments; None: outside of units
    first_allocation: int
    live_at_start: dict[int, int]        # storage -> bytes
    counted_elsewhere: set[int]          # storages that are not this section's to count
    saved: dict[int, None] = field(default_factory=dict)   # storages, in order
    backward_from: int = 0               # number of the first allocation of its backward
    name: str = "outside"                # of items made outside of all modules


def empty_output(output: TensorOutput) -> Tensor:
    return torch.empty_strided(output.size, output.stride, dtype=output.dtype, device="meta")
