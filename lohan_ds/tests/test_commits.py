"""What a commit is of: whole steps, nothing of what comes after, and no edit in part."""
from __future__ import annotations

import threading

import pytest
import torch

from lohan_ds.store.commits import DirtyStore
from lohan_ds.store.filenames import CURRENT
from lohan_ds.store.ssd_io import ThreadSsdIo
from lohan_ds.testing.committed_store import (BLOCKS, FLOAT, FROZEN, IDLE, TRAINED, begin, edit, open_store,
                                              update, values)


class HeldIo(ThreadSsdIo):
    """Syncs of data stop until `go` is set; `reached` says that one has come so far."""

    def __init__(self, num_threads=2):
        super().__init__(num_threads)
        self.go, self.reached = threading.Event(), threading.Event()
        self.go.set()

    def _fdatasync(self, fd):
        self.reached.set()
        assert self.go.wait(20)
        super()._fdatasync(fd)


# -- what a commit is of ---------------------------------------------------------------------------------------------

def test_a_commit_has_nothing_of_the_steps_after_it(tmp_path):
    """Each step trains another block, as with layers that are skipped, so none waits for the record of the one before;
    the second commit is not begun before the first is durable, and by then the third step is over."""
    io = HeldIo(8)
    with open_store(tmp_path, io) as store:
        begin(store)
        io.reached.clear()
        io.go.clear()
        update(store, TRAINED, 11.0)
        first = store.commit(1, b"one")
        assert io.reached.wait(20)
        update(store, IDLE, 12.0)
        second = store.commit(2, b"two")
        update(store, FLOAT, 13.0)
        assert not first.done()
        io.go.set()
        second.wait()
    with open_store(tmp_path, reopen=True) as store:
        assert store.last_commit == (2, b"two")
        assert values(store) == {TRAINED: 11.0, IDLE: 12.0, FLOAT: 2.0, FROZEN: 3.0}


def test_edits_while_a_commit_is_on_its_way_are_not_in_it(tmp_path):
    io = HeldIo(8)
    with open_store(tmp_path, io) as store:
        begin(store)
        io.reached.clear()
        io.go.clear()
        update(store, TRAINED, 11.0)
        held = store.commit(1, b"one")
        assert io.reached.wait(20)
        edit(store, IDLE, 12.0)                       # at once: its other slot is free
        assert not held.done()
        threading.Timer(0.2, io.go.set).start()
        edit(store, TRAINED, 13.0)                    # waits: its other slot is what is committed
        assert held.done()
    with open_store(tmp_path, reopen=True) as store:
        assert store.last_commit == (1, b"one")
        assert values(store) == {TRAINED: 11.0, IDLE: 1.0, FLOAT: 2.0, FROZEN: 3.0}


def test_edits_are_durable_with_the_next_commit_and_not_before(tmp_path):
    with open_store(tmp_path) as store:
        begin(store)
        edit(store, TRAINED, 11.0)
        edit(store, TRAINED, 12.0)                    # of a slot that is not committed: in place
        store.write_initial(FLOAT, torch.full((BLOCKS[FLOAT].numel,), 13.0))
        assert values(store) == {TRAINED: 12.0, IDLE: 1.0, FLOAT: 13.0, FROZEN: 3.0}
    with open_store(tmp_path, reopen=True) as store:
        assert store.last_commit == (0, b"zero")
        assert values(store) == {TRAINED: 0.0, IDLE: 1.0, FLOAT: 2.0, FROZEN: 3.0}
        edit(store, TRAINED, 11.0)
        store.commit(0, b"edited").wait()
        edit(store, TRAINED, 12.0)
    with open_store(tmp_path, reopen=True) as store:
        assert store.last_commit == (0, b"edited")
        assert values(store)[TRAINED] == 11.0


def test_an_update_after_an_edit_takes_neither_from_the_commit(tmp_path):
    """The update writes the slot that the edit has left, which is what is committed until the edit is."""
    io = HeldIo(8)
    with open_store(tmp_path, io) as store:
        begin(store)
        io.reached.clear()
        io.go.clear()
        edit(store, TRAINED, 11.0)
        timer = threading.Timer(0.2, io.go.set)
        timer.start()
        update(store, TRAINED, 12.0)                  # commits the edit first, and waits for that
        assert io.go.is_set()
        assert values(store)[TRAINED] == 12.0
    with open_store(tmp_path, reopen=True) as store:
        assert store.last_commit == (0, b"zero")
        assert values(store)[TRAINED] == 11.0


def test_the_last_edit_is_durable_after_finish(tmp_path):
    with open_store(tmp_path) as store:
        begin(store)
        update(store, TRAINED, 11.0)
        store.commit(1, b"one")
        edit(store, IDLE, 12.0)
        store.finish()
    with open_store(tmp_path, reopen=True) as store:
        assert store.last_commit == (1, b"one")
        assert (values(store)[TRAINED], values(store)[IDLE]) == (11.0, 12.0)


def test_an_edit_of_a_frozen_block_makes_the_run_dirty_until_it_is_committed(tmp_path):
    with open_store(tmp_path) as store:
        begin(store)
        edit(store, FROZEN, 13.0, moments=False)
        store.commit(0, b"edited", last_checkpoint="/ckpt").wait()
    with open_store(tmp_path, reopen=True) as store:
        assert values(store)[FROZEN] == 13.0
        edit(store, FROZEN, 14.0, moments=False)
    with pytest.raises(DirtyStore, match="Its last checkpoint is /ckpt"):
        with open_store(tmp_path, reopen=True):
            pass


# -- runs that are changed in place ----------------------------------------------------------------------------------

def test_in_place_reopens_where_it_was_closed_in_good_order(tmp_path):
    with open_store(tmp_path, durability="in_place") as store:
        begin(store)
        for step in (1, 2):
            update(store, TRAINED, 10.0 + step)
            assert store.commit(step, b"x").done()    # not made
        store.commit(2, b"two", clean=True).wait()
    with open_store(tmp_path, reopen=True, durability="in_place") as store:
        assert store.last_commit == (2, b"two") and values(store)[TRAINED] == 12.0
        edit(store, IDLE, 13.0)
        store.finish()
    with open_store(tmp_path, reopen=True, durability="in_place") as store:
        assert store.last_commit == (2, b"two") and values(store)[IDLE] == 13.0


@pytest.mark.parametrize("checkpoint", [None, "/somewhere/ckpt"])
@pytest.mark.parametrize("change", ["update", "edit"])
def test_in_place_is_refused_where_it_was_cut_off(tmp_path, checkpoint, change):
    with open_store(tmp_path, durability="in_place") as store:
        begin(store)
        update(store, TRAINED, 11.0)
        store.commit(1, b"one", clean=True, last_checkpoint=checkpoint).wait()
        (update if change == "update" else edit)(store, TRAINED, 12.0)
    expected = f"Its last checkpoint is {checkpoint}" if checkpoint else "There is no checkpoint of it"
    with pytest.raises(DirtyStore, match=f"after step 1.*{expected}.*lohan store clean .*--run r"):
        with open_store(tmp_path, reopen=True, durability="in_place"):
            pass


def test_in_place_writes_nothing_before_it_is_marked(tmp_path):
    """Whatever is killed before the mark is durable has changed nothing."""
    class HeldRecords(ThreadSsdIo):
        go = threading.Event()

        def _rename(self, source, target):
            assert not target.endswith(CURRENT) or self.go.wait(20)
            super()._rename(source, target)

    io = HeldRecords(2)
    io.go.set()
    with open_store(tmp_path, io, durability="in_place") as store:
        begin(store)
        io.go.clear()
        written = store.bytes_written
        worker = threading.Thread(target=update, args=(store, TRAINED, 11.0))
        worker.start()
        worker.join(0.2)
        assert worker.is_alive() and store.bytes_written == written
        io.go.set()
        worker.join()
        assert store.bytes_written > written
