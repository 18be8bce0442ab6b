"""Links and drives at a pace: what is queued behind what, by nominal times. No clock is looked at."""
from __future__ import annotations

import pytest
import torch

from lohan_ds.rehearsal.meters import PacedUpdate, covered_s
from lohan_ds.rehearsal.paced_io import PacedDrive, PacedIo
from lohan_ds.rehearsal.paced_streams import PacedStreams

MB = 10**6
PAGE = 4096


@pytest.fixture
def streams():
    streams = PacedStreams(h2d_bytes_per_s=100 * MB, d2h_bytes_per_s=50 * MB)
    streams.copies, streams.computed = [], []
    streams.on_copy = lambda *span: streams.copies.append(span)
    streams.on_compute = lambda *span: streams.computed.append(span)
    yield streams
    streams.close()


def floats(numel: int) -> torch.Tensor:
    return torch.arange(numel, dtype=torch.float32)


def test_a_copy_out_begins_after_the_compute_before_it(streams):
    streams.compute("layer", 0.05)
    mark = streams.compute_mark()
    source, out = floats(25000), torch.zeros(25000)
    event = streams.d2h(out, source)
    assert torch.equal(out, source)   # the bytes move at once, only the time is late
    event.host_wait()
    assert event.done() and mark.done()
    assert event.start_s == mark.end_s   # it was submitted while that computed
    (kind, start, end, nbytes), = streams.copies
    assert (kind, nbytes) == ("d2h", 100_000) and end - start == pytest.approx(100_000 / (50 * MB))


def test_compute_begins_after_the_copy_that_it_waits_for(streams):
    event = streams.h2d(torch.zeros(1_000_000), floats(1_000_000))   # 40 ms
    event.compute_wait()
    streams.compute("layer", 0.01)
    mark = streams.compute_mark()
    mark.host_wait()
    assert mark.start_s >= event.end_s
    assert mark.end_s - mark.start_s == pytest.approx(0.01)
    waited, computed = streams.computed
    assert waited[0] is None and computed[0] == "layer" and waited[2] == event.end_s


def test_a_copy_in_begins_after_its_mark_and_copies_queue_up(streams):
    streams.compute("before", 0.03)
    mark = streams.compute_mark()
    streams.compute("after", 0.03)
    first = streams.h2d(torch.zeros(250_000), floats(250_000), after=mark)
    second = streams.h2d(torch.zeros(250_000), floats(250_000), after=mark)
    second.host_wait()
    assert first.start_s >= mark.end_s and second.start_s >= first.end_s
    assert second.end_s - second.start_s == pytest.approx(0.01)
    last = streams.compute_mark()
    moment = streams.moment()
    last.host_wait()
    assert (moment() if callable(moment) else moment) >= last.end_s


def test_drives_serve_reads_and_writes_one_after_the_other():
    drive = PacedDrive(read_bytes_per_s=100.0, write_bytes_per_s=50.0)
    first = drive.reserve("read", 100)
    assert drive.reserve("write", 100) == pytest.approx(first + 2)
    assert drive.busy_s == pytest.approx(3)


def test_each_directory_is_a_drive_of_its_own(tmp_path):
    drives = {name: PacedDrive(200 * MB, 100 * MB) for name in ("a", "ab")}
    for name in (*drives, "other"):
        (tmp_path / name).mkdir()
    io = PacedIo(2, [(str(tmp_path / name), drive) for name, drive in drives.items()])
    try:
        files = {name: io.open(str(tmp_path / name / "file"), 4 * PAGE) for name in ("a", "ab", "other")}
        data = torch.zeros(5 * PAGE, dtype=torch.uint8)
        data = data[-data.data_ptr() % PAGE:][:4 * PAGE]
        for name in ("ab", "ab", "a", "other"):
            io.write(files[name], 0, data).wait()
        io.read(files["a"], 0, data[:PAGE]).wait()
    finally:
        io.close()
    assert drives["ab"].busy_s == pytest.approx(8 * PAGE / (100 * MB))
    assert drives["a"].busy_s == pytest.approx(4 * PAGE / (100 * MB) + PAGE / (200 * MB))
    assert io.bytes_written == 16 * PAGE and io.bytes_read == PAGE


def test_updates_take_as_long_as_the_pace_and_follow_one_another():
    spans = []
    update = PacedUpdate(params_per_s=1000.0, then=lambda name, start, end, nbytes, step: spans.append((start, end)))
    update("first", 0.0, 0.001, 12 * 10, 1)           # 10 parameters: 10 ms from 0 on
    assert spans == [(0.0, pytest.approx(0.01))]
    woke_up = update._awake_s
    update("next", woke_up, woke_up, 12 * 20, 1)      # its data was there: it begins where the first one ended
    assert spans[1] == (pytest.approx(0.01), woke_up)   # and is over, though only just begun: the thread is late
    assert (update.busy_s, update.num_params) == (pytest.approx(0.03), 30)


def test_seconds_that_anything_covers():
    assert covered_s([(0, 2), (1, 3), (5, 6), (9, 12)], 1, 10) == 2 + 1 + 1
    assert covered_s([], 0, 5) == 0
