"""`OpTrace`: sees every operator that runs on meta tensors and keeps account of storages, writers and FLOPs.

Meta tensors have shapes and no memory, but they live and die exactly like real ones, so how many bytes are alive at
each moment is the truth. It knows where in the model an operator ran only as a `Place` that somebody else sets.
"""
from __future__ import annotations

import weakref
from collections.abc import Container, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lohan_ds.errors import ConfigError
from lohan_ds.profiler.op_flops import op_flops

_aten = torch.ops.aten
# Models ask "is nothing masked?", "is it one sequence?" (yes) and "is anything not finite?" (no) before they run.
_ANSWERS = {_aten.all: True, _aten.eq: True, _aten.any: False, _aten.ne: False}


class Place(NamedTuple):
    """Where in the model something ran: `section` numbers the stretches of the run, `path` is a module's full name."""
    section: int
    path: str


class Op(NamedTuple):
    """One operator of the forward. Storages are serial numbers."""
    flops: int
    inputs: tuple[int, ...]


class Allocation(NamedTuple):
    """Bytes that came to life (nbytes > 0) or died (< 0)."""
    storage: int
    nbytes: int


class OpTrace(TorchDispatchMode):
    """One thread. While `counts` is False (in backward, and in what the profiler itself does) only memory counts."""

    def __init__(self, permanent: Iterable[Tensor]):
        """`permanent`: parameters and buffers, whose storages are never counted."""
        super().__init__()
        self.place = Place(0, "")
        self.counts = True
        self.ops: list[Op] = []
        self.section_flops: dict[int, int] = {}          # of what ran in each section
        self.allocations: list[Allocation] = []
        self.live_bytes: dict[int, int] = {}             # storage -> bytes, of those alive
        self.nbytes: dict[int, int] = {}                 # storage -> bytes, also of those gone
        self.made_at: dict[int, Place] = {}              # storage -> where it was written first
        self.writers: dict[int, list[int]] = {}          # storage -> indexes of ops
        self._asked_of: dict[int, Any] = {}              # storage of one element -> the operator that wrote it
        self._serials = WeakIdKeyDictionary()
        self._references: dict[int, weakref.ref] = {}
        self.permanent = {self.storage(tensor) for tensor in permanent}
        for serial in self.permanent:
            self.live_bytes.pop(serial)
        self.allocations.clear()

    def storage(self, tensor: Tensor) -> int:
        """The serial number of a tensor's storage, a new one if it was never seen."""
        storage = tensor.untyped_storage()
        serial = self._serials.get(storage)
        if serial is None:
            serial = len(self.nbytes)
            self._serials[storage] = serial
            self._references[serial] = weakref.ref(storage, lambda _: self._died(serial))
            self.nbytes[serial] = self.live_bytes[serial] = storage.nbytes()
            self.allocations.append(Allocation(serial, storage.nbytes()))
        return serial

    def record(self, inputs: Iterable[Tensor], outputs: Iterable[Tensor], flops: int, runs: bool = True) -> None:
        """Enters an operation that is not dispatched as one operator. `runs`: its FLOPs count now, not only when it
        is recomputed."""
        self._enter(flops, {self.storage(t) for t in inputs}, {self.storage(t) for t in outputs}, runs)

    def peak_bytes(self, live_at_start: dict[int, int], first: int, end: int, ignored: Container[int]) -> int:
        """The most bytes alive at once from allocation number `first` until `end`, without storages that are `ignored`.
        `live_at_start` is `live_bytes` as it was at `first`."""
        live = peak = sum(nbytes for storage, nbytes in live_at_start.items() if storage not in ignored)
        for allocation in self.allocations[first:end]:
            if allocation.storage not in ignored:
                live += allocation.nbytes
                peak = max(peak, live)
        return peak

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            return self._answer(args[0])
        out = func(*args, **kwargs)
        outputs = {self.storage(t) for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_meta}
        if not self.counts:
            return out
        inputs = {self.storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.is_meta}
        written = outputs if func._schema.is_mutable else outputs - inputs   # the others are views
        flops = op_flops(func, args, kwargs, out)
        if written:
            self._enter(flops, inputs, written, runs=True)
            for serial in written:
                self._asked_of[serial] = func._overloadpacket
        return out

    def _enter(self, flops: int, inputs: set[int], written: set[int], runs: bool) -> None:
        if runs and flops:
            section = self.place.section
            self.section_flops[section] = self.section_flops.get(section, 0) + flops
        self.ops.append(Op(flops, tuple(inputs - self.permanent)))
        for serial in written - self.permanent:
            self.made_at.setdefault(serial, self.place)
            self.writers.setdefault(serial, []).append(len(self.ops) - 1)

    def _answer(self, tensor: Tensor) -> bool:
        asked = self._asked_of.get(self.storage(tensor))
        if tensor.dtype is torch.bool and asked in _ANSWERS:
            return _ANSWERS[asked]
        raise ConfigError(f"module {self.place.path or 'at the top'!r} looks at the values of its tensors (a "
                          f"{str(tensor.dtype).removeprefix('torch.')} made by {asked}), which do not exist before the "
                          "run: its cost cannot be told from the model alone")

    def _died(self, serial: int) -> None:
        self._references.pop(serial, None)
        nbytes = self.live_bytes.pop(serial, None)
        if nbytes is not None:
            self.allocations.append(Allocation(serial, -nbytes))
