from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from lohan_ds.errors import CapacityError, StoreError
from lohan_ds.store import run_dirs
from lohan_ds.store.filenames import CURRENT, LOCK, MANIFEST, named_run_dirs, run_dir_name
from lohan_ds.store.manifest import Manifest, to_json
from lohan_ds.store.run_dirs import RunDirs, remove_dead_runs

HOLD = "import sys, time; from lohan_ds.store.run_dirs import RunDirs; " \
       "d = RunDirs(sys.argv[1:], [0]); print('made', flush=True); time.sleep(60)"


def test_made_locked_private_and_removed(tmp_path):
    path = str(tmp_path / run_dir_name(os.getpid(), "ab12"))
    dirs = RunDirs([path], [0])
    assert dirs.paths == [path] and os.listdir(path) == [LOCK]
    assert os.stat(path).st_mode & 0o777 == 0o700 and os.stat(os.path.join(path, LOCK)).st_mode & 0o777 == 0o600
    assert remove_dead_runs(str(tmp_path)) == []   # ours, and alive
    with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
        RunDirs([path], [0])
    assert os.path.isdir(path)
    dirs.close()
    dirs.close()
    assert os.listdir(tmp_path) == []


def test_what_kill_9_leaves_is_removed_by_the_next_run_and_the_living_stay(tmp_path):
    dead, alive = (str(tmp_path / run_dir_name(pid, "cd34")) for pid in (1, 2))   # process ids say nothing
    processes = [subprocess.Popen([sys.executable, "-c", HOLD, path], stdout=subprocess.PIPE) for path in (dead, alive)]
    try:
        for process in processes:
            assert process.stdout.readline() == b"made\n"
        processes[0].send_signal(signal.SIGKILL)
        processes[0].wait()
        assert os.path.isdir(dead)
        mine = RunDirs([str(tmp_path / run_dir_name(os.getpid(), "ef56"))], [0])
        assert not os.path.exists(dead) and os.path.isdir(alive)
        mine.close()
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_nothing_else_is_touched(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / LOCK).write_text("")
    (tmp_path / "lohan-7-ab").symlink_to(elsewhere)          # a link, not a directory
    (tmp_path / "lohan-7-cd").mkdir()                        # without a lock
    (tmp_path / "lohan-7-ef").mkdir()
    (tmp_path / "lohan-7-ef" / LOCK).symlink_to(elsewhere / LOCK)
    (tmp_path / "lohan-data").mkdir()                        # another name
    (tmp_path / "lohan-data" / LOCK).write_text("")
    before = sorted(os.listdir(tmp_path))
    assert remove_dead_runs(str(tmp_path)) == [] and sorted(os.listdir(tmp_path)) == before
    assert remove_dead_runs(str(tmp_path / "missing")) == []


def test_a_foreign_users_run_is_left_alone(tmp_path, monkeypatch):
    path = tmp_path / "lohan-7-ab"
    path.mkdir()
    (path / LOCK).write_text("")
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(path).st_uid + 1)
    assert remove_dead_runs(str(tmp_path)) == []
    monkeypatch.undo()
    assert remove_dead_runs(str(tmp_path)) == [str(path)]


def test_too_small_a_drive_leaves_nothing(tmp_path):
    with pytest.raises(CapacityError, match="bytes are missing"):
        RunDirs([str(tmp_path / "lohan-1-a1"), str(tmp_path / "lohan-1-b2")], [0, 1 << 60])
    assert os.listdir(tmp_path) == []


# Runs with a name


@pytest.fixture
def named(tmp_path):
    """The directories, not made yet, of the run "r" on two drives."""
    for name in "ab":
        (tmp_path / name).mkdir()
    return named_run_dirs([str(tmp_path / name) for name in "ab"], "r")


def _put_manifests(paths, places=(0, 1)):
    for place in places:
        manifest = Manifest(run_id="a1", directory=place, num_directories=2, durability="shadow", chunk_numel=2048,
                            blocks=())
        with open(os.path.join(paths[place], MANIFEST), "wb") as file:
            file.write(to_json(manifest))


def _leave(paths):
    """As a process that is killed does."""
    dirs = RunDirs(paths, [0, 0])
    dirs.keep = True
    dirs.close()


def test_kept_when_it_is_to_be_and_reopened(named):
    _leave(named)
    assert [os.listdir(path) for path in named] == [[LOCK], [LOCK]]
    again = RunDirs.reopen(named)
    with pytest.raises(StoreError, match=f"in use by process {os.getpid()}: end that first, or choose another "
                                         "lohan.run_name"):
        RunDirs.reopen(named)
    again.close()
    RunDirs.reopen(named).close()
    assert remove_dead_runs(os.path.dirname(named[0])) == []   # no scratch


def test_another_process_that_has_it_is_named(named):
    process = subprocess.Popen([sys.executable, "-c", HOLD.replace("[0]", "[0, 0]"), *named], stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"made\n"
        for open_run in (lambda: RunDirs.reopen(named), lambda: RunDirs(named, [0, 0])):
            with pytest.raises(StoreError, match=f"in use by process {process.pid}"):
                open_run()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    RunDirs.reopen(named).close()


def test_reopen_refuses_what_is_missing_linked_or_foreign(named, tmp_path, monkeypatch):
    _leave(named)
    with pytest.raises(StoreError, match="No such file"):
        RunDirs.reopen([named[0], str(tmp_path / "c" / "lohan-run-r")])
    (tmp_path / "lohan-run-r").symlink_to(named[1])
    with pytest.raises(StoreError, match="symbolic link"):
        RunDirs.reopen([named[0], str(tmp_path / "lohan-run-r")])
    os.rename(os.path.join(named[1], LOCK), tmp_path / "lock")
    os.symlink(tmp_path / "lock", os.path.join(named[1], LOCK))
    with pytest.raises(StoreError, match="lock file cannot be opened"):
        RunDirs.reopen(named)
    os.replace(tmp_path / "lock", os.path.join(named[1], LOCK))
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(named[0]).st_uid + 1)
    with pytest.raises(StoreError, match="belongs to user id"):
        RunDirs.reopen(named)
    monkeypatch.undo()
    RunDirs.reopen(named).close()   # none of them kept a lock


@pytest.mark.parametrize("manifests", [(), (0,), (0, 1)])
def test_a_run_that_was_cut_off_before_its_first_commit_begins_anew(named, manifests):
    _leave(named)
    _put_manifests(named, manifests)
    dirs = RunDirs(named, [0, 0])
    assert [os.listdir(path) for path in named] == [[LOCK], [LOCK]]
    dirs.close()


@pytest.mark.parametrize("manifests,files", [((0, 1), (CURRENT,)), ((0, 1), ("commit.1",)), ((1,), ())])
def test_a_run_that_may_have_been_trained_does_not(named, manifests, files):
    _leave(named)
    _put_manifests(named, manifests)
    for name in files:
        with open(os.path.join(named[0], name), "w"):
            pass
    before = [sorted(os.listdir(path)) for path in named]
    with pytest.raises(StoreError, match="File exists"):
        RunDirs(named, [0, 0])
    assert [sorted(os.listdir(path)) for path in named] == before


@pytest.mark.parametrize("with_lock", [False, True])
def test_a_run_that_was_cut_off_before_it_had_its_name_begins_anew(named, with_lock):
    os.mkdir(named[1] + "~new")
    if with_lock:
        with open(os.path.join(named[1] + "~new", LOCK), "w"):
            pass
    RunDirs(named, [0, 0]).close()
    assert [os.listdir(os.path.dirname(path)) for path in named] == [[], []]


def test_a_removal_that_is_cut_off_leaves_a_dead_run(tmp_path, monkeypatch):
    path = str(tmp_path / run_dir_name(1, "ab"))
    _leave([path, str(tmp_path / run_dir_name(1, "cd"))])
    os.mkdir(os.path.join(path, "spill"))
    with open(os.path.join(path, "block-0000.params"), "w"):
        pass
    removed = []
    monkeypatch.setattr(run_dirs.shutil, "rmtree", lambda path, **_: removed.append(path))   # that is, not
    run_dirs.remove_directory(path)
    assert removed == [os.path.join(path, "spill"), path]
    assert sorted(os.listdir(path)) == [LOCK, "spill"]
    monkeypatch.undo()
    assert len(remove_dead_runs(str(tmp_path))) == 2 and os.listdir(tmp_path) == []
