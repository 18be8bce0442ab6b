"""`RecomputeFrame`: a unit's forward that runs again in backward, for what autograd did not get to keep.

[Note: positions]
Autograd saves tensors in the order in which a forward computes. Each of them has a position, whatever becomes of it;
what is to be recomputed leaves a `Recomputed` behind. When the first of these is needed the forward runs again, and
what it saves at the same positions is what they stand for. The run ends as soon as the last of them has its value.
Nothing is shared with torch.utils.checkpoint: a checkpoint inside the unit, or around it, keeps its own books, and
what it saves from our point of view (its inputs) has positions like anything else.

A value is used once. A second use (`retain_graph`) runs the forward once more.
"""
from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lohan_ds.errors import StepError
from lohan_ds.runtime.compute_state import ComputeState
from lohan_ds.runtime.op_replay import OpRecorder, OpReplay


class Recomputed:
    """What autograd keeps instead of a tensor that will be computed again. `value` belongs to the frame."""
    __slots__ = ("frame", "size", "dtype", "value", "__weakref__")

    def __init__(self, frame: RecomputeFrame, tensor: Tensor):
        self.frame, self.size, self.dtype = frame, tensor.size(), tensor.dtype
        self.value: Tensor | None = None

    def take(self) -> Tensor:
        """The tensor that `frame.run()` has made, for one use."""
        assert self.value is not None
        value, self.value = self.value, None
        return value


class RecomputeFrame:
    """One call of a unit. Used by the thread of the forward, then by autograd's. Kept alive by its `Recomputed`s only.

    `pack_input(tensor)` and `unpack(packed)` keep and give back the tensors among the arguments; `load(packed)` is for
    `OpReplay`. `weights_version()` changes when a weight of the unit does.
    """

    def __init__(self, unit_pass: Any, forward: Callable, args: tuple, kwargs: dict, device: torch.device,
                 pack_input: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor], load: Callable[[Any], Tensor],
                 weights_version: Callable[[], Hashable], recorder: OpRecorder | None):
        self.unit_pass, self._forward = unit_pass, forward
        self._leaves, self._spec = tree_flatten((args, kwargs))
        self._leaves = [_snapshot(leaf) for leaf in self._leaves]
        self._are_packed = False                       # only once something is to be recomputed
        self._requires_grad: list[bool] = []
        self._state = ComputeState(device)
        self._pack_input, self._unpack, self._load = pack_input, unpack, load
        self._weights_version, self._version = weights_version, weights_version()
        self._operations = recorder.operations if recorder is not None else None
        self._waiting: list[weakref.ref[Recomputed] | None] = []   # by position
        self._is_discarded = False

    def position(self, tensor: Tensor, recompute: bool) -> Recomputed | None:
        """Autograd saves `tensor`: what to keep for it, None if the caller keeps it."""
        if not recompute:
            self._waiting.append(None)
            return None
        if not self._are_packed:
            self._are_packed = True
            self._requires_grad = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in self._leaves]
            self._leaves = [self._pack_input(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        recomputed = Recomputed(self, tensor)
        self._waiting.append(weakref.ref(recomputed))
        return recomputed

    def end_forward(self) -> None:
        """Arguments are not held for nothing."""
        if not self._are_packed:
            self._leaves = []

    def release_values(self) -> None:
        """Backward is over: what was computed and not used goes."""
        for recomputed in self._alive().values():
            recomputed.value = None

    def discard(self) -> None:
        """Gives up, whoever still holds a `Recomputed`."""
        self.release_values()
        self._is_discarded, self._leaves = True, []

    def run(self) -> int:
        """Gives all live `Recomputed`s their values; returns how many operations had their results still. StepError
        if the values cannot be right any more."""
        name = self.unit_pass.name
        if self._is_discarded:
            raise StepError(f"this backward needs unit {name} to run again, but reset_step() dropped its inputs; "
                            "run forward again")
        if self._weights_version() != self._version:
            raise StepError(f"a weight of unit {name} was changed between its forward and this backward, which "
                            "computes part of it again; run forward again after step()")
        collector = _Collector(self._alive(), name)
        args, kwargs = tree_unflatten([self._input(*leaf) for leaf in zip(self._leaves, self._requires_grad)],
                                      self._spec)
        replay = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._state.restored())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(collector.pack, lambda tensor: tensor))
            if self._operations is not None:
                inputs = [leaf for leaf in tree_flatten((args, kwargs))[0] if is_plain(leaf)]
                replay = stack.enter_context(OpReplay(self._operations, inputs, self._load))
            with contextlib.suppress(_Enough):
                self._forward(*args, **kwargs)
        collector.check_complete()
        return replay.num_reused if replay is not None else 0

    def _alive(self) -> dict[int, Recomputed]:
        refs = enumerate(self._waiting)
        return {place: recomputed for place, ref in refs if ref is not None and (recomputed := ref()) is not None}

    def _input(self, leaf: Any, requires_grad: bool) -> Any:
        leaf = _snapshot(self._unpack(leaf))
        return leaf.detach().requires_grad_(requires_grad) if type(leaf) is Tensor else leaf


class _Enough(Exception):
    """All values are there. An Exception, because torch runs `always_call` hooks for no other."""


class _Collector:
    """Takes what a second run saves. One run, one thread."""

    def __init__(self, wanted: dict[int, Recomputed], name: str):
        self._wanted, self._name = wanted, name
        self._num_missing = len(wanted)
        self._position = 0

    def pack(self, tensor: Tensor) -> Tensor:
        recomputed = self._wanted.get(self._position)
        self._position += 1
        tensor = tensor.detach()   # [Note: detached] in activation_items.py
        if recomputed is None:
            return tensor
        if tensor.size() != recomputed.size or tensor.dtype != recomputed.dtype:
            raise StepError(f"unit {self._name} took another path when it ran again: {tensor.dtype} "
                            f"{tuple(tensor.size())} where its forward had saved {recomputed.dtype} "
                            f"{tuple(recomputed.size)}; let the plan keep or swap this unit's activations")
        recomputed.value = tensor
        self._num_missing -= 1
        if self._num_missing == 0:
            raise _Enough
        return tensor

    def check_complete(self) -> None:
        if self._num_missing:
            raise StepError(f"unit {self._name} took another path when it ran again: it saved {self._position} tensors "
                            f"and {self._num_missing} are missing; let the plan keep or swap this unit's activations")


def is_plain(leaf: Any) -> bool:
    """Whether it is a tensor with a storage of its own kind that we may look at."""
    return type(leaf) is Tensor and leaf.layout is torch.strided


def _snapshot(leaf: Any) -> Any:
    """A cache of keys and values as it is now: a forward appends to it, the second run must not find that."""
    if not (hasattr(leaf, "update") and hasattr(leaf, "get_seq_length") and hasattr(leaf, "__dict__")):
        return leaf
    taken = copy.copy(leaf)
    for name, value in vars(taken).items():
        if isinstance(value, list):
            setattr(taken, name, [_snapshot(entry) for entry in value])
        elif isinstance(value, dict):
            setattr(taken, name, dict(value))
        else:
            setattr(taken, name, _snapshot(value))
    return taken
