from __future__ import annotations

import pytest
import torch

from lohan_ds.block import make_block
from lohan_ds.runtime.fetch_buffers import FetchBuffers, StagingRing
from lohan_ds.work import Work

BLOCK = make_block(0, "layer", "bfloat16", [("w", (3000,), 0)], 2048)
CPU = torch.device("cpu")
OTHER = make_block(1, "head", "float32", [("w", (9000,), 0)], 2048)


def test_a_buffer_is_used_again_only_when_nobody_has_a_view_of_it():
    buffers = FetchBuffers(10 * BLOCK.param_bytes, CPU, lambda: None)
    first, _ = buffers.take(BLOCK)
    assert first.shape == (BLOCK.numel,) and first.dtype == torch.bfloat16 and first.data_ptr() % 4096 == 0
    view, address = first[5:7].fill_(3), first.data_ptr()
    buffers.give(first)
    del first
    second, _ = buffers.take(BLOCK)
    assert second.data_ptr() != address and view.tolist() == [3, 3]
    del view
    assert buffers.take(BLOCK)[0].data_ptr() == address


def test_what_is_idle_stays_within_the_plan():
    buffers = FetchBuffers(2 * BLOCK.param_bytes + OTHER.param_bytes, CPU, lambda: None)
    held = [buffers.take(BLOCK)[0] for _ in range(2)]
    for buffer in held:
        buffers.give(buffer)
    held.clear()
    assert buffers.nbytes == 2 * BLOCK.param_bytes
    large, _ = buffers.take(OTHER)
    assert buffers.nbytes == 2 * BLOCK.param_bytes + OTHER.param_bytes
    larger, _ = buffers.take(OTHER)
    assert buffers.nbytes == 2 * OTHER.param_bytes   # over the plan by what is in use: nothing idle is kept
    buffers.lose(larger)
    buffers.give(large)
    assert buffers.nbytes == OTHER.param_bytes
    buffers.clear()
    assert buffers.nbytes == 0


def test_a_buffer_waits_only_for_what_was_queued_when_it_was_given_back():
    marks = iter(range(10))
    buffers = FetchBuffers(3 * BLOCK.param_bytes, CPU, lambda: next(marks))
    (first, new), (second, newer) = buffers.take(BLOCK), buffers.take(BLOCK)
    assert (new, newer) == (0, 1), "what the allocator gives waits for all that is queued"
    buffers.give(first)
    buffers.give(second)
    del first, second
    assert [buffers.take(BLOCK)[1], buffers.take(BLOCK)[1], buffers.take(BLOCK)[1]] == [2, 3, 4]


class Copy:
    def __init__(self):
        self.passed = self.waited = False

    def done(self):
        return self.passed

    def host_wait(self):
        self.waited = self.passed = True


def test_a_staging_buffer_is_free_once_its_copy_has_passed():
    ring = StagingRing(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), 2, 64)
    copies = [Copy(), Copy()]
    buffers = [ring.take(), ring.take()]
    for buffer, copy in zip(buffers, copies):
        ring.in_use(buffer, Work.completed(copy))
    assert not ring.has_free()
    assert ring.take() is buffers[0] and copies[0].waited and not copies[1].waited   # the oldest is waited for
    copies[1].passed = True
    assert ring.has_free() and ring.take() is buffers[1]


def test_a_failed_fetch_gives_its_staging_buffer_back():
    ring = StagingRing(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), 1, 64)
    work = Work()
    ring.in_use(ring.take(), work)
    work.fail(OSError("drive"))
    assert ring.has_free()
    with pytest.raises(OSError):
        work.wait()
