"""The recorder's sums on a clock that the test sets."""
import json
import threading
import time
import tracemalloc

import pytest

from lohan_ds.config import parse
from lohan_ds.errors import ConfigError
from lohan_ds.runtime import recorder as recorder_module
from lohan_ds.runtime.recorder import Recorder, stalling
from lohan_ds.step_summary import RESOURCES, Intervals


class Clock:
    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(recorder_module, "time", clock)
    return clock


def phases(recorder, clock, *named_seconds):
    for name, seconds in named_seconds:
        recorder.phase(name)
        clock.now += seconds


# -- unions ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("spans,seconds", [
    ([], 0), ([(0, 1), (2, 3)], 2), ([(0, 2), (1, 3)], 3), ([(1, 2), (0, 3)], 3), ([(0, 1), (1, 2)], 2),
    ([(0, 1), (4, 5), (2, 3)], 3), ([(0, 1), (2, 3), (0.5, 2.5)], 3), ([(0, 1), (4, 5), (6, 7), (0.5, 2)], 4),
    ([(2, 2), (1, 1)], 0)])
def test_the_union_of_spans(spans, seconds):
    intervals = Intervals()
    for start, end in spans:
        intervals.add(start, end)
    assert intervals.seconds()[0] == seconds


def test_many_intervals_are_folded_into_sums():
    intervals = Intervals(hidden_s=lambda start, end: (end - start) / 2, max_intervals=10)
    for i in range(1000):
        intervals.add(i, i + 0.5)
    assert intervals.seconds() == (500, 250) and len(intervals._intervals) <= 10


# -- shares and phases -----------------------------------------------------------------------------------------------

def test_seconds_of_phases_and_step(clock):
    recorder = Recorder()
    clock.now += 50   # before the first phase: of no step
    recorder.span("ssd_write", "f", 101, 102, 100)
    phases(recorder, clock, ("forward", 1), ("other", 0.25), ("backward", 2), ("other", 0.25), ("forward", 1),
           ("backward", 2), ("step", 0.5))
    recorder.end_step(7)
    summary = recorder.step_summary()
    assert (summary.step, summary.forward_s, summary.backward_s, summary.step_s, summary.total_s) == (7, 2, 4, 0.5, 7)
    assert summary.nbytes["ssd_write"] == 0
    clock.now += 3    # evaluation or a pause: of the next step
    phases(recorder, clock, ("forward", 1), ("step", 1))
    recorder.end_step(8)
    assert (recorder.step_summary().forward_s, recorder.step_summary().total_s) == (1, 5)


def test_hidden_is_what_lay_under_forward_or_backward(clock):
    recorder = Recorder()
    phases(recorder, clock, ("forward", 10), ("backward", 10), ("other", 5), ("step", 5))   # 100, 110, 120, 125, 130
    recorder.span("ssd_read", "f", 105, 107, 100)                        # a fetch: no update
    recorder.span("ssd_read", "f", 118, 122, 100, for_step=1)            # half hidden
    recorder.span("ssd_write", "f", 108, 112, 200, for_step=1)           # across two phases that both hide
    recorder.span("ssd_write", "f", 121, 129, 100, for_step=1)           # not hidden
    recorder.span("cpu_update", "b", 111, 115, 9999, for_step=1)         # its bytes do not count beside the SSD's
    recorder.end_step(1)
    summary = recorder.step_summary()
    assert (summary.update_bytes, summary.hidden_bytes_share) == (400, 0.625)
    assert summary.hidden_seconds_share == pytest.approx((7 + 2) / (7 + 11))   # unions: 108 to 115, 118 to 129
    assert summary.nbytes["ssd_read"] == 200 and summary.nbytes["ssd_write"] == 300
    assert summary.busy_s["ssd_read"] == 6 and summary.busy_s["ssd_write"] == 12 and summary.busy_s["h2d"] == 0
    assert "hidden: 62 % of update bytes" in summary.line()


def test_without_ssd_the_bytes_are_those_of_adam(clock):
    recorder = Recorder()
    phases(recorder, clock, ("forward", 10), ("step", 10))
    recorder.span("cpu_update", "b", 105, 115, 80, for_step=1)
    recorder.end_step(1)
    assert (recorder.step_summary().update_bytes, recorder.step_summary().hidden_bytes_share) == (80, 0.5)


def test_a_step_without_update(clock):
    recorder = Recorder()
    phases(recorder, clock, ("forward", 1))
    assert recorder.step_summary() is None
    recorder.end_step(1)
    summary = recorder.step_summary()
    assert summary.hidden_bytes_share is None and summary.hidden_seconds_share is None and summary.is_final
    assert "hidden: no update" in summary.line()


# -- which step ------------------------------------------------------------------------------------------------------

def test_a_trailing_update_counts_to_its_step_and_is_reported_when_it_is_over(clock):
    lines = []
    recorder = Recorder(report=lines.append)
    phases(recorder, clock, ("forward", 1), ("backward", 1), ("step", 1))
    recorder.end_step(1, num_speculated=2, num_dropped=1, oldest_due=1)
    assert not lines and not recorder.step_summary(oldest_due=1).is_final
    phases(recorder, clock, ("forward", 4))
    recorder.span("ssd_write", "f", 103, 107, 100, for_step=1)
    recorder.span("ssd_read", "f", 103, 104, 10)
    assert recorder.step_summary().hidden_bytes_share == 1
    phases(recorder, clock, ("step", 1))
    recorder.end_step(2, num_speculated=5, num_dropped=1, oldest_due=2)
    assert len(lines) == 1
    assert lines[0].startswith("lohan step 1: 3.00 s (forward 1.00, backward 1.00, step 1.00) | hidden: 100 % of")
    assert "ssd read 0 bytes, written 100 bytes at 25 bytes/s | speculated 2 dropped 1" in lines[0]
    recorder.end_step(3, num_speculated=5, num_dropped=1)
    assert [line.split(":")[0] for line in lines] == ["lohan step 1", "lohan step 2", "lohan step 3"]
    assert "ssd read 10 bytes at 10 bytes/s, written 0 bytes | speculated 3 dropped 0" in lines[1]


def test_the_end_reports_what_is_left(clock):
    lines = []
    recorder = Recorder(report=lines.append)
    for step in (1, 2):
        recorder.phase("forward")
        recorder.end_step(step, oldest_due=1)
    recorder.end(oldest_due=2)
    recorder.end(oldest_due=None)
    recorder.close()
    recorder.close()
    assert len(lines) == 2
    assert not lines[0].endswith("not over") and lines[1].endswith("update not over")


def test_stalls_by_cause(clock):
    recorder = Recorder()
    recorder.phase("forward")
    for cause, seconds in (("update", 1), ("update", 2), ("parameters", 4), ("gradient", 1e-5), ("step", 8)):
        with stalling(recorder, cause):
            clock.now += seconds
    with stalling(None, "update"):
        clock.now += 100
    recorder.end_step(1)
    summary = recorder.step_summary()
    assert summary.stall_s == pytest.approx({"parameters": 4, "update": 3, "gradient": 0, "activation": 0, "step": 8})
    assert "stalled: parameters 4.00, update 3.00, step 8.00 |" in summary.line()


def test_compute_goes_from_one_mark_to_the_next():
    recorder = Recorder()
    recorder.phase("forward")
    for name, moment in ((None, 1), ("a", 2), (None, 5), ("b", 6), ("c", 8), (None, 9), (None, 10)):
        recorder.compute(name, moment)
    assert [tuple(span)[1:4] for span in recorder._fresh] == [("a", 2, 5), ("b", 6, 8), ("c", 8, 9)]


def test_moments_of_a_device_are_taken_when_they_are_known():
    recorder = Recorder()
    recorder.phase("forward")
    known = {}
    recorder.span("h2d", "copy", lambda: known.get("start"), lambda: known.get("end"), 8)
    known["start"] = 1.0
    recorder.end_step(1, oldest_due=1)
    assert recorder.step_summary().nbytes["h2d"] == 0
    known["end"] = 3.0
    summary = recorder.step_summary()
    assert (summary.nbytes["h2d"], summary.busy_s["h2d"]) == (8, 2)


# -- bounds ----------------------------------------------------------------------------------------------------------

def test_memory_is_bounded_and_sums_are_not_cut():
    recorder = Recorder(max_spans=1000)
    recorder.phase("step")
    tracemalloc.start()
    try:
        sizes = []
        for part in range(4):
            for i in range(20_000 * part, 20_000 * (part + 1)):
                recorder.span("ssd_read", "f", i, i + 0.5, 1)
                recorder.phase(("forward", "backward")[i % 2])
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert len(recorder._kept) + len(recorder._fresh) <= 2000 and len(recorder._phases) <= 2000
    assert sizes[3] < 1.5 * sizes[0]
    recorder.end_step(1)
    assert recorder.step_summary().nbytes["ssd_read"] == 80_000


def test_many_threads():
    recorder = Recorder(max_spans=500)
    recorder.phase("forward")

    def record():
        for _ in range(5000):
            now = time.perf_counter()
            recorder.span("ssd_write", "f", now, now, 1, for_step=1)

    threads = [threading.Thread(target=record) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.end_step(1)
    assert recorder.step_summary().update_bytes == 20_000


# -- the trace -------------------------------------------------------------------------------------------------------

def test_trace_schema(clock, tmp_path):
    recorder = Recorder(trace_path=str(tmp_path / "trace.json"))
    phases(recorder, clock, ("forward", 1), ("backward", 1), ("step", 1))
    for resource in RESOURCES:
        recorder.span(resource, "update" if resource == "stall" else "x", 100.5, 101.5, 64)
    recorder.span("ssd_read", "y", 101, 102, 64, for_step=1)   # overlaps: a row of its own
    recorder.span("ssd_read", "z", 102, 103, 64, for_step=1)
    recorder.end_step(1)
    recorder.close()
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]
    rows = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert sorted(rows.values()) == sorted([*RESOURCES, "phase", "ssd_read 2"])
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all(event.keys() >= {"name", "cat", "pid", "tid", "ts", "dur"} for event in spans)
    assert [(rows[e["tid"]], e["ts"], e["dur"]) for e in spans if e["name"] in ("y", "forward")] == [
        ("phase", 0, 1e6), ("ssd_read 2", 1e6, 1e6)]
    assert next(e for e in spans if e["name"] == "z")["args"] == {"bytes": 64, "update of step": 1}
    for tid in rows:   # what a viewer needs: spans of a row do not overlap
        ends = [(event["ts"], event["ts"] + event["dur"]) for event in spans if event["tid"] == tid]
        assert all(end <= start for (_, end), (start, _) in zip(ends, ends[1:]))


def test_the_trace_is_written_every_hundred_steps(tmp_path):
    path = tmp_path / "trace.json"
    recorder = Recorder(trace_path=str(path))
    for step in range(1, 101):
        assert not path.exists()
        recorder.phase("forward")
        recorder.end_step(step)
    assert path.exists()


def test_the_directory_of_the_trace_must_exist(tmp_path):
    assert parse({"lohan": {"trace_path": str(tmp_path / "trace.json")}}).trace_path
    for wrong, reason in ((tmp_path / "no" / "trace.json", "does not exist"), (tmp_path, "is a directory")):
        with pytest.raises(ConfigError, match=rf"lohan\.trace_path.*{reason}"):
            parse({"lohan": {"trace_path": str(wrong)}})
