"""`GradientPipeline`: gradients come off the accelerator as they arrive, and the CPU Adam consumes them chunk by chunk.

[Note: the update]
Updates run in one thread, block after block in forward order, chunk after chunk: *read c+1 | Adam on c | write
c-1* in a ring of chunk buffers, so host memory is O(chunk), not O(block). In `deferred` mode that goes on while
the next forward runs: it waits, block by block, for what it needs. `serial` waits for all of it in step().

[Note: exact]
A gradient is held in the parameter's dtype when there is one micro-step, else accumulated in fp32. The norm is
the fp64 sum of squares over fixed segments of each parameter, so it depends on nothing but the values. The
clip coefficient is known before the first update starts. A parameter that got no gradient is left as it is.
"""
from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lohan_ds.adam import AdamHyper, adam_update_
from lohan_ds.block import Block, Chunk
from lohan_ds.errors import StepError
from lohan_ds.grad_norm import global_norm, sum_of_squares
from lohan_ds.memory.pinned_pool import BufferRing, PinnedPool
from lohan_ds.plan import OffloadPlan
from lohan_ds.runtime.streams import Streams
from lohan_ds.store.block_store import BlockStore
from lohan_ds.work import Work

logger = logging.getLogger(__name__)


class Run(NamedTuple):
    """Neighbouring parameters of a block that are updated alike."""
    start: int                # elements from the start of the block
    end: int
    hyper: AdamHyper
    step: int                 # of Adam's bias correction, 1 at the first update


@dataclass(frozen=True)
class BlockUpdate:
    """What one step does to one block. The hyper-parameters are those of the step boundary."""
    block: Block
    runs: tuple[Run, ...]
    grads: Tensor             # (numel,) host, fp32 or the block's dtype; not written before the block is published
    coefficient: float        # every gradient is multiplied by it; exactly 1.0 when there is nothing to scale


class _HeldGradients:
    """One block's gradients of the step under way. `values` is allocated when the first one arrives."""

    def __init__(self, num_slots: int):
        self.values: Tensor | None = None                          # (numel,) fp32 or block dtype, host
        self.present = [False] * num_slots
        self.squares: list[list[float] | None] = [None] * num_slots  # partial sums, None: not computed yet


class GradientPipeline:
    """Called from the training thread (and autograd's); owns one collecting and one updating thread.

    Fixed after construction: blocks, plan, store. `_held` belongs to the training thread, except that the
    collecting thread fills `squares` of what it was handed; `_error` is under `_lock`.
    """

    def __init__(self, blocks: Sequence[Block], plan: OffloadPlan, store: BlockStore, streams: Streams,
                 pool: PinnedPool):
        self._blocks, self._plan, self._store, self._streams, self._pool = blocks, plan, store, streams, pool
        self._held = [_HeldGradients(len(block.slots)) for block in blocks]
        self._collected: deque[Work] = deque()
        self._collect_jobs: queue.SimpleQueue = queue.SimpleQueue()
        self._updates: queue.SimpleQueue = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._last_step: Work = Work.completed()
        self._stopping = False                   # set once, by any thread
        trainable = [block for block in blocks if block.trainable]
        largest = max((c.numel for block in trainable for c in block.chunks), default=0)
        self._scratch = pool.alloc(max(largest, 1) * 4, "gradient scratch of the update").view(torch.float32)
        self._ring = BufferRing(pool, plan.num_chunk_buffers, max(store.chunk_buffer_bytes, 1),
                                "chunk buffers of the update")
        largest_grad = max((s.numel for block in trainable for s in block.slots), default=0)
        self._staging = None if streams.unified else BufferRing(pool, 2, max(largest_grad, 1) * 4, "gradient staging")
        self._threads = [threading.Thread(target=self._collect_loop, name="lohan-collect", daemon=True),
                         threading.Thread(target=self._update_loop, name="lohan-update", daemon=True)]
        for thread in self._threads:
            thread.start()

    # -- gradients in --------------------------------------------------------------------------------------------

    def arrive(self, block_index: int, slot: int, grad: Tensor, want_squares: bool) -> None:
        """Takes one parameter's gradient (its shape and dtype, on the device); the caller may drop it at once."""
        block, held = self._blocks[block_index], self._held[block_index]
        info = block.slots[slot]
        self._store.wait_published(block_index)  # an update under way still reads the buffer
        add = held.present[slot]
        target = self._buffer_for(block, held, fp32=add)[info.offset:info.offset + info.numel]
        grad = grad.detach().reshape(-1)
        held.present[slot], held.squares[slot] = True, None
        if self._streams.unified:
            target.add_(grad) if add else target.copy_(grad)
            if want_squares:
                self._submit(lambda: self._square(held, slot, target))
            return
        if not add and target.dtype == grad.dtype:
            event = self._streams.d2h(target, grad)
            self._submit(lambda: (event.host_wait(), want_squares and self._square(held, slot, target)))
            return
        raw = self._staging.acquire()
        staged = raw[:grad.nbytes].view(grad.dtype)
        event = self._streams.d2h(staged, grad)
        self._submit(lambda: self._take_staged(event, raw, staged, target, add, held, slot, want_squares))

    def _take_staged(self, event, raw: Tensor, staged: Tensor, target: Tensor, add: bool, held: _HeldGradients,
                     slot: int, want_squares: bool) -> None:
        try:
            event.host_wait()
            target.add_(staged) if add else target.copy_(staged)
        finally:
            self._staging.release(raw)
        if want_squares:
            self._square(held, slot, target)

    def _buffer_for(self, block: Block, held: _HeldGradients, fp32: bool) -> Tensor:
        """The block's gradient buffer; made fp32 once something has to be added to it."""
        fp32 = fp32 or self._plan.accumulate_fp32
        dtype = torch.float32 if fp32 else getattr(torch, block.dtype)
        if held.values is None or (fp32 and held.values.dtype != torch.float32):
            self._wait_collected()
            old = held.values
            held.values = self._pool.alloc(block.numel * dtype.itemsize, f"gradients of {block.name}").view(dtype)
            held.values.zero_() if old is None else held.values.copy_(old)
            if old is not None:
                self._pool.free(old.view(torch.uint8))
        return held.values

    def _square(self, held: _HeldGradients, slot: int, values: Tensor) -> None:
        held.squares[slot] = sum_of_squares(values)

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
                self._latch(error)
                work.fail(error)
            else:
                work.finish()

    def _wait_collected(self) -> None:
        while self._collected:
            self._collected.popleft().wait()

    def gradient(self, block_index: int, slot: int) -> Tensor | None:
        """(numel,) the held gradient of this step, a live view, or None: not arrived, or step() has used it."""
        self._wait_collected()
        held, info = self._held[block_index], self._blocks[block_index].slots[slot]
        return held.values[info.offset:info.offset + info.numel] if held.present[slot] else None

    def gradient_edited(self, block_index: int, slot: int) -> None:
        """The view that `gradient` gave was written to."""
        self._held[block_index].squares[slot] = None

    def norm(self) -> float:
        """Of all gradients held, still scaled by the loss scale; inf or nan when one of them is not finite."""
        self._wait_collected()
        parts: list[float] = []
        for block, held in zip(self._blocks, self._held):
            for slot, info in enumerate(block.slots):
                if held.present[slot]:
                    if held.squares[slot] is None:
                        self._square(held, slot, held.values[info.offset:info.offset + info.numel])
                    parts.extend(held.squares[slot])
        return global_norm(parts)

    def drop(self) -> None:
        """Forgets the gradients of this step: it is skipped, or an exception ended it."""
        try:
            self._wait_collected()
        except Exception:  # noqa: BLE001 - latched; the gradients are dropped all the same
            self._collected.clear()
        for held in self._held:
            held.present = [False] * len(held.present)
            held.squares = [None] * len(held.squares)

    def present_slots(self) -> list[tuple[int, int]]:
        """(block, slot) of every gradient held."""
        return [(b, s) for b, held in enumerate(self._held) for s, there in enumerate(held.present) if there]

    # -- updates -------------------------------------------------------------------------------------------------

    def start_updates(self, hypers: Sequence[AdamHyper], steps: dict[tuple[int, int], int],
                      coefficient: float) -> list[int]:
        """Step t begins: every block with gradients is updated in forward order. Returns those blocks' indexes.

        `hypers`: by optimizer group; `steps`: of each parameter that has a gradient, counting this step. Reads of
        these blocks wait from now on. `serial` plans return when all is done.
        """
        updates = []
        for block, held in zip(self._blocks, self._held):
            runs = self._runs(block, held, hypers, steps)
            if runs:
                updates.append(BlockUpdate(block, runs, held.values, coefficient))
        self.drop()
        self._last_step = Work()
        for update in updates:
            self._store.announce_update(update.block.index)
        self._updates.put((updates, self._last_step))
        if self._plan.update == "serial":
            self.drain()
        return [update.block.index for update in updates]

    @staticmethod
    def _runs(block: Block, held: _HeldGradients, hypers: Sequence[AdamHyper],
              steps: dict[tuple[int, int], int]) -> tuple[Run, ...]:
        runs: list[Run] = []
        for slot, info in enumerate(block.slots):
            if not held.present[slot]:
                continue
            run = Run(info.offset, info.offset + info.numel, hypers[info.group], steps[block.index, slot])
            if runs and runs[-1].end == run.start and runs[-1][2:] == run[2:]:
                run = run._replace(start=runs.pop().start)
            runs.append(run)
        return tuple(runs)

    def drain(self) -> None:
        """Waits until every update that was started is published; raises the first failure."""
        try:
            self._last_step.wait()
        finally:
            self.check()

    def _update_loop(self) -> None:
        while (item := self._updates.get()) is not None:
            updates, done = item
            try:
                self._update_step(updates)
            except BaseException as error:  # noqa: BLE001 - raised in the training thread
                self._latch(error)
                done.fail(error)
            else:
                done.finish()

    def _update_step(self, updates: list[BlockUpdate]) -> None:
        published: set[int] = set()
        saves: list[Work] = []
        try:
            chunks = _chunks_of(updates)
            loading: deque = deque()
            while True:
                if self._stopping:
                    raise StepError("the engine was closed while an update was under way")
                while len(loading) < 2 and (item := next(chunks, None)) is not None:
                    update, chunk, runs, is_last = item
                    raw = self._ring.acquire()
                    load = self._store.load_chunk(update.block.index, chunk, raw)
                    loading.append((update, chunk, runs, is_last, raw, load))
                if not loading:
                    break
                update, chunk, runs, is_last, raw, load = loading.popleft()
                saves.append(self._update_chunk(update, chunk, runs, raw, load))
                if is_last:
                    self._publish_after(update.block.index, saves, published)
                    saves = []
            self._wait_published(updates)
        except BaseException as error:
            self._latch(error)
            for update in updates:
                if update.block.index not in published:
                    self._store.fail(update.block.index, error)
            for block_index in published:   # their last writes may be under way
                with contextlib.suppress(StepError):
                    self._store.wait_published(block_index)
            raise

    def _update_chunk(self, update: BlockUpdate, chunk: Chunk, runs: list[Run], raw: Tensor, load: Work) -> Work:
        arrays = load.wait()
        for run in runs:
            piece = slice(run.start - chunk.start, run.end - chunk.start)
            adam_update_(arrays.master[piece], update.grads[run.start:run.end], arrays.exp_avg[piece],
                         arrays.exp_avg_sq[piece], run.step, run.hyper, update.coefficient, scratch=self._scratch)
        if arrays.params is not None:
            arrays.params.copy_(arrays.master)
        save = self._store.save_chunk(update.block.index, chunk, arrays)
        save.on_done(lambda: self._ring.release(raw))
        return save

    def _publish_after(self, block_index: int, saves: list[Work], published: set[int]) -> None:
        published.add(block_index)
        joint = Work.all_of(saves)

        def settle() -> None:
            error = joint.exception()
            if error is None:
                self._store.publish(block_index)
            else:
                self._latch(error)
                self._store.fail(block_index, error)

        joint.on_done(settle)

    def _wait_published(self, updates: list[BlockUpdate]) -> None:
        for update in updates:
            self._store.wait_published(update.block.index)

    # -- failure and end -----------------------------------------------------------------------------------------

    def _latch(self, error: BaseException) -> None:
        with self._lock:
            if self._error is None:
                self._error = error
            elif error is not self._error:
                logger.error("a later failure of background work: %s", error)

    def check(self) -> None:
        """Raises StepError from the first failure of background work, at every call after it."""
        with self._lock:
            error = self._error
        if error is not None:
            raise StepError(f"background work failed: {error}") from error

    def stop(self) -> None:
        """Ends an update under way at its next chunk; the blocks it did not come to fail. The store is void then."""
        self._stopping = True

    def close(self) -> None:
        """Ends both threads; idempotent. An update under way is cut as by `stop`."""
        self.stop()
        self._collect_jobs.put(None)
        self._updates.put(None)
        for thread in self._threads:
            thread.join()
        self._ring.close()
        if self._staging is not None:
            self._staging.close()


def _chunks_of(updates: list[BlockUpdate]) -> Iterator[tuple[BlockUpdate, Chunk, list[Run], bool]]:
    """Every chunk that has something to update, with its part of the runs; the flag marks a block's last one."""
    for update in updates:
        touched = []
        for chunk in update.block.chunks:
            end = chunk.start + chunk.numel
            runs = [run._replace(start=max(run.start, chunk.start), end=min(run.end, end)) for run in update.runs
                    if run.start < end and run.end > chunk.start]
            if runs:
                touched.append((chunk, runs))
        for i, (chunk, runs) in enumerate(touched):
            yield update, chunk, runs, i == len(touched) - 1
