"""`Feeds`: reads of params that wait for an update get them from the update itself.

[Note: feeding] Who waits for the params of an update on SSD gets them chunk by chunk as the update saves them, and has
them before they are written; the drive is not asked again. What a speculation made and has not written is handed
out too, once it is known to stand. If a write fails then, the update fails and the run ends, as always.
"""
from __future__ import annotations

import threading
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

from lohan_ds.block import Block, Chunk
from lohan_ds.work import Work


class _Made(NamedTuple):
    update: Work | None    # None: of a speculation, so far
    chunk: Chunk
    params: Tensor


class Feed:
    """One read. Any thread; `_taken`, `_open` and `_ended` are under `_lock`, the rest is fixed."""

    def __init__(self, block: Block, out: Tensor, update: Work):
        self.work = Work(out)     # of `out`
        self.update = update      # what the read waits for
        self._out = out           # (numel,) block dtype, host
        self._num_chunks = len(block.chunks)
        self._lock = threading.Lock()
        self._taken: set[int] = set()
        self._open = True
        self._ended = False

    @torch.no_grad()
    def take(self, chunk: Chunk, params: Tensor) -> bool:
        """The update has made a chunk: (chunk.numel,) block dtype. Whether all are there now: then call `end`."""
        with self._lock:
            if self._open:
                self._out[chunk.start:chunk.start + chunk.numel].copy_(params)
                self._taken.add(chunk.index)
            return len(self._taken) == self._num_chunks

    def stop(self) -> Collection[int]:
        """Takes no more: the rest is read from the drive. The indexes of the chunks that are there."""
        with self._lock:
            self._open = False
            return self._taken

    def end(self, error: BaseException | None) -> None:
        """Ends `work`; only the first call counts."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self.work.finish(self._out) if error is None else self.work.fail(error)


class Feeds:
    """Those of all blocks, and the chunks that updates have made and not written yet. Any thread; all under `_lock`."""

    def __init__(self, num_blocks: int):
        self._lock = threading.Lock()
        self._feeds: list[list[Feed]] = [[] for _ in range(num_blocks)]   # by block
        self._made: list[dict[int, _Made]] = [{} for _ in range(num_blocks)]   # by block, by chunk
        self._adopted: list[Work | None] = [None] * num_blocks   # by block, the update that its last speculation became

    def add(self, block: Block, out: Tensor, update: Work) -> Feed:
        """`update`: ends when the update that the read waits for is published; done already if there is none."""
        feed = Feed(block, out, update)
        if update.done():
            return feed
        with self._lock:
            self._feeds[block.index].append(feed)
            complete = self._take_made(feed, block.index)
        if complete:
            feed.end(None)
        return feed

    def _take_made(self, feed: Feed, block_index: int) -> bool:
        of_update = [made for made in self._made[block_index].values() if made.update is feed.update]
        return any([feed.take(made.chunk, made.params) for made in of_update])

    def adopt(self, block_index: int, update: Work) -> None:
        """The last speculation on the block stands: it, finished or not, is the update that ends with `update`."""
        with self._lock:
            self._adopted[block_index] = update
            of_block = self._made[block_index]
            of_block.update({place: made._replace(update=update) for place, made in of_block.items()
                             if made.update is None})
            complete = [feed for feed in self._feeds[block_index]
                        if feed.update is update and self._take_made(feed, block_index)]
        for feed in complete:
            feed.end(None)

    def give(self, block_index: int, update: Work | None, chunk: Chunk, params: Tensor) -> None:
        """To all reads that wait for `update`, and to those that come before `written` is called. None: to nobody
        unless the speculation that made it is adopted."""
        with self._lock:
            adopted = self._adopted[block_index]
            if update is None and adopted is not None and not adopted.done():
                update = adopted
            self._made[block_index][chunk.index] = _Made(update, chunk, params)
            feeds = [feed for feed in self._feeds[block_index] if feed.update is update]   # none if it is None
        for feed in feeds:
            if feed.take(chunk, params):
                feed.end(None)

    def written(self, block_index: int, chunk: Chunk) -> None:
        """The memory of what was given may be used again after this call."""
        with self._lock:
            self._made[block_index].pop(chunk.index, None)

    def remove(self, block_index: int, feed: Feed) -> None:
        with self._lock:
            self._feeds[block_index] = [other for other in self._feeds[block_index] if other is not feed]
