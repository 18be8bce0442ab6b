"""`check_run` and `find_runs`: whatever is wrong with a run is named, and what is right is left alone."""
from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys

import pytest

from lohan_ds.errors import StoreError
from lohan_ds.store.check import check_run
from lohan_ds.store.filenames import CURRENT, LOCK, MANIFEST, commit_file_name
from lohan_ds.store.found_runs import find_runs
from lohan_ds.store.manifest import Commit, Manifest, read_json, to_json
from lohan_ds.testing.durable_training import durable_training

HOLD = ("import sys, time; from lohan_ds.store.run_dirs import RunDirs; "
        "d = RunDirs.reopen(sys.argv[1:]); print('held', flush=True); time.sleep(60)")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two SSD paths with the run "test" at step 3."""
    paths = [str(tmp_path_factory.mktemp(name)) for name in "ab"]
    with durable_training(paths, "eager") as training:
        training.run(3)
        training.finish()
    return paths


@pytest.fixture
def run_dirs(trained, tmp_path):
    """Of a copy of that run."""
    copies = []
    for path in trained:
        copies.append(str(tmp_path / os.path.basename(path) / "lohan-run-test"))
        shutil.copytree(os.path.join(path, "lohan-run-test"), copies[-1])
    return copies


def parents(run_dirs):
    return [os.path.dirname(path) for path in run_dirs]


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << offset % 8]))


def committed_files(run_dirs):
    """(path, block's name, kind) of every file that the commit is of."""
    manifest = read_json(os.path.join(run_dirs[0], MANIFEST), Manifest)
    commit = read_json(os.path.join(run_dirs[0], CURRENT), Commit)
    for index, (block, slot) in enumerate(zip(manifest.blocks, commit.slots)):
        for kind in ("params", "state") if block.trainable else ("params",):
            name = f"block-{index:04d}.{kind}" + (f".{slot}" if block.trainable else "")
            for run_dir in run_dirs:
                if os.path.exists(os.path.join(run_dir, name)):
                    yield os.path.join(run_dir, name), block.name, kind


def test_a_whole_run_is_reported_whole(run_dirs):
    report = check_run(run_dirs)
    assert report.damages == () and report.unexpected == ()
    assert (report.commit.step, report.manifest.durability, report.commit.dirty) == (3, "shadow", False)
    assert report.bytes_checked == sum(os.path.getsize(path) for path, *_ in committed_files(run_dirs))
    assert report.commit.bytes_written > 3 * report.bytes_checked * 0.9   # every step, and the first values
    with durable_training(parents(run_dirs), "eager") as training:       # checking leaves it as it was
        assert training.step == 3


def test_a_flipped_bit_in_any_file_of_the_commit_is_named(run_dirs):
    draw = random.Random(5)
    files = list(committed_files(run_dirs))
    assert len(files) == 11
    for path, block, kind in files:
        offset = draw.randrange(os.path.getsize(path))
        flip(path, offset)
        damage, = check_run(run_dirs).damages
        assert (damage.path, damage.block, damage.kind) == (path, block, kind)
        assert damage.offset <= offset < damage.offset + damage.nbytes and damage.chunk in (0, 1)
        assert "checksum needed" in damage.what
        flip(path, offset)
    assert not check_run(run_dirs).damages


def test_several_damages_are_all_named(run_dirs):
    files = [path for path, *_ in committed_files(run_dirs)]
    for path in files[:3]:
        flip(path, 7)
    os.unlink(files[4])
    os.truncate(files[5], 4096)
    damages = {damage.path: damage for damage in check_run(run_dirs).damages}
    assert damages.keys() == {*files[:3], *files[4:6]}
    assert "No such file" in damages[files[4]].what and damages[files[4]].offset is None
    assert "bytes, got 4096" in damages[files[5]].what


def test_what_is_not_of_the_commit_may_be_anything(run_dirs):
    committed = {path for path, *_ in committed_files(run_dirs)}
    for run_dir in run_dirs:
        for name in os.listdir(run_dir):
            if name.startswith("block-") and os.path.join(run_dir, name) not in committed:
                flip(os.path.join(run_dir, name), 11)
    with open(os.path.join(run_dirs[0], CURRENT + "~new"), "w") as file:
        file.write("half a rec")                                          # what a crash leaves
    report = check_run(run_dirs)
    assert report.damages == () and report.unexpected == ()


@pytest.mark.parametrize("name", [CURRENT, MANIFEST, "details"])
@pytest.mark.parametrize("how", ["flipped", "gone", "cut"])
def test_damaged_records_are_named(run_dirs, name, how):
    if name == "details":
        name = commit_file_name(read_json(os.path.join(run_dirs[0], CURRENT), Commit).number)
    path = os.path.join(run_dirs[0], name)
    if how == "flipped":
        flip(path, os.path.getsize(path) // 2)
    elif how == "cut":
        os.truncate(path, os.path.getsize(path) - 3)
    else:
        os.unlink(path)
    if (name, how) == (MANIFEST, "gone"):
        with pytest.raises(StoreError, match="part of this run is missing"):
            check_run(run_dirs)
        return
    damage, = check_run(run_dirs).damages
    assert damage.path == (run_dirs[0] if (name, how) == (CURRENT, "gone") else path)
    with pytest.raises(StoreError, match="damaged"):   # and never trained on
        with durable_training(parents(run_dirs), "eager"):
            raise AssertionError("opened")


def test_a_record_of_another_run_is_damage(run_dirs):
    path = os.path.join(run_dirs[0], CURRENT)
    commit = read_json(path, Commit)
    with open(path, "wb") as file:
        file.write(to_json(commit.model_copy(update={"run_id": "f0"})))
    assert check_run(run_dirs).damages[0].what == "it is of another run"
    with pytest.raises(StoreError, match="of another run"):
        with durable_training(parents(run_dirs), "eager"):
            raise AssertionError("opened")


def test_unexpected_files_are_listed(run_dirs):
    for run_dir, name in zip(run_dirs, ("notes.txt", "block-0009.params.0")):
        with open(os.path.join(run_dir, name), "w"):
            pass
    assert check_run(run_dirs).unexpected == (os.path.join(run_dirs[0], "notes.txt"),
                                              os.path.join(run_dirs[1], "block-0009.params.0"))


def test_in_use_says_by_whom(run_dirs):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, *run_dirs], stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(StoreError, match=f"in use by process {holder.pid}"):
            check_run(run_dirs)
        run, = find_runs(parents(run_dirs))
        assert run.state() == f"in use by process {holder.pid}" and not run.may_go
        with pytest.raises(StoreError, match=f"in use by process {holder.pid}"):
            run.remove()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    run, = find_runs(parents(run_dirs))
    assert run.state() == "at step 3" and not check_run(run_dirs).damages


def test_foreign_and_linked_directories_are_refused(run_dirs, tmp_path, monkeypatch):
    link = tmp_path / "c" / "lohan-run-test"
    link.parent.mkdir()
    link.symlink_to(run_dirs[0])
    with pytest.raises(StoreError, match="symbolic link"):
        check_run([str(link), run_dirs[1]])
    run, = find_runs([str(link.parent)])
    assert "not looked at: refused as a run directory: it is no directory, or a symbolic link" == run.state()
    with pytest.raises(StoreError, match="symbolic link"):
        run.remove()
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(run_dirs[0]).st_uid + 1)
    with pytest.raises(StoreError, match="belongs to user id"):
        check_run(run_dirs)
    for run in find_runs(parents(run_dirs)):
        assert "belongs to user id" in run.state() and not run.may_go
        with pytest.raises(StoreError, match="belongs to user id"):
            run.remove()
    monkeypatch.undo()
    assert not check_run(run_dirs).damages


def test_a_dirty_run_is_said_to_be(tmp_path):
    os.mkdir(tmp_path / "a")
    with durable_training([str(tmp_path / "a")], "deferred", durability="in_place") as training:
        training.run(1)
    run, = find_runs([str(tmp_path / "a")])
    assert run.state() == "dirty after step 0"
    report = check_run(run.dirs)
    assert report.commit.dirty and report.damages == () and report.bytes_checked == 0


def test_runs_are_found_by_path_or_by_themselves(run_dirs, tmp_path):
    (tmp_path / "a0").mkdir(exist_ok=True)
    paths = parents(run_dirs)
    for name in ("lohan-run-begun", "lohan-12-ab", "lohan-13-ab~new", "lohan-run-half~new", "other"):
        os.mkdir(os.path.join(paths[0], name))
        if name != "lohan-run-half~new":
            with open(os.path.join(paths[0], name, LOCK), "w"):
                pass
    by_path = {os.path.basename(run.dirs[0]): run for run in find_runs([*paths, run_dirs[0]])}
    assert {name: (run.name, run.state(), run.may_go) for name, run in by_path.items()} == {
        "lohan-run-test": ("test", "at step 3", False), "lohan-run-begun": ("begun", "unfinished", True),
        "lohan-12-ab": (None, "dead scratch", True), "lohan-13-ab~new": (None, "dead scratch", True),
        "lohan-run-half~new": ("half", "unfinished", True)}
    assert by_path["lohan-run-test"].dirs == tuple(run_dirs) and not by_path["lohan-run-test"].is_partial
    alone, = find_runs([run_dirs[1]])
    assert alone.is_partial and alone.state() == "at an unknown step, 1 of 2 directories" and not alone.may_go
    for run in by_path.values():
        if run.may_go:
            run.remove()
    assert sorted(os.listdir(paths[0])) == ["lohan-run-test", "other"]
    with pytest.raises(StoreError, match="cannot list"):
        find_runs([str(tmp_path / "none")])
