"""`OldestFirst`: LoHan's own order of updates, to be compared with ours."""
from __future__ import annotations

from lohan_ds.step_protocol import StepProtocol


class OldestFirst(StepProtocol):
    """Speculates on the block whose gradients came first, and finishes it."""

    def gradient_complete(self, block: int, square_sum: float) -> None:
        super().gradient_complete(block, square_sum)
        if self._ready and self._ready[-1] == block:
            self._ready.insert(0, self._ready.pop())
            self._arrival[block] *= -1
