"""What the kernel knows of this process: bytes from and to drives, peak memory, files in the page cache."""
from __future__ import annotations

import ctypes
import mmap
import os
import signal
from pathlib import Path

import numpy

_PR_SET_PDEATHSIG = 1


def drive_bytes() -> tuple[int, int]:
    """Read from and written to drives so far, by all threads; what the page cache answers is not counted."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def peak_rss_bytes() -> int:
    """Since the start, or the last `forget_peak_rss`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no VmHWM: the peak of resident memory is unknown on this kernel")


def forget_peak_rss() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def be_first_to_be_killed() -> None:
    """When memory runs out the kernel ends this process, not another one."""
    Path("/proc/self/oom_score_adj").write_text("1000")


def end_with_parent() -> None:
    """However the process that started this one ends: a side must not train on, and hold memory, unseen."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")


def cached_share(folder: str) -> float | None:
    """The part of all bytes in the files of `folder` that is in the page cache; None if there are none."""
    total = cached = 0
    for path in Path(folder).rglob("*"):
        if path.is_file() and path.stat().st_size:
            found = _cached_pages(path)
            total += found[1]
            cached += found[0]
    return cached / total if total else None


def _cached_pages(path: Path) -> tuple[int, int]:
    """Pages in the page cache, and all pages. Mapping a file reads nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        with mmap.mmap(file.fileno(), nbytes, access=mmap.ACCESS_READ) as pages:
            resident = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
            address = numpy.frombuffer(pages, numpy.uint8).ctypes.data
            if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), resident):
                number = ctypes.get_errno()
                raise OSError(number, f"mincore of {path}: {os.strerror(number)}")
            return sum(page & 1 for page in resident), len(resident)
