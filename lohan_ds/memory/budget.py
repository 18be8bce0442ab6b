"""`MemoryBudget`: the bytes of one tier that may be promised, and what the machine has to promise from.

A budget counts, it does not allocate. `available_host_bytes` reads the kernel's own numbers, the limits of every
cgroup above this process included, so that a container is never planned at the size of its host.
"""
from __future__ import annotations

import threading
from pathlib import Path

from lohan_ds.errors import CapacityError

GIB = 1 << 30


def available_host_bytes(cgroup_root: str = "/sys/fs/cgroup", proc_root: str = "/proc") -> int:
    """Bytes of host RAM that this process can still take without swapping or being killed.

    The least of MemAvailable and, for each memory cgroup from this process's own up to the root, its limit less
    its usage; page cache that the kernel would give back (inactive_file) does not count as used. A snapshot: other
    processes move it. Both roots are arguments so that tests can lay out fake files. Any thread.
    """
    available = [_mem_available_bytes(Path(proc_root))]
    for directory, names in _memory_cgroups(Path(cgroup_root), Path(proc_root)):
        left = _cgroup_available_bytes(directory, *names)
        if left is not None:
            available.append(left)
    return max(0, min(available))


def _mem_available_bytes(proc_root: Path) -> int:
    fields = dict(line.split(":", 1) for line in (proc_root / "meminfo").read_text().splitlines() if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024


_V2_NAMES = (("memory.max", "memory.high"), "memory.current", "inactive_file")
_V1_NAMES = (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file")


def _memory_cgroups(cgroup_root: Path, proc_root: Path) -> list[tuple[Path, tuple]]:
    """The directories of this process's memory cgroups, innermost first, each with the names of its files.

    Without a cgroup namespace a container sees the host's path but only its own directory, mounted at the root:
    levels that do not exist are skipped on the way up, and the root has the container's limit.
    """
    try:
        lines = (proc_root / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            mount, names = cgroup_root, _V2_NAMES
        elif "memory" in controllers.split(","):
            mount, names = cgroup_root / "memory", _V1_NAMES
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        found += [(mount.joinpath(*parts[:depth]), names) for depth in range(len(parts), -1, -1)]
    return found


def _cgroup_available_bytes(directory: Path, limit_names: tuple[str, ...], usage_name: str,
                            cache_key: str) -> int | None:
    """Limit less unreclaimable usage of one cgroup, None where it sets no limit."""
    limits = [value for value in (_read_int(directory / name) for name in limit_names) if value is not None]
    usage = _read_int(directory / usage_name)
    if not limits or usage is None:
        return None
    reclaimable = 0
    try:
        for line in (directory / "memory.stat").read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == cache_key:
                reclaimable = int(value)
    except OSError:
        pass  # without statistics all usage counts as used
    return min(limits) - max(0, usage - reclaimable)


def _read_int(path: Path) -> int | None:
    """The number in a cgroup file; None for "max" or a file that is not there."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


class MemoryBudget:
    """Counts promised bytes of one tier against a total.

    Any thread. `name` and `total_bytes` are fixed after construction, the counters are under `_lock`.
    """

    def __init__(self, name: str, total_bytes: int):
        self.name = name
        self.total_bytes = total_bytes
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._peak_bytes = 0

    def charge(self, nbytes: int, what: str) -> None:
        """Promises `nbytes` for `what` (named in the message); CapacityError, nothing charged, if they are not left."""
        with self._lock:
            left_bytes = self.total_bytes - self._used_bytes
            if nbytes > left_bytes:
                raise CapacityError(
                    f"{self.name}: {what} needs {nbytes} bytes ({nbytes / GIB:.3f} GiB), the budget of "
                    f"{self.total_bytes} has {left_bytes} left ({left_bytes / GIB:.3f} GiB); raise the budget, "
                    f"or let the plan put more on another tier")
            self._used_bytes += nbytes
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)

    def release(self, nbytes: int) -> None:
        """Gives back what was charged."""
        with self._lock:
            if nbytes > self._used_bytes:
                raise AssertionError(f"{self.name}: releases {nbytes} bytes of {self._used_bytes} used")
            self._used_bytes -= nbytes

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes
