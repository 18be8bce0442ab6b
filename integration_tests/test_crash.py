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

from integration_tests.crashes import MODES, PHASES, READ_AHEAD, Sweep, crash, fast_folder, make_reference, ssd_paths
from integration_tests.failing_drives import KINDS, fail_drives
from integration_tests.killed_training import kill_processes
from lohan_ds.errors import StepError
from lohan_ds.store.block_order import BlockOrder
from lohan_ds.store.commits import Commits
from lohan_ds.store.ssd_io import ThreadSsdIo
from lohan_ds.testing.durable_training import durable_training
from lohan_ds.work import Work

NUM_CRASHES = 2   # in every phase
SEED = 20240501


@pytest.fixture(scope="module")
def folder():
    with fast_folder() as path:
        yield path


@pytest.fixture(scope="module")
def references(folder):
    """By mode."""
    return {name: make_reference(folder, mode) for name, mode in MODES.items()}


def sampled_events(events, num_crashes, seed=SEED):
    """Events of every kind, drawn, as ((kind, number), seed)."""
    draw = random.Random(seed)
    return [((kind, draw.randrange(count)), draw.randrange(10**6))
            for kind, count in collections.Counter(events).items() for _ in range(num_crashes)]


@pytest.mark.parametrize("name", MODES)
def test_no_crash_loses_more_than_the_steps_under_way(folder, references, name):
    mode, reference, sweep = MODES[name], references[name], Sweep()
    for at, seed in sampled_events(reference.events, NUM_CRASHES):
        if not crash(folder, mode, reference, at, seed, sweep):   # how many there are of a kind differs
            crash(folder, mode, reference, (at[0], 0), seed, sweep)
    for seed in range(NUM_CRASHES):
        crash(folder, mode, reference, random.Random(seed).randrange(reference.bytes_written), seed, sweep)
    print(f"{name}, drawn with seed {SEED}, bytes with seeds 0 to {NUM_CRASHES - 1}: {sweep}")
    assert not sweep.losses
    luck = ["trailing update under the next backward", *([READ_AHEAD] if name == "eager" else [])]
    sweep.hits.update(dict.fromkeys(luck, NUM_CRASHES))
    assert not sweep.check_phases(mode, NUM_CRASHES)


def test_a_phase_that_was_not_hit_or_cannot_be_is_a_problem(references):
    sweep = Sweep(hits=collections.Counter(dict.fromkeys(PHASES, 20)))
    assert not sweep.check_phases(MODES["deferred"], 20)
    sweep.hits["data sync"] -= 1
    sweep.seen = collections.Counter(references["eager"].events)
    problems = sweep.check_phases(MODES["deferred"], 20)
    assert "'data sync' hit 19 times" in problems[0] and "'update in backward' cannot be" in problems[1]


def test_killed_processes_lose_no_more(tmp_path, references):
    sweep = Sweep()
    kill_processes(str(tmp_path), MODES["eager"], references["eager"], range(4), sweep)
    print(f"seeds 0 to 3: {sweep}")
    assert not sweep.losses and sweep.hits


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["eager", "read-ahead"])
def test_failing_drives_end_training_with_an_error_that_says_where(folder, references, name):
    sweep = Sweep()
    fail_drives(folder, MODES[name], references[name], range(3 * len(KINDS)), sweep)
    print(f"{name}, seeds 0 to {3 * len(KINDS) - 1}: {sweep}")
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


# What each of them would be without, in which mode:
RULES = {
    "none is left out": ("eager", ThreadSsdIo, "sync", ThreadSsdIo.sync),
    "data is synced before the record": ("eager", ThreadSsdIo, "sync", lambda self, files: Work.completed()),
    "no write enters a slot before the record that retires it": (
        "eager", BlockOrder, "_announce",
        lambda self, commit, may_write, real=BlockOrder._announce: real(self, None, None)),
    "a record waits for the updates that it is of": (
        "eager", BlockOrder, "published", lambda self: Work.completed(self.current_slot())),
    "what is changed in place is marked before": (
        "in_place", Commits, "mark_dirty", lambda self: Work.completed()),
}


@pytest.mark.parametrize("rule", RULES)
def test_the_sweep_finds_a_rule_that_is_not_kept(folder, references, rule, monkeypatch):
    name, *change = RULES[rule]
    monkeypatch.setattr(*change)
    mode, reference, sweep = MODES[name], references[name], Sweep()
    crashes = [(at, seed) for at, seed in sampled_events(reference.events, 12)
               if at[0] not in ("manifest write", "write of first values")]
    random.Random(SEED).shuffle(crashes)
    for at, seed in crashes[:3] if rule == "none is left out" else crashes:
        try:
            crash(folder, mode, reference, at, seed, sweep)
        except AssertionError as error:   # of the training itself
            sweep.losses.append(repr(error))
        if sweep.losses:
            break
    print(f"after {sweep.hits.total()} crashes: {sweep.losses}")
    assert bool(sweep.losses) == (rule != "none is left out")
