"""`ModelReport`: how a `ModelProfile` was found, and the table that shows both."""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rich import box
from rich.table import Table

from lohan_ds.planner.memory_model import format_bytes
from lohan_ds.profile import ModelProfile


@dataclass(frozen=True)
class ModelReport:
    model_class: str
    seconds: float               # that it took
    num_run: int                 # calls of units that ran on meta tensors; all the others are alike
    num_calls: int
    saved_bytes: int             # that autograd keeps; the items hold inputs as well that it does not need
    device_type: str
    num_fused_attention: int     # calls in the units that ran
    num_unfused_attention: int
    loss: str                    # how it is computed, for people; "" of a model without a head that is known

    @property
    def attention(self) -> str:
        """What was assumed, for people."""
        if not self.num_fused_attention and not self.num_unfused_attention:
            return "as the model computes it itself (eager): score matrices are saved"
        if not self.num_unfused_attention:
            return f"fused kernel on {self.device_type}: no score matrices"
        return ("without a fused kernel: score matrices are saved" if not self.num_fused_attention else
                f"fused kernel on {self.device_type} in {self.num_fused_attention} of "
                f"{self.num_fused_attention + self.num_unfused_attention} calls; the others save score matrices")


def model_table(profile: ModelProfile) -> Table:
    """A row for each kind of unit and, below it, for each of its items."""
    table = Table("unit or item", "units", "parameters", "forward", "saved", "recompute", "output", "workspace",
                  box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    counts = Counter(unit.unit_class for unit in profile.units)
    shown = set()
    for unit in profile.units:
        if unit.unit_class in shown:
            continue
        shown.add(unit.unit_class)
        numel = sum(slot.numel for b in unit.blocks for slot in profile.size.blocks[b].slots)
        table.add_row(unit.unit_class, str(counts[unit.unit_class]), f"{numel:,}", _flops(unit.forward_flops),
                      format_bytes(sum(item.nbytes for item in unit.items)), "", format_bytes(unit.output_bytes),
                      format_bytes(unit.workspace_bytes))
        for item in unit.items:
            table.add_row("  " + item.name, "", "", "", format_bytes(item.nbytes), _flops(item.recompute_flops))
    return table


def _flops(flops: float) -> str:
    for unit, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if flops >= size:
            return f"{flops / size:.2f} {unit}"
    return f"{flops:.0f} FLOP"
