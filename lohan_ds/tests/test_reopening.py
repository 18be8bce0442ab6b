"""Reopening a run: after failures, damage, or by somebody else, it is whole or it is refused with the reason."""
from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest
import torch

from lohan_ds.block import make_block
from lohan_ds.errors import StepError, StoreError
from lohan_ds.store.check import check_run
from lohan_ds.store.checksums import checksum
from lohan_ds.store.filenames import CURRENT, MANIFEST, named_run_dirs
from lohan_ds.store.manifest import Commit, Manifest, read_json, to_json
from lohan_ds.store.ssd_io import ThreadSsdIo
from lohan_ds.testing.committed_store import (BLOCKS, FLOAT, FROZEN, IDLE, TRAINED, array, begin, open_store,
                                              update, values)
from lohan_ds.testing.crashing_io import CrashingIo



class FailingIo(ThreadSsdIo):
    """The next `num_failures` syncs of data fail."""
    num_failures = 0
    num_syncs = 0

    def _fdatasync(self, fd):
        self.num_syncs += 1
        if self.num_failures:
            self.num_failures -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super()._fdatasync(fd)


# -- the stripe that it was begun with -------------------------------------------------------------------------------

@pytest.mark.parametrize("first,then", [((0, 0, 1), ()), ((0, 0, 1), (1,)), ((), (1, 1, 0)), ((1,), (0, 1))])
def test_a_run_stays_striped_as_it_was_begun(tmp_path, first, then):
    with open_store(tmp_path, stripe=first) as store:
        begin(store)
        update(store, TRAINED, 11.0)
        store.commit(1, b"one").wait()
    sizes = _sizes(tmp_path)
    with open_store(tmp_path, reopen=True, stripe=then) as store:
        assert values(store)[TRAINED] == 11.0
        update(store, TRAINED, 12.0)
        store.commit(2, b"two").wait()
    assert _sizes(tmp_path) == sizes
    run_dirs = named_run_dirs([str(tmp_path / name) for name in "ab"], "r")
    manifest = read_json(os.path.join(run_dirs[1], MANIFEST), Manifest)
    assert manifest.stripe == (first or (0, 1))
    report = check_run(run_dirs)
    assert report.damages == report.unexpected == () and report.commit.step == 2
    with open_store(tmp_path, reopen=True) as store:
        assert values(store)[TRAINED] == 12.0


def test_a_run_of_an_older_version_is_striped_evenly(tmp_path):
    with open_store(tmp_path) as store:
        begin(store)
    run_dirs = named_run_dirs([str(tmp_path / name) for name in "ab"], "r")
    for run_dir in run_dirs:   # its manifest says nothing
        path = os.path.join(run_dir, MANIFEST)
        manifest = read_json(path, Manifest)
        text = to_json(manifest).decode().split('"value": ')[1].rstrip("}\n").replace('"stripe":[0,1],', "") + "}"
        assert "stripe" not in text and Manifest.model_validate_json(text).stripe == ()
        with open(path, "w") as file:
            file.write(f'{{"xxh3": "{checksum(text.encode()):016x}", "value": {text}}}\n')
    assert check_run(run_dirs).damages == ()
    with open_store(tmp_path, reopen=True, stripe=(0, 0, 1)) as store:
        assert values(store)[IDLE] == float(IDLE)


def _sizes(folder):
    return {str(path): path.stat().st_size for path in folder.rglob("block-*")}


# -- failing drives --------------------------------------------------------------------------------------------------

def test_a_failed_sync_is_not_tried_again_and_nothing_is_committed_after_it(tmp_path):
    io = FailingIo(2)
    with open_store(tmp_path, io) as store:
        begin(store)
        update(store, TRAINED, 11.0)
        io.num_failures = 1
        with pytest.raises(StoreError, match=r"sync failed: Input/output error: .*block-0000") as caught:
            store.commit(1, b"one").wait()
        assert caught.value.errno == errno.EIO
        num_syncs = io.num_syncs
        for _ in range(2):                            # the kernel would say now that all is well
            with pytest.raises(StoreError, match="a commit before failed: .*sync failed"):
                store.commit(1, b"again").wait()
        assert io.num_syncs == num_syncs
    with open_store(tmp_path, reopen=True) as store:
        assert store.last_commit == (0, b"zero") and values(store)[TRAINED] == 0.0


def test_what_failed_in_an_update_is_not_committed(tmp_path):
    with open_store(tmp_path) as store:
        begin(store)
        update(store, TRAINED, 11.0, publish=False)
        store.fail(TRAINED, OSError(errno.EIO, "broken drive"))
        with pytest.raises(StepError, match="broken drive"):
            store.commit(1, b"one").wait()
        with pytest.raises(StoreError, match="a commit before failed: .*broken drive"):
            store.commit(2, b"two").wait()
    with open_store(tmp_path, reopen=True) as store:
        assert store.last_commit == (0, b"zero") and values(store)[TRAINED] == 0.0


@pytest.mark.parametrize("kind,match", [("params", "params of block 0"), ("state", "state of block 0")])
def test_a_flipped_bit_is_found_and_never_trained_on(tmp_path, kind, match):
    with open_store(tmp_path) as store:
        begin(store)
        update(store, TRAINED, 11.0)
        store.commit(1, b"one").wait()
    path = tmp_path / "b" / "lohan-run-r" / f"block-0000.{kind}.1"   # with the second chunk
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 8
    path.write_bytes(data)
    with open_store(tmp_path, reopen=True) as store:
        with pytest.raises(StoreError, match=rf"{match} \(trained\), chunk 1, in {path} at offset 0.*not used"):
            if kind == "params":
                out = store.pool.alloc(BLOCKS[0].param_bytes, "params").view(torch.bfloat16)
                store.read_params(0, out).wait()
            else:
                update(store, TRAINED, 12.0)
        assert [array(store, index)[0].item() for index in (IDLE, FLOAT, FROZEN)] == [1.0, 2.0, 3.0]
    assert path.read_bytes() == data                   # it is the only copy


def test_a_lost_write_is_found(tmp_path):
    """The drive said yes and kept the old data, which is whole."""
    path = tmp_path / "a" / "lohan-run-r" / "block-0000.params.1"
    with open_store(tmp_path) as store:
        begin(store)
        for step in (1, 2, 3):
            update(store, TRAINED, 10.0 + step)
            store.commit(step, b"x").wait()
            if step == 1:
                old = path.read_bytes()
    path.write_bytes(old)
    with open_store(tmp_path, reopen=True) as store:
        with pytest.raises(StoreError, match="params of block 0 .*damaged"):
            array(store, TRAINED)


@pytest.mark.parametrize("how,match", [("gone", "cannot open a file of 8192 bytes: No such file"),
                                       ("cut", "needed a file of 8192 bytes, got one of 100")])
def test_a_file_that_is_not_as_it_was_is_named_at_once(tmp_path, how, match):
    with open_store(tmp_path) as store:
        begin(store)
    path = tmp_path / "a" / "lohan-run-r" / "block-0000.params.1"
    path.unlink() if how == "gone" else os.truncate(path, 100)
    with pytest.raises(StoreError, match=match) as caught:
        with open_store(tmp_path, reopen=True):
            pass
    assert caught.value.filename == str(path)


# -- who may open it, and how ----------------------------------------------------------------------------------------

def test_the_lock_forbids_two_trainers(tmp_path):
    with open_store(tmp_path) as store:
        begin(store)
        code = ("import sys; from lohan_ds.store.run_dirs import RunDirs; from lohan_ds.errors import StoreError\n"
                "try: RunDirs.reopen(sys.argv[1:])\n"
                "except StoreError as error: print(error); sys.exit(7)")
        second = subprocess.run([sys.executable, "-c", code, *store._run_dirs.paths], capture_output=True, text=True)
        assert second.returncode == 7 and f"in use by process {os.getpid()}" in second.stdout, second
        with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
            with open_store(tmp_path, reopen=True):
                pass
        update(store, TRAINED, 11.0)                   # the first one goes on
        store.commit(1, b"one").wait()
    with open_store(tmp_path, reopen=True) as store:
        assert store.last_commit == (1, b"one")


def _other_blocks(**changes):
    values = {"name": "p", "numel": 5000, "dtype": "bfloat16", **changes}
    return (make_block(0, "trained", values["dtype"], [(values["name"], (values["numel"],), 0)], 2048), *BLOCKS[1:])


@pytest.mark.parametrize("changes,match", [
    ({"blocks": _other_blocks(name="q")}, "another model: parameter p"),
    ({"blocks": _other_blocks(numel=5001)}, r"another model: parameter p \[5000\]"),
    ({"blocks": _other_blocks(dtype="float16")}, "another model: block 0 is trained, bfloat16"),
    ({"names": ("b", "a")}, "is directory 2 of 2 of its run, not 1 of 2; name lohan.ssd_paths as at first"),
    ({"names": ("a",)}, "is directory 1 of 2 of its run, not 1 of 1"),
    ({"names": ("a", "c")}, "cannot open the run directory: No such file"),
    ({"durability": "in_place"}, "durability shadow, the plan has 2048 and in_place"),
])
def test_what_does_not_fit_is_refused_and_left_alone(tmp_path, changes, match):
    with open_store(tmp_path) as store:
        begin(store)
    with pytest.raises(StoreError, match=match):
        with open_store(tmp_path, reopen=True, **changes):
            pass
    with open_store(tmp_path, reopen=True) as store:
        assert values(store) == {TRAINED: 0.0, IDLE: 1.0, FLOAT: 2.0, FROZEN: 3.0}


@pytest.mark.parametrize("begins", [False, True])
def test_a_drive_that_is_not_mounted_is_no_new_run(tmp_path, begins):
    with open_store(tmp_path) as store:
        begin(store)
    (tmp_path / "a").rename(tmp_path / "unmounted")
    with pytest.raises(StoreError, match="No such file" if not begins else "File exists"):
        with open_store(tmp_path, reopen=not begins):
            pass
    if (tmp_path / "a").exists():
        (tmp_path / "a").rmdir()
    (tmp_path / "unmounted").rename(tmp_path / "a")
    with open_store(tmp_path, reopen=True) as store:
        assert values(store) == {TRAINED: 0.0, IDLE: 1.0, FLOAT: 2.0, FROZEN: 3.0}


def test_all_bytes_ever_written_are_counted(tmp_path):
    written = []
    for step in range(3):
        with open_store(tmp_path, reopen=step > 0) as store:
            if step == 0:
                begin(store)
            update(store, TRAINED, 10.0 + step)
            store.commit(step, b"x").wait()
            written.append(store.bytes_written)
            assert read_json(os.path.join(store._run_dirs.paths[0], CURRENT), Commit).bytes_written == sum(written)
    assert written[1] == written[2] == 14 * BLOCKS[TRAINED].numel


def test_killed_before_the_record_was_synced_then_reopened_then_the_power_fails(tmp_path):
    """A process that finds a record must make it durable before it writes to what the record retires."""
    for seed in range(12):
        paths = tmp_path / str(seed)
        first = CrashingIo(4)
        with open_store(paths, first) as store:
            begin(store)
            update(store, TRAINED, 11.0)
            first.die_at("directory sync", 1)   # after that of the details: the last thing that a commit does
            with pytest.raises(StoreError):
                store.commit(1, b"one").wait()
            assert first.events[-1] == "directory sync" and first.events[-2] == "record rename"
        second = CrashingIo(4, seed=seed)
        second._renames = first._renames               # the machine went on, and so did its memory
        with open_store(paths, second, reopen=True) as store:
            assert store.last_commit == (1, b"one")
            second.die_at("write of first values", 3)
            with pytest.raises((StoreError, StepError)):
                update(store, TRAINED, 12.0)
        second.lose_power()
        with open_store(paths, reopen=True) as store:
            assert values(store)[TRAINED] == 11.0
