"""`GradientPipeline`: gradients come off the accelerator as they arrive and are held until the CPU Adam takes them.

[Note: exact]
A gradient is held in the parameter's dtype when there is one micro-step, else accumulated in fp32. The norm is
the fp64 sum of squares over fixed segments of each parameter, so it depends on nothing but the values. What an
update is made with (hyper-parameters, step counts, coefficient) is fixed at the step boundary: an update begun
earlier, in backward, stands only if all of it turns out to be the same. A parameter that got no gradient is left
as it is.
"""
from __future__ import annotations

import functools
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lohan_ds.adam import AdamHyper
from lohan_ds.block import Block
from lohan_ds.grad_norm import accumulate_, global_norm, sum_of_squares
from lohan_ds.memory.pinned_pool import BufferRing, PinnedPool
from lohan_ds.ops.grad_pack import can_pack
from lohan_ds.plan import OffloadPlan
from lohan_ds.runtime.gradient_packer import DirectCopies, GradientPacker, Packed
from lohan_ds.runtime.recorder import Recorder, stalling
from lohan_ds.runtime.streams import Streams
from lohan_ds.step_protocol import StepProtocol
from lohan_ds.store.block_store import BlockStore
from lohan_ds.updater import BlockUpdate, Run, Updater
from lohan_ds.work import Work


class StepTerms(NamedTuple):
    """What a step's updates are made with."""
    hypers: list[AdamHyper]                # by optimizer group
    steps: dict[tuple[int, int], int]      # by (block, slot): updates before this one
    coefficient: float                     # every gradient is multiplied by it


class _HeldGradients:
    """One block's gradients of the step under way. `values` is allocated when the first one arrives."""

    def __init__(self, num_slots: int):
        self.values: Tensor | None = None                          # (numel,) fp32 or block dtype, host
        self.present = [False] * num_slots
        self.squares: list[list[float] | None] = [None] * num_slots  # partial sums, None: not computed yet
        self.final = [False] * num_slots                           # arrived in the step's last backward


class GradientPipeline:
    """Called from the training thread (and autograd's); owns the collecting thread and the updater.

    Fixed after construction: blocks, plan, store. `_held` belongs to the training thread, except that the
    collecting thread fills `squares` of what it was handed.
    """

    def __init__(self, blocks: Sequence[Block], plan: OffloadPlan, store: BlockStore, streams: Streams,
                 pool: PinnedPool, recorder: Recorder | None = None, num_threads: int | None = None,
                 device: torch.device = torch.device("cpu"), make_protocol=StepProtocol):
        """`num_threads`: of the CPU, for updates and for what comes off an accelerator; torch's number when None.
        `device`: where gradients come from."""
        self._blocks, self._plan, self._store, self._streams, self._pool = blocks, plan, store, streams, pool
        self._recorder, self._num_threads = recorder, num_threads
        self._held = [_HeldGradients(len(block.slots)) for block in blocks]
        self._collected: deque[Work] = deque()
        self._collect_jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._terms: StepTerms | None = None       # what speculation in this step is made with
        largest_grad = max((s.numel for block in blocks if block.trainable for s in block.slots), default=0)
        self._staging = None if streams.unified else BufferRing(pool, 2, max(largest_grad, 1) * 4, "gradient staging")
        self._direct = DirectCopies(streams, recorder)
        self._packer: GradientPacker | None = None   # None: gradients leave one by one, or do not have to
        if not streams.unified and not plan.accumulate_fp32 and can_pack(device):
            self._packer = GradientPacker(blocks, streams, pool, device, self._direct, recorder)
        self.updater = Updater(blocks, store, pool, plan.num_chunk_buffers, plan.num_read_ahead_chunks, num_threads,
                               make_protocol)
        if recorder is not None:
            self.updater.on_span = recorder.update_span
        self._thread = threading.Thread(target=self._collect_loop, name="lohan-collect", daemon=True)
        self._thread.start()

    # -- gradients in --------------------------------------------------------------------------------------------

    def arrive(self, block_index: int, slot: int, grad: Tensor, want_squares: bool) -> None:
        """Takes one parameter's gradient (its shape and dtype, on the device); the caller may drop it at once."""
        block, held = self._blocks[block_index], self._held[block_index]
        info = block.slots[slot]
        with stalling(self._recorder, "gradient"):
            self._store.wait_published(block_index)  # an update under way still reads the buffer
        add = held.present[slot]
        if held.final[slot]:
            self.updater.spoil(block_index)   # a second gradient in one step
        target = self._buffer_for(block, held, fp32=add)[info.offset:info.offset + info.numel]
        grad = grad.detach().reshape(-1)
        held.present[slot], held.squares[slot], held.final[slot] = True, None, want_squares
        if self._packer is not None:
            if want_squares and not add and target.dtype == grad.dtype:
                left = self._packer.add(block, slot, grad, held.values, all(held.present))
                return self._submit_packed(left)
            self._submit_packed(self._packer.flush())   # what comes now may be added to what waits
        if self._streams.unified:
            squares = accumulate_(target, grad, add, want_squares)
            if want_squares:
                self._submit(lambda: self._have_squares(block, held, slot, squares))
            return
        if not add and target.dtype == grad.dtype:
            event = self._direct.d2h(target, grad)

            def take_copied() -> None:
                event.host_wait()
                if want_squares:
                    self._have_squares(block, held, slot, sum_of_squares(target, self._num_threads))

            self._submit(take_copied)
            return
        with stalling(self._recorder, "gradient"):
            raw = self._staging.acquire()
        staged = raw[:grad.nbytes].view(grad.dtype)
        event = self._streams.d2h(staged, grad)

        def take_staged() -> None:
            try:
                event.host_wait()
                squares = accumulate_(target, staged, add, want_squares, self._num_threads)
            finally:
                self._staging.release(raw)
            if want_squares:
                self._have_squares(block, held, slot, squares)

        self._submit(take_staged)

    def _buffer_for(self, block: Block, held: _HeldGradients, fp32: bool) -> Tensor:
        """The block's gradient buffer; made fp32 once something has to be added to it."""
        fp32 = fp32 or self._plan.accumulate_fp32
        dtype = torch.float32 if fp32 else getattr(torch, block.dtype)
        if held.values is None or (fp32 and held.values.dtype != torch.float32):
            self.wait_collected()
            old = held.values
            held.values = self._pool.alloc(block.numel * dtype.itemsize, f"gradients of {block.name}").view(dtype)
            held.values.zero_() if old is None else held.values.copy_(old)
            if old is not None:
                self._pool.free(old.view(torch.uint8))
        return held.values

    def _submit_packed(self, left: list[Packed]) -> None:
        for packed in left:
            self._submit(functools.partial(self._take_packed, packed))

    def _take_packed(self, packed: Packed) -> None:
        """In the collecting thread."""
        held = self._held[packed.block.index]
        try:
            packed.event.host_wait()
            for slot, squares in zip(packed.slots, packed.sums_by_slot(), strict=True):
                held.squares[slot] = squares
        finally:
            packed.release()
        self._offer(packed.block, held)

    def _have_squares(self, block: Block, held: _HeldGradients, slot: int, squares: list[float]) -> None:
        """In the collecting thread."""
        held.squares[slot] = squares
        self._offer(block, held)

    def _submit(self, job) -> None:
        work = Work()
        self._collected.append(work)
        while self._collected and self._collected[0].done():
            if self._collected[0].exception() is not None:
                break
            self._collected.popleft()
        self._collect_jobs.put((job, work))

    def _collect_loop(self) -> None:
        while (item := self._collect_jobs.get()) is not None:
            job, work = item
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - raised in the training thread
                self.updater.fail(error)
                work.fail(error)
            else:
                work.finish()

    def wait_collected(self) -> None:
        """Until every gradient that has arrived so far is held, and its sum of squares known."""
        if self._packer is not None:
            self._submit_packed(self._packer.flush())
        while self._collected:
            self._collected[0].wait()
            self._collected.popleft()

    def gradient(self, block_index: int, slot: int) -> Tensor | None:
        """(numel,) the held gradient of this step, a live view, or None: not arrived, or step() has used it."""
        self.wait_collected()
        held, info = self._held[block_index], self._blocks[block_index].slots[slot]
        return held.values[info.offset:info.offset + info.numel] if held.present[slot] else None

    def gradient_edited(self, block_index: int, slot: int) -> None:
        """The view that `gradient` gives is about to be written to."""
        self.updater.spoil(block_index)
        self._held[block_index].squares[slot] = None

    def norm(self) -> float:
        """Of all gradients held, still scaled by the loss scale; inf or nan when one of them is not finite."""
        with stalling(self._recorder, "step"):
            self.wait_collected()
        parts: list[float] = []
        for block, held in zip(self._blocks, self._held):
            for slot, info in enumerate(block.slots):
                if held.present[slot]:
                    if held.squares[slot] is None:
                        held.squares[slot] = sum_of_squares(held.values[info.offset:info.offset + info.numel])
                    parts.extend(held.squares[slot])
        return global_norm(parts)

    def drop(self) -> None:
        """There is no update in this step: it is skipped, or an exception ended it."""
        if self._packer is not None:
            self._packer.drop()
        self.updater.skip()
        self._forget()

    def _forget(self) -> None:
        """The gradients held so far are of no further step. Their values stay until updates under way are over."""
        try:
            self.wait_collected()
        except Exception:  # noqa: BLE001 - latched; the gradients are dropped all the same
            self._collected.clear()
        self._terms = None
        for held in self._held:
            held.present = [False] * len(held.present)
            held.squares = [None] * len(held.squares)
            held.final = [False] * len(held.final)

    @property
    def holds_any(self) -> bool:
        """Whether a gradient has arrived since the last step."""
        return any(any(held.present) for held in self._held)

    def present_slots(self) -> list[tuple[int, int]]:
        """(block, slot) of every gradient held."""
        return [(b, s) for b, held in enumerate(self._held) for s, there in enumerate(held.present) if there]

    # -- the step ------------------------------------------------------------------------------------------------

    def open_step(self, make_terms: Callable[[], StepTerms] | None, limit: float) -> None:
        """The last backward of a step begins. With `make_terms` blocks whose gradients are complete are updated in
        their shadow slots from now on, while the norm of what has arrived stays under `limit`."""
        self._terms = make_terms() if make_terms is not None else None
        if self._terms is not None:
            self._store.commit_edits()
        self.updater.open_step(self._terms is not None, limit, None if self._recorder is None else self._recorder.step)

    def _offer(self, block: Block, held: _HeldGradients) -> None:
        """In the collecting thread: if this was a block's last gradient, it may be speculated on."""
        terms = self._terms
        if terms is None or not all(held.present) or any(part is None for part in held.squares):
            return
        try:
            square_sum = math.fsum(value for part in held.squares for value in part)
        except (OverflowError, ValueError):
            square_sum = math.nan
        update = self._update_of(block, held, terms)
        if update.runs:
            self.updater.gradient_complete(update, square_sum)

    def decide(self, terms: StepTerms) -> None:
        """step() happens: every block with gradients is updated with `terms`.

        Reads of these blocks wait from now on. `serial` plans return when all is done.
        """
        updates = [self._update_of(block, held, terms) for block, held in zip(self._blocks, self._held)
                   if any(held.present)]
        updates = [update for update in updates if update.runs]
        stands = self._terms == terms
        self._forget()
        self.updater.decide(updates, stands)
        if self._plan.update == "serial":
            with stalling(self._recorder, "step"):
                self.updater.drain()

    def _update_of(self, block: Block, held: _HeldGradients, terms: StepTerms) -> BlockUpdate:
        runs: list[Run] = []
        for slot, info in enumerate(block.slots):
            if not held.present[slot] or not info.numel:
                continue
            run = Run(info.offset, info.offset + info.numel, terms.hypers[info.group],
                      terms.steps[block.index, slot] + 1)
            if runs and runs[-1].end == run.start and runs[-1][2:] == run[2:]:
                run = run._replace(start=runs.pop().start)
            runs.append(run)
        for_step = None if self._recorder is None else self._recorder.step
        return BlockUpdate(block, tuple(runs), held.values, terms.coefficient, for_step)

    def stop(self) -> None:
        """As `Updater.stop`."""
        self.updater.stop()

    def close(self) -> None:
        """Ends both threads; idempotent. An update under way is cut as by `stop`."""
        self.stop()
        self._collect_jobs.put(None)
        self._thread.join()
        self.updater.close()
        if self._packer is not None:
            self._packer.close()
        if self._staging is not None:
            self._staging.close()
