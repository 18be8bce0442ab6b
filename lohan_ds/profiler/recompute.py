"""FLOPs to make saved tensors again, by going back over the operators of an `OpTrace` that led to them."""
from __future__ import annotations

from collections.abc import Container

from lohan_ds.profiler.op_trace import OpTrace


def flops_to_make(trace: OpTrace, storage: int, available: Container[int], charged: set[int]) -> int:
    """FLOPs of the operators between `available` storages and `storage`, which need not be among them.

    Operators in `charged` (indexes) were counted before, for another storage; the others are added to it.
    """
    flops, waiting, seen = 0, [storage], {storage}
    while waiting:
        for op_index in trace.writers.get(waiting.pop(), ()):
            if op_index in charged:
                continue
            charged.add(op_index)
            op = trace.ops[op_index]
            flops += op.flops
            new = [s for s in op.inputs if s not in seen and s not in available]
            seen.update(new)
            waiting += new
    return flops
