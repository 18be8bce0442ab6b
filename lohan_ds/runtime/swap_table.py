"""`SwapTable`: what is swapped out now, by the pass that saved it. It moves nothing by itself and decides nothing.

It refers to what it lists weakly: only autograd's graph keeps a swapped storage, see swapped_storage.py.
"""
from __future__ import annotations

import threading
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lohan_ds.plan import ActivationPolicy
from lohan_ds.runtime.activation_items import UnitPass
from lohan_ds.runtime.recorder import Recorder, stalling
from lohan_ds.runtime.streams import Streams
from lohan_ds.runtime.swap_tiers import SwapCopy, SwapTier
from lohan_ds.runtime.swapped_storage import SwappedStorage, flat_bytes


class HeldActivation(NamedTuple):
    """Something swapped out that a graph still holds."""
    unit: str
    item: str
    tier: ActivationPolicy
    nbytes: int


class SwapTable:
    """Fixed after construction: tiers, streams, recorder. Under `_lock`: `_passes`, `_by_storage`. `_buried` fills at
    any moment, from any thread: a collector may be at work. Of the training and autograd thread: `counts`."""

    def __init__(self, tiers: dict[str, SwapTier], streams: Streams, recorder: Recorder | None = None):
        """`tiers`: by policy."""
        self._tiers, self._streams, self._recorder = tiers, streams, recorder
        self._lock = threading.RLock()
        self._passes: weakref.WeakValueDictionary[int, UnitPass] = weakref.WeakValueDictionary()   # by serial number
        self._by_storage: dict[int, tuple[StorageWeakRef, weakref.ref[SwappedStorage]]] = {}
        self._buried: deque[SwapCopy] = deque()     # copies that nobody needs, not dropped yet
        self.counts: Counter[str] = Counter()

    def has(self, policy: ActivationPolicy) -> bool:
        """Whether there is such a tier."""
        return policy in self._tiers

    def swap_out(self, tensor: Tensor, policy: ActivationPolicy, unit_pass: UnitPass,
                 item: str) -> SwappedStorage | None:
        """The whole storage of a plain tensor, on its way out; the same again for the same unchanged storage. None if
        it stays: the planned space is full, or host memory is the device's. Blocks while all buffers are in use."""
        if policy == "swap_host" and self._streams.unified:
            self.counts["host_is_device_bytes"] += tensor.nbytes
            return None
        storage = self._known(tensor)
        if storage is not None:
            return storage
        self.bury()
        flat = flat_bytes(tensor.detach())
        with stalling(self._recorder, "activation"):
            copy = self._tiers[policy].put(flat)
        if copy is None:
            self.counts["unplanned_kept_bytes"] += flat.numel()
            return None
        storage = SwappedStorage(tensor, flat, copy, unit_pass, item, policy, self._streams, self._buried.append,
                                 self._recorder)
        self.counts[f"{policy}_bytes_out"] += flat.numel()
        self.counts[f"{unit_pass.name}: bytes_out"] += flat.numel()
        with self._lock:
            self._passes[unit_pass.serial] = unit_pass
            unit_pass.storages.append(weakref.ref(storage))
            self._by_storage = {key: refs for key, refs in self._by_storage.items() if not refs[0].expired()}
            untyped = tensor.untyped_storage()
            self._by_storage[untyped._cdata] = (StorageWeakRef(untyped), weakref.ref(storage))
        return storage

    def start_way_back(self, unit_pass: UnitPass) -> None:
        """Of all that a pass swapped out, and of what the pass before it in forward did; last saved first."""
        with self._lock:
            before = max((serial for serial in self._passes.keys() if serial < unit_pass.serial), default=None)
            previous = self._passes.get(before) if before is not None else None
        for each in (unit_pass, previous):
            for ref in reversed(each.storages) if each is not None else ():
                storage = ref()
                if storage is not None:
                    self.fetch(storage)

    def fetch(self, storage: SwappedStorage) -> SwappedStorage:
        """Starts its way back, unless it has begun."""
        if storage.start_fetch():
            self.counts[f"{storage.tier}_bytes_in"] += storage.nbytes
        return storage

    def held(self) -> list[HeldActivation]:
        """What is swapped out now: empty when no graph is alive."""
        return [HeldActivation(storage.unit_pass.name, storage.item, storage.tier, storage.nbytes)
                for storage in self._held()]

    def release_resident(self) -> None:
        """Backward is over: what was brought back and not used is let go of."""
        for storage in self._held():
            storage.release_resident()
        self.bury()

    def discard(self) -> None:
        """Gives up everything, whoever still holds a graph."""
        for storage in self._held():
            storage.discard()
        self.bury()

    def bury(self) -> None:
        """Frees the space of what nobody needs any more; that of copies under way when they end. Does not block."""
        while True:
            try:
                copy = self._buried.popleft()
            except IndexError:
                return
            copy.drop()

    def _known(self, tensor: Tensor) -> SwappedStorage | None:
        refs = self._by_storage.get(tensor.untyped_storage()._cdata)
        storage = refs[1]() if refs is not None and not refs[0].expired() else None
        return storage if storage is not None and storage.version == tensor._version else None

    def _held(self) -> list[SwappedStorage]:
        with self._lock:
            refs = [ref for unit_pass in list(self._passes.values()) for ref in unit_pass.storages]
        return [storage for ref in refs if (storage := ref()) is not None and not storage.is_given_up]


def leak_text(held: Sequence[HeldActivation]) -> str:
    """Of what is held after a step: how much, the largest of it, and what to do."""
    worst = max(held, key=lambda each: each.nbytes)
    return (f"{sum(each.nbytes for each in held)} bytes of activations are still swapped out after step(), of unit "
            f"{worst.unit} {worst.nbytes} bytes ({worst.item}, {worst.tier}): something holds the graph of a loss or "
            "an output; keep .item() or .detach() of it instead")
