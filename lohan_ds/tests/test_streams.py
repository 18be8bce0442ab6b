"""Streams: copies arrive, and `DelayedStreams` turns a missing wait into a wrong number."""
from __future__ import annotations

import time

import pytest
import torch

from lohan_ds.errors import ConfigError
from lohan_ds.runtime.streams import CudaStreams, InlineStreams, make_streams
from lohan_ds.testing.delayed_streams import DelayedStreams


@pytest.fixture
def delayed():
    streams = DelayedStreams(seed=1, max_delay_s=0.002, held_delay_s=0.3)
    yield streams
    streams.close()


def test_make_streams():
    assert isinstance(make_streams("cpu"), InlineStreams)
    assert make_streams(torch.device("cpu")).unified
    with pytest.raises(ConfigError, match="meta"):
        make_streams("meta")


def test_inline_copies_at_once():
    streams, src, dst = make_streams("cpu"), torch.arange(5.0), torch.zeros(5)
    for event in (streams.h2d(dst, src, after=streams.compute_mark()), streams.d2h(dst, src)):
        assert event.done()
        event.compute_wait()
        event.host_wait()
        assert torch.equal(dst, src)
    streams.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_destination_is_poisoned_until_the_copy(dtype):
    streams = DelayedStreams(seed=0, max_delay_s=0.0)
    streams.drop_one_wait_at(1_000, "h2d")          # holds copies back until they are waited for
    src, dst = torch.ones(3, 4, dtype=dtype), torch.zeros(3, 4, dtype=dtype)
    event = streams.h2d(dst, src, after=streams.compute_mark())
    assert dst.isnan().all() and not event.done()
    event.compute_wait()
    assert torch.equal(dst, src) and event.done()
    streams.close()


def test_copies_arrive_in_order_and_read_the_source_late(delayed):
    src, dst = torch.zeros(4), torch.zeros(4)
    events = []
    for _ in range(20):
        events.append(delayed.d2h(dst, src))
    events[-1].host_wait()
    assert all(event.done() for event in events) and torch.equal(dst, src)
    event = delayed.d2h(dst, src)
    src.fill_(7)                                     # too early: shows, unless the worker was quicker
    event.host_wait()
    assert dst[0] in (0, 7)


def pipeline(streams, num_items: int = 6) -> tuple[float, list[int]]:
    """Brings values to the "device", doubles them there, and takes them back."""
    total = 0.0
    for index in range(num_items):
        weight, activation, result = torch.full((8,), index + 1.0), torch.empty(8), torch.empty(8)
        streams.h2d(activation, weight, after=streams.compute_mark()).compute_wait()
        back = streams.d2h(result, activation * 2)
        back.host_wait()
        total += result.sum().item()
    return total, [streams.num_waits(kind) for kind in ("h2d", "d2h")] if hasattr(streams, "num_waits") else []


def test_with_all_waits_the_result_is_right(delayed):
    want, _ = pipeline(InlineStreams())
    assert pipeline(delayed) == (want, [6, 6])
    assert not delayed.dropped()


@pytest.mark.parametrize("kind", ["h2d", "d2h"])
@pytest.mark.parametrize("n", [1, 4, 6])
def test_any_skipped_wait_gives_a_wrong_number(delayed, kind, n):
    delayed.drop_one_wait_at(n, kind)
    total, _ = pipeline(delayed)
    assert delayed.dropped() and total != total      # nan


def test_a_skipped_wait_can_be_made_up_for(delayed):
    delayed.drop_one_wait_at(1, "h2d")
    src, dst = torch.ones(3), torch.zeros(3)
    event = delayed.h2d(dst, src)
    event.compute_wait()
    assert dst.isnan().all()
    event.compute_wait()
    assert torch.equal(dst, src)


def test_unwaited_copies_come_by_themselves(delayed):
    delayed.drop_one_wait_at(5, "d2h")
    src, dst = torch.ones(3), torch.zeros(3)
    event, started = delayed.d2h(dst, src), time.monotonic()
    while not event.done():
        assert time.monotonic() - started < 10
        time.sleep(0.01)
    assert torch.equal(dst, src)


def test_a_freed_source_is_an_error_not_a_crash():
    streams = DelayedStreams(seed=0)
    streams.drop_one_wait_at(100, "h2d")
    src, dst = torch.ones(3), torch.zeros(3)
    event = streams.h2d(dst, src)
    src.untyped_storage().resize_(0)
    with pytest.raises(AssertionError, match="freed"):
        event.host_wait()
    with pytest.raises(AssertionError, match="freed"):
        streams.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_copies_wait_for_compute_and_compute_for_copies():
    streams = make_streams("cuda")
    assert isinstance(streams, CudaStreams) and not streams.unified
    src = torch.randn(1 << 22).pin_memory()
    result = torch.empty_like(src).pin_memory()
    for _ in range(20):
        dst = torch.empty(src.shape, device="cuda")
        dst.fill_(float("nan"))
        torch.cuda._sleep(5_000_000)                 # compute still busy with dst's memory
        event = streams.h2d(dst, src, after=streams.compute_mark())
        event.compute_wait()
        doubled = dst * 2
        del dst
        back = streams.d2h(result, doubled)
        del doubled
        torch.full(src.shape, float("nan"), device="cuda")   # would take doubled's memory if it were freed
        back.host_wait()
        assert torch.equal(result, src * 2)
    streams.close()
