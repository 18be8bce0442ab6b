"""The protocol under random orders of events: a model of one updating thread, with the invariants of its file."""
from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lohan_ds.step_protocol import Stage, StepProtocol

NUM_BLOCKS = 4
SHADOWS = [True, True, False, True]
IN_HOST_MEMORY = {1, 2, 3}


class OneTrainingRun(RuleBasedStateMachine):
    """Values are step numbers: `value[b]` is what block b's current slot holds, `shadow[b]` what the other one does."""

    def __init__(self):
        super().__init__()
        self.protocol = StepProtocol(SHADOWS)
        self.step = 1                         # the step under way
        self.in_backward = False
        self.coefficient = None               # what speculation of this step is made with
        self.complete = []                    # blocks whose gradients are there, in order
        self.values = [0] * NUM_BLOCKS        # steps applied to each block
        self.due: dict[int, tuple] = {}       # block -> the update that must be published
        self.running: dict[int, tuple] = {}   # block -> the update being made, by whether it is speculative
        self.shadow: dict[int, tuple] = {}    # block -> a whole speculative update
        self.grads = [0] * NUM_BLOCKS         # version of each block's gradients
        self.begun: list[int] = []            # running blocks with chunks yet to load; the last one goes on

    # -- the training thread

    @precondition(lambda self: not self.in_backward)
    @rule(speculate=st.booleans(), limit=st.sampled_from([math.inf, 2.5]))
    def open_step(self, speculate, limit):
        self.protocol.open_step(speculate, limit)
        self.in_backward, self.complete, self.norm_square, self.limit = True, [], 0.0, limit
        self.shadow.clear()

    @precondition(lambda self: self.in_backward)
    @rule(block=st.integers(0, NUM_BLOCKS - 1), square=st.sampled_from([0.0, 1.0, 4.0, 9.0, math.inf, math.nan]))
    def gradient(self, block, square):
        if block in self.due:   # its forward would still be waiting
            return
        if block in self.complete:
            self.grads[block] += 1
            self.protocol.spoil(block)
            self.shadow.pop(block, None)
            return
        self.complete.append(block)
        self.norm_square += square
        self.protocol.gradient_complete(block, square)

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def edited(self, block):
        if block not in self.due:
            self.grads[block] += 1   # stands for any change of what the update reads
            self.protocol.spoil(block)
            self.shadow.pop(block, None)

    @precondition(lambda self: self.in_backward)
    @rule(same_terms=st.booleans())
    def step_decided(self, same_terms):
        stands = same_terms and math.sqrt(self.norm_square) <= self.limit if self.norm_square == self.norm_square \
            else False
        if not math.isfinite(self.norm_square):
            return self.step_skipped()
        due = sorted(self.complete)
        for block in due:
            self.due[block] = (self.step, self.grads[block], stands)
        published = self.protocol.decide(stands, due)
        for block in published:
            made = self.shadow.pop(block)
            assert stands and made == (self.step, self.grads[block], "speculative")
            self._published(block, made)
        self.shadow.clear()
        self.in_backward, self.step = False, self.step + 1

    @precondition(lambda self: self.in_backward)
    @rule()
    def step_skipped(self):
        self.protocol.skip()
        self.shadow.clear()
        self.in_backward, self.step = False, self.step + 1

    # -- the updating thread: between two chunks a block that goes first interrupts the one under way

    @precondition(lambda self: len(self.running) < 3)
    @rule()
    def take(self):
        top = self.begun[-1] if self.begun else None
        top_stage = None if top is None else self.protocol.stage(top)
        block = self.protocol.take(top)
        waiting = [b for b in self.due if self.protocol.stage(b) is Stage.DUE]
        if block is None:
            assert self.begun or not waiting or any(self.protocol.stage(b) is Stage.DROPPED for b in self.due)
            return
        assert block not in self.running, "taken again before its dropped update ended"
        assert top_stage is not Stage.DROPPED
        if self.protocol.stage(block) is Stage.SPECULATING:
            assert SHADOWS[block] and not waiting and self.in_backward and top_stage is not Stage.UPDATING
            assert top_stage is not Stage.SPECULATING or self.complete.index(block) > self.complete.index(top)
            self.running[block] = (self.step, self.grads[block], "speculative")
        else:
            if top_stage is Stage.UPDATING and self.due[top][0] == self.due[block][0]:
                assert block < top, "interrupted for a later block"
            self.running[block] = (*self.due[block][:2], "decided")
        self.begun.append(block)

    @precondition(lambda self: self.begun and not set(self.running) - set(self.begun))
    @rule()
    def take_aside(self):
        top = self.begun[-1]
        top_stage, waiting = self.protocol.stage(top), [b for b in self.due if self.protocol.stage(b) is Stage.DUE]
        block = self.protocol.take_aside(top, IN_HOST_MEMORY.__contains__)
        if block is None:
            of_step = [b for b in waiting if b in IN_HOST_MEMORY and self.due[b][0] == self.due.get(top, (None,))[0]]
            assert top_stage is not Stage.UPDATING or not of_step
            return
        assert block in IN_HOST_MEMORY and block not in self.running and top_stage is not Stage.DROPPED
        if self.protocol.stage(block) is Stage.SPECULATING:
            assert SHADOWS[block] and not waiting and self.in_backward and top_stage is Stage.SPECULATING
            self.running[block] = (self.step, self.grads[block], "speculative")
        else:
            assert self.due[block][0] == self.due[top][0]
            self.running[block] = (*self.due[block][:2], "decided")

    @precondition(lambda self: self.begun)
    @rule()
    def all_chunks_loaded(self):
        self.begun.pop()

    @precondition(lambda self: set(self.running) - set(self.begun))
    @rule(data=st.data())
    def ended(self, data):
        block = data.draw(st.sampled_from(sorted(set(self.running) - set(self.begun))))
        made = self.running.pop(block)
        wanted = self.protocol.wanted(block)
        publish = self.protocol.ended(block)
        if publish:
            assert wanted
            self._published(block, made)
        elif self.protocol.stage(block) is Stage.SPECULATED:
            self.shadow[block] = made
        else:
            assert not wanted

    def _published(self, block, made):
        step, grads, stands = self.due.pop(block)
        assert made[:2] == (step, grads), f"block {block}: published {made}, due {step, grads}"
        assert made[2] == "decided" or stands, "a dropped result was published"
        self.values[block] = step

    # -- invariants

    @invariant()
    def what_is_due_is_being_worked_on(self):
        for block in self.due:
            assert self.protocol.stage(block) in (Stage.DUE, Stage.UPDATING, Stage.DROPPED)
        for block in range(NUM_BLOCKS):
            if block not in self.due:
                assert self.protocol.stage(block) not in (Stage.DUE, Stage.UPDATING)
        assert self.protocol.idle == (not self.due and not self.running)

    def teardown(self):
        """Whatever happened: let run to its end, everything due is published and nothing else."""
        self.protocol.skip()
        self.begun.clear()
        for _ in range(4 * NUM_BLOCKS):
            for block in sorted(self.running):
                if self.protocol.ended(block):
                    self._published(block, self.running[block])
                del self.running[block]
            if (block := self.protocol.take()) is not None:
                self.running[block] = (*self.due[block][:2], "decided")
        assert not self.due and self.protocol.idle


TestOneTrainingRun = OneTrainingRun.TestCase
TestOneTrainingRun.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


def blocks_taken(protocol, number):
    taken = []
    for _ in range(number):
        taken.append(protocol.take())
        protocol.ended(taken[-1])
    return taken


def test_newest_arrived_is_speculated_first_and_due_ones_in_forward_order():
    protocol = StepProtocol([True] * 4)
    protocol.open_step(True, math.inf)
    for block in (3, 2, 1):
        protocol.gradient_complete(block, 1.0)
    assert blocks_taken(protocol, 2) == [1, 2]
    protocol.gradient_complete(0, 1.0)
    assert protocol.decide(True, [0, 1, 2, 3]) == [1, 2]
    assert blocks_taken(protocol, 2) == [0, 3] and protocol.take() is None and protocol.idle


def test_the_limit_stops_speculation_at_once_and_drops_what_is_under_way():
    protocol = StepProtocol([True] * 3)
    protocol.open_step(True, 2.0)
    protocol.gradient_complete(2, 1.0)
    assert protocol.take() == 2
    protocol.gradient_complete(1, 100.0)
    assert not protocol.wanted(2) and protocol.take() is None
    assert protocol.decide(False, [1, 2]) == []
    assert protocol.take() == 1   # 2 comes after it in forward order anyway
    assert protocol.take() is None
    assert not protocol.ended(2) and protocol.take() == 2


def test_a_block_that_goes_first_interrupts_one_under_way():
    protocol = StepProtocol([True] * 4)
    protocol.open_step(True, math.inf)
    protocol.gradient_complete(3, 1.0)
    assert protocol.take() == 3 and protocol.take(3) is None
    protocol.gradient_complete(2, 1.0)
    assert protocol.take(3) == 2 and protocol.take(2) is None   # newer
    assert protocol.decide(True, [0, 2, 3]) == []
    assert protocol.take(2) == 0 and protocol.take(0) is None   # due earlier in forward
    for block in (0, 2, 3):
        assert protocol.ended(block)
    assert protocol.idle


def test_a_spoiled_block_is_updated_after_the_decision_alone():
    protocol = StepProtocol([True, True])
    protocol.open_step(True, math.inf)
    protocol.gradient_complete(1, 1.0)
    protocol.gradient_complete(0, 1.0)
    assert blocks_taken(protocol, 2) == [0, 1]
    protocol.spoil(1)
    assert protocol.decide(True, [0, 1]) == [0]
    assert protocol.take() == 1 and protocol.stage(1) is Stage.UPDATING


def test_without_a_shadow_slot_there_is_no_speculation():
    protocol = StepProtocol([False])
    protocol.open_step(True, math.inf)
    protocol.gradient_complete(0, 1.0)
    assert protocol.take() is None
    assert protocol.decide(True, [0]) == [] and protocol.take() == 0


def test_a_block_of_an_earlier_step_gives_way_to_none_of_a_later_one():
    """Else the later one's writes, which wait for the earlier step's commit, could take all the buffers it needs."""
    protocol = StepProtocol([True, True])
    protocol.open_step(False, math.inf)
    protocol.decide(True, [0, 1])
    assert protocol.take() == 0 and protocol.ended(0)
    assert protocol.take() == 1
    protocol.open_step(False, math.inf)
    protocol.decide(True, [0])
    assert protocol.take(begun=1) is None
    assert protocol.ended(1) and protocol.take() == 0


def test_nothing_is_speculated_on_while_an_earlier_step_is_not_done():
    protocol = StepProtocol([True, True])
    protocol.open_step(True, math.inf)
    protocol.gradient_complete(1, 1.0)
    assert protocol.take() == 1
    protocol.decide(False, [1])            # its speculation is dropped, and must end before it is done again
    protocol.open_step(True, math.inf)
    protocol.gradient_complete(0, 1.0)
    assert protocol.take() is None
    assert not protocol.ended(1) and protocol.take() == 1
