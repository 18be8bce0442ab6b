"""The tiers alone: space is used again only when the last copy to or from it has ended."""
from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import pytest
import torch

from lohan_ds.memory.budget import MemoryBudget
from lohan_ds.memory.pinned_pool import PAGE_BYTES, PinnedPool
from lohan_ds.plan import ActivationPlan
from lohan_ds.runtime.streams import Streams, make_streams
from lohan_ds.runtime.swap_space import SwapSpace
from lohan_ds.runtime.swap_tiers import SwapTier
from lohan_ds.store.native_io import make_ssd_io
from lohan_ds.store.ssd_io import ThreadSsdIo
from lohan_ds.testing.delayed_streams import DelayedStreams


@contextlib.contextmanager
def tier_of(policy: str, tmp_path, streams: Streams | None = None, make_io=make_ssd_io, num_pages: int = 1,
            num_buffers: int = 2, num_dirs: int = 1, buffer_pages: int = 1) -> Iterator[SwapTier]:
    streams = streams or make_streams("cpu")
    pool, io = PinnedPool(MemoryBudget("host", 1 << 20), pin=False), make_io(4)
    size = {"swap_host": "host_bytes", "swap_ssd": "ssd_bytes"}[policy]
    plan = ActivationPlan(num_buffers=num_buffers, buffer_bytes=buffer_pages * PAGE_BYTES,
                          **{size: num_pages * PAGE_BYTES})
    dirs = [str(tmp_path / str(place)) for place in range(num_dirs)]
    space = SwapSpace(plan, pool, io, dirs, streams)
    try:
        yield space.tiers[policy]
    finally:
        space.close()
        io.close()
        streams.close()
        pool.close()


def filled(value: int, num_pages: int = 1) -> torch.Tensor:
    return torch.full((num_pages * PAGE_BYTES,), value, dtype=torch.uint8)


def fetch(copy, num_pages: int = 1) -> torch.Tensor:
    dst = filled(0, num_pages)
    for event in copy.fetch(dst, None).wait():
        event.host_wait()
    return dst


class FirstWriteIsSlow(ThreadSsdIo):
    num_writes = 0

    def _pwrite(self, fd, view, offset):
        self.num_writes += 1
        if self.num_writes == 1:
            time.sleep(0.2)
        return super()._pwrite(fd, view, offset)


class SlowIn(DelayedStreams):
    """Copies out come at once, copies in after 0.2 s."""

    def __init__(self):
        super().__init__(0, 0.0)
        self._lanes["h2d"]._rng.uniform = lambda low, high: 0.2


def test_a_place_is_not_overwritten_while_it_is_read(tmp_path):
    with tier_of("swap_host", tmp_path, SlowIn()) as tier:
        first = tier.put(filled(1))
        first.left.wait()
        dst = filled(0)
        incoming = first.fetch(dst, None)
        first.drop()
        second = tier.put(filled(2))   # waits until the only place is free
        for event in incoming.wait():
            event.host_wait()
        assert (dst == 1).all() and (fetch(second) == 2).all()


def test_a_late_write_does_not_hit_what_came_after_it(tmp_path):
    with tier_of("swap_ssd", tmp_path, make_io=FirstWriteIsSlow) as tier:
        first = tier.put(filled(1))
        first.drop()
        second = tier.put(filled(2))   # waits for the slow write
        second.written.wait()
        time.sleep(0.3)
        assert (fetch(second) == 2).all()


@pytest.mark.parametrize("policy", ["swap_host", "swap_ssd"])
def test_full_space_says_so_at_once_and_costs_nothing(tmp_path, policy):
    with tier_of(policy, tmp_path, DelayedStreams(0, 0.001), num_pages=3, num_buffers=1) as tier:
        copies = [tier.put(filled(1)), tier.put(filled(2, 2))]
        start = time.monotonic()
        assert tier.put(filled(3)) is None and time.monotonic() - start < 1
        assert tier.used_bytes == 3 * PAGE_BYTES
        assert (fetch(copies[1], 2) == 2).all()
        copies[0].drop()
        assert tier.put(filled(4, 2)) is None, "one page is free"
        third = tier.put(filled(5))
        assert (fetch(third) == 5).all()
        for copy in (copies[1], third):
            copy.drop()
        assert (fetch(tier.put(filled(6, 3)), 3) == 6).all(), "all of it again"


def test_planned_space_is_enough_however_many_drives_share_it(tmp_path):
    """Tensors as large as a buffer do not divide evenly: five of them on three drives."""
    with tier_of("swap_ssd", tmp_path, num_pages=5 * 4, num_dirs=3, buffer_pages=4) as tier:
        copies = [tier.put(filled(value, 4)) for value in range(5)]
        assert None not in copies
        assert all((fetch(copy, 4) == value).all() for value, copy in enumerate(copies))
        assert tier.put(filled(9, 2)) is None and tier.used_bytes == 20 * PAGE_BYTES


def test_a_copy_that_is_waited_for_overtakes(tmp_path):
    class Slow(ThreadSsdIo):
        order: list[int] = []

        def _pread(self, fd, view, offset):
            self.order.append(offset // PAGE_BYTES)
            time.sleep(0.01)
            return super()._pread(fd, view, offset)

    with tier_of("swap_ssd", tmp_path, make_io=Slow, num_pages=8, num_buffers=1) as tier:
        copies = [tier.put(filled(value)) for value in range(8)]
        for copy in copies:
            copy.written.wait()
        works = [copy.fetch(filled(0), None) for copy in copies]
        copies[7].hurry()
        works[7].wait()
        assert Slow.order.index(7) <= 2, Slow.order
        for work in works:
            work.wait()
        assert len(Slow.order) == 8


def test_reads_not_begun_of_what_was_dropped_are_spared(tmp_path):
    class Slow(ThreadSsdIo):
        num_reads = 0

        def _pread(self, fd, view, offset):
            Slow.num_reads += 1
            time.sleep(0.05)
            return super()._pread(fd, view, offset)

    with tier_of("swap_ssd", tmp_path, make_io=Slow, num_pages=8, num_buffers=1) as tier:
        copies = [tier.put(filled(value)) for value in range(8)]
        for copy in copies:
            copy.written.wait()
        works = [copy.fetch(filled(0), None) for copy in copies]
        for copy in copies:
            copy.drop()
        for work in works:
            work.wait()
        assert Slow.num_reads <= 2
        deadline = time.monotonic() + 5
        while tier.used_bytes and time.monotonic() < deadline:
            time.sleep(0.002)
        assert tier.used_bytes == 0
