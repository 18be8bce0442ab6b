"""`ActivationSwapper`: what autograd saves in a forward, kept, swapped out, or computed again, as the plan says.

It works on any module: the forward of each unit is wrapped, and hooks on saved tensors do the rest. It touches no
parameters: `weights` recognises them and says what to keep instead.

[Note: a pass]
One call of a unit is a pass. Its saved tensors refer to it; it refers to none of them, so a graph that is dropped takes
everything with it, without the help of Python's collector. Backward meets the passes in reverse order: the first thing
it needs of one starts the way back of all that the pass swapped out, and of what the pass before it did.

[Note: checkpoints of others]
`gradient_checkpointing_enable`, or torch.utils.checkpoint in user code, save and recompute by themselves; hooks of
theirs then lie over ours. A unit that runs under such hooks is left alone; one that puts them up inside only has its
input swapped. In backward, when they run a unit again, nothing is swapped. Said once, never in the way.

Where device memory is the host's there is nothing to gain from the host tier: "swap_host" is then "keep" by definition
(`stats` counts the bytes). "swap_ssd" is real.
"""
from __future__ import annotations

import functools
import itertools
import logging
import threading
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lohan_ds.errors import ConfigError
from lohan_ds.plan import ActivationPlan, ActivationPolicy
from lohan_ds.runtime.activation_items import INPUT, Kept, UnitPass, UnitPolicies, check_nesting, is_swappable
from lohan_ds.runtime.activation_items import track_modules
from lohan_ds.runtime.op_replay import OpRecorder
from lohan_ds.runtime.recompute import Recomputed, RecomputeFrame, is_plain
from lohan_ds.runtime.recorder import Recorder
from lohan_ds.runtime.saved_weights import WeightHooks
from lohan_ds.runtime.streams import Streams
from lohan_ds.runtime.swap_table import HeldActivation, SwapTable, leak_text
from lohan_ds.runtime.swap_tiers import SwapTier
from lohan_ds.runtime.swapped_storage import SavedView

logger = logging.getLogger(__name__)


class _Running(threading.local):
    """Of each thread: the passes that are running, innermost last, and whether a unit runs again for us."""

    def __init__(self) -> None:
        self.passes: list[UnitPass] = []
        self.is_rerun = False


class ActivationSwapper:
    """Called from the training thread and autograd's. Fixed between `change_policies`: policies; between `attach` and
    `detach`: `_forwards`, `_handles`. The rest has a lock of its own, or belongs to one thread (`_running`)."""

    def __init__(self, units: Sequence[tuple[str, nn.Module]], plan: ActivationPlan, tiers: dict[str, SwapTier],
                 streams: Streams, device: torch.device, weights: WeightHooks, recorder: Recorder | None = None):
        """`units`: names and modules. `tiers`: of "swap_host" and "swap_ssd", what the plan uses; the caller closes
        them, after `detach`. ConfigError if the plan does not fit the units."""
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self._units, self._plan, self._device, self._weights = units, plan, device, weights
        given = itertools.chain(plan.policies, itertools.repeat(()))
        self.policies = [UnitPolicies(name, module, dict(policies))
                         for (name, module), policies in zip(units, given)]
        self._check(tiers, streams)
        self._table = SwapTable(tiers, streams, recorder)
        self._running = _Running()
        self._serials = itertools.count()
        self._frames: weakref.WeakSet[RecomputeFrame] = weakref.WeakSet()
        self._said: set[str] = set()
        self._forwards: list[tuple[nn.Module, Any, Any]] = []   # modules, our `forward`, and their own before, if any
        self._handles: list = []

    def _check(self, tiers: dict[str, SwapTier], streams: Streams) -> None:
        wanted = {tier for policies in self.policies for tier in policies.tiers}
        missing = sorted(wanted - tiers.keys() - ({"swap_host"} if streams.unified else set()))
        if missing:
            raise ConfigError(f"the plan swaps activations ({missing[0]}), but has no space for them")
        check_nesting(self.policies, [module for _, module in self._units])

    # -- attaching -----------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Wraps the units' forwards. A module that is copied afterwards keeps working, on its own parameters."""
        for index, (policies, (_, module)) in enumerate(zip(self.policies, self._units)):
            before = vars(module).get("forward")
            module.forward = wrapped = types.MethodType(self._wrapped(index, module.forward), module)
            self._forwards.append((module, wrapped, before))
            if policies.is_mixed:
                self._handles += track_modules(module, self._top, policies)

    def detach(self) -> None:
        """Units run as before. What graphs still hold is given up."""
        for handle in self._handles:
            handle.remove()
        for module, wrapped, before in self._forwards:
            if vars(module).get("forward") is wrapped:   # else somebody wrapped it again: then ours only hands on
                del module.forward
                if before is not None:
                    module.forward = before
        self._handles, self._forwards = [], []
        self.reset()

    def change_policies(self, of_units: Sequence[tuple[tuple[str, ActivationPolicy], ...]]) -> bool:
        """Between two steps: other policies for all units, in the same space. False, and nothing changes, while
        anything is alive that was saved under the old ones."""
        if self.held() or len(self._frames):
            return False
        self.detach()
        self.policies = [UnitPolicies(name, module, dict(policies))
                         for (name, module), policies in zip(self._units, of_units)]
        check_nesting(self.policies, [module for _, module in self._units])
        self.attach()
        return True

    def _wrapped(self, index: int, bound: Callable) -> Callable:
        function = bound.__func__ if isinstance(bound, types.MethodType) else None

        def forward(module: nn.Module, *args, **kwargs):
            original = bound if function is None else types.MethodType(function, module)
            return self._run_unit(index, module, original, args, kwargs)
        return forward if function is None else functools.wraps(function)(forward)

    @property
    def saved_tensors_hooks(self) -> tuple[Callable, Callable]:
        """For torch.autograd.graph.saved_tensors_hooks, around forwards (and backwards that compute forwards)."""
        return self._pack, self._unpack

    # -- a pass --------------------------------------------------------------------------------------------------

    def _top(self) -> UnitPass | None:
        return self._running.passes[-1] if self._running.passes else None

    def _run_unit(self, index: int, module: nn.Module, forward: Callable, args: tuple, kwargs: dict) -> Any:
        policies, outer = self.policies[index], self._running.passes
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        is_inside = any(unit_pass.frame is not None for unit_pass in outer)   # then it is part of that unit
        if hooks is None or not torch.is_grad_enabled() or self._running.is_rerun or is_inside:
            return forward(*args, **kwargs)
        if policies.keeps_all and not outer:   # it needs no pass
            return forward(*args, **kwargs)
        if _in_backward() or hooks[0] != self._pack:
            self._say_checkpointed(policies)
            return forward(*args, **kwargs)
        checkpoints_itself = getattr(module, "gradient_checkpointing", False) and module.training
        if checkpoints_itself:
            self._say_checkpointed(policies)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if is_plain(leaf)]
        unit_pass = UnitPass(policies, next(self._serials), module, inputs)
        outer.append(unit_pass)
        try:
            if checkpoints_itself or not (policies.is_mixed or policies.recomputes):
                return forward(*args, **kwargs)
            return self._run_recorded(index, unit_pass, forward, args, kwargs, inputs)
        finally:
            outer.pop()
            unit_pass.close()

    def _run_recorded(self, index: int, unit_pass: UnitPass, forward: Callable, args: tuple, kwargs: dict,
                      inputs: list[Tensor]) -> Any:
        policies = unit_pass.policies
        if policies.is_mixed:
            unit_pass.recorder = OpRecorder(inputs, self._device, lambda: unit_pass.paths[-1])
        if policies.recomputes:
            unit_pass.frame = RecomputeFrame(
                unit_pass, self._as_rerun(index, forward), args, kwargs, self._device,
                functools.partial(self._pack_input, unit_pass), self._unpack, self._load,
                functools.partial(self._weights.version, index), unit_pass.recorder)
            self._frames.add(unit_pass.frame)
        if unit_pass.recorder is None:
            return forward(*args, **kwargs)
        with unit_pass.recorder:
            return forward(*args, **kwargs)

    def _as_rerun(self, index: int, forward: Callable) -> Callable:
        def run_again(*args, **kwargs):
            before, self._running.is_rerun = self._running.is_rerun, True
            try:
                with self._weights.running_again(index):
                    return forward(*args, **kwargs)
            finally:
                self._running.is_rerun = before
        return run_again

    def _say_checkpointed(self, policies: UnitPolicies) -> None:
        if not policies.keeps_all:
            self._say_once("checkpointed", (
                f"unit {policies.name} is checkpointed by the model or by user code: there the plan's policies for "
                "activations do not apply, results are the same; leave gradient checkpointing to lohan to have them"))

    def _say_once(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            logger.warning("%s", text)

    # -- saving --------------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Any:
        unit_pass = self._top()
        if unit_pass is None or unit_pass.recorder is None:
            return self._pack_in(unit_pass, tensor)
        unit_pass.recorder.is_paused = True
        try:
            return self._pack_in(unit_pass, tensor)
        finally:
            unit_pass.recorder.is_paused = False

    def _pack_in(self, unit_pass: UnitPass | None, tensor: Tensor) -> Any:
        weight = self._weights.pack(tensor)
        if weight is not None or not is_plain(tensor):
            if unit_pass is not None and unit_pass.frame is not None:
                unit_pass.frame.position(tensor, recompute=False)
            return tensor.detach() if weight is None else weight
        if unit_pass is None:
            return Kept(tensor, "(none)", "outside of units")
        item = unit_pass.item_of(tensor)
        if unit_pass.frame is not None:
            recompute = unit_pass.policies.of(item) == "recompute" and not unit_pass.lasts(tensor)
            recomputed = unit_pass.frame.position(tensor, recompute)
            if recomputed is not None:
                return recomputed
        packed = self._keep_or_swap(unit_pass, tensor, item)
        if unit_pass.recorder is not None:
            unit_pass.recorder.saved(tensor, packed)
        return packed

    def _pack_input(self, unit_pass: UnitPass, tensor: Tensor) -> Any:
        weight = self._weights.pack(tensor)
        if weight is not None or not is_plain(tensor):
            return tensor if weight is None else weight
        return self._keep_or_swap(unit_pass, tensor, INPUT)

    def _keep_or_swap(self, unit_pass: UnitPass, tensor: Tensor, item: str) -> Any:
        policy = unit_pass.policies.of(item)
        storage = None
        if policy.startswith("swap") and not unit_pass.lasts(tensor) and is_swappable(
                tensor, self._device, self._plan.smallest_swap_bytes):
            storage = self._table.swap_out(tensor, policy, unit_pass, item)
            if storage is None and self._table.has(policy):
                self._say_once("full", f"{item} of unit {unit_pass.name} ({tensor.nbytes} bytes) stays on the device: "
                                       f"the space that was planned for {policy} is full; plan more of it")
        return storage.view(tensor) if storage is not None else Kept(tensor, unit_pass.name, item)

    # -- bringing back -------------------------------------------------------------------------------------------

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Kept):
            return packed.take()
        if isinstance(packed, SavedView):
            self._begin_way_back(packed.storage.unit_pass)
            return self._table.fetch(packed.storage).restore(packed)
        if isinstance(packed, Recomputed):
            self._begin_way_back(packed.frame.unit_pass)
            if packed.value is None:
                self._table.counts["operations_reused"] += packed.frame.run()
                self._table.counts["reruns"] += 1
            return packed.take()
        return self._weights.unpack(packed)

    def _load(self, packed: Any) -> Tensor:
        return packed.take() if isinstance(packed, Kept) else self._table.fetch(packed.storage).load()

    def _begin_way_back(self, unit_pass: UnitPass) -> None:
        task = torch._C._current_graph_task_id()
        if unit_pass.begun_in != task:
            unit_pass.begun_in = task
            self._table.start_way_back(unit_pass)

    # -- moments -------------------------------------------------------------------------------------------------

    def end_backward(self) -> None:
        """Backward is over: what was brought back or computed and not used is let go of."""
        self._table.release_resident()
        for frame in list(self._frames):
            frame.release_values()

    def end_step(self) -> None:
        """After step(): names what a graph still holds, once."""
        held = self.held()
        if held:
            self._say_once("held", leak_text(held))

    def reset(self) -> None:
        """After an exception in forward or backward: gives up everything, whoever still holds a graph."""
        self._table.discard()
        for frame in list(self._frames):
            frame.discard()

    # -- facts ---------------------------------------------------------------------------------------------------

    def held(self) -> list[HeldActivation]:
        """What is swapped out now: empty when no graph is alive."""
        self._table.bury()
        return self._table.held()

    def stats(self) -> dict[str, int]:
        """Bytes so far: out and in by tier, out by unit, kept because the plan's space was full, kept because host
        memory is the device's. How many forwards ran again, and how many operations of theirs had not to."""
        return dict(self._table.counts)

    def table(self) -> str:
        """One line per unit: what becomes of its items."""
        return "\n".join(f"{policies.name}: {policies}" for policies in self.policies if not policies.keeps_all)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
