"""A save that is cut off, or finds the disk full, costs nothing but itself (user case D74)."""
from __future__ import annotations

import os
import resource

import pytest

from integration_tests.crashes import Sweep
from integration_tests.doubles import train_engine
from integration_tests.killed_saving import NUM_STEPS, batches, config, kill_savers, load, make_states
from lohan_ds.errors import StoreError
from lohan_ds.testing.harness import engine_for, engine_state
from lohan_ds.testing.models import OddModel
from lohan_ds.testing.twin import assert_same_bits


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    return make_states(tmp_path_factory.mktemp("ssd"))


def latest(folder):
    return (folder / "latest").read_text()


def test_killed_while_it_saves_a_whole_checkpoint_is_the_latest(tmp_path, states):
    sweep = Sweep()
    kill_savers(tmp_path, states, range(4), sweep)
    print(f"seeds 0 to 3: {sweep}")
    assert not sweep.losses


def test_everything_is_on_disk_before_latest_names_it(tmp_path, monkeypatch):
    synced, seen, fsync, rename = set(), [], os.fsync, os.rename
    folder = tmp_path / "checkpoints"

    def noted_fsync(fd):
        synced.add(os.stat(fd).st_ino)
        fsync(fd)

    def noted_rename(source, target):
        if os.path.basename(target) == "latest":
            paths = [folder, *(folder / "one").rglob("*"), folder / "one"]
            seen.append([path for path in paths if path.stat().st_ino not in synced])
        rename(source, target)

    (tmp_path / "ssd").mkdir()
    with engine_for(OddModel(), config(tmp_path / "ssd")) as engine:
        train_engine(engine, batches()[:1])
        monkeypatch.setattr(os, "fsync", noted_fsync)
        monkeypatch.setattr(os, "rename", noted_rename)
        assert engine.save_checkpoint(folder, tag="one")
    assert seen == [[]] and latest(folder) == "one"


@pytest.mark.parametrize("tier", ["host", "ssd"])
@pytest.mark.parametrize("tag", ["one", "two"])
def test_a_full_disk_leaves_the_checkpoint_before_and_training_goes_on(tmp_path, states, tier, tag):
    """Saved again as "one", or beside it."""
    folder = tmp_path / "checkpoints"
    (tmp_path / "ssd").mkdir()
    with engine_for(OddModel(), config(tmp_path / "ssd", tier)) as engine:
        train_engine(engine, batches()[:1])
        engine.save_checkpoint(folder, tag="one")
        largest_bytes = max(path.stat().st_size for path in folder.glob("one/*"))
        train_engine(engine, batches()[1:2])
        engine.offload.gradients.updater.drain()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_bytes // 2, limits[1]))   # what a full disk does to a file
        try:
            with pytest.raises(StoreError, match="not saved: .* bytes of it were written, free") as caught:
                engine.save_checkpoint(folder, tag=tag)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert str(folder / tag) in str(caught.value)
        assert latest(folder) == "one" and not list(folder.glob("*~*"))
        train_engine(engine, batches()[2:])
        assert_same_bits(engine_state(engine), states[NUM_STEPS])
    step, state = load(folder, tmp_path / "ssd")
    assert step == 1
    assert_same_bits(state, states[1])
