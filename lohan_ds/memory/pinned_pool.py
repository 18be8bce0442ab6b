"""`PinnedPool`: host buffers of exactly the size asked for; `BufferRing`: a few of them, lent in turn.

torch's own pinned allocator rounds every block up to a power of two, up to twice what was asked. Here a buffer is
its own anonymous mapping, rounded up to 4096 bytes: 1.125 MB costs 1.125 MB. The mappings are *shared* ones
(Python's default): a forked DataLoader worker then never makes the kernel copy each page that training writes.
"""
from __future__ import annotations

import contextlib
import logging
import mmap
import threading
from collections import deque

import torch

from lohan_ds.block import round_up
from lohan_ds.errors import CapacityError, StepError
from lohan_ds.memory.budget import MemoryBudget
from lohan_ds.work import Work

PAGE_BYTES = 4096
NUM_STAGING = 4   # two for each direction
_LARGEST_STAGING_BYTES, _SMALLEST_STAGING_BYTES = 16 << 20, 1 << 18   # of each

logger = logging.getLogger(__name__)


class PinnedPool:
    """Hands out page-aligned host buffers and charges them to a budget.

    When CUDA refuses to pin one (a low `ulimit -l`, or WSL2, which pins little), this is said once, later buffers are
    not pinned, and the pool pins a few small ones, `staging`, through which copies pass: see runtime/staged_streams.py.

    Any thread. The pool owns the promise (budget) and the pinning; the memory itself lives until the last tensor
    that looks at it is gone. `budget` is fixed after construction, the rest is under `_lock`, which is not held while
    memory is being pinned.
    """

    def __init__(self, budget: MemoryBudget, pin: bool):
        self.budget = budget
        self.staging: BufferRing | None = None   # NUM_STAGING pinned buffers, once one could not be pinned
        self._lock = threading.Lock()
        self._pin = pin and torch.cuda.is_available()
        self._closed = False
        self._buffers: dict[int, tuple[mmap.mmap, int, bool]] = {}  # address -> mapping, its bytes, is it pinned

    def alloc(self, nbytes: int, what: str) -> torch.Tensor:
        """A zeroed uint8 tensor (nbytes,) whose address is a multiple of 4096, pinned if the pool pins.

        `what` names it in the CapacityError that is raised when the budget or the machine lacks the bytes. The
        caller owns it until `free`. The budget is charged `nbytes` rounded up to 4096 (at least one page).
        """
        buffer, code = self._alloc(nbytes, what, self._pin)
        if code:
            self._stop_pinning(nbytes, code)
        return buffer

    def _alloc(self, nbytes: int, what: str, pin: bool) -> tuple[torch.Tensor, int]:
        """The buffer, and the CUDA error that it is not pinned for, or 0."""
        mapped_bytes = max(PAGE_BYTES, round_up(nbytes, PAGE_BYTES))
        self.budget.charge(mapped_bytes, what)
        try:
            mapping = mmap.mmap(-1, mapped_bytes)
        except OSError as error:
            self.budget.release(mapped_bytes)
            raise CapacityError(f"{self.budget.name}: the system has no {mapped_bytes} bytes for {what}: "
                                f"{error}") from error
        buffer = torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping alive
        address = buffer.data_ptr()
        code = int(torch.cuda.cudart().cudaHostRegister(address, mapped_bytes, 0)) if pin else 0
        with self._lock:
            self._buffers[address] = (mapping, mapped_bytes, pin and code == 0)
            if self._closed:
                self._drop(address)
                raise StepError(f"{self.budget.name}: buffer for {what} asked of a closed pool")
        return buffer[:nbytes], code

    def free(self, tensor: torch.Tensor) -> None:
        """Takes back what `alloc` returned (or any view of it). No copy to or from it may be in flight."""
        address = tensor.untyped_storage().data_ptr()
        with self._lock:
            if address not in self._buffers:
                raise AssertionError(f"{self.budget.name}: tensor at {address:#x} is not of this pool, or freed twice")
            self._drop(address)

    def close(self) -> None:
        """Unpins and gives back all buffers still lent. Idempotent; `alloc` raises StepError from now on."""
        with self._lock:
            self._closed = True
            for address in list(self._buffers):
                self._drop(address)

    @property
    def pins(self) -> bool:
        """Whether buffers are pinned: asked for, CUDA is there, and no registration has failed so far."""
        return self._pin

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in a buffer of this pool that is pinned."""
        with self._lock:
            return self._buffers.get(tensor.untyped_storage().data_ptr(), (None, 0, False))[2]

    def _drop(self, address: int) -> None:
        _, mapped_bytes, pinned = self._buffers.pop(address)
        if pinned:
            torch.cuda.cudart().cudaHostUnregister(address)
        self.budget.release(mapped_bytes)

    def _stop_pinning(self, nbytes: int, code: int) -> None:
        with self._lock:
            if not self._pin:
                return   # another thread has said it
            self._pin = False
        self.staging = self._pinned_staging()
        if self.staging is None:
            how = "none smaller could be pinned either: copies will hold up the device"
        else:
            how = f"copies pass through {NUM_STAGING} pinned buffers of {self.staging.nbytes} bytes, which is slower"
        logger.warning("%s: cudaHostRegister of %d bytes failed with CUDA error %d (is `ulimit -l` too low? WSL2 pins "
                       "little). Host buffers are not pinned from now on; %s", self.budget.name, nbytes, code, how)
        try:  # CUDA would report the failed call again at the next kernel launch: let it be this one
            torch.zeros(1, device="cuda")
        except RuntimeError:
            pass

    def _pinned_staging(self) -> BufferRing | None:
        nbytes = _LARGEST_STAGING_BYTES
        while nbytes >= _SMALLEST_STAGING_BYTES:
            with contextlib.suppress(CapacityError):
                return BufferRing(_Pinned(self), NUM_STAGING, nbytes, "pinned staging buffer")
            nbytes //= 2
        return None


class _Pinned:
    """A pool's buffers, pinned or none."""

    def __init__(self, pool: PinnedPool):
        self._pool = pool
        self.free = pool.free

    def alloc(self, nbytes: int, what: str) -> torch.Tensor:
        buffer, code = self._pool._alloc(nbytes, what, pin=True)
        if code:
            self.free(buffer)
            raise CapacityError(f"{what}: {nbytes} bytes cannot be pinned, CUDA error {code}")
        return buffer


class BufferRing:
    """`count` equal buffers of a pool; acquiring one blocks until one is free, in order of asking.

    Any thread. `nbytes` and `count` are fixed after construction, the rest is under `_lock`, which is never held
    while waiting.
    """

    def __init__(self, pool: PinnedPool | _Pinned, count: int, nbytes: int, what: str):
        """Allocates all buffers at once: CapacityError (and none kept) if they do not fit."""
        self.count = count
        self.nbytes = nbytes
        self._pool = pool
        self._what = what
        self._lock = threading.Lock()
        self._waiters: deque[Work] = deque()
        self._lent: set[int] = set()
        self._closed = False
        self._free: deque[torch.Tensor] = deque()  # (nbytes,) uint8, host
        try:
            for index in range(count):
                self._free.append(pool.alloc(nbytes, f"{what} {index + 1} of {count}"))
        except BaseException:
            self.close()
            raise

    def acquire(self) -> torch.Tensor:
        """A buffer, uint8 (nbytes,), the caller's until `release`. Blocks; StepError once the ring is closed."""
        with self._lock:
            self._check_open()
            if self._free:
                return self._lend(self._free.popleft())
            waiter = Work()
            self._waiters.append(waiter)
        try:
            return waiter.wait()
        except KeyboardInterrupt:
            self._give_up(waiter)
            raise

    def try_acquire(self) -> torch.Tensor | None:
        """As `acquire`, but None at once when none is free."""
        with self._lock:
            self._check_open()
            return self._lend(self._free.popleft()) if self._free else None

    def release(self, buffer: torch.Tensor) -> None:
        """Gives a buffer back, to whoever has waited longest. Nothing may be in flight on it. Never blocks."""
        address = buffer.untyped_storage().data_ptr()
        with self._lock:
            if address not in self._lent:
                raise AssertionError(f"{self._what}: released a buffer that is not lent")
            self._lent.remove(address)
            if self._closed:
                self._pool.free(buffer)
                return
            if not self._waiters:
                self._free.append(buffer)
                return
            waiter = self._waiters.popleft()
            self._lend(buffer)
        waiter.finish(buffer)

    def close(self) -> None:
        """Frees idle buffers (lent ones when released) and wakes waiters with a StepError. Idempotent."""
        with self._lock:
            self._closed = True
            waiters, self._waiters = self._waiters, deque()
            while self._free:
                self._pool.free(self._free.popleft())
        for waiter in waiters:
            waiter.fail(StepError(f"{self._what}: closed while waiting for a buffer"))

    def _lend(self, buffer: torch.Tensor) -> torch.Tensor:
        self._lent.add(buffer.untyped_storage().data_ptr())
        return buffer

    def _check_open(self) -> None:
        if self._closed:
            raise StepError(f"{self._what}: buffer asked of a closed ring")

    def _give_up(self, waiter: Work) -> None:
        with self._lock:
            waiting = waiter in self._waiters
            if waiting:
                self._waiters.remove(waiter)
        if not waiting and waiter.exception() is None:
            self.release(waiter.wait())
