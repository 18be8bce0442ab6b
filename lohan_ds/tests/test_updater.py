"""Blocks in host memory are updated while one on the drives waits for them; the bits stay the same."""
from __future__ import annotations

import threading
import time

import pytest
import torch

from lohan_ds import updater as updater_module
from lohan_ds.adam import adam_update_
from lohan_ds.errors import StepError
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


def updates_of(blocks, step, numel=4000):
    def grads(block):
        return torch.randn(block.numel, generator=torch.Generator().manual_seed(10 * step + block.index)).bfloat16()

    return [BlockUpdate(b, (Run(0, numel, HYPER, step),), grads(b), 0.5) for b in blocks if b.trainable]


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


def test_a_block_beside_another_goes_on_in_its_turn(tmp_path, monkeypatch):
    """Where the drives keep up, it is not overtaken by the blocks after it."""
    def slow_adam(*args):
        time.sleep(0.003)
        adam_update_(*args)

    monkeypatch.setattr(updater_module, "adam_update_", slow_adam)
    order = []
    tiers, numel = ("ssd", "ssd", "host", "ssd"), 8 * 2048
    with store_of(tmp_path, ThreadSsdIo(2), "host", state_tier=tiers, numel=numel) as (blocks, store, pool):
        updater = Updater(blocks, store, pool, 3)
        updater.on_span = lambda name, *_: order.append(name)
        for step in (1, 2, 3):
            updater.open_step(False, 1e9)
            updater.decide(updates_of(blocks, step, numel), False)
            updater.drain()
            assert order.index("b3") > max(place for place, name in enumerate(order) if name == "b2"), order
            order.clear()
        updater.close()


@pytest.mark.timeout(30)
def test_what_was_decided_just_before_the_end_fails_and_keeps_nobody_waiting(tmp_path, monkeypatch):
    """The updating thread has looked and found nothing when step() decides and the engine is closed."""
    has_looked, go_on = threading.Event(), threading.Event()
    load_aside = Updater._load_aside

    def held(self):
        load_aside(self)
        has_looked.set()
        assert go_on.wait(30)

    monkeypatch.setattr(Updater, "_load_aside", held)
    with store_of(tmp_path) as (blocks, store, pool):
        updater = Updater(blocks, store, pool, 3)
        updates = updates_of(blocks, 1)
        assert has_looked.wait(10)
        updater.open_step(False, 1e9)
        updater.decide(updates, False)
        updater.stop()
        go_on.set()
        with pytest.raises(StepError, match="closed while an update was under way"):
            Work.first_of([store.published(0), _after(10)]).wait()
            updater.drain()
        assert store.published(0).done()
        updater.close()
