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
    """Pins up to `limit_bytes` in all."""

    def __init__(self, limit_bytes: int):
        self.registered, self.calls, self.limit_bytes = {}, 0, limit_bytes

    def cudaHostRegister(self, address, nbytes, flags):
        self.calls += 1
        if nbytes + sum(self.registered.values()) > self.limit_bytes:
            return 2
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address):
        del self.registered[address]


@pytest.fixture
def cudart(monkeypatch):
    fake = _FakeCudart(1 << 40)
    monkeypatch.setattr(pinned_pool.torch, "cuda", SimpleNamespace(is_available=lambda: True, cudart=lambda: fake))
    monkeypatch.setattr(pinned_pool.torch, "zeros", lambda *a, **k: None)
    return fake


def test_registers_what_is_mapped_and_no_more(cudart):
    """torch's own allocator would take 8 MB for 4.1."""
    pool = _pool(pin=True)
    sizes = [5000, int(4.1 * MB), 1]
    buffers = [pool.alloc(size, "x") for size in sizes]
    assert list(cudart.registered) == [buffer.data_ptr() for buffer in buffers]
    assert [*cudart.registered.values()] == [8192, -(-sizes[1] // 4096) * 4096, 4096]
    assert pool.budget.used_bytes == sum(cudart.registered.values()) and pool.pins and pool.staging is None
    assert all(pool.is_pinned(buffer[10:]) for buffer in buffers) and not pool.is_pinned(torch.ones(3))
    pool.free(buffers[0])
    assert len(cudart.registered) == 2
    pool.close()
    assert cudart.registered == {}


def test_what_cannot_be_pinned_is_said_once_and_passes_through_a_small_ring(cudart, caplog):
    cudart.limit_bytes = 9 * MB + 4096
    pool = _pool(pin=True)
    with caplog.at_level(logging.WARNING):
        first, *others = [pool.alloc(5 * MB, "x") for _ in range(4)]
    assert len(caplog.records) == 1
    line = caplog.records[0].getMessage()
    assert f"cudaHostRegister of {5 * MB} bytes failed with CUDA error 2" in line
    assert "ulimit" in line and "WSL2" in line
    assert f"4 pinned buffers of {MB} bytes" in line
    assert pool.is_pinned(first) and not any(map(pool.is_pinned, others)) and not pool.pins
    assert pool.staging.count == 4 and pool.staging.nbytes == MB   # 2 MB are too many
    assert sum(cudart.registered.values()) == 9 * MB and pool.budget.used_bytes == 24 * MB
    staging = pool.staging.acquire()
    assert pool.is_pinned(staging)
    pool.staging.release(staging)
    pool.close()
    assert cudart.registered == {} and pool.budget.used_bytes == 0


@pytest.mark.parametrize(("limit_bytes", "budget_bytes"), [(0, 64 * MB), (1 << 40, 5 * MB)])
def test_where_no_ring_can_be_had_the_run_goes_on(cudart, caplog, limit_bytes, budget_bytes):
    """Nothing can be pinned at all, or the budget has nothing left."""
    cudart.limit_bytes = limit_bytes
    pool = _pool(budget_bytes, pin=True)
    if limit_bytes:
        pool.alloc(4 * MB + 300_000, "kept")
        cudart.limit_bytes = 0
    with caplog.at_level(logging.WARNING):
        buffers = [pool.alloc(4096, "x") for _ in range(3)]
    assert len(caplog.records) == 1 and "none smaller" in caplog.records[0].getMessage()
    assert pool.staging is None and not any(map(pool.is_pinned, buffers))
    used = pool.budget.used_bytes
    assert used == sum(-(-size // 4096) * 4096 for size in ([4 * MB + 300_000] if limit_bytes else [])) + 3 * 4096
    pool.close()


def test_a_buffer_asked_of_a_closed_pool_is_not_left_pinned(cudart):
    pool = _pool(pin=True)
    pool.close()
    with pytest.raises(StepError):
        pool.alloc(MB, "late")
    assert cudart.registered == {} and pool.budget.used_bytes == 0


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
