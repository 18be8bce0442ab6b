"""`SwapSpace`: the tiers that a plan swaps activations to, made and closed together."""
from __future__ import annotations

from collections.abc import Sequence

from lohan_ds.errors import ConfigError
from lohan_ds.memory.pinned_pool import PAGE_BYTES, BufferRing, PinnedPool
from lohan_ds.plan import ActivationPlan
from lohan_ds.runtime.ssd_tier import SsdTier
from lohan_ds.runtime.streams import Streams
from lohan_ds.runtime.swap_tiers import EventWatcher, HostTier, SwapTier
from lohan_ds.store.file_io import FileIo
from lohan_ds.store.spill_file import SpillFile
from lohan_ds.stripe import Stripe


class SwapSpace:
    """Fixed after construction. All that it will ever take of host memory and disk it takes at once."""

    def __init__(self, plan: ActivationPlan, pool: PinnedPool, io: FileIo | None, dirs: Sequence[str],
                 streams: Streams, stripe: Stripe = ()):
        """CapacityError or StoreError, and nothing kept, if memory or disk space cannot be had. `io`: None without an
        SSD. The host tier is left out where host memory is the device's."""
        self.tiers: dict[str, SwapTier] = {}
        self._watcher = EventWatcher()
        try:
            if plan.host_bytes and not streams.unified:
                self.tiers["swap_host"] = HostTier(pool, plan.host_bytes, streams, self._watcher)
            if plan.ssd_bytes:
                self.tiers["swap_ssd"] = self._ssd_tier(plan, pool, io, dirs, streams, stripe)
        except BaseException:
            self.close()
            raise

    def _ssd_tier(self, plan: ActivationPlan, pool: PinnedPool, io: FileIo | None, dirs: Sequence[str],
                  streams: Streams, stripe: Stripe) -> SsdTier:
        if io is None or not dirs:
            raise ConfigError("the plan swaps activations to SSD, but there are no lohan.ssd_paths")
        if plan.num_buffers < 1 or plan.buffer_bytes < PAGE_BYTES or plan.buffer_bytes % PAGE_BYTES:
            raise ConfigError(f"the plan has {plan.num_buffers} buffers of {plan.buffer_bytes} bytes for activations "
                              f"on their way to the SSD; at least 1 of a multiple of {PAGE_BYTES} is needed")
        ring = BufferRing(pool, plan.num_buffers, plan.buffer_bytes, "buffer of activations")
        try:
            spill = SpillFile(io, dirs, plan.ssd_bytes, stripe)
        except BaseException:
            ring.close()
            raise
        return SsdTier(spill, ring, streams, self._watcher)

    def close(self) -> None:
        """Waits for all copies, then gives everything back. Idempotent; ahead of io, pool and streams."""
        for tier in self.tiers.values():
            tier.drain()
        self._watcher.close()
        for tier in self.tiers.values():
            tier.close()
        self.tiers = {}
