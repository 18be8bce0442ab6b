from __future__ import annotations

import pytest
import torch

from lohan_ds.block import make_block
from lohan_ds.runtime.fetch_buffers import HostFetchBuffers, StagingRing
from lohan_ds.work import Work

BLOCK = make_block(0, "layer", "bfloat16", [("w", (3000,), 0)], 2048)
OTHER = make_block(1, "head", "float32", [("w", (9000,), 0)], 2048)


def test_a_buffer_is_used_again_only_when_nobody_has_a_view_of_it():
    buffers = HostFetchBuffers(10 * BLOCK.param_bytes)
    first = buffers.take(BLOCK)
    assert first.shape == (BLOCK.numel,) and first.dtype == torch.bfloat16 and first.data_ptr() % 4096 == 0
    view, address = first[5:7].fill_(3), first.data_ptr()
    buffers.give(first)
    del first
    second = buffers.take(BLOCK)
    assert second.data_ptr() != address and view.tolist() == [3, 3]
    del view
    assert buffers.take(BLOCK).data_ptr() == address


def test_what_is_idle_stays_within_the_plan():
    buffers = HostFetchBuffers(2 * BLOCK.param_bytes + OTHER.param_bytes)
    held = [buffers.take(BLOCK) for _ in range(2)]
    for buffer in held:
        buffers.give(buffer)
    held.clear()
    assert buffers.nbytes == 2 * BLOCK.param_bytes
    large = buffers.take(OTHER)
    assert buffers.nbytes == 2 * BLOCK.param_bytes + OTHER.param_bytes
    larger = buffers.take(OTHER)
    assert buffers.nbytes == 2 * OTHER.param_bytes   # over the plan by what is in use: nothing idle is kept
    buffers.lose(larger)
    buffers.give(large)
    assert buffers.nbytes == OTHER.param_bytes
    buffers.clear()
    assert buffers.nbytes == 0


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
