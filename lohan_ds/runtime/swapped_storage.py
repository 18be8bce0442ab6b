"""`SwappedStorage`: one storage that autograd saved, away from the device between forward and backward.

Autograd saves views: three projections save their common input, attention saves q, k and v that are slices of one
product. The storage goes out once, whole; every saved view becomes a `SavedView` of it, and comes back with the very
strides it had, because other strides can give other bits.

Nothing but the `SavedView`s keeps it alive: when autograd lets go of the last, the space is free again.
"""
from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lohan_ds.errors import StepError
from lohan_ds.runtime.recorder import Recorder, stalling
from lohan_ds.runtime.streams import Streams
from lohan_ds.runtime.swap_tiers import SwapCopy
from lohan_ds.work import Work

CHANGED = ("an activation of unit {unit} ({item}) that backward needs was changed in place after its forward, which "
           "plain torch forbids too")


class SavedView:
    """What autograd keeps instead of a tensor. Fixed, but for `epoch`: the last round of uses it took part in."""
    __slots__ = ("storage", "dtype", "size", "stride", "offset", "epoch", "__weakref__")

    def __init__(self, storage: SwappedStorage, tensor: Tensor):
        self.storage = storage
        self.dtype = tensor.dtype
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        self.epoch = -1


class SwappedStorage:
    """Used by the thread of the forward, then by autograd's, under `_lock`; the end of the way out comes from others.

    Between the way out and the way back the bytes are in `_copy` only. While the way out is not over the tensor is
    still there, and is what a backward that comes too early gets.
    """

    def __init__(self, tensor: Tensor, flat: Tensor, copy: SwapCopy, unit_pass: Any, item: str, tier: str,
                 streams: Streams, bury: Callable[[SwapCopy], None], recorder: Recorder | None = None):
        """`flat`: the whole storage of `tensor`, (nbytes,) uint8. `unit_pass`: kept alive for whoever unpacks.
        `bury(copy)` is called, from any thread and at any moment, when nobody needs the copy any more."""
        self.nbytes, self.device = flat.numel(), flat.device
        self.unit_pass, self.item, self.tier = unit_pass, item, tier
        self.version = tensor._version
        self._streams, self._bury, self._recorder = streams, bury, recorder
        self._lock = threading.Lock()
        self._copy: SwapCopy | None = copy
        self._witness: Tensor | None = tensor.detach()   # shares version counter and storage; None when out
        self._source: Tensor | None = flat               # None when out
        self._changed = False                            # in place, before the way out was over
        self._resident: Tensor | None = None             # (nbytes,) uint8, device: on its way back, or back
        self._incoming: Work | None = None               # of the Events of the way back
        self._num_views = self._num_unused = self._epoch = 0
        ref = weakref.ref(self)   # else a copy that is late would keep what no graph holds
        copy.left.on_done(lambda: (storage := ref()) is not None and storage._end_way_out())

    def __del__(self) -> None:
        copy = self.__dict__.get("_copy")
        if copy is not None:
            self._bury(copy)

    @property
    def is_out(self) -> bool:
        """Whether the way out is over: the device memory is free, unless somebody else holds it."""
        return self._source is None

    @property
    def is_given_up(self) -> bool:
        """Whether `discard` was called."""
        return self._copy is None

    def view(self, tensor: Tensor) -> SavedView:
        """Of a tensor that lies in this storage, unchanged since."""
        with self._lock:
            self._num_views += 1
            self._num_unused += 1
        return SavedView(self, tensor)

    def start_fetch(self) -> bool:
        """Starts the way back, unless it has begun, or the bytes were given up; whether that moves bytes. Autograd's
        thread, or a forward's."""
        with self._lock:
            return self._copy is not None and self._start_fetch()

    def restore(self, view: SavedView) -> Tensor:
        """The tensor, for one use. After as many uses as there are views the device lets go of the bytes; a further
        round of uses (`retain_graph`) fetches them again. StoreError when they could not be written or read."""
        flat = self.load()
        with self._lock:
            if view.epoch != self._epoch:
                view.epoch = self._epoch
                self._num_unused -= 1
                if self._num_unused == 0:
                    self._end_round()
        return as_view(flat, view.dtype, view.size, view.stride, view.offset)

    def load(self) -> Tensor:
        """(nbytes,) uint8, device: the bytes, for this thread to compute with. Waits for them."""
        with self._lock:
            if self._copy is None:
                raise StepError(f"this backward needs activations of unit {self.unit_pass.name} that reset_step() "
                                "dropped; run forward again")
            self._start_fetch()
            flat, incoming, copy = self._resident, self._incoming, self._copy
        if incoming is not None:
            if not incoming.done():
                copy.hurry()
            with stalling(self._recorder, "activation"):
                events = incoming.wait()
            for event in events:
                event.compute_wait()
            with self._lock:
                if self._incoming is incoming:
                    self._incoming = None
        if self._changed:
            raise StepError(CHANGED.format(unit=self.unit_pass.name, item=self.item))
        return flat

    def release_resident(self) -> None:
        """Backward is over: what was fetched and not used goes."""
        with self._lock:
            self._end_round()

    def discard(self) -> None:
        """Gives up the bytes, whoever still holds a view."""
        with self._lock:
            self._end_round()
            copy, self._copy = self._copy, None
        if copy is not None:
            self._bury(copy)

    def _start_fetch(self) -> bool:
        if self._resident is not None:
            return False
        witness, source = self._witness, self._source
        if witness is not None and source is not None:
            self._changed |= witness._version != self.version
            self._resident = source
            return False
        self._resident = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        self._incoming = self._copy.fetch(self._resident, self._streams.compute_mark())
        return True

    def _end_round(self) -> None:
        self._resident = self._incoming = None
        self._epoch += 1
        self._num_unused = self._num_views

    def _end_way_out(self) -> None:
        self._changed |= self._witness._version != self.version
        self._witness = self._source = None


def as_view(flat: Tensor, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
    """A tensor in the storage of `flat`; no view of it for autograd. `offset`: elements."""
    return torch.empty(0, dtype=dtype, device=flat.device).set_(flat.untyped_storage(), offset, size, stride)


def flat_bytes(tensor: Tensor) -> Tensor:
    """(nbytes,) uint8: the whole storage of `tensor`, shared."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
