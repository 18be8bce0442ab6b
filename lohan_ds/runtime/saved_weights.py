"""`SavedWeights`: what autograd keeps of weights between forward and backward.

[Note: saved weights]
Autograd saves weights, and views of them, for backward. Such a tensor would keep the block's buffer alive from
forward to backward. The pack hook recognises tensors that lie in a resident block's buffer and saves (block,
offset, size, stride) instead; unpacking fetches the block again. If the block was updated or the parameter changed
in place in between, the graph is stale and unpacking raises, as plain torch does for an in-place change. A parameter
that its module changes in forward *before* it computes with it is not: what is saved has the new version.
"""
from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lohan_ds.errors import StepError
from lohan_ds.runtime.released_parameter import ReleasedParameter
from lohan_ds.runtime.residence import Residence


class SavedWeight(NamedTuple):
    """What autograd keeps instead of a tensor that lies in a block's buffer."""
    block: int
    version: int              # of the block when it was saved
    in_place: int             # torch's in-place version of the parameter then
    offset: int               # elements from the start of the block
    size: torch.Size
    stride: tuple[int, ...]


class WeightHooks(NamedTuple):
    """What the parameter streamer knows of weights, for whoever installs hooks on saved tensors instead of it."""
    pack: Callable[[Tensor], Any | None]        # what to keep instead of a tensor; None if it is no weight
    unpack: Callable[[Any], Tensor]             # the reverse; what it does not know it returns as it is
    version: Callable[[int], Hashable]          # of a unit, by index: changes whenever one of its weights does
    running_again: Callable[[int], contextlib.AbstractContextManager[None]]   # around a unit's forward in backward


class SavedWeights:
    """Under the streamer's lock: `_block_of_storage`. Of the training thread: the hooks."""

    def __init__(self, residences: list[Residence], make_resident: Callable[[int], None], name_of: Callable[[int], str],
                 in_place_version: Callable[[int, int], int], lock: threading.RLock):
        """`in_place_version(block, offset)`: torch's, of the parameter that lies there."""
        self._residences, self._make_resident, self._name_of, self._lock = residences, make_resident, name_of, lock
        self._in_place_version = in_place_version
        self._block_of_storage: dict[int, int] = {}
        self._hooks: tuple[Callable, Callable] = (self._pack, self.unpack)

    def add(self, block: int, buffer: Tensor) -> None:
        """The block is resident in `buffer`."""
        self._block_of_storage[buffer.untyped_storage().data_ptr()] = block

    def remove(self, buffer: Tensor) -> None:
        self._block_of_storage.pop(buffer.untyped_storage().data_ptr(), None)

    def use_hooks(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        """From now on `hooks` installs these; they call `pack_weight` and `unpack` for what may be a weight."""
        self._hooks = (pack, unpack)

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Context for a forward, or a backward that computes forwards again; see [Note: saved weights]."""
        with torch.autograd.graph.saved_tensors_hooks(*self._hooks):
            yield

    def hooks_for_look(self) -> contextlib.AbstractContextManager[None]:
        """Context for one operation on released parameters. A checkpoint must not find our hooks inside its own."""
        some_are_open = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        return contextlib.nullcontext() if some_are_open else self.hooks()

    def pack_weight(self, tensor: Tensor) -> SavedWeight | None:
        """What to keep instead of a tensor, None if it lies in no block."""
        if type(tensor) not in (Tensor, nn.Parameter, ReleasedParameter):
            return None
        b = self._block_of_storage.get(tensor.untyped_storage().data_ptr()) if tensor.layout is torch.strided else None
        if b is None:
            return None
        buffer = self._residences[b].buffer
        if buffer is None or tensor.dtype != buffer.dtype:
            return None
        offset = tensor.storage_offset() - buffer.storage_offset()
        return SavedWeight(b, self._residences[b].version, self._in_place_version(b, offset), offset, tensor.size(),
                           tensor.stride())

    def unpack(self, saved: Any) -> Tensor:
        """The tensor again, with today's values; anything but a SavedWeight as it is. StepError if they changed."""
        if not isinstance(saved, SavedWeight):
            return saved
        with self._lock:
            residence = self._residences[saved.block]
            in_place = self._in_place_version(saved.block, saved.offset)   # first: it may change the block's version
            if (residence.version, in_place) != (saved.version, saved.in_place):
                raise StepError(f"a weight of block {self._name_of(saved.block)} that this backward needs was "
                                "changed after its forward; run forward again after step()")
            self._make_resident(saved.block)
            buffer = residence.buffer
            return buffer.as_strided(saved.size, saved.stride, buffer.storage_offset() + saved.offset)

    def _pack(self, tensor: Tensor) -> Any:
        saved = self.pack_weight(tensor)
        return tensor.detach() if saved is None else saved   # [Note: detached] in activation_items.py
