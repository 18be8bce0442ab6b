"""`OpRecorder` and `OpReplay`: a forward whose saved results are not computed a second time when it runs again.

[Note: same results, same place]
The recorder notes every operation of a unit's forward: which function, and where each of its inputs came from (the
output of an earlier operation, an argument of the unit, or from outside). When autograd then saves what an operation
made, and the plan keeps or swaps it, the operation's result is known in backward. The replay walks through the same
operations. As long as each has the function and the inputs that were recorded, it hands out results that are still
there, and computes the others. The first operation that is another (an autocast cache was full in forward and is empty
now, a parameter had to be fetched) ends that: from there on everything is computed, which is slower and never wrong.

Operations that draw random numbers move the generators; one that is not computed sets them to where it left them.
Results that only depend on the outside (a cast of a weight) are always computed.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lohan_ds.runtime.compute_state import RngState

_IGNORED = frozenset((torch.ops.aten.detach.default, torch.ops.prim.device.default))   # also ours
_SMALL_BYTES = 256     # such results are held as they are: sizes and seeds beside a large one
Key = tuple            # ("op", operation, output), ("input", leaf) or ("outside", shape, dtype)


class _Made(NamedTuple):
    """A storage that an operation made, or that the unit was called with."""
    ref: StorageWeakRef
    key: Key
    path: str          # of the module that was running


class _Output:
    """One result of an operation: not a tensor, a small tensor, or a tensor that autograd saved (`saved`)."""
    __slots__ = ("value", "version", "saved", "dtype", "size", "stride", "offset")

    def __init__(self, leaf: Any):
        self.saved: weakref.ref | None = None     # to what autograd keeps instead of it
        self.value, self.version = None, 0
        if not isinstance(leaf, Tensor):
            self.value = leaf
            return
        self.dtype, self.size, self.stride = leaf.dtype, leaf.size(), leaf.stride()
        self.offset = leaf.storage_offset()
        if leaf.nbytes <= _SMALL_BYTES:
            self.value, self.version = leaf, leaf._version


class _Operation(NamedTuple):
    func: Any
    inputs: tuple[Key, ...]
    outputs: list[_Output]
    spec: TreeSpec
    rng: RngState | None       # after it, if it draws


class _Tracer(TorchDispatchMode):
    """What both have in common: they count operations and know where storages came from. One thread."""

    def __init__(self, inputs: list[Tensor], path_of: Callable[[], str] = lambda: ""):
        super().__init__()
        self.is_paused = False                     # operations of our own are not counted
        self._path_of = path_of
        self._made: dict[int, _Made] = {}          # by storage
        for leaf, tensor in enumerate(inputs):
            self._note(tensor, ("input", leaf))

    def _note(self, tensor: Tensor, key: Key) -> None:
        storage = tensor.untyped_storage()
        if self.made(storage) is None:             # else the result is a view of its argument
            self._made[storage._cdata] = _Made(StorageWeakRef(storage), key, self._path_of())

    def made(self, storage: torch.UntypedStorage) -> _Made | None:
        made = self._made.get(storage._cdata)      # the weak reference keeps the address from being used again
        return None if made is None or made.ref.expired() else made

    def _keys(self, args: tuple, kwargs: dict) -> tuple[Key, ...]:
        keys = []
        for leaf in tree_flatten((args, kwargs))[0]:
            if isinstance(leaf, Tensor):
                made = self.made(leaf.untyped_storage()) if leaf.layout is torch.strided else None
                keys.append(made.key if made is not None else ("outside", leaf.shape, leaf.dtype))
        return tuple(keys)

    def _note_outputs(self, number: int, leaves: list[Any]) -> None:
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                self._note(leaf, ("op", number, place))


class OpRecorder(_Tracer):
    """Around a unit's forward. `saved` says what autograd keeps; `operations` goes to the replay."""

    def __init__(self, inputs: list[Tensor], device: torch.device, path_of: Callable[[], str]):
        """`inputs`: tensors among the unit's arguments, in order. `path_of()`: the module that is running."""
        super().__init__(inputs, path_of)
        self._device = device
        self.operations: list[_Operation] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.is_paused or func in _IGNORED:
            return func(*args, **kwargs)
        keys = self._keys(args, kwargs)
        out = func(*args, **kwargs)
        leaves, spec = tree_flatten(out)
        rng = RngState(self._device) if torch.Tag.nondeterministic_seeded in func.tags else None
        self._note_outputs(len(self.operations), leaves)
        self.operations.append(_Operation(func, keys, [_Output(leaf) for leaf in leaves], spec, rng))
        return out

    def saved(self, tensor: Tensor, packed: Any) -> None:
        """Autograd keeps `packed` (weakly referable) for `tensor`."""
        made = self.made(tensor.untyped_storage())
        if made is not None and made.key[0] == "op" and tensor._version == 0:
            output = self.operations[made.key[1]].outputs[made.key[2]]
            output.saved = weakref.ref(packed)


class OpReplay(_Tracer):
    """Around a second run of the forward that `operations` were recorded in."""

    def __init__(self, operations: list[_Operation], inputs: list[Tensor], load: Callable[[Any], Tensor]):
        """`load(packed)`: a tensor in the storage that was saved."""
        super().__init__(inputs)
        self._operations, self._load = operations, load
        self._next = 0
        self._has_diverged = False
        self.num_reused = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.is_paused or func in _IGNORED:
            return func(*args, **kwargs)
        number, keys = self._next, self._keys(args, kwargs)
        self._next += 1
        operation = self._operations[number] if number < len(self._operations) else None
        if operation is None or operation.func is not func or operation.inputs != keys:
            self._has_diverged = True
        leaves = None if self._has_diverged else self._reuse(operation)
        if leaves is None:
            out = func(*args, **kwargs)
            self._note_outputs(number, tree_flatten(out)[0])
            return out
        self._note_outputs(number, leaves)
        self.num_reused += 1
        if operation.rng is not None:
            operation.rng.restore()
        return tree_unflatten(leaves, operation.spec)

    def _reuse(self, operation: _Operation) -> list[Any] | None:
        """The results of an operation, None unless all of them are there."""
        if all(key[0] == "outside" for key in operation.inputs):
            return None
        kept = [output.saved() if output.saved is not None else None for output in operation.outputs]
        if all(packed is None for packed in kept):
            return None
        leaves = []
        for output, packed in zip(operation.outputs, kept):
            if packed is not None:
                whole = self._load(packed)
                leaves.append(torch.empty(0, dtype=output.dtype, device=whole.device).set_(
                    whole.untyped_storage(), output.offset, output.size, output.stride))
            elif isinstance(output.value, Tensor):
                if output.value._version != output.version:
                    return None
                leaves.append(output.value)
            elif output.value is not None or not hasattr(output, "dtype"):
                leaves.append(output.value)
            else:
                return None
        return leaves
