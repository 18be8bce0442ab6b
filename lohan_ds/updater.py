"""`Updater`: the out-of-core CPU Adam. One thread takes blocks in the order of the step protocol and updates them
chunk by chunk over the store.

[Note: the update]
*read c+1 | Adam on c | write c-1*, in a ring of chunk buffers and on across blocks, so host memory is O(chunk), not
O(block), and the drives do not pause between blocks. Between two chunks a block gives way to one that is needed
earlier: else the next forward would wait for the rest of that one too before it can begin. In `deferred` mode that
goes on while the next forward runs, which waits, block by block, for what it needs. In `eager` mode it begins in
backward, on blocks with a shadow slot (see [Note: the protocol of a step] in step_protocol.py). While a block waits for
the drives, one that lies in host memory is updated beside it. Where host memory is left over, the state of the first
blocks is read ahead in backward (read_ahead.py).
"""
from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from lohan_ds.adam import PIECE_NUMEL, AdamHyper, adam_update_
from lohan_ds.block import Block, Chunk
from lohan_ds.errors import StepError
from lohan_ds.memory.pinned_pool import BufferRing, PinnedPool
from lohan_ds.read_ahead import ReadAhead
from lohan_ds.step_protocol import Stage, StepProtocol
from lohan_ds.store.block_store import BlockStore
from lohan_ds.store.io_threads import Urgency
from lohan_ds.work import Work

logger = logging.getLogger(__name__)
_NUM_ASIDE = 2   # chunks of the block beside: Adam works on one, the next is copied


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
    grads: Tensor             # (numel,) host, fp32 or the block's dtype; not written before the update is over
    coefficient: float        # every gradient is multiplied by it; exactly 1.0 when there is nothing to scale
    for_step: int | None = None   # what a recorder calls the step


@dataclass
class _Job:
    """A taken block. Belongs to the updating thread."""
    update: BlockUpdate
    speculative: bool
    left: deque[tuple[Chunk, list[Run]]]   # what is yet to be loaded
    num_loading: int = 0                   # chunks
    saves: list[Work] = field(default_factory=list)


@dataclass(eq=False)
class _Due:
    """That a block is announced to the store, and not published yet. Another one for every update."""
    for_step: int | None


class _Piece(NamedTuple):
    job: _Job
    chunk: Chunk
    runs: list[Run]
    buffer: Tensor | None     # (chunk_buffer_bytes,) uint8; None if nothing of the block lies on SSD
    load: Work
    release: Callable[[Tensor], None]   # where the buffer goes back to
    is_ahead: bool            # it was read ahead


class Updater:
    """Called from the training thread and from the one that collects gradients; owns the updating thread.

    Under `_condition`: protocol, `_recipes`, `_due`, counters, `_error`, `_ahead_orders`. The rest is fixed, or
    belongs to the updating thread, which calls `on_span` as (block's name, start, end of time.perf_counter, bytes,
    `for_step`) for each chunk's Adam if somebody wants to know; it is set before the first step.
    """
    on_span: Callable[[str, float, float, int, int | None], None] | None = None

    def __init__(self, blocks: Sequence[Block], store: BlockStore, pool: PinnedPool, num_chunk_buffers: int,
                 num_read_ahead_chunks: int = 0, num_threads: int | None = None, make_protocol=StepProtocol):
        self._store = store
        self._num_threads = num_threads              # of Adam; torch's number when None
        self._shadow = [store.has_shadow(block.index) for block in blocks]
        self._uses_drive = [store.uses_drive(block.index) for block in blocks]
        self._protocol = make_protocol(self._shadow)
        self._condition = threading.Condition()
        self._num_events = 0                         # grows with whatever somebody may be waiting for
        self._recipes: dict[int, BlockUpdate] = {}   # of blocks that may be taken
        self._due: dict[int, _Due] = {}              # by block
        self._num_publishing = 0
        self._num_writing = 0                        # blocks whose last writes are under way
        self._error: BaseException | None = None     # the first failure of background work
        self._stopping = False                       # set once, by any thread
        self.num_speculated = 0                      # blocks whose speculative update stood, all steps
        largest = max((c.numel for block in blocks if block.trainable for c in block.chunks), default=0)
        scratch_numel = max(min(largest, PIECE_NUMEL), 1)
        self._scratch = pool.alloc(scratch_numel * 4, "gradient scratch of the update").view(torch.float32)
        self._ring = BufferRing(pool, num_chunk_buffers, max(store.chunk_buffer_bytes, 1),
                                "chunk buffers of the update")
        self._num_loading = self._ring.count // 2 + 1   # chunks: half are read, half are written, Adam works on one
        self._ahead = ReadAhead(blocks, store, pool, num_read_ahead_chunks, self._wake)   # of the updating thread
        self._ahead_for_step: int | None = None
        self._loading: deque[_Piece] = deque()
        self._begun: list[_Job] = []   # with chunks yet to load; the last one goes on
        self._aside: _Job | None = None
        self._ahead_orders: deque[Callable[[], None]] = deque()   # for that thread, to be done before anything else
        self._thread = threading.Thread(target=self._loop, name="lohan-update", daemon=True)
        self._thread.start()

    # -- events of a step ----------------------------------------------------------------------------------------

    def open_step(self, speculate: bool, limit: float, for_step: int | None = None) -> None:
        """The last backward of a step begins; as `StepProtocol.open_step`."""
        with self._condition:
            self._protocol.open_step(speculate, limit)
            self._ahead_for_step = for_step
            self._ahead_orders.append(self._ahead.open_step)
            self._notify()

    def gradient_complete(self, update: BlockUpdate, square_sum: float) -> None:
        """All gradients of a block are there; `update` is what its speculation would do."""
        with self._condition:
            self._recipes[update.block.index] = update
            self._protocol.gradient_complete(update.block.index, square_sum)
            self._notify()

    def spoil(self, block_index: int, wait: bool = False) -> None:
        """Call *before* a block's gradients, parameters or state change: its speculation is dropped.

        `wait`: until nothing of it is being written or read ahead any more; needed before the store is written to.
        """
        with self._condition:
            self._protocol.spoil(block_index)
            if not wait:
                return
            if self._ahead.num_chunks:
                self._ahead_orders.append(functools.partial(self._ahead.drop, block_index))
                self._notify()
            self._condition.wait_for(
                lambda: self._error is not None or self._stopping
                or (not self._ahead_orders and self._protocol.stage(block_index) is not Stage.DROPPED))

    def skip(self) -> None:
        """There is no update in this step."""
        with self._condition:
            self._protocol.skip()
            self._ahead_orders.append(self._ahead.end)
            self._notify()

    def decide(self, updates: Sequence[BlockUpdate], stands: bool) -> None:
        """step() happens: every block of `updates` (forward order) is updated. Reads of them wait from now on.

        `stands`: what was speculated has the coefficient and hyper-parameters of `updates`.
        """
        for update in updates:
            self._store.announce_update(update.block.index)
        due = {update.block.index: _Due(update.for_step) for update in updates}
        with self._condition:
            self._due.update(due)
            self._ahead_orders.append(self._ahead.end)
            before = [self._protocol.stage(update.block.index) for update in updates]
            publish = self._protocol.decide(stands, [update.block.index for update in updates])
            for update, stage in zip(updates, before):
                if not (stands and stage is Stage.SPECULATING):   # that one goes on with what it has, the same
                    self._recipes[update.block.index] = update
                if stands and stage in (Stage.SPECULATING, Stage.SPECULATED):
                    self.num_speculated += 1
                    self._store.adopt_speculation(update.block.index)
            self._num_publishing += len(publish)
            self._notify()
            error = self._error
        if error is not None:   # since step() looked: nobody else is going to end these updates
            self._fail_due(error)
        for block_index in publish:
            self._publish(block_index, due[block_index])

    def _publish(self, block_index: int, due: _Due | None) -> None:
        """`_num_publishing` counts it already: nobody may see the protocol idle before the store has published. By the
        time that `due` is struck off, the block may be due again."""
        try:
            self._store.publish(block_index)
        except AssertionError:   # failed meanwhile
            if self._error is None:
                raise
        with self._condition:
            if due is not None and self._due.get(block_index) is due:
                del self._due[block_index]
            self._num_publishing -= 1
            self._notify()

    @property
    def num_dropped(self) -> int:
        """Blocks whose speculative update was for nothing, all steps."""
        with self._condition:
            return self._protocol.num_dropped

    def oldest_due_step(self) -> int | None:
        """The first `for_step` of which step() has decided blocks that are not published yet; None: there is none."""
        with self._condition:
            return min((due.for_step for due in self._due.values()), default=None)

    def stages(self) -> list[Stage]:
        """Of every block, right now."""
        with self._condition:
            return [self._protocol.stage(block_index) for block_index in range(len(self._shadow))]

    def drain(self) -> None:
        """Waits until everything that step() decided is published; raises the first failure."""
        with self._condition:
            self._condition.wait_for(lambda: self._error or (self._protocol.idle and not self._num_publishing))
        self.check()

    # -- the updating thread -------------------------------------------------------------------------------------

    def _loop(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - raised in the training thread
            self.fail(error)

    def _run(self) -> None:
        """Keeps the drives busy; of what is loaded, the chunk of the block that goes first is updated."""
        while True:
            with self._condition:
                num_events = self._num_events
            self._obey_ahead_orders()
            while self._load_next():
                pass
            self._load_aside()
            piece = self._take_loaded()
            if piece is not None:
                self._process(piece)
                continue
            with self._condition:
                if self._num_events != num_events:
                    continue   # there may be something to do, also before it ends
                if (self._stopping or self._error is not None) and not (self._loading or self._begun or self._aside):
                    return
                self._condition.wait_for(lambda: self._num_events != num_events)   # noqa: B023 - at once

    def _take_loaded(self) -> _Piece | None:
        loaded = [place for place, piece in enumerate(self._loading) if piece.load.done()]
        if not loaded:
            return None
        with self._condition:
            first = min(loaded, key=lambda place: self._protocol.order(self._loading[place].job.update.block.index))
        piece = self._loading[first]
        del self._loading[first]
        return piece

    def _load_next(self) -> bool:
        """Takes a block, begins to load a chunk, or ends a block that is not wanted; False if none of these can be done
        now."""
        job = self._take(self._begun[-1] if self._begun else None)
        if job is not None:
            self._begun.append(job)
        if not self._begun:
            return False
        going_on = self._begun[-1]
        if not self._load_chunk_of(going_on):
            return job is not None
        if not going_on.left:
            self._begun.pop()
        return True

    def _load_aside(self) -> None:
        """While the block that goes on waits for the drives, one that does not need them does, chunk by chunk."""
        if self._aside is None and self._begun and not self._needs_no_drive(self._begun[-1].update.block.index):
            with self._condition:
                block_index = self._protocol.take_aside(self._begun[-1].update.block.index, self._needs_no_drive)
                self._aside = None if block_index is None else self._job_of(block_index)
        if self._aside is None or sum(piece.job is self._aside for piece in self._loading) >= _NUM_ASIDE:
            return
        self._load_chunk_of(self._aside)
        if not self._aside.left:
            self._aside = None

    def _load_chunk_of(self, job: _Job) -> bool:
        """Its next chunk, if it is still wanted; False if that cannot be done now."""
        if not self._wanted(job):
            job.left.clear()
        if job.left:
            piece = self._begin_to_load(job)
            if piece is None:
                return False
            self._loading.append(piece)
        if not job.left:
            self._end_if_done(job)
        return True

    def _take(self, begun: _Job | None) -> _Job | None:
        """The next block, one that goes before `begun`; None if there is none now."""
        begun_index = None if begun is None else begun.update.block.index
        with self._condition:
            urgency = Urgency.UPDATE if self._protocol.speculates else Urgency.AHEAD
            while self._ahead.advance(self._is_at_rest, self._ahead_for_step, urgency):
                pass
            block_index = self._protocol.take(begun_index)
            return None if block_index is None else self._job_of(block_index)

    def _job_of(self, block_index: int) -> _Job:
        """Under `_condition`: of a block that was taken just now."""
        update = self._recipes.pop(block_index)
        touched = _touched(update, every_chunk=self._shadow[block_index])
        return _Job(update, self._protocol.stage(block_index) is Stage.SPECULATING, deque(touched))

    def _obey_ahead_orders(self) -> None:
        while True:
            with self._condition:
                if not self._ahead_orders:
                    self._condition.notify_all()
                    return
                order = self._ahead_orders[0]
            order()   # may wait for a read
            with self._condition:
                self._ahead_orders.popleft()

    def _notify(self) -> None:
        """Under `_condition`: something has changed."""
        self._num_events += 1
        self._condition.notify_all()

    def _wake(self) -> None:
        with self._condition:
            self._notify()

    def _needs_no_drive(self, block_index: int) -> bool:
        return not self._uses_drive[block_index]

    def _is_at_rest(self, block_index: int) -> bool:
        return self._protocol.stage(block_index) is Stage.IDLE and block_index not in self._due

    def _wanted(self, job: _Job) -> bool:
        if self._stopping:
            raise StepError("the engine was closed while an update was under way")
        with self._condition:
            if self._error is not None:
                raise self._error
            return self._protocol.wanted(job.update.block.index)

    def _begin_to_load(self, job: _Job) -> _Piece | None:
        """The next chunk of a block; None if it was not read ahead, and cannot be read now."""
        block_index, (chunk, runs) = job.update.block.index, job.left[0]
        is_on_host = self._needs_no_drive(block_index)
        alike = sum((piece.buffer is None) == is_on_host for piece in self._loading
                    if not piece.is_ahead and piece.job is not self._aside)
        ahead = self._ahead.take(block_index, chunk)
        if ahead is not None:
            buffer, release = ahead.buffer, self._ahead.release
            writable = self._store.writable(block_index, job.speculative)
            load = writable.then(lambda _: ahead.load)
        elif alike >= self._num_loading and job is not self._aside:
            return None
        else:
            buffer, release = None, self._ring.release
            if not is_on_host:
                buffer = self._ring.try_acquire()
                if buffer is None:
                    return None
            load = self._store.load_chunk(block_index, chunk, buffer, job.speculative, job.update.for_step)
        job.left.popleft()
        job.num_loading += 1
        load.on_done(self._wake)
        return _Piece(job, chunk, runs, buffer, load, release, ahead is not None)

    def _process(self, piece: _Piece) -> None:
        job, update = piece.job, piece.job.update
        arrays = piece.load.wait()
        job.num_loading -= 1
        if not self._wanted(job):
            self._release(piece)
            self._end_if_done(job)
            return
        start = time.perf_counter() if self.on_span is not None else 0.0
        covered = sum(run.end - run.start for run in piece.runs) == piece.chunk.numel
        for run in piece.runs:
            part = slice(run.start - piece.chunk.start, run.end - piece.chunk.start)
            out = arrays.params[part] if covered and arrays.params is not None else None
            adam_update_(arrays.master[part], update.grads[run.start:run.end], arrays.exp_avg[part],
                         arrays.exp_avg_sq[part], run.step, run.hyper, update.coefficient, self._scratch, out,
                         self._num_threads)
        if arrays.params is not None and not covered:   # gaps between parameters, and those that got no gradient
            arrays.params.copy_(arrays.master)
        if self.on_span is not None:
            state_bytes = 12 * sum(run.end - run.start for run in piece.runs)
            self.on_span(update.block.name, start, time.perf_counter(), state_bytes, update.for_step)
        save = self._store.save_chunk(update.block.index, piece.chunk, arrays, job.speculative, update.for_step)
        save.on_done(lambda: self._release(piece))
        job.saves.append(save)
        self._end_if_done(job)

    def _release(self, piece: _Piece) -> None:
        if piece.buffer is not None:
            piece.release(piece.buffer)
        self._wake()

    def _end_if_done(self, job: _Job) -> None:
        """After a job's last chunk: once its writes have ended, the protocol says what becomes of it."""
        if job.left or job.num_loading:
            return
        with self._condition:
            self._num_writing += 1
        written = Work.all_of(job.saves)
        written.on_done(lambda: self._ended(job, written.exception()))

    def _ended(self, job: _Job, error: BaseException | None) -> None:
        """In whatever thread ended the last write."""
        if error is not None:
            self.fail(error)
        block_index, publish = job.update.block.index, False
        with self._condition:
            due = self._due.get(block_index)
            if self._error is None:
                publish = self._protocol.ended(block_index)
                self._num_publishing += publish
            self._notify()
        if publish:
            self._publish(block_index, due)
        with self._condition:
            self._num_writing -= 1
            self._notify()

    # -- failure and end -----------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Background work failed: every block that is due fails, and `check` raises from now on."""
        with self._condition:
            if self._error is not None:
                if error is not self._error and not self._stopping:
                    logger.error("a later failure of background work: %s", error)
                return
            self._error = error
            self._notify()
        self._fail_due(error)

    def _fail_due(self, error: BaseException) -> None:
        with self._condition:
            due, self._due = self._due, {}
        for block_index in due:
            with contextlib.suppress(AssertionError):   # published meanwhile
                self._store.fail(block_index, error)

    def check(self) -> None:
        """Raises StepError from the first failure of background work, at every call after it."""
        with self._condition:
            error = self._error
        if error is not None:
            raise StepError(f"background work failed: {error}") from error

    def stop(self) -> None:
        """Ends an update under way at its next chunk; the blocks it did not come to fail. The store is void then."""
        self._stopping = True
        with self._condition:
            self._notify()

    def close(self) -> None:
        """Ends the thread; idempotent. An update under way is cut as by `stop`."""
        self.stop()
        self._thread.join()
        with self._condition:   # their end still needs the store
            self._condition.wait_for(lambda: not self._num_writing)
        self._ahead.close()
        self._ring.close()


def _touched(update: BlockUpdate, every_chunk: bool) -> Iterator[tuple[Chunk, list[Run]]]:
    """The chunks that have something to update, each with its part of the runs; with `every_chunk` all of them,
    because the other slot of the block must become a whole copy."""
    for chunk in update.block.chunks:
        end = chunk.start + chunk.numel
        runs = [run._replace(start=max(run.start, chunk.start), end=min(run.end, end)) for run in update.runs
                if run.start < end and run.end > chunk.start]
        if runs or every_chunk:
            yield chunk, runs
