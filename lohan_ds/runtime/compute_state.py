"""`ComputeState`: what besides its arguments decides the bits of a forward: random generators and autocast."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class RngState:
    """State of the host's generator and of one device's. Fixed after construction."""

    def __init__(self, device: torch.device):
        self._device = device
        self._host = torch.get_rng_state()   # (5056,) uint8, host
        self._on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None   # uint8, host

    def restore(self) -> None:
        """Sets both generators."""
        torch.set_rng_state(self._host)
        if self._on_device is not None:
            torch.cuda.set_rng_state(self._on_device, self._device)

    def same_as(self, other: RngState) -> bool:
        return torch.equal(self._host, other._host) and (
            self._on_device is None or torch.equal(self._on_device, other._on_device))


class ComputeState:
    """Taken where a forward begins, restored where it runs again. Fixed after construction."""

    def __init__(self, device: torch.device):
        self._device = device
        self.rng = RngState(device)
        self._autocast = [_Autocast(kind) for kind in dict.fromkeys((device.type, "cpu"))]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """The generators are afterwards where they were before, whatever the body draws."""
        with contextlib.ExitStack() as stack:
            before = RngState(self._device)
            stack.callback(before.restore)
            self.rng.restore()
            for autocast in self._autocast:
                stack.enter_context(autocast.restored())
            yield


class _Autocast:
    """Autocast of one kind of device, as it is now."""

    def __init__(self, kind: str):
        self._kind = kind
        self._enabled = torch.is_autocast_enabled(kind)
        self._dtype = torch.get_autocast_dtype(kind)
        self._caches = torch.is_autocast_cache_enabled()

    def restored(self) -> contextlib.AbstractContextManager[None]:
        return torch.autocast(self._kind, enabled=self._enabled, dtype=self._dtype, cache_enabled=self._caches)
