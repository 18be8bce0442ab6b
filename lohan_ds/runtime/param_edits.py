"""`ParamEdits`: what user code changes in resident parameters gets into the store, and graphs from before are known.

[Note: edits]
A change in place raises torch's version of the parameter. One through `.data`, NumPy or a fused optimizer raises
nothing: then the block was *looked at* (released_parameter.py) and is compared with what is stored. `param.data = ...`
gives the parameter other memory than its place in the block's buffer. What torch's versions do not show raises the
block's own.
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor, nn

from lohan_ds.block import Block
from lohan_ds.errors import StepError
from lohan_ds.runtime.residence import Residence, Residency
from lohan_ds.store.block_store import BlockStore


class ParamEdits:
    """Called under the streamer's lock. `on_edit(block, slot, values)`: as `ParamStreamer` has it."""

    def __init__(self, blocks: Sequence[Block], params: Sequence[Sequence[nn.Parameter]],
                 residences: Sequence[Residence], store: BlockStore, on_edit: Callable[[int, int, Tensor], None]):
        self._blocks, self._params, self._residences = blocks, params, residences
        self._store, self._on_edit = store, on_edit

    def write_back(self, b: int) -> bool:
        """The store gets the values of a resident block that are others than when it was fetched. Whether a parameter
        has other memory than its place in the buffer now. StepError if it was replaced by one of another size."""
        residence, block = self._residences[b], self._blocks[b]
        edits, is_traced, has_moved = [], True, False
        for slot, (info, param, seen) in enumerate(zip(block.slots, self._params[b], residence.seen_versions)):
            in_buffer = residence.buffer[info.offset:info.offset + info.numel]
            with torch._C.DisableTorchFunctionSubclass():   # this is no look
                values, version = param.data.reshape(-1), param._version
            moved = values.data_ptr() != in_buffer.data_ptr()
            has_moved |= moved
            if not (moved or residence.looked_at or version != seen):
                continue
            residence.seen_versions[slot] = version
            if residence.is_lent and not moved:
                edits.append((slot, values.clone()))   # of the store's tensor: nothing is left to compare with
            else:
                stored = torch.empty(info.numel, dtype=in_buffer.dtype)
                self._store.read_array(b, "param", info.offset, stored)
                if values.shape != in_buffer.shape:
                    raise StepError(f"parameter {info.name} was replaced by a tensor of {values.numel()} elements, "
                                    f"{info.numel} needed; change values in place instead")
                values = values.to(device="cpu", dtype=in_buffer.dtype)
                if torch.equal(values.view(torch.uint8), stored.view(torch.uint8)):
                    continue
                edits.append((slot, values.clone()))
            is_traced &= version != seen and not moved
        for slot, values in edits:
            self._on_edit(b, slot, values)
        if not is_traced:
            residence.version += 1
        return has_moved

    def version(self, b: int) -> Hashable:
        """Changes with every update and edit of the block."""
        residence = self._residences[b]
        if residence.state is Residency.RESIDENT and not residence.num_running:
            self.write_back(b)
        with torch._C.DisableTorchFunctionSubclass():
            return residence.version, *(param._version for param in self._params[b])

    def in_place_version(self, b: int, offset: int) -> int:
        """torch's, of the parameter at this offset of the block. One that was given other memory is written back
        first: the block's own version shows it then."""
        slots, residence = self._blocks[b].slots, self._residences[b]
        slot = bisect_right(slots, offset, key=lambda slot: slot.offset) - 1
        with torch._C.DisableTorchFunctionSubclass():
            param = self._params[b][slot]
            if residence.state is Residency.RESIDENT and not residence.num_running and (
                    param.data_ptr() != residence.buffer.data_ptr() + slots[slot].offset * residence.buffer.itemsize):
                self.write_back(b)
            return param._version
