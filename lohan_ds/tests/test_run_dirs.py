from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from lohan_ds.errors import CapacityError, StoreError
from lohan_ds.store.filenames import LOCK, run_dir_name
from lohan_ds.store.run_dirs import RunDirs, remove_dead_runs

HOLD = "import sys, time; from lohan_ds.store.run_dirs import RunDirs; " \
       "d = RunDirs(sys.argv[1:], [0]); print('made', flush=True); time.sleep(60)"


def test_made_locked_private_and_removed(tmp_path):
    path = str(tmp_path / run_dir_name(os.getpid(), "ab12"))
    dirs = RunDirs([path], [0])
    assert dirs.paths == [path] and os.listdir(path) == [LOCK]
    assert os.stat(path).st_mode & 0o777 == 0o700 and os.stat(os.path.join(path, LOCK)).st_mode & 0o777 == 0o600
    assert remove_dead_runs(str(tmp_path)) == []   # ours, and alive
    with pytest.raises(StoreError, match="File exists"):
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
