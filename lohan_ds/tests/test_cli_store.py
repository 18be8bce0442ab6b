"""`lohan store`: what it prints, what it removes, and how it exits. What it finds is tested in test_store_check.py."""
from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from lohan_ds import cli
from lohan_ds.store.filenames import LOCK
from lohan_ds.testing.durable_training import durable_training
from lohan_ds.tests.test_store_check import HOLD, committed_files, flip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    paths = [str(tmp_path_factory.mktemp(name)) for name in "ab"]
    with durable_training(paths, "eager") as training:
        training.run(2)
        training.finish()
    return paths


@pytest.fixture
def paths(trained, tmp_path):
    """Two SSD paths with the run "test" at step 2, dead scratch and a run that was cut off as it began."""
    copies = []
    for path in trained:
        copies.append(str(tmp_path / os.path.basename(path)))
        shutil.copytree(path, copies[-1])
    for name in ("lohan-12-ab", "lohan-run-begun"):
        os.mkdir(os.path.join(copies[0], name))
        with open(os.path.join(copies[0], name, LOCK), "w"):
            pass
    return copies


def lohan(*words, answer=None):
    return CliRunner().invoke(cli.app, ["store", *words], input=answer)


def run_dirs(paths):
    return [os.path.join(path, "lohan-run-test") for path in paths]


def test_list_has_a_line_for_each_run(paths):
    result = lohan("list", *paths)
    assert result.exit_code == 0
    lines = {line.split("  ")[0].strip(): line for line in result.output.splitlines()[2:]}
    assert lines.keys() == {"begun", "test", "scratch"}
    assert "at step 2" in lines["test"] and "kB" in lines["test"] and all(path in lines["test"] for path in paths)
    assert "unfinished" in lines["begun"] and "dead scratch" in lines["scratch"]
    entry = next(entry for entry in json.loads(lohan("list", "--json", *paths).output) if entry["name"] == "test")
    assert entry["state"] == "at step 2" and entry["directories"] == run_dirs(paths)
    assert entry["bytes_written"] > sum(entry["disk_bytes"]) > 0
    assert lohan("list", paths[0] + "-none").exit_code == 2


def test_check_says_what_is_committed(paths):
    result = lohan("check", *paths, "--run", "test")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("run test: step 2, commit 3, durability shadow, 4 blocks, ")
    assert lines[0].endswith("kB written so far")
    assert lines[1] == "  slots of the blocks: 0-3: 0"
    assert [line.split(" in ")[1] for line in lines[2:4]] == run_dirs(paths)
    assert lines[4].startswith("ok: ") and len(lines) == 5
    entry, = json.loads(lohan("check", "--json", *run_dirs(paths)).output)
    assert (entry["step"], entry["durability"], entry["damages"], entry["dirty"]) == (2, "shadow", [], False)
    assert entry["slots"] == {"embedding": 0, "layer 0": 0, "frozen": 0, "layer 1": 0}


def test_check_names_what_is_damaged(paths):
    path, block, kind = list(committed_files(run_dirs(paths)))[3]
    flip(path, 17)
    result = lohan("check", *paths, "--run", "test")
    assert result.exit_code == 1
    row = next(line for line in result.output.splitlines() if line.startswith(path))
    assert row.split()[1:3] == ["0", str(os.path.getsize(path))] or row.split()[1] == "0"
    assert block in row and kind in row and "checksum needed" in row
    assert "damaged: 1 pieces" in result.output
    damage, = json.loads(lohan("check", "--json", *run_dirs(paths)).output)[0]["damages"]
    assert (damage["path"], damage["block"], damage["kind"], damage["offset"]) == (path, block, kind, 0)


def test_check_exits_2_where_it_cannot(paths):
    result = lohan("check", paths[0], "--run", "test")
    assert result.exit_code == 2 and "only 1 of its 2 directories found" in result.output
    assert lohan("check", *paths, "--run", "nobody").exit_code == 2
    assert lohan("check", *paths).exit_code == 2              # there is one that was never committed
    assert lohan("check", paths[1] + "/..").exit_code == 2    # no run at all
    os.unlink(os.path.join(run_dirs(paths)[1], "MANIFEST.json"))
    result = lohan("check", *run_dirs(paths))
    assert result.exit_code == 2 and "only 1 of its 2" in result.output


def test_check_of_a_dirty_run_exits_2(tmp_path):
    with durable_training([str(tmp_path)], "deferred", durability="in_place") as training:
        training.run(1)
        training.pipeline.updater.drain()
    result = lohan("check", str(tmp_path))
    assert result.exit_code == 2 and "dirty: cut off while data was changed in place" in result.output


def test_clean_removes_what_nobody_misses(paths):
    result = lohan("clean", *paths)
    assert result.exit_code == 0 and result.output.count("removed") == 2
    assert os.listdir(paths[0]) == os.listdir(paths[1]) == ["lohan-run-test"]
    assert lohan("clean", *paths).output == ""


@pytest.mark.parametrize("answer,gone", [("y\n", True), ("n\n", False), ("", False)])
def test_clean_asks_before_it_removes_a_run_with_a_name(paths, answer, gone):
    result = lohan("clean", *paths, "--run", "test", answer=answer)
    assert "Remove test (at step 2, " in result.output
    assert result.exit_code == (0 if gone else 2)
    assert [os.path.exists(path) for path in run_dirs(paths)] == [not gone] * 2


def test_clean_with_yes(paths):
    assert lohan("clean", *paths, "--run", "nobody", "--yes").exit_code == 2
    result = lohan("clean", *paths, "--run", "test", "--run", "begun", "--yes")
    assert result.exit_code == 0 and "Remove" not in result.output
    assert os.listdir(paths[0]) == os.listdir(paths[1]) == []


def test_clean_removes_a_damaged_run_too(paths):
    for run_dir in run_dirs(paths):
        flip(os.path.join(run_dir, "MANIFEST.json"), 40)
    result = lohan("clean", *paths, "--run", "test", answer="y\ny\n")   # nothing says that they belong together
    assert result.exit_code == 0 and result.output.count(": damaged: ") == 2
    assert os.listdir(paths[0]) == os.listdir(paths[1]) == []


def test_clean_leaves_what_is_in_use_foreign_or_linked(paths, tmp_path, monkeypatch):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, os.path.join(paths[0], "lohan-12-ab"), *run_dirs(paths)],
                              stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"held\n"
        result = lohan("clean", *paths, "--run", "test", "--yes")
        assert result.exit_code == 2 and f"in use by process {holder.pid}" in result.output
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    left = ["lohan-12-ab", "lohan-run-test"]
    assert sorted(os.listdir(paths[0])) == left
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(paths[0]).st_uid + 1)
    assert lohan("clean", *paths, "--run", "test", "--yes").exit_code == 2
    monkeypatch.undo()
    links = tmp_path / "links"
    links.mkdir()
    for name in left:
        (links / name).symlink_to(os.path.join(paths[0], name))
    assert lohan("clean", str(links), "--run", "test", "--yes").exit_code == 2
    assert sorted(os.listdir(paths[0])) == sorted(os.listdir(links)) == left
