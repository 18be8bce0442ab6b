"""`ParamStreamer`: brings blocks of parameters to the accelerator when a module needs them, and drops them after.

It owns the module hooks, so it is the clock of a step. It updates nothing.

[Note: residency]
A block is OFFLOADED -> FETCHING -> RESIDENT -> OFFLOADED. What is resident is decided at four moments: a unit's
forward begins or ends, a unit's backward begins (its output's gradient has come), backward is over. Everything
else is a safety net that makes a wrong prediction slow instead of wrong: an operation on a released parameter
fetches its block (`released_parameter.py`), and so does unpacking a saved weight in backward.

What autograd saves of weights is the matter of saved_weights.py.

A fetched block lives in a buffer of its own; see fetch_buffers.py for when that is used again.

[Note: lent]
Where the accelerator's memory is the host's and the params are in host RAM, units compute with the store's own tensor:
nothing is copied. Whoever else looks at a parameter gets a copy, which stays as it is when the block is updated later.
An edit of a lent tensor, in a unit's own forward, is in the store already; its master has yet to follow.
"""
from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lohan_ds.block import Block
from lohan_ds.errors import StepError
from lohan_ds.runtime.fetch_buffers import FetchBuffers, StagingRing
from lohan_ds.runtime.param_edits import ParamEdits
from lohan_ds.runtime.recorder import Recorder, stalling
from lohan_ds.runtime.released_parameter import mark_released, mark_resident, mark_watched
from lohan_ds.runtime.residence import Residence, Residency
from lohan_ds.runtime.saved_weights import SavedWeights
from lohan_ds.runtime.streams import Streams
from lohan_ds.store.block_store import BlockStore
from lohan_ds.work import Work

logger = logging.getLogger(__name__)


class Unit(NamedTuple):
    """A module that runs forward as a whole, and the blocks its forward needs."""
    name: str
    module: nn.Module
    blocks: tuple[int, ...]


class ParamStreamer:
    """Fixed after construction: units, blocks, params. Everything else is under `_lock`.

    `params[b][s]` is the live `nn.Parameter` of slot s of block b. `on_edit(block, slot, values)` is called with a
    parameter's new values (flat, block dtype, device) when user code changed them while they were resident.
    `check_background()` raises the first failure of background work.
    """

    def __init__(self, units: Sequence[Unit], blocks: Sequence[Block], params: Sequence[Sequence[nn.Parameter]],
                 store: BlockStore, streams: Streams, device: torch.device, prefetch_depth: int,
                 take_staging: Callable[[int], Tensor] | None,
                 on_edit: Callable[[int, int, Tensor], None], check_background: Callable[[], None],
                 set_status: Callable[[nn.Parameter, bool], None] = lambda param, available: None,
                 recorder: Recorder | None = None):
        self._units, self._blocks, self._params = units, blocks, params
        self._store, self._streams, self._device = store, streams, device
        self._prefetch_depth = prefetch_depth
        self._recorder = recorder
        self._check_background, self._set_status = check_background, set_status
        self._lock = threading.RLock()
        self._residence = [Residence() for _ in blocks]
        self._edits = ParamEdits(blocks, params, self._residence, store, on_edit)
        self.saved = SavedWeights(self._residence, self._finish, lambda b: blocks[b].name,
                                  self._edits.in_place_version, self._lock)
        self._accessed: deque[int] = deque()     # blocks fetched by a look from outside a unit, oldest first
        largest = sorted((sum(blocks[b].param_bytes for b in unit.blocks) for unit in units), reverse=True)
        planned_bytes = sum(largest[:prefetch_depth + 2])   # as planner/memory_model.py counts them
        self.buffers = FetchBuffers(planned_bytes, device, streams.compute_mark)
        self._staging = StagingRing(take_staging, prefetch_depth + 2, max(b.param_bytes for b in blocks)) \
            if take_staging is not None else None
        self._next_unit: dict[tuple[bool, int], int] = {}   # (in backward, unit) -> the unit that followed it last time
        self._last_unit: tuple[bool, int] | None = None
        self._placeholders = [[_placeholder(slot.shape, getattr(torch, block.dtype), device) for slot in block.slots]
                              for block in blocks]
        self._handles: list = []
        self.bytes_fetched = 0

    # -- attaching ---------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Registers the module hooks and releases every parameter (their values must already be in the store)."""
        for index, unit in enumerate(self._units):
            self._handles.append(unit.module.register_forward_pre_hook(functools.partial(self._pre_forward, index),
                                                                       prepend=True))
            self._handles.append(unit.module.register_forward_hook(functools.partial(self._post_forward, index),
                                                                   always_call=True))
            self._next_unit.setdefault((False, index), index + 1)
            self._next_unit.setdefault((True, index + 1), index)
        for block_index, block_params in enumerate(self._params):
            for param in block_params:
                param.lohan_access, param.lohan_handed_out = self._access, self._handed_out
                param.lohan_saved_tensors_hooks = self.saved.hooks_for_look
                param.lohan_block = block_index
            self._drop(block_index)

    def detach(self) -> None:
        """Removes the hooks. Released parameters stay released: their values live in the store."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        with self._lock:
            self.buffers.clear()
            if self._staging is not None:
                self._staging.drain()

    # -- the moments -------------------------------------------------------------------------------------------

    def _pre_forward(self, index: int, module: nn.Module, args) -> None:
        with self._lock:
            for b in self._units[index].blocks:
                residence = self._residence[b]
                if residence.state is Residency.RESIDENT and not residence.num_running and not _in_backward():
                    has_moved = self._edits.write_back(b)   # made before this forward: its graph is not stale
                    if has_moved and not residence.num_gathered:
                        self._drop(b)   # what is saved of it is to be known as ours
                residence.num_running += 1
            self._enter(index)

    def _post_forward(self, index: int, module: nn.Module, args, output) -> None:
        self._compute(None)
        with self._lock:
            for b in self._units[index].blocks:
                self._residence[b].num_running -= 1
            if not _in_backward():  # else a recompute: it is released when the next unit begins
                following = self._following(index)
                needed_soon = {b for unit in following for b in self._units[unit].blocks}
                is_last = not following and torch.is_grad_enabled()  # its backward comes next
                for b in self._units[index].blocks:
                    if not is_last and b not in needed_soon:
                        self._release(b)
            for b in self._units[index].blocks:
                self._watch(b)
        if torch.is_grad_enabled() and output is not None:
            outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
            if outputs:
                torch.autograd.graph.register_multi_grad_hook(
                    outputs, functools.partial(self._pre_backward, index), mode="any")

    def run_in_unit(self, index: int, function: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """function(hidden), as if it were a forward of this unit; it may use the unit's weights, there and in backward.

        Without an outer forward the hooks on saved tensors are put up here.
        """
        module, output = self._units[index].module, None
        with self.saved.hooks_for_look():
            self._pre_forward(index, module, (hidden,))
            try:
                output = function(hidden)
                return output
            finally:
                self._post_forward(index, module, (hidden,), output)

    @contextlib.contextmanager
    def running_again(self, index: int) -> Iterator[None]:
        """Around a second run of a unit's forward, in its backward, without the module's hooks."""
        blocks = self._units[index].blocks
        with self._lock:
            for b in blocks:
                self._residence[b].num_running += 1
                self._finish(b)
                self._unwatch(b)
        try:
            yield
        finally:
            with self._lock:
                for b in blocks:
                    self._residence[b].num_running -= 1
                    self._watch(b)

    def _pre_backward(self, index: int, grad: Tensor) -> None:
        with self._lock:
            self._enter(index)

    def end_backward(self) -> None:
        """Backward is over: nothing is needed until the next forward."""
        self._compute(None)
        with self._lock:
            self._keep_only(set())
            self._last_unit = None

    def release_all(self) -> None:
        """Ahead of an update: writes back edits and drops every block. Raises StepError inside GatheredParameters."""
        with self._lock:
            held = [self._blocks[i].name for i, r in enumerate(self._residence) if r.num_gathered]
            if held:
                raise StepError(f"step() inside GatheredParameters of block {held[0]}: leave the context first")
            for b, residence in enumerate(self._residence):
                residence.num_running = 0
                self._forget(b)
            self._accessed.clear()
            self._last_unit = None

    def reset(self) -> None:
        """After an exception in forward or backward: as if no forward had begun."""
        self._compute(None)
        with self._lock:
            for residence in self._residence:
                residence.num_running = 0
            self._keep_only(set())
            self._last_unit = None

    def prefetch_first(self) -> None:
        """Starts fetching what the next forward needs first."""
        with self._lock:
            for index in range(min(1 + self._prefetch_depth, len(self._units))):
                self._start_unit(index)

    def block_changed(self, block_index: int) -> None:
        """The block is about to be updated: graphs saved before are stale."""
        with self._lock:
            self._residence[block_index].version += 1

    def invalidate(self, block_index: int) -> None:
        """Ahead of a write to the block's values in the store. StepError while a forward or a context uses it."""
        with self._lock:
            self._forget(block_index)
            residence = self._residence[block_index]
            if residence.state is not Residency.OFFLOADED:
                raise StepError(f"block {self._blocks[block_index].name} is in use by a running forward or a "
                                "GatheredParameters context; change its values after that")
            residence.version += 1

    def _enter(self, index: int) -> None:
        """A unit is about to compute: makes it resident, starts the next ones, drops what is not needed."""
        self._compute(None)
        self._check_background()
        backward = _in_backward()
        if self._last_unit is not None and self._last_unit[0] == backward and self._last_unit[1] != index:
            self._next_unit[self._last_unit] = index
        self._last_unit = (backward, index)
        following = self._following(index)
        keep = {b for unit in (index, *following) for b in self._units[unit].blocks}
        self._keep_only(keep)
        for unit in (index, *following):
            self._start_unit(unit, demand=unit == index)
        for b in self._units[index].blocks:
            self._finish(b)
            if self._residence[b].num_running:
                self._unwatch(b)
            else:   # in its backward autograd computes, and only hooks of the user look at it
                self._watch(b)
        self._compute(self._units[index].name)

    def _compute(self, name: str | None) -> None:
        if self._recorder is not None:
            self._recorder.compute(name, self._streams.moment())

    def _following(self, index: int) -> list[int]:
        """The units that came after this one last time, nearest first, at most prefetch_depth."""
        backward, units, unit = _in_backward(), [], index
        for _ in range(self._prefetch_depth):
            unit = self._next_unit.get((backward, unit), -1)
            if not 0 <= unit < len(self._units) or unit in units or unit == index:
                break
            units.append(unit)
        return units

    # -- one block ---------------------------------------------------------------------------------------------

    def _start_unit(self, index: int, demand: bool = False) -> None:
        for b in self._units[index].blocks:
            self._start(b, demand)

    def _start(self, b: int, demand: bool, lend: bool = True) -> None:
        residence = self._residence[b]
        if residence.state is not Residency.OFFLOADED:
            return
        if self._staging is not None and not demand and not self._staging.has_free():
            return  # prefetch slows down, it never waits
        lent = self._store.lend_params(b) if lend and self._streams.unified else None
        if lent is not None:
            residence.is_lent, residence.work, residence.state = True, lent, Residency.FETCHING
            return
        block = self._blocks[b]
        with torch.inference_mode(False):   # else a later training forward could not save what lies in it
            buffer, mark = self.buffers.take(block)
        if self._staging is None:
            work = self._store.read_params(b, buffer)
        else:
            raw = self._staging.take()
            staging = raw[:block.param_bytes].view(buffer.dtype)
            work = self._store.read_params(b, staging).then(
                lambda _: self._streams.h2d(buffer, staging, after=mark))
            self._staging.in_use(raw, work)
        residence.buffer, residence.work, residence.state = buffer, work, Residency.FETCHING
        self.bytes_fetched += block.param_bytes

    def _finish(self, b: int, lend: bool = True) -> None:
        """Waits until the block may be computed with. Without `lend` it lies in no tensor of the store, if it is not
        computed with already: see [Note: lent]."""
        residence = self._residence[b]
        if residence.is_lent and not lend:
            self._forget(b)
        if residence.state is Residency.RESIDENT:
            return
        self._start(b, demand=True, lend=lend)
        try:
            if self._recorder is not None:
                self._record_stalls(b)
            result = residence.work.wait()
        except BaseException:
            if not residence.is_lent:
                self.buffers.lose(residence.buffer)
            residence.state, residence.work, residence.buffer = Residency.OFFLOADED, None, None
            residence.is_lent = False
            self._check_background()  # the first cause, if it is known
            raise
        if residence.is_lent:
            residence.buffer = result
        elif self._staging is not None:
            result.compute_wait()
        residence.work = None
        buffer = residence.buffer
        with torch.inference_mode(False):
            for slot, param in zip(self._blocks[b].slots, self._params[b]):
                mark_resident(param, buffer[slot.offset:slot.offset + slot.numel].view(slot.shape))
                self._set_status(param, True)
        residence.seen_versions = [p._version for p in self._params[b]]
        residence.looked_at = False
        self.saved.add(b, buffer)
        residence.state = Residency.RESIDENT

    def _record_stalls(self, b: int) -> None:
        """Waits for a fetch, and says how much of that was for an update. What fails is raised by the caller's own
        wait. The fetch may end before the update: its params come from memory then."""
        fetch = self._residence[b].work
        if not fetch.done():
            with stalling(self._recorder, "update"):
                Work.first_of([fetch, self._store.published(b)]).wait()
            with stalling(self._recorder, "parameters"):
                fetch.exception()

    def _watch(self, b: int) -> None:
        """A resident block that no module computes with: looks go through `_access`, so that no edit is lost."""
        residence = self._residence[b]
        if residence.state is Residency.RESIDENT and not residence.num_running and not residence.num_gathered:
            for param in self._params[b]:
                mark_watched(param, True)

    def _unwatch(self, b: int) -> None:
        for param in self._params[b]:
            mark_watched(param, False)

    def _release(self, b: int) -> None:
        """Drops a resident block unless a running unit or a GatheredParameters context holds it."""
        residence = self._residence[b]
        if residence.state is Residency.RESIDENT and not residence.num_running and not residence.num_gathered:
            self._edits.write_back(b)
            self._drop(b)

    def _forget(self, b: int) -> None:
        """Also drops a fetch that is under way."""
        residence = self._residence[b]
        if residence.state is Residency.FETCHING:
            residence.work.wait()
            residence.state, residence.work = Residency.OFFLOADED, None
            self._give_buffer(residence)
        self._release(b)

    def _give_buffer(self, residence: Residence) -> None:
        buffer, residence.buffer = residence.buffer, None
        if buffer is not None and not residence.is_lent:
            self.buffers.give(buffer)
        residence.is_lent = False

    def _drop(self, b: int) -> None:
        residence = self._residence[b]
        for param, placeholder in zip(self._params[b], self._placeholders[b]):
            mark_released(param, placeholder)
            self._set_status(param, False)
        residence.state = Residency.OFFLOADED
        if residence.buffer is not None:
            self.saved.remove(residence.buffer)
            self._give_buffer(residence)

    def _keep_only(self, keep: set[int]) -> None:
        for b, residence in enumerate(self._residence):
            if b in keep or residence.state is Residency.OFFLOADED:
                continue
            if residence.state is Residency.RESIDENT:
                self._release(b)
            elif residence.work.done() and residence.work.exception() is None:
                self._forget(b)

    # -- looks and edits from outside ----------------------------------------------------------------------------

    def _access(self, params: Sequence[nn.Parameter]) -> None:
        """Called by a released parameter whose values are wanted."""
        wanted = {param.lohan_block for param in params}
        self.fetch(wanted)
        with self._lock:
            for b in wanted:
                self._watch(b)
                if b in self._accessed:
                    self._accessed.remove(b)
                self._accessed.append(b)
            for b in list(self._accessed):
                if len(self._accessed) <= max(self._prefetch_depth + 2, len(wanted)):
                    break
                if b not in wanted and not self._is_held(b):   # else it may be edited yet, and takes its memory anyway
                    self._accessed.remove(b)
                    self._release(b)

    def _is_held(self, b: int) -> bool:
        """Whether somebody has a view of the block's buffer."""
        buffer = self._residence[b].buffer
        if buffer is None or not self._residence[b].looked_at:
            return False
        ours = 2 + len(self._params[b])   # the buffer, the one made to ask, and a view for each parameter
        return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata) > ours

    def _handed_out(self, params: Sequence[nn.Parameter]) -> None:
        with self._lock:
            for param in params:
                self._residence[param.lohan_block].looked_at = True

    def fetch(self, block_indexes: Iterable[int]) -> None:
        """Makes these blocks resident, waiting for their updates only."""
        with self._lock:
            self._check_background()
            for b in block_indexes:
                self._finish(b, lend=False)

    def gather(self, params: Sequence[nn.Parameter]) -> None:
        """Holds the blocks of `params` resident until `ungather`."""
        with self._lock:
            blocks = {p.lohan_block for p in params}
            self.fetch(blocks)
            for b in blocks:
                self._unwatch(b)
            for param in params:
                self._residence[param.lohan_block].num_gathered += 1

    def ungather(self, params: Sequence[nn.Parameter], edited: bool) -> None:
        """Ends a `gather`; `edited` says that values may have changed."""
        with self._lock:
            for param in params:
                residence = self._residence[param.lohan_block]
                residence.num_gathered -= 1
                residence.looked_at |= edited
            for b in {p.lohan_block for p in params}:
                self._release(b)

    def flush(self, b: int) -> None:
        """Ahead of a read from the store: edits of the block, if it is resident, get there."""
        with self._lock:
            if self._residence[b].state is Residency.RESIDENT:
                self._edits.write_back(b)

    # -- saved tensors -------------------------------------------------------------------------------------------

    def saved_tensors_hooks(self) -> contextlib.AbstractContextManager[None]:
        """Context for a forward, or a backward that computes forwards again."""
        return self.saved.hooks()

    def weights_version(self, index: int) -> tuple[Hashable, ...]:
        """Changes with every update and edit of a weight of this unit, those included that leave no trace."""
        with self._lock:
            return tuple(self._edits.version(b) for b in self._units[index].blocks)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _placeholder(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One NaN in the parameter's shape; each has a storage of its own, so that sharing is never guessed from it."""
    return torch.full((1,), float("nan"), dtype=dtype, device=device).expand(shape)
