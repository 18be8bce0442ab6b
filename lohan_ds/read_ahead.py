"""`ReadAhead`: optimizer state that is read before it is known whether, and with what, it will be updated.

What the first blocks' updates will need is read in backward, into host memory that is left over: the next forward
waits for them. In `deferred` mode the drives have nothing else to do for updates then. In `eager` mode the gradients of
the first blocks are the last to come; their updates need no reads any more then. What was read stays valid over a
skipped step, until somebody edits the block.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from lohan_ds.block import Block, Chunk
from lohan_ds.memory.pinned_pool import BufferRing, PinnedPool
from lohan_ds.store.block_store import BlockStore
from lohan_ds.store.io_threads import Urgency
from lohan_ds.work import Work


class Ahead(NamedTuple):
    """A chunk that is read, or being read."""
    buffer: Tensor   # (chunk_buffer_bytes,) uint8, to be given back to `ReadAhead.release`
    load: Work       # of ChunkArrays


_NUM_READING = 2   # chunks at a time: enough to keep the drives busy, and few enough to be in nobody's way


class ReadAhead:
    """Belongs to the updating thread, but for `release`."""

    def __init__(self, blocks: Sequence[Block], store: BlockStore, pool: PinnedPool, num_chunks: int,
                 on_read: Callable[[], None] = lambda: None):
        """`on_read`: called in any thread when there may be something to do for `advance` again."""
        self._on_read = on_read
        self._reading: list[Work] = []
        self._chunks = [(block, chunk) for block in blocks if block.trainable and store.reads_for_update(block.index)
                        for chunk in block.chunks]
        self._store = store
        self._ring = BufferRing(pool, num_chunks, max(store.chunk_buffer_bytes, 1), "optimizer state read ahead")
        self._entries: dict[tuple[int, int], Ahead] = {}   # by (block, chunk)
        self._edited: set[int] = set()                     # blocks, since the step was opened
        self._next: int | None = None                      # into `_chunks`; None: not reading

    @property
    def num_chunks(self) -> int:
        return self._ring.count

    def open_step(self) -> None:
        """From now on `advance` reads what is not here yet, from the first block on in forward order; what was edited
        before may be read again."""
        self._edited.clear()
        self._next = 0

    def end(self) -> None:
        self._next = None

    def advance(self, may_read: Callable[[int], bool], for_step: int | None, urgency: Urgency = Urgency.AHEAD) -> bool:
        """Starts to read one more chunk; False if there is nothing to read now, or no room. `may_read`: whether a block
        has no update under way. Does not block."""
        self._reading = [work for work in self._reading if not work.done()]
        if len(self._reading) == _NUM_READING:
            return False
        while self._next is not None and self._next < len(self._chunks):
            block, chunk = self._chunks[self._next]
            if (block.index, chunk.index) in self._entries or block.index in self._edited:
                self._next += 1
                continue
            buffer = self._ring.try_acquire() if may_read(block.index) else None
            if buffer is None:
                return False
            self._next += 1
            load = self._store.load_chunk(block.index, chunk, buffer, for_step=for_step, urgency=urgency,
                                          ahead=True)
            self._entries[block.index, chunk.index] = Ahead(buffer, load)
            self._reading.append(load)
            load.on_done(self._on_read)
            return True
        return False

    def take(self, block_index: int, chunk: Chunk) -> Ahead | None:
        """What was read of a chunk; None if nothing was."""
        return self._entries.pop((block_index, chunk.index), None)

    def release(self, buffer: Tensor) -> None:
        """Any thread."""
        self._ring.release(buffer)

    def drop(self, block_index: int) -> None:
        """Forgets what was read of a block, and reads no more of it before the next step; waits until nothing of
        it is being read."""
        self._edited.add(block_index)
        for key in [key for key in self._entries if key[0] == block_index]:
            entry = self._entries.pop(key)
            entry.load.exception()
            self._ring.release(entry.buffer)

    def close(self) -> None:
        """Waits for what is being read, frees the buffers. Idempotent."""
        for block_index in {key[0] for key in self._entries}:
            self.drop(block_index)
        self._ring.close()
