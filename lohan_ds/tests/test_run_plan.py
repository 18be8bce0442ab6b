"""The stripe of a run: by the speed of its directories, where that is known and there is room, and as it was begun."""
import logging
import os

import pytest
import torch
from torch import nn

from lohan_ds import run_plan
from lohan_ds.config import LohanConfig
from lohan_ds.errors import ConfigError
from lohan_ds.planner.plan_file import BlockEntry, PlanFile, save_plan
from lohan_ds.profiler import hardware
from lohan_ds.run_plan import plan_run
from lohan_ds.store.block_files import required_ssd_bytes
from lohan_ds.testing.committed_store import begin, open_store
from lohan_ds.tests.planner_cases import machine

CPU = torch.device("cpu")


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """The plan of a small model over two directories that suit `stripe`; further arguments are of the config."""
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        os.mkdir(path)

    def plan(stripe=(), **lohan):
        monkeypatch.setattr(hardware, "cached_stripe", lambda paths, device: stripe)
        config = LohanConfig(**{"ssd_paths": paths, "optimizer_tier": "ssd", **lohan})
        return plan_run(nn.Linear(64, 64, dtype=torch.bfloat16), config, lambda param: 0, 1, CPU)

    return plan


def test_measured_directories_get_their_share(planned):
    assert planned().plan.stripe == () == planned((0, 1)).plan.stripe
    assert planned((0, 0, 1)).plan.stripe == (0, 0, 1)
    assert planned((0, 0, 1), run_name="r", optimizer_tier=None).plan.stripe == (0, 0, 1)
    assert planned((0, 0, 1), optimizer_tier="host").plan.stripe == ()          # nothing is on SSD


def test_a_directory_that_is_left_out_is_named(planned, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "lohan_ds"):
        assert planned((1,)).plan.stripe == (1,)
    assert f"nothing is kept in {tmp_path / 'a'}, which is so slow" in caplog.text


def test_where_the_faster_drive_has_no_room_all_get_as_much(planned, monkeypatch, caplog):
    even_room, evenly = run_plan.striped_free_bytes, planned()
    needed = required_ssd_bytes(evenly.model_blocks.blocks, evenly.plan)
    monkeypatch.setattr(run_plan, "striped_free_bytes", lambda paths, stripe=(): needed if stripe else even_room(paths))
    with caplog.at_level(logging.WARNING, "lohan_ds"):
        assert planned((0, 0, 1)).plan.stripe == ()
    room = int(run_plan.SSD_SHARE * needed)   # the rest is for others
    assert f"shares of 67 %, 33 %, which leave room for {room} of the {needed} bytes needed" in caplog.text


def test_a_plan_file_has_the_last_word(planned, tmp_path):
    block, = planned().model_blocks.blocks
    file = PlanFile(model="m", hardware=machine(num_ssds=2), micro_batch=None, accumulation=1, sequence_length=None,
                    update="deferred", prefetch_depth=1, chunk_bytes=1 << 20, activations=(), running_unit_bytes=0,
                    stripe=(1, 0, 1), blocks={block.name: BlockEntry(parameters="ssd", optimizer_state="ssd",
                                                                     numel=block.numel, dtype=block.dtype)})
    path, lohan = str(tmp_path / "plan.json"), {"plan": str(tmp_path / "plan.json"), "optimizer_tier": None}
    save_plan(file, path)
    assert planned((0, 0, 1), **lohan).plan.stripe == (1, 0, 1)
    save_plan(file.model_copy(update={"stripe": ()}), path)
    assert planned((0, 0, 1), **lohan).plan.stripe == (0, 0, 1)
    save_plan(file.model_copy(update={"stripe": (0, 2)}), path)
    with pytest.raises(ConfigError, match="stripe names directory 2, counted from 0, but lohan.ssd_paths has 2"):
        planned(**lohan)


def test_a_run_that_exists_keeps_its_stripe(planned, tmp_path):
    with open_store(tmp_path, stripe=(1, 1, 0)) as store:
        begin(store)
    assert planned((0, 0, 1), run_name="r", optimizer_tier=None).plan.stripe == (1, 1, 0)
