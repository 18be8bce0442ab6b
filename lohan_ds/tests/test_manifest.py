"""No number of a manifest or a commit record is believed that was not written so, nor used for another run."""
from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from lohan_ds.block import make_block
from lohan_ds.errors import StoreError
from lohan_ds.store import manifest as manifest_module
from lohan_ds.store.checksums import checksum
from lohan_ds.store.filenames import CURRENT, MANIFEST
from lohan_ds.store.manifest import (Commit, Damaged, Manifest, blocks_of, check_same_model, describe, is_unfinished,
                                     read_json, read_manifests, to_json)

BLOCKS = (make_block(0, "embedding", "float32", [("e", (40, 3), 0)], 2048),
          make_block(1, "layer", "bfloat16", [("a", (2048,), 0), ("b", (60,), 0)], 2048),
          make_block(2, "frozen", "bfloat16", [("f", (50,), None)], 2048))
MANIFEST_OF = Manifest(run_id="a1", directory=0, num_directories=2, durability="shadow", chunk_numel=2048,
                       blocks=describe(BLOCKS))
COMMIT = Commit(run_id="a1", number=3, step=4, slots=(1, 0, 0), bytes_written=1000, details_bytes=96,
                details_checksum=2**64 - 1, checksums_bytes=88, last_checkpoint="/ckpt")


@pytest.fixture
def run_dirs(tmp_path):
    """Two directories of a committed run."""
    paths = [str(tmp_path / name / "lohan-run-r") for name in "ab"]
    for place, path in enumerate(paths):
        os.makedirs(path)
        _put(path, MANIFEST, to_json(MANIFEST_OF.model_copy(update={"directory": place})))
    _put(paths[0], CURRENT, to_json(COMMIT))
    return paths


def _put(run_dir, name, data):
    with open(os.path.join(run_dir, name), "wb") as file:
        file.write(data)
    return os.path.join(run_dir, name)


@pytest.mark.parametrize("value", [MANIFEST_OF, COMMIT])
def test_comes_back_as_written(tmp_path, value):
    assert read_json(_put(tmp_path, "x", to_json(value)), type(value)) == value


@pytest.mark.parametrize("value", [MANIFEST_OF, COMMIT])
def test_every_flipped_bit_and_every_cut_is_found(tmp_path, value):
    data = bytearray(to_json(value))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged) as caught:
            read_json(_put(tmp_path, "x", data), type(value))
        assert caught.value.filename == str(tmp_path / "x") and "damaged" in str(caught.value)
        data[bit // 8] ^= 1 << bit % 8
    for length in range(len(data) - 2):
        with pytest.raises(Damaged):
            read_json(_put(tmp_path, "x", data[:length]), type(value))
    with pytest.raises(Damaged, match="gone"):
        read_json(str(tmp_path / "none"), type(value))


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_refused_by_number(tmp_path, version):
    text = json.dumps({**json.loads(MANIFEST_OF.model_dump_json()), "format": version, "new": 1})
    path = _put(tmp_path, "x", f'{{"xxh3": "{checksum(text.encode()):016x}", "value": {text}}}\n'.encode())
    with pytest.raises(StoreError, match=rf"of format {version}, this version of lohan_ds reads 1") as caught:
        read_json(path, Manifest)
    assert caught.value.filename == path and not isinstance(caught.value, Damaged)


def test_blocks_as_far_as_their_bytes_go():
    for ours, theirs in zip(BLOCKS, blocks_of(MANIFEST_OF)):
        assert (ours.index, ours.name, ours.dtype, ours.trainable, ours.numel, ours.chunks) == (
            theirs.index, theirs.name, theirs.dtype, theirs.trainable, theirs.numel, theirs.chunks)
        assert ours.state_bytes == theirs.state_bytes and ours.param_bytes == theirs.param_bytes


def test_the_run_of_these_directories_in_this_order(run_dirs, tmp_path):
    assert read_manifests(run_dirs).run_id == "a1"
    assert read_manifests([str(tmp_path / "c")]) is None
    with pytest.raises(StoreError, match=r"is directory 2 of 2 of its run, not 1 of 2; name lohan.ssd_paths as at f"):
        read_manifests(run_dirs[::-1])
    with pytest.raises(StoreError, match="is directory 1 of 2 of its run, not 1 of 1"):
        read_manifests(run_dirs[:1])
    _put(run_dirs[1], MANIFEST, to_json(MANIFEST_OF.model_copy(update={"directory": 1, "run_id": "b2"})))
    with pytest.raises(StoreError, match="another run"):
        read_manifests(run_dirs)


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_drive_is_named_and_nothing_begins_anew(run_dirs, missing):
    os.unlink(os.path.join(run_dirs[missing], MANIFEST))
    assert not is_unfinished(run_dirs)
    with pytest.raises(StoreError, match=r"Is the drive mounted\?.*lohan store clean .* --run r") as caught:
        read_manifests(run_dirs)
    assert caught.value.filename == run_dirs[missing]


def test_before_its_first_commit_it_is_no_run(run_dirs):
    os.unlink(os.path.join(run_dirs[0], CURRENT))
    assert is_unfinished(run_dirs) and read_manifests(run_dirs) is None
    os.unlink(os.path.join(run_dirs[1], MANIFEST))       # cut off between the two manifests
    assert is_unfinished(run_dirs) and read_manifests(run_dirs) is None
    _put(run_dirs[1], MANIFEST, to_json(MANIFEST_OF.model_copy(update={"directory": 1, "run_id": "b2"})))
    assert not is_unfinished(run_dirs)                   # of two runs: no guess
    assert not is_unfinished(run_dirs[::-1])             # nor in the wrong order


def test_a_run_that_lost_its_commit_record_does_not_begin_anew(run_dirs):
    os.unlink(os.path.join(run_dirs[0], CURRENT))
    _put(run_dirs[0], "commit.1", b"")                   # there was a second commit
    assert not is_unfinished(run_dirs)
    with pytest.raises(Damaged, match="CURRENT.json is gone"):
        read_manifests(run_dirs)


def _changed(place, **values):
    entry = MANIFEST_OF.blocks[place]
    params = values.pop("params", None)
    if params is not None:
        values["params"] = (entry.params[0].model_copy(update=params), *entry.params[1:])
    blocks = list(MANIFEST_OF.blocks)
    blocks[place] = entry.model_copy(update=values)
    return MANIFEST_OF.model_copy(update={"blocks": tuple(blocks)})


@pytest.mark.parametrize("manifest,expected", [
    (_changed(1, params={"name": "z"}), "parameter z"),
    (_changed(0, params={"shape": (3, 40)}), r"parameter e \[3, 40\].*here it is e \[40, 3\]"),
    (_changed(1, params={"group": 1}), "in optimizer group 1, here it is a .* in group 0"),
    (_changed(2, trainable=True), "block 2 is frozen.*trained; here it is .*frozen"),
    (_changed(1, dtype="float16"), "block 1 is layer, float16"),
    (MANIFEST_OF.model_copy(update={"blocks": MANIFEST_OF.blocks[:2]}), "it has 2 blocks, this one 3"),
])
def test_another_model_is_refused_by_its_first_difference(manifest, expected):
    check_same_model(MANIFEST_OF, BLOCKS)
    with pytest.raises(StoreError, match=f"another model: .*{expected}"):
        check_same_model(manifest, BLOCKS)


def test_nothing_that_reads_records_imports_torch():
    code = ("import sys, lohan_ds.cli_store, lohan_ds.store.check, lohan_ds.store.found_runs; "
            "sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert manifest_module.FORMAT == 1
