"""Blocks in host memory are updated while one on the drives waits for them; the bits stay the same."""
from __future__ import annotations

import threading

import pytest
import torch

from lohan_ds.store.ssd_io import ThreadSsdIo
from lohan_ds.tests.test_read_ahead import HYPER, store_of
from lohan_ds.updater import BlockUpdate, Run, Updater
from lohan_ds.work import Work


class HeldReads(ThreadSsdIo):
    """Reads wait until `go_on` is set."""

    def __init__(self, num_threads: int = 2):
        super().__init__(num_threads)
        self.go_on = threading.Event()
        self.go_on.set()

    def _pread(self, fd, view, offset):
        assert self.go_on.wait(30)
        return super()._pread(fd, view, offset)


def updates_of(blocks, step):
    def grads(block):
        return torch.randn(block.numel, generator=torch.Generator().manual_seed(10 * step + block.index)).bfloat16()

    return [BlockUpdate(b, (Run(0, 4000, HYPER, step),), grads(b), 0.5) for b in blocks if b.trainable]


def masters(store, blocks):
    found = []
    for block in blocks:
        out = torch.empty(block.numel)
        store.read_array(block.index, "master", 0, out)
        found.append(out)
    return found


@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize("num_chunk_buffers", [1, 3])
def test_what_lies_in_host_memory_does_not_wait_for_the_drives(tmp_path, num_chunk_buffers, speculates):
    """The first block's state is on SSD, of the others everything is in host memory."""
    results = []
    for held in (False, True):
        io, tiers = HeldReads(), ("ssd", "host", "host", "host")
        with store_of(tmp_path / str(held), io, "host", speculates, state_tier=tiers) as (blocks, store, pool):
            updater = Updater(blocks, store, pool, num_chunk_buffers)
            for step in (1, 2):
                updates = updates_of(blocks, step)
                updater.open_step(speculates, 1e9)
                if held:
                    io.go_on.clear()
                if speculates:   # the first is the newest, and goes first
                    for update in reversed(updates):
                        updater.gradient_complete(update, 1.0)
                updater.decide(updates, speculates)
                if held:
                    for block in blocks[2:]:
                        assert Work.first_of([store.published(block.index), _after(10)]).wait() is None
                        assert store.published(block.index).done()
                    assert not store.published(0).done()
                    io.go_on.set()
                updater.drain()
            results.append(masters(store, [b for b in blocks if b.trainable]))
            updater.close()
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def _after(seconds: float) -> Work:
    work = Work()
    timer = threading.Timer(seconds, work.finish)
    timer.daemon = True
    timer.start()
    return work
