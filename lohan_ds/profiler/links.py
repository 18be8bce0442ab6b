"""How fast bytes go between the host and a device of its own: each direction alone, and both at once."""
from __future__ import annotations

import time
from collections.abc import Callable

import torch
from pydantic import BaseModel, ConfigDict

from lohan_ds.memory.budget import MemoryBudget
from lohan_ds.memory.pinned_pool import PinnedPool
from lohan_ds.profiler.rates import MIN_SAMPLES, Rate
from lohan_ds.runtime.streams import Event, Streams

COPY_BYTES = 64 << 20
_COPIES_PER_SAMPLE = 4


class LinkReport(BaseModel):
    """Bytes per second."""
    model_config = ConfigDict(frozen=True, extra="forbid")

    h2d: Rate
    d2h: Rate
    h2d_with_d2h: Rate        # while the other direction is busy too
    d2h_with_h2d: Rate
    pinned: bool              # False: the system refused to pin host memory, and copies are slower for it

    @property
    def h2d_sustained_per_s(self) -> float:
        """What a run can count on: backward uses both directions at once."""
        return min(self.h2d.per_s, self.h2d_with_d2h.per_s)

    @property
    def d2h_sustained_per_s(self) -> float:
        return min(self.d2h.per_s, self.d2h_with_h2d.per_s)


def measure_link(streams: Streams, device: torch.device, seconds: float, copy_bytes: int = COPY_BYTES) -> LinkReport:
    """Copies through `streams`, which have a device memory of their own, from and to pinned buffers of the product's.

    Takes 2 x `copy_bytes` on the host and on the device: CapacityError if the host lacks them.
    """
    pool = PinnedPool(MemoryBudget("host", 2 * copy_bytes), pin=device.type == "cuda")
    try:
        source, target = (pool.alloc(copy_bytes, "link measurement") for _ in range(2))   # (copy_bytes,) uint8, host
        there, here = (torch.zeros(copy_bytes, dtype=torch.uint8, device=device) for _ in range(2))

        def h2d() -> Event:
            return streams.h2d(there, source)

        def d2h() -> Event:
            return streams.d2h(target, here)

        alone = [_measure([submit], copy_bytes, seconds / 3)[0] for submit in (h2d, d2h)]
        together = _measure([h2d, d2h], copy_bytes, seconds / 3)
        return LinkReport(h2d=alone[0], d2h=alone[1], h2d_with_d2h=together[0], d2h_with_h2d=together[1],
                          pinned=pool.pins)
    finally:
        pool.close()


def _measure(submits: list[Callable[[], Event]], copy_bytes: int, seconds: float) -> list[Rate]:
    """A rate per direction. All directions start together; each is timed until its own last copy is over."""
    samples: list[list[float]] = [[] for _ in submits]
    for submit in submits:
        submit().host_wait()
    deadline = time.perf_counter() + seconds
    while len(samples[0]) < MIN_SAMPLES or time.perf_counter() < deadline:
        start = time.perf_counter()
        last = {}
        for _ in range(_COPIES_PER_SAMPLE):
            for index, submit in enumerate(submits):
                last[index] = submit()
        while last:
            for index in [i for i, event in last.items() if event.done()]:
                last.pop(index).host_wait()
                samples[index].append(_COPIES_PER_SAMPLE * copy_bytes / (time.perf_counter() - start))
            time.sleep(1e-5)
    return [Rate.of(rates) for rates in samples]
