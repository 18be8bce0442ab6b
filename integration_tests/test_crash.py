"""A run that is cut off goes on at a whole step, bit for bit: a sample of crash_sweep.py, and proof that it would find
a rule that is not kept.
"""
from __future__ import annotations

import collections
import errno
import random
import threading
import time

import pytest

from integration_tests.crashes import Sweep, crash, fast_folder, make_reference, ssd_paths
from integration_tests.failing_drives import KINDS, fail_drives
from integration_tests.killed_training import kill_processes
from lohan_ds.errors import StepError
from lohan_ds.store.block_order import BlockOrder
from lohan_ds.store.ssd_io import ThreadSsdIo
from lohan_ds.testing.durable_training import durable_training
from lohan_ds.work import Work

NUM_CRASHES = 2   # of every kind of event
SEED = 20240501


@pytest.fixture(scope="module")
def folder():
    with fast_folder() as path:
        yield path


@pytest.fixture(scope="module")
def references(folder):
    """By update mode."""
    return {update: make_reference(folder, update) for update in ("eager", "deferred")}


def sampled_events(events, num_crashes, seed=SEED):
    """Events of every kind, drawn, as (number, seed)."""
    draw = random.Random(seed)
    by_kind = collections.defaultdict(list)
    for number, event in enumerate(events):
        by_kind[event].append(number)
    return [(draw.choice(numbers), draw.randrange(10**6)) for numbers in by_kind.values() for _ in range(num_crashes)]


@pytest.mark.parametrize("update", ["eager", "deferred"])
def test_no_crash_loses_more_than_the_steps_under_way(folder, references, update):
    reference, sweep = references[update], Sweep()
    for at_event, seed in sampled_events(reference.events, NUM_CRASHES):
        crash(folder, update, reference, at_event, seed, sweep)
    print(f"{update}, drawn with seed {SEED}: {sweep}")
    assert not sweep.losses
    kinds = {"data sync", "details write", "record write", "record rename", "directory sync", "slot reuse",
             "write trailing"} | ({"write in backward"} if update == "eager" else set())
    assert kinds <= sweep.hits.keys()


def test_killed_processes_lose_no_more(tmp_path, references):
    sweep = Sweep()
    kill_processes(str(tmp_path), "eager", references["eager"], range(4), sweep)
    print(f"seeds 0 to 3: {sweep}")
    assert not sweep.losses and sweep.hits


@pytest.mark.timeout(120)
@pytest.mark.parametrize("update", ["eager", "deferred"])
def test_failing_drives_end_training_with_an_error_that_says_where(folder, references, update):
    sweep = Sweep()
    fail_drives(folder, update, references[update], range(3 * len(KINDS)), sweep)
    print(f"{update}, seeds 0 to {3 * len(KINDS) - 1}: {sweep}")
    assert not sweep.losses


class HeldWrites(ThreadSsdIo):
    def __init__(self, num_threads):
        super().__init__(num_threads)
        self.go = threading.Event()
        self.go.set()

    def _pwrite(self, fd, view, offset):
        time.sleep(0.02)   # so that it is an I/O thread that ends an update
        assert self.go.wait(20)
        return super()._pwrite(fd, view, offset)


@pytest.mark.timeout(60)
def test_a_failure_reaches_a_block_that_is_due_again_before_its_last_publication_has_ended(tmp_path):
    """Reads go on as soon as the store has published, in another thread than the one that is still at it."""
    io, published, end = HeldWrites(8), threading.Event(), threading.Event()
    with durable_training(ssd_paths(str(tmp_path)), "deferred", io) as training:
        store, updater, publish = training.store, training.pipeline.updater, training.store.publish

        def slow_publish(block_index):
            publish(block_index)
            if block_index == 0 and not published.is_set():
                published.set()
                assert end.wait(20)

        store.publish = slow_publish
        training.run(1)
        assert published.wait(20)
        for order in store._orders:
            order.wait_published()
        io.go.clear()   # the updates of the second step stay under way
        second = threading.Thread(target=lambda: pytest.raises(StepError, training.run, 2))
        second.start()
        while training.step < 2:
            time.sleep(0.01)
        end.set()
        while 0 in updater._due and updater._num_publishing:
            time.sleep(0.01)
        updater.fail(OSError(errno.EIO, "broken drive"))
        with pytest.raises(StepError, match="broken drive"):
            store.wait_published(0)
        io.go.set()
        second.join()


# What each of them would be without:
RULES = {
    "none is left out": (ThreadSsdIo, "sync", ThreadSsdIo.sync),
    "data is synced before the record": (ThreadSsdIo, "sync", lambda self, files: Work.completed()),
    "no write enters a slot before the record that retires it": (
        BlockOrder, "_announce", lambda self, commit, may_write, real=BlockOrder._announce: real(self, None, None)),
    "a record waits for the updates that it is of": (
        BlockOrder, "published", lambda self: Work.completed(self.current_slot())),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_sweep_finds_a_rule_that_is_not_kept(folder, references, rule, monkeypatch):
    monkeypatch.setattr(*RULES[rule])
    sweep = Sweep()
    crashes = [crash for crash in sampled_events(references["eager"].events, 12)
               if references["eager"].events[crash[0]] not in ("manifest write", "write of first values")]
    random.Random(SEED).shuffle(crashes)
    for at_event, seed in crashes[:3] if rule == "none is left out" else crashes:
        try:
            crash(folder, "eager", references["eager"], at_event, seed, sweep)
        except AssertionError as error:   # of the training itself
            sweep.losses.append(repr(error))
        if sweep.losses:
            break
    print(f"after {sweep.hits.total()} crashes: {sweep.losses}")
    assert bool(sweep.losses) == (rule != "none is left out")
