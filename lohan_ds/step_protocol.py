"""`StepProtocol`: which block is updated when, which results stand and which are dropped. Pure: no torch, no I/O.

[Note: the protocol of a step]
Events come in (a block's gradients are complete, something was edited, step() decided, an update ended), answers go
out (what to update next, what to publish). Nothing here waits and nothing here is thread-safe: the owner calls it
under one lock.

    IDLE --gradient_complete--> READY --take--> SPECULATING --ended--> SPECULATED --decide(stands)--> published
                                  |                 |                      |
                                  +-----------------+-- decide, dropped ---+--> DUE
    DUE --take--> UPDATING --ended--> published

*Speculation* updates a block in backward, into its shadow slot, with the coefficient that is right if the step will
not be clipped. It is newest first: the block whose gradients came last is the one the next forward needs first, and
interrupts an older one under way. It stops at once when the running norm passes the limit or a value is not finite.
That is only a guess; what decides is `decide`: the coefficient is then known, and speculative results stand if it is
exactly the one they were made with. A block whose gradients, values or state changed after its speculation began is
dropped alone.

Invariants (tests/test_step_protocol.py draws random orders of events):
  1. a block is published at most once per step, and only after an update with that step's coefficient ended;
  2. after `decide` every due block gets published, others never;
  3. after `skip` nothing is published and nothing is left to do;
  4. a dropped result is never published, and a block is not taken again before its dropped update has ended;
  5. due blocks are taken step by step, in forward order, before any speculation; only blocks begun as speculations may
     still be under way then, and are interrupted for earlier ones. A block of an earlier step gives way to none of a
     later one: its writes may be what theirs wait for. Only `take_aside` is free to choose, within a step.
"""
from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Sequence


class Stage(enum.Enum):
    IDLE = "idle"                  # published; its gradients of this step are not complete
    READY = "ready"                # may be speculated on
    SPECULATING = "speculating"
    SPECULATED = "speculated"      # the shadow slot holds a whole update
    DROPPED = "dropped"            # a speculative update is under way that is no longer wanted
    DUE = "due"                    # to be updated: step() has decided
    UPDATING = "updating"          # under way, and published when it ends


class StepProtocol:
    """`may_speculate[b]`: block b has a shadow slot to be updated into."""

    def __init__(self, may_speculate: Sequence[bool]):
        self._may_speculate = tuple(may_speculate)
        self._stages = [Stage.IDLE] * len(may_speculate)
        self._spoiled = [False] * len(may_speculate)   # changed since: not to be speculated on again in this step
        self._ready: list[int] = []                    # READY blocks, newest last
        self._due: list[int] = []                      # DUE blocks, and DROPPED ones that are due again
        self._arrival = [0] * len(may_speculate)       # of READY and SPECULATING blocks: grows with each that is ready
        self._num_arrived = 0
        self._num_decided = 0                          # steps
        self._place = [(0, 0)] * len(may_speculate)    # step and place in forward order, of blocks due or UPDATING
        self._speculate = False
        self._limit = math.inf
        self._squares: list[float] = []                # sums of squares of the blocks complete so far
        self.num_dropped = 0                           # speculative updates that were for nothing, all steps

    def stage(self, block: int) -> Stage:
        return self._stages[block]

    @property
    def speculates(self) -> bool:
        """Whether blocks that get ready in the step that is open are updated in backward."""
        return self._speculate

    # -- backward ------------------------------------------------------------------------------------------------

    def open_step(self, speculate: bool, limit: float) -> None:
        """The last backward of a step begins. `limit`: on the norm of the gradients as they arrive; inf for none."""
        self._speculate, self._limit = speculate, limit
        self._squares.clear()
        self._ready.clear()
        self._spoiled = [False] * len(self._spoiled)

    def gradient_complete(self, block: int, square_sum: float) -> None:
        """All gradients of a block have arrived; `square_sum` of their squares, inf or nan if one is not finite."""
        if self._stages[block] is not Stage.IDLE or self._spoiled[block]:
            self.spoil(block)
            return
        self._squares.append(square_sum)
        if not math.sqrt(_sum(self._squares)) <= self._limit or not math.isfinite(square_sum):
            self.stop_speculation()
        if self._speculate and self._may_speculate[block]:
            self._stages[block] = Stage.READY
            self._ready.append(block)
            self._num_arrived += 1
            self._arrival[block] = self._num_arrived

    def spoil(self, block: int) -> None:
        """A block's gradients, parameters or state changed after they were complete: its speculation is dropped."""
        self._spoiled[block] = True
        self._drop(block)

    def stop_speculation(self) -> None:
        """No more of it in this step; what is done may still stand. What is under way is dropped, to save time."""
        self._speculate = False
        for block in self._ready:
            self._stages[block] = Stage.IDLE
        self._ready.clear()
        for block, stage in enumerate(self._stages):
            if stage is Stage.SPECULATING:
                self._drop(block)

    def _drop(self, block: int) -> None:
        stage = self._stages[block]
        if stage is Stage.READY:
            self._ready.remove(block)
        if stage in (Stage.READY, Stage.SPECULATED):
            self.num_dropped += stage is Stage.SPECULATED
            self._stages[block] = Stage.IDLE
        elif stage is Stage.SPECULATING:
            self._stages[block] = Stage.DROPPED

    # -- step() --------------------------------------------------------------------------------------------------

    def decide(self, stands: bool, due: Iterable[int]) -> list[int]:
        """step() happens for the blocks `due` (those with gradients, forward order); `stands`: the coefficient is the
        one speculation used, and so are the hyper-parameters. Returns the blocks to publish at once."""
        self._speculate = False
        self._num_decided += 1
        publish = []
        for place, block in enumerate(due):
            self._place[block] = self._num_decided, place
            if not stands:
                self._drop(block)
            stage = self._stages[block]
            if stage is Stage.SPECULATED:
                self._stages[block] = Stage.IDLE
                publish.append(block)
            elif stage is Stage.SPECULATING:
                self._stages[block] = Stage.UPDATING
            elif stage in (Stage.IDLE, Stage.READY):
                self._stages[block] = Stage.DUE
                self._due.append(block)
            elif stage is Stage.DROPPED:
                self._due.append(block)
            else:
                raise AssertionError(f"block {block} is {stage.value} when its step is decided")
        self._ready.clear()
        return publish

    def skip(self) -> None:
        """There is no update in this step: whatever was speculated is dropped."""
        self._speculate = False
        for block in range(len(self._stages)):
            self._drop(block)

    # -- the updating thread -------------------------------------------------------------------------------------

    def take(self, begun: int | None = None) -> int | None:
        """The block to update next; its stage is then UPDATING or SPECULATING. None: nothing to do now.

        `begun`: a taken block whose update can be interrupted here; then only a block that goes before it.
        """
        stage = None if begun is None else self._stages[begun]
        if stage is Stage.DROPPED:
            return None   # to end it takes no time
        for block in self._due:
            if stage is Stage.UPDATING and self._place[begun] < self._place[block]:
                break
            if self._stages[block] is Stage.DUE:
                self._due.remove(block)
                self._stages[block] = Stage.UPDATING
                return block
            break   # a dropped update of this one must end first: forward order is kept
        if self._due or stage is Stage.UPDATING or not self._speculate or not self._ready:
            return None
        if stage is Stage.SPECULATING and self._arrival[self._ready[-1]] < self._arrival[begun]:
            return None
        block = self._ready.pop()
        self._stages[block] = Stage.SPECULATING
        return block

    def take_aside(self, begun: int, may_take: Callable[[int], bool]) -> int | None:
        """Another block, to be updated while `begun` waits for something that this one does not need: the first in
        order that `may_take`, of the same step. As `take` otherwise."""
        stage = self._stages[begun]
        if stage is Stage.UPDATING:
            block = next((block for block in self._due if self._stages[block] is Stage.DUE
                          and self._place[block][0] == self._place[begun][0] and may_take(block)), None)
            if block is not None:
                self._due.remove(block)
                self._stages[block] = Stage.UPDATING
            return block
        if stage is not Stage.SPECULATING or self._due or not self._speculate:
            return None
        block = next((block for block in reversed(self._ready) if may_take(block)), None)
        if block is not None:
            self._ready.remove(block)
            self._stages[block] = Stage.SPECULATING
        return block

    def order(self, block: int) -> tuple[int, ...]:
        """Of taken blocks, the one with the smallest goes first. What is not wanted ends at once."""
        stage = self._stages[block]
        if stage is Stage.UPDATING:
            return 1, *self._place[block]
        return (2, -self._arrival[block]) if stage is Stage.SPECULATING else (0,)

    def wanted(self, block: int) -> bool:
        """Whether the update of a taken block should go on."""
        return self._stages[block] is not Stage.DROPPED

    def ended(self, block: int) -> bool:
        """The update of a taken block has ended, all its writes too. True: publish it."""
        stage = self._stages[block]
        if stage is Stage.UPDATING:
            self._stages[block] = Stage.IDLE
            return True
        if stage is Stage.SPECULATING:
            self._stages[block] = Stage.SPECULATED
        elif stage is Stage.DROPPED:
            self.num_dropped += 1
            self._stages[block] = Stage.DUE if block in self._due else Stage.IDLE
        else:
            raise AssertionError(f"block {block} is {stage.value} when its update ends")
        return False

    @property
    def idle(self) -> bool:
        """Nothing is due and nothing is under way."""
        under_way = (Stage.SPECULATING, Stage.DROPPED, Stage.UPDATING)
        return not self._due and not any(stage in under_way for stage in self._stages)


def _sum(parts: list[float]) -> float:
    try:
        return math.fsum(parts)
    except (OverflowError, ValueError):
        return math.nan
