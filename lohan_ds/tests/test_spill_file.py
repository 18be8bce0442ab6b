"""Extents and the spill file: no overlap, bounded, striped, never synced, nothing left."""
from __future__ import annotations

import errno
import os
import random

import pytest
import torch

from lohan_ds.errors import StoreError
from lohan_ds.memory.extents import Extents
from lohan_ds.memory.pinned_pool import PAGE_BYTES
from lohan_ds.store.io_threads import Urgency
from lohan_ds.store.native_io import make_ssd_io
from lohan_ds.store.spill_file import SPILL_DIR, SpillFile, spill_file_name
from lohan_ds.testing.faulty_io import FaultyIo


@pytest.fixture
def io():
    threads = make_ssd_io(2)
    yield threads
    threads.close()


def page_buffer(num_pages: int, value: int) -> torch.Tensor:
    raw = torch.empty((num_pages + 1) * PAGE_BYTES, dtype=torch.uint8)
    start = -raw.data_ptr() % PAGE_BYTES
    return raw[start:start + num_pages * PAGE_BYTES].fill_(value)


@pytest.mark.parametrize("stripe,pages", [((), [4, 4, 4]), ((0, 0, 2), [8, 0, 4]), ((1,), [0, 12, 0])])
def test_each_directory_has_its_share_at_any_time(io, tmp_path, stripe, pages):
    dirs = [str(tmp_path / name) for name in "abc"]
    spill = SpillFile(io, dirs, 12 * PAGE_BYTES, stripe)
    sizes = [os.path.getsize(os.path.join(path, SPILL_DIR, spill_file_name(index))) for index, path in enumerate(dirs)]
    assert sizes == [PAGE_BYTES * num for num in pages] and spill.nbytes == 12 * PAGE_BYTES
    for _ in range(2):
        extents = []
        while (extent := spill.take(PAGE_BYTES)) is not None:
            extents.append(extent)
            taken = [sum(other.directory == index for other in extents) for index in range(3)]
            assert all(abs(got - num * len(extents) / 12) <= 1 for got, num in zip(taken, pages))
        assert taken == pages
        for extent in extents:
            spill.give(extent)
    spill.close()


def test_what_backward_waits_for_overtakes_updates(io, tmp_path, monkeypatch):
    spill, urgencies = SpillFile(io, [str(tmp_path)], PAGE_BYTES), []
    start = io._start
    monkeypatch.setattr(io, "_start", lambda request: (urgencies.append(request.urgency), start(request))[1])
    extent = spill.take(PAGE_BYTES)
    spill.write(extent, page_buffer(1, 7)).wait()
    spill.read(extent, page_buffer(1, 0)).wait()
    spill.close()
    assert urgencies == [Urgency.UPDATE, Urgency.FETCH]


def test_extents_never_overlap_and_all_space_comes_back():
    rng, space = random.Random(0), Extents(100 * PAGE_BYTES + 17)
    assert space.nbytes == 100 * PAGE_BYTES
    taken: dict[int, int] = {}
    for _ in range(3000):
        if taken and rng.random() < 0.5:
            offset = rng.choice(list(taken))
            space.give(offset, taken.pop(offset))
        else:
            nbytes = rng.randint(0, 9 * PAGE_BYTES)
            offset = space.take(nbytes)
            if offset is None:
                continue
            assert offset % PAGE_BYTES == 0 and offset + nbytes <= space.nbytes
            taken[offset] = nbytes
        pages = [page for offset, nbytes in taken.items()
                 for page in range(offset // PAGE_BYTES, max(offset + 1, offset + nbytes - 1) // PAGE_BYTES + 1)]
        assert len(pages) == len(set(pages)) and space.used_bytes == len(pages) * PAGE_BYTES
    for offset, nbytes in taken.items():
        space.give(offset, nbytes)
    assert space.used_bytes == 0 and 50 * PAGE_BYTES < space.peak_bytes <= space.nbytes
    assert space.take(space.nbytes) == 0, "one piece again"


def test_a_full_space_says_so_and_a_second_give_is_a_bug():
    space = Extents(3 * PAGE_BYTES)
    offsets = [space.take(1), space.take(PAGE_BYTES), space.take(PAGE_BYTES)]
    assert offsets == [0, PAGE_BYTES, 2 * PAGE_BYTES] and space.take(1) is None
    space.give(PAGE_BYTES, PAGE_BYTES)
    with pytest.raises(AssertionError, match="free already"):
        space.give(PAGE_BYTES, PAGE_BYTES)
    assert space.take(PAGE_BYTES + 1) is None and space.take(PAGE_BYTES) == PAGE_BYTES
    assert Extents(0).take(1) is None


def test_what_is_written_is_read_in_all_directories(io, tmp_path):
    dirs = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]
    spill = SpillFile(io, [str(path) for path in dirs], 30 * PAGE_BYTES)
    extents = [spill.take(3 * PAGE_BYTES - 5) for _ in range(9)]
    assert [extents.count(e) for e in extents] == [1] * 9
    assert {e.directory for e in extents[:3]} == {0, 1, 2}, "successive ones lie on different drives"
    for number, extent in enumerate(extents):
        spill.write(extent, page_buffer(3, number + 1)).wait()
    for number, extent in enumerate(extents):
        back = page_buffer(3, 0)
        spill.read(extent, back).wait()
        assert (back == number + 1).all()
        spill.give(extent)
    assert spill.used_bytes == 0 and spill.peak_bytes == 27 * PAGE_BYTES
    spill.close()


def test_it_is_as_large_as_planned_from_the_start_and_never_larger(io, tmp_path):
    spill = SpillFile(io, [str(tmp_path)], 10 * PAGE_BYTES)
    path = tmp_path / SPILL_DIR / spill_file_name(0)
    assert path.stat().st_size == 10 * PAGE_BYTES == spill.nbytes
    taken = []
    while (extent := spill.take(PAGE_BYTES)) is not None:
        taken.append(extent)
        spill.write(extent, page_buffer(1, 7)).wait()
    assert len(taken) == 10 and path.stat().st_size == 10 * PAGE_BYTES
    assert path.stat().st_mode & 0o777 == 0o600
    spill.close()


def test_it_wipes_what_lay_there_and_leaves_nothing(io, tmp_path):
    folder = tmp_path / SPILL_DIR
    folder.mkdir()
    (folder / spill_file_name(0)).write_bytes(b"of a run that crashed")
    (folder / spill_file_name(5)).write_bytes(b"of a run with more directories")
    spill = SpillFile(io, [str(tmp_path)], PAGE_BYTES)
    assert [entry.name for entry in folder.iterdir()] == [spill_file_name(0)]
    spill.close()
    spill.close()
    assert not folder.exists()


def test_what_is_not_its_own_stays(io, tmp_path):
    folder = tmp_path / SPILL_DIR
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    SpillFile(io, [str(tmp_path)], PAGE_BYTES).close()
    assert [entry.name for entry in folder.iterdir()] == ["notes.txt"]


def test_it_is_never_synced(io, tmp_path, monkeypatch):
    synced = []
    for name in ("fsync", "fdatasync", "sync"):
        monkeypatch.setattr(os, name, lambda *args, name=name: synced.append(name))
    spill = SpillFile(io, [str(tmp_path)], 4 * PAGE_BYTES)
    extent = spill.take(PAGE_BYTES)
    spill.write(extent, page_buffer(1, 1)).wait()
    spill.read(extent, page_buffer(1, 0)).wait()
    spill.close()
    io.close()
    assert synced == []


def test_space_that_cannot_be_had_leaves_no_file(io, tmp_path):
    with pytest.raises(StoreError, match="free"):
        SpillFile(io, [str(tmp_path / "a"), str(tmp_path / "b")], 1 << 60)
    assert not list(tmp_path.rglob("*.bin"))


def test_a_failing_drive_is_named(tmp_path):
    io = FaultyIo(1)
    spill = SpillFile(io, [str(tmp_path)], PAGE_BYTES)
    extent = spill.take(PAGE_BYTES)
    io.inject("write", errno.EIO, at_call=0)
    with pytest.raises(StoreError, match=spill_file_name(0)):
        spill.write(extent, page_buffer(1, 1)).wait()
    spill.close()
    io.close()


def test_what_backward_waits_for_goes_before_updates(tmp_path, monkeypatch):
    io, urgencies = make_ssd_io(1), []
    start = io._start
    monkeypatch.setattr(io, "_start", lambda r: urgencies.append((r.verb, r.urgency)) or start(r))
    spill = SpillFile(io, [str(tmp_path)], PAGE_BYTES)
    extent, buffer = spill.take(PAGE_BYTES), page_buffer(1, 3)
    spill.write(extent, buffer).wait()
    spill.read(extent, buffer).wait()
    assert urgencies == [("write", Urgency.UPDATE), ("read", Urgency.FETCH)]
    spill.close()
    io.close()
