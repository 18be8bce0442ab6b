"""`BlockStore`: the home of param, master, exp_avg and exp_avg_sq of every block, in host RAM and on SSD.

It orders the operations on each block (see [Note: order of a block] in block_order.py); where each chunk lies is
told by [Note: striping] in block_files.py. It is a store, not a cache: what it holds is the only copy, and nothing
is removed before `close`; in a run with a name not even then ([Note: commits] in commits.py). Blocks with a shadow
slot ([Note: slots] in block_order.py) are held twice. One update of a bf16 block with everything on SSD reads 12 and
writes 14 bytes a parameter, of a float32 block 12 and 12, since there the param array is the master. A shadow slot
changes nothing about that; in host RAM the update copies what it reads. Who waits for the params of an update need not
read them: [Note: feeding] in feeds.py.
"""
from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from lohan_ds.block import Block, Chunk
from lohan_ds.errors import StoreError
from lohan_ds.memory.pinned_pool import BufferRing, PinnedPool
from lohan_ds.plan import OffloadPlan
from lohan_ds.store.block_files import num_slots, required_ssd_bytes
from lohan_ds.store.block_home import BlockHome, ChunkArrays
from lohan_ds.store.block_order import BlockOrder, EditSlots
from lohan_ds.store.commits import Commits, Contents
from lohan_ds.store.feeds import Feeds
from lohan_ds.store.file_io import FileIo
from lohan_ds.store.filenames import CURRENT
from lohan_ds.store.io_threads import Urgency
from lohan_ds.store.manifest import Damaged, Manifest, check_same_model, describe, read_manifests
from lohan_ds.store.run_dirs import RunDirs
from lohan_ds.stripe import even_stripe
from lohan_ds.work import Work

__all__ = ["BlockStore", "ChunkArrays", "required_ssd_bytes"]


class BlockStore:
    """Any thread, one update at a time per block. All fields but `_closed` are fixed after construction.

    Owns the host tensors (taken from `pool`), the files and the run directories; not `pool` and `io`, which their
    maker closes after the store. `block_index` is a block's `index`, its place in `blocks`. After `close` every
    method raises StoreError.
    """

    def __init__(self, blocks: Sequence[Block], plan: OffloadPlan, pool: PinnedPool, io: FileIo | None,
                 run_dirs: Sequence[str], reopen: bool = False):
        """Takes all memory and disk space at once: CapacityError or StoreError, nothing kept, if one lacks.

        The SSD tier needs `io` and at least one run directory; they must not exist yet. Without it none is made.
        `reopen`: they hold a run of a durable plan, which is opened as it was last committed (`last_commit`), and stays
        striped as it was at first, whatever the plan says.
        StoreError if it is of another model, damaged, in use, or (DirtyStore) was changed in place when it ended.
        """
        if any(block.index != place for place, block in enumerate(blocks)):
            raise AssertionError("blocks are not in the order of their index")
        self.ssd_bytes = required_ssd_bytes(blocks, plan)
        if self.ssd_bytes and (io is None or not run_dirs):
            raise ValueError(f"the plan puts {self.ssd_bytes} bytes on SSD, but there is no I/O or no directory")
        if max(plan.stripe, default=-1) >= len(run_dirs):
            raise ValueError(f"the plan deals to directory {max(plan.stripe) + 1}, but there are {len(run_dirs)}")
        self._pool = pool
        self._plan = plan
        self._run_dirs: RunDirs | None = None
        self._commits: Commits | None = None     # of a durable plan
        self._edited = False                     # since the last commit asked for
        self._finished = False                   # no commit counts any more
        self.num_edits = 0                       # begun so far
        self._announced = False                  # an update, since the last commit asked for
        self._durable = Work.completed()         # of the last commit asked for
        self._last_given: tuple[int, bytes] | None = None   # step and details of the last commit asked for
        self._staging: BufferRing | None = None  # one buffer for what is not aligned or not in fp32 yet
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="lohan-store-copy")  # of host params to readers
        self._shadow_copier = ThreadPoolExecutor(1, thread_name_prefix="lohan-store-shadow")  # of what updates load
        self._feeds = Feeds(len(blocks))
        self._closed = False
        self._slots: list[list[BlockHome]] = []  # by block, by slot
        self._homes: list[BlockHome] = []
        self._orders: list[BlockOrder] = []
        try:
            manifest = self._reopen(run_dirs) if reopen else None
            self._stripe = (plan.stripe if manifest is None else manifest.stripe) or even_stripe(len(run_dirs))
            for block in blocks:
                names = [None] if num_slots(block, plan) == 1 else [0, 1]
                self._slots.append([BlockHome(block, plan, pool, io, self._stripe, name) for name in names])
            self._homes += [home for slots in self._slots for home in slots]
            if self.ssd_bytes:
                if manifest is None:
                    self._run_dirs = RunDirs(run_dirs, self._needed_bytes(len(run_dirs)))
                staging_bytes = max(home.chunk_bytes for home in self._homes)
                self._staging = BufferRing(pool, 1, staging_bytes, "staging buffer of the store")
            if plan.durability != "none":
                self._commits = Commits(io, run_dirs, self._contents)
            current = [0] * len(blocks) if manifest is None else self._load_commit(manifest, blocks)
            open_commit = None if reopen or self._commits is None else self._commits.open
            self._orders += [
                BlockOrder(f"block {block.index} ({block.name})", num_slots(block, plan), slot, open_commit)
                for block, slot in zip(blocks, current)]
            for home in self._homes:
                home.open(run_dirs, reopen)
        except BaseException:
            self.close()
            raise

    def _needed_bytes(self, num_dirs: int) -> list[int]:
        """Of the files in each directory."""
        return [sum(files.nbytes_in(directory) for home in self._homes for files in home.all_files)
                for directory in range(num_dirs)]

    def _reopen(self, run_dirs: Sequence[str]) -> Manifest:
        self._run_dirs = RunDirs.reopen(run_dirs)
        manifest = read_manifests(run_dirs)
        if manifest is None:
            raise StoreError(2, "there is no run", run_dirs[0])
        return manifest

    def _load_commit(self, manifest: Manifest, blocks: Sequence[Block]) -> tuple[int, ...]:
        """Sets the checksums of the last commit; by block, the slot it is in."""
        check_same_model(manifest, blocks)
        if (manifest.chunk_numel, manifest.durability) != (self._plan.chunk_numel, self._plan.durability):
            raise StoreError(22, f"the run was made with chunks of {manifest.chunk_numel} elements and durability "
                                 f"{manifest.durability}, the plan has {self._plan.chunk_numel} and "
                                 f"{self._plan.durability}", self._run_dirs.paths[0])
        checksums = memoryview(self._commits.load())
        commit = self._commits.last
        if commit.run_id != manifest.run_id:
            raise Damaged("it is of another run", os.path.join(self._run_dirs.paths[0], CURRENT))
        self._last_given = commit.step, self._commits.details
        for slots, slot in zip(self._slots, commit.slots):
            for files in slots[slot].all_files:
                files.checksums.set_bytes(checksums[:files.checksums.nbytes])
                checksums = checksums[files.checksums.nbytes:]
        return commit.slots

    # Whole blocks

    @torch.no_grad()
    def write_initial(self, block_index: int, params: Tensor) -> None:
        """Sets a block's params, (numel,) block dtype, host; masters become their fp32 values, moments zero. Blocks.

        Waits for an update under way, and also mends a block whose last update failed. Reads issued meanwhile wait.
        """
        slots, order = self._open_block(block_index)
        _check(slots[0].block, "params", params, slots[0].dtype, 0, slots[0].block.numel)
        with self._editing(order, replaces_all=True) as where, self._staged() as buffer:
            slots[where.target].initialise(params, buffer)

    def read_params(self, block_index: int, out: Tensor) -> Work:
        """Work of `out`, (numel,) block dtype, host, which then holds the params after the last announced update.

        Never blocks. `out` must be 4096-aligned for params on SSD, and not touched until the work is done. StepError
        through the Work if that update failed, StoreError if the read did.
        """
        slots, order = self._open_block(block_index)
        _check(slots[0].block, "out", out, slots[0].dtype, 0, slots[0].block.numel)
        if slots[0].params is None:
            return self._read_or_feed(block_index, out)
        return order.read(
            lambda slot: Work.of_future(self._copier.submit(_copy, slots[slot].params, out), holds=out))

    def lend_params(self, block_index: int) -> Work | None:
        """Work of the host tensor of the params itself, (numel,) block dtype, after the last announced update; None for
        params on SSD. Never blocks. StepError through the Work if that update failed.

        The store does not see what is done with the tensor: be done with it before the next update is announced, and
        ask again after that, because a block with a shadow slot has another tensor then.
        """
        slots, order = self._open_block(block_index)
        if slots[0].params is None:
            return None
        return order.read(lambda slot: Work.completed(slots[slot].params))

    # Updates: announce, load and save each chunk, publish or fail. Speculations: load and save each chunk, then
    # either announce and publish, or drop them by doing nothing.

    def has_shadow(self, block_index: int) -> bool:
        """Whether updates of this block leave its bytes alone until `publish`, so that it may speculate."""
        return self._open_block(block_index)[1].has_shadow

    def reads_for_update(self, block_index: int) -> bool:
        """Whether an update of this block reads anything from SSD."""
        home = self._open_block(block_index)[0][0]
        return home.state_files is not None or (home.param_files is not None and not home.block.has_separate_master)

    def uses_drive(self, block_index: int) -> bool:
        """Whether anything of this block lies on SSD."""
        return bool(self._open_block(block_index)[0][0].all_files)

    def announce_update(self, block_index: int) -> None:
        """From now on reads of this block wait for its publication. Does not block."""
        order = self._open_block(block_index)[1]
        self.commit_edits()
        self._announced = True
        if self._commits is None:
            order.announce()
        else:
            order.announce(self._commits.open, None if order.has_shadow else self._commits.mark_dirty())

    def adopt_speculation(self, block_index: int) -> None:
        """The speculation on this block, finished or not, is the announced update: who waits for that gets params of it
        before they are written. Does not block."""
        order = self._open_block(block_index)[1]
        self._feeds.adopt(block_index, order.published())

    def publish(self, block_index: int) -> None:
        """All chunks are saved (their Works are done): reads may go on. Starts them, does not wait for them.

        With a shadow slot that means every chunk of the block, changed or not, whether the update or a speculation
        before it has saved it: the slot they were saved to is read from now on.
        """
        self._open_block(block_index)[1].publish()

    def fail(self, block_index: int, error: BaseException) -> None:
        """The update cannot be completed: waiting and later reads get a StepError from `error`, until the next one.

        That one starts from what is there. With a shadow slot these are the values before the failed update, whole;
        without one, whatever it has left.
        """
        self._open_block(block_index)[1].fail(error)

    def published(self, block_index: int) -> Work:
        """Ends once no update of the block is under way; fails with a StepError if the last one failed."""
        return self._open_block(block_index)[1].published()

    def wait_published(self, block_index: int) -> None:
        """Blocks until no update of the block is under way; StepError if the last one failed."""
        self.published(block_index).wait()

    @property
    def chunk_buffer_bytes(self) -> int:
        """Bytes that `load_chunk` needs of a buffer for the largest chunk; 0 when no trained block is on SSD."""
        return max((home.chunk_bytes for home in self._homes if home.block.trainable), default=0)

    def load_chunk(self, block_index: int, chunk: Chunk, buffer: Tensor | None, speculative: bool = False,
                   for_step: int | None = None, *, urgency: Urgency = Urgency.UPDATE, ahead: bool = False) -> Work:
        """Work of the ChunkArrays of a chunk of the announced update. Does not block. StepError if none is announced.

        Kinds on SSD are read into `buffer` (uint8, 4096-aligned, at least `chunk_buffer_bytes`; None if that is 0),
        which is lent until `save_chunk` is done. Kinds in host RAM are the store's own tensors, handed out once the
        reads issued before the announcement have ended. 16-bit params are never read: they are only written.

        With a shadow slot those tensors are the shadow's, filled with the current values once the reads issued before
        the *last* update's announcement have ended; nothing waits for later reads. `speculative`: no announcement is
        needed, the block stays as it is for readers. AssertionError if it has no shadow slot. What is loaded while
        somebody edits the block may be of before and after: drop that speculation. Before the block's next update or
        speculation, wait for the works of the dropped one. `for_step`: whose update it is, for `FileIo.on_span`.

        `ahead`: of the next update or speculation, before either is known. Nobody may edit the block or update it in
        another way from this call on to the end of the work; then wait for `writable` too before changing the arrays.
        """
        slots, order = self._open_block(block_index)
        where = order.update_slots(speculative, ahead)
        source, target = slots[where.source], slots[where.target]
        arrays, reads = target.load(chunk, buffer, source, for_step, urgency)
        if target.params is not None or target.state:
            reads.append(where.drained if target is source else where.drained.then(
                lambda _: Work.of_future(self._shadow_copier.submit(target.copy_host_arrays, chunk, source))))
        return Work.all_of(reads, value=arrays)

    def writable(self, block_index: int, speculative: bool = False) -> Work:
        """Ends when nobody reads any more what an update or speculation changes in host memory."""
        slots, order = self._open_block(block_index)
        on_ssd = slots[0].params is None and not slots[0].state
        return Work.completed() if on_ssd else order.update_slots(speculative).drained

    def save_chunk(self, block_index: int, chunk: Chunk, arrays: ChunkArrays, speculative: bool = False,
                   for_step: int | None = None) -> Work:
        """Writes back what `load_chunk` gave, changed in place. Does not block; the buffer is free when it is done.

        Readers that wait for this update get the new params from the arrays. What lies in host RAM is saved already.
        Writes start when the reads issued before the announcement have ended;
        with a shadow slot, which they go to, those before the announcement of the update before.
        """
        slots, order = self._open_block(block_index)
        where = order.update_slots(speculative)
        feeds, update = slots[0].params is None, None if speculative else order.published()

        def save(_: object) -> Work:   # once the commit before is durable, so that no reader is further ahead of it
            if feeds:
                params = arrays.master if arrays.params is None else arrays.params
                self._feeds.give(block_index, update, chunk, params)
            return slots[where.target].save(chunk, arrays, for_step)

        saved = where.drained.then(save)
        return saved.first_calling(lambda: self._feeds.written(block_index, chunk)) if feeds else saved

    def _read_or_feed(self, block_index: int, out: Tensor) -> Work:
        slots, order = self._slots[block_index], self._orders[block_index]
        feed = self._feeds.add(slots[0].block, out, order.published())
        read = order.read(lambda slot: slots[slot].read_params(out, without=feed.stop()))

        def end() -> None:
            self._feeds.remove(block_index, feed)
            feed.end(read.exception())

        read.on_done(end)
        return feed.work

    # Single elements, for look-ups, edits and checkpoints

    @torch.no_grad()
    def read_array(self, block_index: int, kind: str, start: int, out: Tensor) -> None:
        """Fills `out`, 1-D of the array's dtype, host, from element `start` on; any range within the block.

        `kind`: "param", "master", "exp_avg" or "exp_avg_sq"; the first two are one array in a float32 block. Blocks,
        also for an update under way: never call it from the thread that is to publish that. ValueError for what the
        block does not have, StepError if its last update failed.
        """
        slots, order = self._open_block(block_index)
        _check(slots[0].block, kind, out, slots[0].array_dtype(kind), start)
        with order.reading() as slot, self._staged() as buffer:
            slots[slot].read_range(kind, start, out, buffer)

    @torch.no_grad()
    def write_array(self, block_index: int, kind: str, start: int, values: Tensor) -> None:
        """Sets the elements from `start` on to `values`; otherwise as `read_array`. Reads issued meanwhile wait.

        The other kinds stay as they are: a 16-bit "param" edited alone leaves its "master" with the old value. If
        the disk fails the block is failed, as by `fail`, until `write_initial` or the next announced update.
        """
        slots, order = self._open_block(block_index)
        _check(slots[0].block, kind, values, slots[0].array_dtype(kind), start)
        with self._editing(order) as where, self._staged() as buffer:
            if where.target != where.source:
                slots[where.target].copy_records(slots[where.source], buffer)
            slots[where.target].write_range(kind, start, values, buffer)

    def array_view(self, block_index: int, kind: str, start: int, numel: int) -> Tensor | None:
        """The host tensor itself, (numel,) of the array's dtype; None when it lies on SSD.

        The store does not see what is done with it: call `wait_published` first, and be done with reading before the
        next update is announced.
        """
        slots, order = self._open_block(block_index)
        array = slots[order.current_slot()].host_array(kind)
        return None if array is None else array[start:start + numel]

    # Commits, of a durable plan. Called from the thread that announces updates and edits.

    def commit(self, step: int, details: bytes, clean: bool = False, last_checkpoint: str | None = None) -> Work:
        """Makes everything announced and edited so far, once it is published, durable as the state of `step`.

        Never blocks, except for the first one, with which a run begins. The Work fails, and the commit before stays,
        with a StoreError or with what an update failed with. `details`: any bytes, to be found in `last_commit` after a
        crash. With durability "in_place" only `clean` commits are made: ask for one when no update follows for a while.
        """
        self._last_given, first = (step, details), self._commits.last is None
        self._announced = False
        if self._plan.durability == "in_place" and not (clean or first):
            return Work.completed()
        self._edited = False
        slots = [order.published() for order in self._orders]   # of this step: the next ones may be published by then
        published = Work.all_of(slots).then(lambda _: tuple(slot.wait() for slot in slots))
        if not first:
            self._durable = self._commits.commit(step, details, published, last_checkpoint)
            return self._durable
        blocks = [slots[0].block for slots in self._slots]
        self._commits.create(Manifest(run_id=uuid.uuid4().hex, directory=0, num_directories=len(self._run_dirs.paths),
                                      durability=self._plan.durability, chunk_numel=self._plan.chunk_numel,
                                      stripe=self._stripe, blocks=describe(blocks)))
        durable = self._commits.commit(step, details, published, last_checkpoint)
        durable.wait()
        self._run_dirs.keep = True
        return durable

    @property
    def last_commit(self) -> tuple[int, bytes] | None:
        """Step and details of the last durable commit; None if the plan is not durable or before the first."""
        if self._commits is None or self._commits.last is None:
            return None
        return self._commits.last.step, self._commits.details

    def commit_edits(self) -> None:
        """Before speculations: they write slots that edits have left, which are free only after a commit. Updates do it
        by themselves. Does nothing if there was no edit, or the plan is not durable. Never blocks."""
        if self._edited and not self._announced and self._last_given is not None and not self._finished:
            self.commit(*self._last_given)

    def finish(self) -> None:
        """Before `close`, when no update is under way any more: makes the last commit asked for durable, and what was
        edited since. Blocks. StoreError or what an update failed with. Nothing if the plan is not durable, or if an
        update came after that commit: of which step that is only its caller knows."""
        self._finished = True
        if self._last_given is None or self._commits is None or self._announced:
            return
        if self._edited or self._plan.durability == "in_place":
            self.commit(*self._last_given, clean=True)
        self._durable.wait()

    @contextmanager
    def _editing(self, order: BlockOrder, replaces_all: bool = False) -> Iterator[EditSlots]:
        self.num_edits += 1
        if self._commits is None:
            with order.editing(replaces_all) as where:
                yield where
            return
        may_write = None if order.has_shadow else self._commits.mark_dirty()
        with order.editing(replaces_all, self._commits.open, may_write) as where:
            self._edited = True
            yield where

    def _contents(self, slots: tuple[int, ...]) -> Contents:
        files = [files for homes, slot in zip(self._slots, slots) for files in homes[slot].all_files]
        return Contents(slots, b"".join(f.checksums.to_bytes() for f in files),
                        [file for f in files for file in f.files], self.bytes_written)

    # The whole

    @property
    def scratch_dir(self) -> str | None:
        """A directory on an SSD for files that their maker removes; None without an SSD tier."""
        return self._run_dirs.paths[0] if self._run_dirs is not None else None

    @property
    def bytes_read(self) -> int:
        """From the store's files, all reads that have succeeded."""
        return sum(file.bytes_read for home in self._homes for files in home.all_files for file in files.files)

    @property
    def bytes_written(self) -> int:
        return sum(file.bytes_written for home in self._homes for files in home.all_files for file in files.files)

    @property
    def host_bytes(self) -> int:
        """Host RAM held: the host tier and, beside an SSD tier, one staging buffer of a chunk."""
        staging_bytes = self._staging.nbytes if self._staging is not None and not self._closed else 0
        return sum(home.host_bytes for home in self._homes) + staging_bytes

    def close(self) -> None:
        """Fails what waits for an update, waits for requests under way, removes files, directories, host tensors; those
        of a run with a name stay as they were last committed.

        Idempotent. Tensors that the store handed out are void: do not have copies from them in flight.
        """
        if self._closed:
            return
        self._closed = True
        for order in self._orders:
            order.abandon(_closed_error())
        if self._commits is not None:
            self._commits.close()
        self._copier.shutdown(wait=True)
        self._shadow_copier.shutdown(wait=True)
        for home in self._homes:
            home.close()
        if self._staging is not None:
            self._staging.close()
        if self._run_dirs is not None:
            self._run_dirs.close()

    def _open_block(self, block_index: int) -> tuple[list[BlockHome], BlockOrder]:
        if self._closed:
            raise _closed_error()
        return self._slots[block_index], self._orders[block_index]

    @contextmanager
    def _staged(self) -> Iterator[Tensor | None]:
        """The staging buffer for the time of the body, None if all blocks are in host RAM."""
        if self._staging is None:
            yield None
            return
        buffer = self._staging.acquire()
        try:
            yield buffer
        finally:
            self._staging.release(buffer)


def _closed_error() -> StoreError:
    return StoreError("the block store is closed")


def _check(block: Block, what: str, tensor: Tensor, dtype: torch.dtype, start: int, numel: int | None = None) -> None:
    """ValueError unless `tensor` is 1-D, contiguous, in host memory, of `dtype`, and within the block."""
    fits = 0 <= start <= start + tensor.numel() <= block.numel if numel is None else tensor.numel() == numel
    flat_on_host = tensor.dim() == 1 and tensor.is_contiguous() and tensor.device.type == "cpu"
    if not flat_on_host or tensor.dtype != dtype or not fits:
        raise ValueError(f"block {block.index}: {what} needs a contiguous 1-D host tensor of {dtype} within "
                         f"{block.numel} elements, got {tuple(tensor.shape)} {tensor.dtype} on {tensor.device} at "
                         f"element {start}")


@torch.no_grad()
def _copy(source: Tensor, out: Tensor) -> Tensor:
    return out.copy_(source)
