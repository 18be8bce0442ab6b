"""`UnitRuns`: runs a model on meta tensors, each kind of unit once, and finds what every unit costs.

[Note: cutting at units]
The forward runs through the whole model, but a unit that is like one that already ran, with inputs that are alike, is
not run: it hands on stand-ins for its outputs. Every unit is cut out of autograd's graph at its inputs and outputs, so
its backward runs right after its forward, alone, and the graph of a 96-layer model never exists. What runs outside of
units (residual additions, dropout, the loss) belongs to the unit before it, the way it would in time; what comes before
the first unit, to that one. So does what a unit does that has other units inside: only those are cut out.
"""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lohan_ds.profiler.alike import inputs_key, is_plain, module_key
from lohan_ds.profiler.cut import cut, is_cut, make_anchor, run_backward
from lohan_ds.profiler.item_ledger import Claim, ItemLedger
from lohan_ds.profiler.model_hooks import ModulePaths, calls_through, gradients_taken
from lohan_ds.profiler.op_trace import OpTrace, Place
from lohan_ds.profiler.recompute import flops_to_make
from lohan_ds.profiler.unit_record import (InputOutput, ItemRecord, Section, TensorOutput, UnitRecord, UnitTally,
                                           empty_output)
from lohan_ds.runtime.lazy_logits import LazyLogits
from lohan_ds.runtime.param_streamer import Unit
from lohan_ds.runtime.tiled_head import TiledHead


class UnitRuns:
    """One model, one thread. `run` once; then `tallies` and `ledger` have an entry for every unit."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], trace: OpTrace, tiled_head: TiledHead | None = None):
        """`tiled_head`: of the model, not attached yet."""
        self._tiled_head = tiled_head
        self._model, self._units, self._trace = model, units, trace
        self._anchor = make_anchor()
        self.paths = ModulePaths(model, self._set_place)
        self._records: dict[tuple, UnitRecord] = {}
        self._module_keys: dict[int, tuple] = {}
        self._charged: set[int] = set()                  # operators whose FLOPs are in an item
        self._sections: list[Section] = []               # all so far; the last one is running
        self._last_outputs: set[int] = set()             # storages that the last unit handed on
        self.calls: list[int] = []                       # indexes of the units that were called, in order
        self.num_run = 0                                 # of the calls; the others are alike
        self.returned_bytes = 0                          # that the model gave its caller and are not in any item
        self.tallies = [UnitTally() for _ in units]
        self.ledger = ItemLedger()

    def run(self, args: tuple, kwargs: dict[str, Any], loss_of: Callable[[Any], Any]) -> None:
        """Forward of the model on meta arguments, loss and backward; `loss_of` maps the model's output to the loss."""
        with contextlib.ExitStack() as stack:
            for manager in (calls_through(self._units, self._call), self.paths.followed(),
                            gradients_taken(self._model), torch.enable_grad(),
                            torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)):
                stack.enter_context(manager)
            self._attach_tiled_head(stack)
            self._begin(None)
            output = self._model(*args, **kwargs)
            loss = loss_of(output)
            self._sections[-1].name = "loss"
            self._end_outside(tree_flatten(loss)[0], retain_graph=False)
            returned = {self._trace.storage(t) for t in tree_flatten(output)[0] if _is_meta(t)}
            self.returned_bytes = sum(self._trace.nbytes[s] for s in returned - self.ledger.claims.keys())
            if self._tiled_head is not None:   # backward counts as two forwards, and makes the logits once more
                self.tallies[self.calls[-1]].forward_flops *= 4 / 3

    def _attach_tiled_head(self, stack: contextlib.ExitStack) -> None:
        """What it puts off is then the call of its unit."""
        if self._tiled_head is not None:
            head = self._tiled_head.head
            unit = next(i for i, unit in enumerate(self._units) if any(m is head for m in unit.module.modules()))
            self._tiled_head.attach(lambda function, hidden: self._call(unit, function, hidden))
            stack.callback(self._tiled_head.detach)

    # -- sections --------------------------------------------------------------------------------------------------

    def _begin(self, unit: int | None, inputs: Sequence[Any] | None = None) -> Section:
        section = Section(len(self._sections), unit, inputs, len(self._trace.allocations),
                          dict(self._trace.live_bytes), set(self.ledger.claims))
        self._sections.append(section)
        self._set_place()
        return section

    def _set_place(self) -> None:
        self._trace.place = Place(self._sections[-1].number, self.paths.current)

    def _end_outside(self, leads_to: list[Any], retain_graph: bool) -> None:
        """What ran outside of units since the last call goes to the unit of that call. `leads_to`: its results."""
        section = self._sections[-1]
        self._claim_saved(section)
        self._backward(leads_to, retain_graph)
        tally = self.tallies[section.unit or 0]
        tally.forward_flops += self._trace.section_flops.get(section.number, 0)
        section.counted_elsewhere |= self._last_outputs
        tally.workspace_bytes = max(tally.workspace_bytes, self._workspace_bytes(section, set()))

    def _workspace_bytes(self, section: Section, outputs: set[int]) -> int:
        """Bytes at the section's peak, in forward or backward, beyond its items and `outputs` (storages), which are
        gone by the time of backward unless somebody saved them."""
        trace, claims = self._trace, self.ledger.claims
        others = section.counted_elsewhere
        begin, turn, end = section.first_allocation, section.backward_from, len(trace.allocations)
        forward_bytes = trace.peak_bytes(section.live_at_start, begin, turn, others)
        whole_bytes = trace.peak_bytes(section.live_at_start, begin, end, others | (outputs - claims.keys()))
        item_bytes = sum(claim.nbytes for s, claim in claims.items() if s not in section.counted_elsewhere)
        output_bytes = sum(trace.nbytes[s] for s in outputs)
        return max(0, max(forward_bytes, whole_bytes) - item_bytes - output_bytes)

    def _backward(self, tensors: list[Any], retain_graph: bool = False) -> None:
        self._sections[-1].backward_from = len(self._trace.allocations)
        self._trace.counts = False
        run_backward([t for t in tensors if isinstance(t, Tensor) and not is_cut(t)], retain_graph)
        self._trace.counts = True

    # -- calls of units --------------------------------------------------------------------------------------------

    def _call(self, unit: int, forward: Callable, *args, **kwargs) -> Any:
        if not self._trace.counts or self._sections[-1].inputs is not None:
            return forward(*args, **kwargs)   # recomputed by a checkpoint of the model's own, or inside another unit
        leaves, structure = tree_flatten((args, kwargs))
        if self._sections[-1].unit is None:
            self._sections[-1].unit = unit
        differentiable = [i for i, t in enumerate(leaves) if isinstance(t, Tensor) and t.requires_grad]
        self._claim_inputs(unit, leaves, differentiable)
        self._end_outside(leaves, retain_graph=True)   # a residual stream leads to several units
        self.calls.append(unit)
        section = self._begin(unit, leaves)
        key = (self._module_key(unit), inputs_key(args, kwargs))
        record = self._records.get(key)
        if record is not None and record.can_stand_in:
            outputs, structure = self._stand_in(record, section), record.structure
        else:
            self.num_run += 1
            args, kwargs = tree_unflatten([cut(leaf, self._anchor) for leaf in leaves], structure)
            outputs, structure = tree_flatten(forward(*args, **kwargs))
            record = self._records[key] = self._finish_run(section, outputs, structure)
            outputs = [cut(leaf, self._anchor) for leaf in outputs]
        self._tally(record, section)
        self._begin(unit)
        return tree_unflatten(outputs, structure)

    def _module_key(self, unit: int) -> tuple:
        if unit not in self._module_keys:
            self._module_keys[unit] = module_key(self._units[unit].module)
        return self._module_keys[unit]

    def _tally(self, record: UnitRecord, section: Section) -> None:
        tally = self.tallies[section.unit]
        tally.forward_flops += record.forward_flops
        tally.output_bytes = max(tally.output_bytes, record.output_bytes)
        tally.workspace_bytes = max(tally.workspace_bytes, record.workspace_bytes)
        self.ledger.saved.update(self._trace.storage(section.inputs[place]) for place in record.saved_inputs)
        self._claim_inputs(section.unit, section.inputs, record.saved_inputs)

    def _claim_inputs(self, unit: int, leaves: Sequence[Any], places) -> None:
        for place in places:
            storage = self._trace.storage(leaves[place])
            if storage not in self._trace.permanent:
                self.ledger.claim_input(storage, unit, self._trace.nbytes[storage])

    def _finish_run(self, section: Section, outputs: list[Any], structure) -> UnitRecord:
        """After the forward of a unit: claims what it saved, runs its backward."""
        trace, claims = self._trace, self.ledger.claims
        inputs = {trace.storage(t): place for place, t in enumerate(section.inputs) if _is_meta(t)}
        self._claim_saved(section, inputs)
        storages = [trace.storage(t) if _is_meta(t) else None for t in outputs]
        self._last_outputs = {s for s in storages if s is not None and s not in inputs}
        output_bytes = sum(trace.nbytes[s] for s in self._last_outputs)
        described = tuple(self._describe(section, leaf, storage, inputs) for leaf, storage in zip(outputs, storages))
        items = tuple(
            ItemRecord(claim.name, claim.nbytes, claim.flops, storages.index(s) if s in self._last_outputs else None)
            for s, claim in claims.items() if s not in section.counted_elsewhere)
        self._backward(outputs)
        saved_inputs = frozenset(inputs[s] for s in section.saved if s in inputs)
        section.counted_elsewhere |= inputs.keys()   # by who made them, or as this unit's input
        can_stand_in = all(is_plain(leaf) or isinstance(leaf, (TensorOutput, InputOutput)) for leaf in described)
        return UnitRecord(trace.section_flops.get(section.number, 0), items, saved_inputs, output_bytes,
                          self._workspace_bytes(section, self._last_outputs), structure, described,
                          can_stand_in)

    def _describe(self, section: Section, leaf: Any, storage: int | None, inputs: dict[int, int]) -> Any:
        if storage is None:
            return leaf
        if storage in inputs and leaf.shape == section.inputs[inputs[storage]].shape:
            return InputOutput(inputs[storage])
        flops = flops_to_make(self._trace, storage, self.ledger.claims.keys() | inputs.keys(), set(self._charged))
        made_at = self._trace.made_at.get(storage, self._trace.place)
        return TensorOutput(tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad,
                            made_at.path.removeprefix(self._units[section.unit].name), flops)

    def _stand_in(self, record: UnitRecord, section: Section) -> list[Any]:
        """The outputs of a call that is not run, after claiming what it would have saved."""
        trace, made = self._trace, []
        sources = [t for t in section.inputs if _is_meta(t)]
        trace.counts = False
        for output in record.outputs:
            if isinstance(output, TensorOutput):
                tensor = empty_output(output)
                trace.place = Place(section.number, self._units[section.unit].name + output.made_in)
                trace.record(sources, (tensor,), output.flops_if_saved, runs=False)
                made.append(cut(tensor.requires_grad_(output.requires_grad), self._anchor))
            else:
                made.append(section.inputs[output.place] if isinstance(output, InputOutput) else output)
        trace.counts = True
        for item in record.items:
            claim = Claim(section.unit, item.name, item.nbytes, item.flops)
            if item.output is None:
                self.ledger.claim_anonymous(claim)
            else:
                self.ledger.claim(trace.storage(made[item.output]), claim)
        self._last_outputs = {trace.storage(t) for t in made if _is_meta(t)} - {trace.storage(t) for t in sources}
        return made

    # -- what is saved ---------------------------------------------------------------------------------------------

    def _pack(self, tensor: Tensor) -> Tensor:
        if self._trace.counts and tensor.is_meta:
            storage = self._trace.storage(tensor)
            if storage not in self._trace.permanent:
                self._sections[-1].saved[storage] = None
        return tensor

    def _claim_saved(self, section: Section, inputs: dict[int, int] | None = None) -> None:
        """Claims what a section saved, in the order it was made. Inputs of its unit are claimed by the caller."""
        trace, ledger = self._trace, self.ledger
        for storage in sorted(section.saved, key=lambda s: trace.writers.get(s, [-1])[0]):
            if inputs is not None and storage in inputs:
                continue
            ledger.saved.add(storage)
            made_at = trace.made_at.get(storage)
            if made_at is None:      # came with the model's own arguments, like labels
                ledger.claim_input(storage, section.unit or 0, trace.nbytes[storage])
            elif storage not in ledger.claims:
                available = ledger.claims.keys() | (inputs or {}).keys()
                flops = flops_to_make(trace, storage, available, self._charged)
                maker = self._sections[made_at.section]
                ledger.claim(storage, Claim(maker.unit or 0, self._item_name(maker, made_at.path),
                                            trace.nbytes[storage], flops, section.inputs is None))

    def _item_name(self, section: Section, path: str) -> str:
        """Within the unit; of what is outside of units, the module's full name."""
        if section.inputs is None:
            return path or section.name
        return path.removeprefix(self._units[section.unit].name).removeprefix(".") or "forward"


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta and not isinstance(leaf, LazyLogits)
