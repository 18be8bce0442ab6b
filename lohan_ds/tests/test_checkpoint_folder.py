"""Whenever a save is cut off, `latest` names a checkpoint that is complete and on disk."""
from __future__ import annotations

import errno
import os
import re

import pytest

from lohan_ds import checkpoint_folder
from lohan_ds.checkpoint_folder import restore_replaced, whole_checkpoint
from lohan_ds.errors import StepError, StoreError


def save(save_dir, tag, text, save_latest=True):
    with whole_checkpoint(str(save_dir), tag, save_latest) as new_tag:
        folder = os.path.join(save_dir, new_tag, "inner")
        os.makedirs(folder)
        for name in ("a", "b"):
            with open(os.path.join(folder, name), "w") as file:
                file.write(text + name)


def text_of(save_dir, tag):
    """What was saved, checked to be all of one save."""
    folder = os.path.join(save_dir, tag, "inner")
    texts = [open(os.path.join(folder, name)).read().removesuffix(name) for name in ("a", "b")]
    assert texts[0] == texts[1]
    return texts[0]


def latest(save_dir):
    with open(os.path.join(save_dir, "latest")) as file:
        return file.read()


def test_latest_follows_and_nothing_else_is_left(tmp_path):
    save(tmp_path, "one", "1")
    save(tmp_path, "two", "2")
    save(tmp_path, "aside", "3", save_latest=False)
    save(tmp_path, "two", "4")
    assert latest(tmp_path) == "two" and text_of(tmp_path, "two") == "4"
    assert sorted(os.listdir(tmp_path)) == ["aside", "latest", "one", "two"]


def test_everything_is_synced_before_it_has_its_name_and_latest_comes_last(tmp_path, monkeypatch):
    calls = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(os.readlink(f"/proc/self/fd/{fd}")) or fsync(fd))
    monkeypatch.setattr(os, "rename", lambda source, target: calls.append((source, target)) or rename(source, target))
    save(tmp_path, "one", "1")
    new, one, path = tmp_path / "one~new", tmp_path / "one", tmp_path / "latest"
    assert set(calls[:2]) == {f"{new}/inner/a", f"{new}/inner/b"}
    assert calls[2:] == [f"{new}/inner", str(new), str(tmp_path), (str(new), str(one)), str(tmp_path), f"{path}~new",
                         (f"{path}~new", str(path)), str(tmp_path)]


def _die_at(event, save_dir, tag):
    """Saves in a process of its own, which ends without another word before its mkdir, sync or rename number `event`;
    whether it came so far."""
    pid = os.fork()
    if pid:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status in (0, 9)
        return status == 9
    try:
        left = [event]
        for name in ("fsync", "rename", "mkdir"):
            def call(*args, real=getattr(os, name)):
                if left[0] == 0:
                    os._exit(9)
                left[0] -= 1
                return real(*args)

            setattr(os, name, call)
        save(save_dir, tag, "new")
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("tag", ["other", "same"])
def test_cut_off_at_any_moment_a_whole_checkpoint_is_the_latest(tmp_path, tag):
    seen, event = set(), 0
    while True:
        folder = tmp_path / str(event)
        save(folder, "same", "old")
        died = _die_at(event, folder, tag)
        restore_replaced(str(folder))
        seen.add((latest(folder), text_of(folder, latest(folder))))
        save(folder, "third", "again")   # and what was left of it is in nobody's way
        save(folder, tag, "later")
        assert text_of(folder, tag) == "later" and latest(folder) == tag
        assert not [name for name in os.listdir(folder) if "~" in name and name != f"{tag}~new"]
        if not died:
            break
        event += 1
    assert event > 8 and seen == {("same", "old"), (tag, "new")}


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("file write failed")])
def test_a_failed_save_leaves_nothing_and_says_where(tmp_path, error):
    save(tmp_path, "one", "1")
    expected = rf"not saved: .*{re.escape(str(error))}; 5 bytes .* written, free \d+"
    with pytest.raises(StoreError, match=expected) as caught:
        with whole_checkpoint(str(tmp_path), "two", True) as tag:
            os.mkdir(tmp_path / tag)
            (tmp_path / tag / "f").write_text("12345")
            raise error
    assert caught.value.filename == str(tmp_path / "two")
    assert latest(tmp_path) == "one" and sorted(os.listdir(tmp_path)) == ["latest", "one"]


@pytest.mark.parametrize("error", [StepError("background work failed"), KeyboardInterrupt(), ValueError("bad")])
def test_other_exceptions_pass(tmp_path, error):
    with pytest.raises(type(error)) as caught:
        with whole_checkpoint(str(tmp_path), "two", True) as tag:
            os.mkdir(tmp_path / tag)
            raise error
    assert caught.value is error and os.listdir(tmp_path) == []


def test_a_disk_that_cannot_sync_does_not_move_latest(tmp_path, monkeypatch):
    save(tmp_path, "one", "1")

    def fails(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(checkpoint_folder.os, "fsync", fails)
    with pytest.raises(StoreError, match="Input/output error"):
        save(tmp_path, "two", "2")
    assert latest(tmp_path) == "one" and not (tmp_path / "two").exists()


def test_a_checkpoint_that_was_moved_away_comes_back_and_says_so(tmp_path, caplog):
    save(tmp_path, "one", "1")
    os.rename(tmp_path / "one", tmp_path / "one~old")
    restore_replaced(str(tmp_path))
    assert text_of(tmp_path, "one") == "1" and "from before a save that was cut off" in caplog.text
    restore_replaced(str(tmp_path / "none"))
