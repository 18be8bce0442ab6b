"""Items and their policies: `UnitPolicies` of a unit, `UnitPass` of one call of it, `Kept` of what stays.

What an item is: plan.ActivationPlan. Which one a saved tensor belongs to is decided by where its storage was made, not
by who saves it: the input of `down_proj` is an item of the module that computed it.

[Note: detached]
An operation that saves its own result would keep itself alive through a pack hook that returns that very tensor: a
cycle through C++ that no collector sees, and a leak whenever a graph is dropped without backward. What pack hooks keep
is always detached; storage and version counter are the same.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lohan_ds.errors import ConfigError, StepError
from lohan_ds.plan import ActivationPolicy
from lohan_ds.runtime.op_replay import OpRecorder
from lohan_ds.runtime.recompute import RecomputeFrame
from lohan_ds.runtime.swapped_storage import CHANGED, SwappedStorage

INPUT, OWN_CODE, WHOLE = "input", "forward", ""
_DTYPES = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))


class UnitPolicies:
    """Fixed after construction, but for a cache of answers."""

    def __init__(self, name: str, module: nn.Module, policies: Mapping[str, ActivationPolicy]):
        """ConfigError for an item that the unit has not, or an input that is to be recomputed."""
        self.name = name
        paths = [path for path, _ in module.named_modules() if path]
        unknown = sorted(set(policies) - set(paths) - {INPUT, OWN_CODE, WHOLE})
        if unknown:
            raise ConfigError(f"the plan has a policy for {unknown[0]!r}, which unit {name} has not; it has "
                              f"{', '.join([INPUT, OWN_CODE, *paths])}")
        if policies.get(INPUT) == "recompute":
            raise ConfigError(f"the plan recomputes the input of unit {name}: an input can be kept or swapped")
        self._policies = dict(policies)
        whole = policies.get(WHOLE, "keep")
        self._policies.setdefault(INPUT, "keep" if whole == "recompute" else whole)
        self._policies.setdefault(OWN_CODE, whole)
        of_items = {self.of(item) for item in (OWN_CODE, *paths)}
        self.is_mixed = len(of_items) > 1           # else nobody need know which module is running
        self.recomputes = "recompute" in of_items
        self.tiers = {policy for policy in of_items | {self.of(INPUT)} if policy.startswith("swap")}
        self.keeps_all = not self.recomputes and not self.tiers

    def of(self, item: str) -> ActivationPolicy:
        """Of a module's path, "forward" or "input"."""
        policy = self._policies.get(item)
        if policy is None:
            policy = self._policies[item] = self.of(item.rpartition(".")[0]) if "." in item else \
                self._policies.get(WHOLE, "keep")
        return policy

    def __str__(self) -> str:
        """"input swap_host; forward recompute; mlp.down_proj keep": each policy that differs from the parent's."""
        said = [INPUT, OWN_CODE]
        said += sorted(path for path in self._policies if path not in (INPUT, OWN_CODE, WHOLE)
                       and self._policies[path] != self.of(path.rpartition(".")[0] or OWN_CODE))
        return "; ".join(f"{item} {self._policies[item]}" for item in said)


def check_nesting(policies: Sequence[UnitPolicies], modules: Sequence[nn.Module]) -> None:
    """ConfigError if a unit is to be recomputed and one inside of it has a policy of its own."""
    for outer, module in zip(policies, modules):
        inside = {id(inner) for inner in module.modules()} - {id(module)}
        nested = [other.name for other, m in zip(policies, modules) if id(m) in inside and not other.keeps_all]
        if outer.recomputes and nested:
            raise ConfigError(f"the plan recomputes {outer.name} and has a policy for {nested[0]} inside it: plan one "
                              "of them")


class UnitPass:
    """One call of a unit: alive as long as something that it saved. Used by one thread until `close`."""

    def __init__(self, policies: UnitPolicies, serial: int, module: nn.Module, inputs: list[Tensor]):
        """`inputs`: the plain tensors among the arguments. `serial`: passes are numbered in the order of forward."""
        self.policies, self.name, self.serial = policies, policies.name, serial
        self.storages: list[weakref.ref[SwappedStorage]] = []    # in the order of saving
        self.begun_in = -1                       # the backward (its graph task) in which its way back has begun
        self.frame: RecomputeFrame | None = None       # while it runs, if something of it is recomputed
        self.recorder: OpRecorder | None = None        # while it runs, if its items differ
        self.paths: list[str] = [OWN_CODE]             # of the modules that are running, innermost last
        self._inputs = {_storage_id(tensor) for tensor in inputs}
        self._lasting = _lasting_storages(module)      # parameters and buffers: they stay anyway

    def close(self) -> None:
        """The call is over. What autograd keeps refers to this pass, so it must not refer back."""
        if self.frame is not None:
            self.frame.end_forward()
        self.frame = self.recorder = None
        self._inputs, self._lasting = set(), set()

    def item_of(self, tensor: Tensor) -> str:
        """What a plain tensor belongs to that autograd saves now."""
        if _storage_id(tensor) in self._inputs:
            return INPUT
        made = self.recorder.made(tensor.untyped_storage()) if self.recorder is not None else None
        return made.path if made is not None else self.paths[-1]

    def lasts(self, tensor: Tensor) -> bool:
        """Whether it is a parameter or buffer of the unit, or a view of one."""
        return _storage_id(tensor) in self._lasting


class Kept:
    """What autograd keeps of a tensor that stays. With hooks torch itself does not notice changes in place."""
    __slots__ = ("tensor", "version", "unit", "item", "__weakref__")

    def __init__(self, tensor: Tensor, unit: str, item: str):
        self.tensor, self.version = tensor.detach(), tensor._version
        self.unit, self.item = unit, item

    def take(self) -> Tensor:
        """StepError if it was changed in place."""
        if self.tensor._version != self.version:
            raise StepError(CHANGED.format(unit=self.unit, item=self.item))
        return self.tensor


def is_swappable(tensor: Tensor, device: torch.device, smallest_bytes: int) -> bool:
    """Whether a plain tensor can leave: of floats, on `device`, large enough, with nothing special about it."""
    return (tensor.dtype in _DTYPES and tensor.device == device and tensor.dim() > 0 and tensor.numel() > 0
            and not (tensor.is_leaf and tensor.requires_grad) and not tensor.is_neg()
            and tensor.untyped_storage().nbytes() >= smallest_bytes)


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _lasting_storages(module: nn.Module) -> set[int]:
    with torch._C.DisableTorchFunctionSubclass():   # looking at a released parameter would fetch it
        return {_storage_id(t) for find in (module.parameters, module.buffers) for t in find()
                if t.layout is torch.strided}


def track_modules(module: nn.Module, running: Callable[[], UnitPass | None], policies: UnitPolicies) -> list:
    """Keeps `paths` of the running pass up to date while modules inside of `module` run; returns the handles."""
    def enter(path: str) -> Callable:
        def pre_forward(_, args) -> None:
            unit_pass = running()
            if unit_pass is not None and unit_pass.policies is policies:
                unit_pass.paths.append(path)
        return pre_forward

    def leave(path: str) -> Callable:
        def post_forward(_, args, output) -> None:
            unit_pass = running()
            if unit_pass is not None and unit_pass.policies is policies and unit_pass.paths[-1] == path:
                unit_pass.paths.pop()
        return post_forward

    handles = []
    for path, inner in module.named_modules():
        if path:
            handles.append(inner.register_forward_pre_hook(enter(path), prepend=True))
            handles.append(inner.register_forward_hook(leave(path), always_call=True))
    return handles
