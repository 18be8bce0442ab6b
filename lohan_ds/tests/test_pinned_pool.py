"""Pool buffers are exact in size (user case D16), aligned and accounted for; rings are fair and never lose a buffer."""
import logging
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from lohan_ds.errors import CapacityError, StepError
from lohan_ds.memory import pinned_pool
from lohan_ds.memory.budget import MemoryBudget
from lohan_ds.memory.pinned_pool import BufferRing, PinnedPool

MB = 1 << 20


def _pool(total_bytes: int = 64 * MB, pin: bool = False) -> PinnedPool:
    return PinnedPool(MemoryBudget("host", total_bytes), pin)


def test_sizes_are_exact_and_addresses_aligned():
    pool = _pool()
    sizes = [int(0.56 * MB), int(1.125 * MB), int(2.25 * MB)]
    buffers = [pool.alloc(size, "x") for size in sizes]
    assert sum(sizes) <= pool.budget.used_bytes <= 1.05 * sum(sizes)
    for buffer, size in zip(buffers, sizes):
        assert buffer.dtype == torch.uint8 and buffer.shape == (size,) and buffer.data_ptr() % 4096 == 0
        assert int(buffer.sum()) == 0
        buffer.fill_(7)
        pool.free(buffer.view(torch.uint8)[:16])
    assert pool.budget.used_bytes == 0


def test_over_budget_and_foreign_tensors():
    pool = _pool(8192)
    kept = pool.alloc(4097, "kept")
    with pytest.raises(CapacityError, match="more"):
        pool.alloc(1, "more")
    pool.free(kept)
    with pytest.raises(AssertionError):
        pool.free(kept)
    with pytest.raises(AssertionError):
        pool.free(torch.empty(4096, dtype=torch.uint8))


def test_close_gives_everything_back():
    pool = _pool()
    pool.alloc(MB, "x")
    assert pool.alloc(0, "nothing").numel() == 0
    pool.close()
    pool.close()
    assert pool.budget.used_bytes == 0
    with pytest.raises(StepError):
        pool.alloc(1, "late")
    assert pool.budget.used_bytes == 0


class _FakeCudart:
    def __init__(self, fail_from: int):
        self.registered, self.calls, self.fail_from = {}, 0, fail_from

    def cudaHostRegister(self, address, nbytes, flags):
        self.calls += 1
        if self.calls > self.fail_from:
            return 2
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):
        del self.registered[address]


def test_registers_exact_bytes_and_goes_on_unpinned_after_a_failure(monkeypatch, caplog):
    cudart = _FakeCudart(fail_from=2)
    monkeypatch.setattr(pinned_pool.torch, "cuda",
                        SimpleNamespace(is_available=lambda: True, cudart=lambda: cudart))
    monkeypatch.setattr(pinned_pool.torch, "zeros", lambda *a, **k: None)
    pool = _pool(pin=True)
    with caplog.at_level(logging.WARNING):
        buffers = [pool.alloc(5000, "x") for _ in range(4)]
    assert list(cudart.registered.values()) == [8192, 8192] and cudart.calls == 3
    assert len(caplog.records) == 1 and not pool.pins
    for buffer in buffers:
        pool.free(buffer)
    assert cudart.registered == {}


def test_ring_blocks_and_serves_in_order_of_asking():
    pool = _pool()
    ring = BufferRing(pool, 1, 4096, "chunk buffer")
    held, order, threads = ring.acquire(), [], []

    def worker(index):
        buffer = ring.acquire()
        order.append(index)
        ring.release(buffer)

    for index in range(5):
        threads.append(threading.Thread(target=worker, args=(index,)))
        threads[-1].start()
        while len(ring._waiters) <= index:
            time.sleep(0.001)
    assert order == []
    ring.release(held)
    for thread in threads:
        thread.join(5)
    assert order == [0, 1, 2, 3, 4]
    with pytest.raises(AssertionError):
        ring.release(held)
    ring.close()
    assert pool.budget.used_bytes == 0


def test_ring_close_wakes_waiters_and_frees_lent_buffers_on_release():
    pool = _pool()
    ring = BufferRing(pool, 2, 4096, "chunk buffer")
    first, second = ring.acquire(), ring.acquire()
    errors = []

    def worker():
        try:
            ring.acquire()
        except StepError as error:
            errors.append(str(error))

    thread = threading.Thread(target=worker)
    thread.start()
    while not ring._waiters:
        time.sleep(0.001)
    ring.close()
    thread.join(5)
    assert len(errors) == 1 and "chunk buffer" in errors[0]
    assert pool.budget.used_bytes == 8192
    ring.release(first)
    ring.release(second)
    assert pool.budget.used_bytes == 0
    with pytest.raises(StepError):
        ring.acquire()


def test_ring_that_does_not_fit_keeps_nothing():
    pool = _pool(3 * 4096)
    with pytest.raises(CapacityError, match="chunk buffer 4 of 4"):
        BufferRing(pool, 4, 4096, "chunk buffer")
    assert pool.budget.used_bytes == 0
