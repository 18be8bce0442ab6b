"""How fast SSD directories are read and written through the product's own I/O: each alone, and all together.

Files are unlinked as soon as they are open: however this process ends, nothing is left behind.
"""
from __future__ import annotations

import contextlib
import math
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from pydantic import BaseModel, ConfigDict

from lohan_ds.config import AUTOMATIC
from lohan_ds.errors import CapacityError
from lohan_ds.memory.budget import MemoryBudget
from lohan_ds.memory.pinned_pool import PinnedPool
from lohan_ds.planner.memory_model import format_bytes
from lohan_ds.store.free_space import drive_of, free_bytes
from lohan_ds.profiler.rates import Rate
from lohan_ds.profiler.ssd_traffic import Traffic, sustained
from lohan_ds.store.direct_io import file_system_type
from lohan_ds.store.file_io import FileIo, SsdFile
from lohan_ds.store.native_io import make_ssd_io

FILE_PREFIX = ".lohan-profile-"
_MIN_FILE_CHUNKS = 4
_NUM_IN_FLIGHT = 4           # chunks per file: as many as keep the threads busy
# Bytes that may be moved, as shares of SsdLimits.write_bytes. Half of "mixed" is written: 1 in all.
_WRITE_SHARE = 1 / 2
_SHARES_ALONE = {"read": math.inf, "mixed": 1 / 4}
_SHARES_TOGETHER = {"read": math.inf, "write": 1 / 4, "mixed": 1 / 4}


@dataclass(frozen=True)
class SsdLimits:
    """What measuring may take."""
    seconds: float = 20.0            # of all directories together, about
    write_bytes: int = 16 << 30      # per directory: it wears the drive
    file_bytes: int = 4 << 30        # of the file in each directory
    free_share: float = 0.1          # of a drive's free space that its files may have
    chunk_bytes: int = AUTOMATIC["chunk_bytes"]
    num_threads: int = AUTOMATIC["ssd_threads"]   # for each directory


class SsdRates(BaseModel):
    """Bytes per second. `mixed`: half of the bytes are read, half written, at the same time."""
    model_config = ConfigDict(frozen=True, extra="forbid")

    read: Rate
    write: Rate
    mixed: Rate


class SsdReport(BaseModel):
    """One directory."""
    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    file_system: str
    direct: bool                       # O_DIRECT; False: through the page cache, or in RAM
    file_bytes: int
    written_bytes: int
    rates: SsdRates
    sustained_write_per_s: float | None   # past the drive's fast cache; None: unknown, it was not seen to slow down

    @property
    def kept_write_per_s(self) -> float:
        """As far as is known."""
        return self.sustained_write_per_s or self.rates.write.per_s


def measure_ssds(paths: Sequence[str], limits: SsdLimits,
                 progress: Callable[[str], None] = lambda what: None) -> tuple[tuple[SsdReport, ...], SsdRates | None]:
    """A report of each directory, and the rates of all together if there are several.

    CapacityError with needed and free bytes if a drive has too little space, StoreError if a directory cannot be used
    or an access fails. Whatever happens, no file is left.
    """
    num_phases = 4 * len(paths) + (3 if len(paths) > 1 else 0)   # of a directory alone, writing counts twice
    phase_s = limits.seconds / max(1, num_phases)
    files: list[SsdFile] = []
    pool = PinnedPool(MemoryBudget("host", len(paths) * _NUM_IN_FLIGHT * limits.chunk_bytes), pin=False)
    io = make_ssd_io(limits.num_threads * len(paths))
    try:
        for path, nbytes in zip(paths, _file_sizes(paths, limits)):
            files.append(_open_unlinked(io, path, nbytes))
        buffers = [[_random_buffer(pool, limits.chunk_bytes) for _ in range(_NUM_IN_FLIGHT)] for _ in paths]
        reports = tuple(_measure_directory(io, path, file, own, limits, phase_s, progress)
                        for path, file, own in zip(paths, files, buffers))
        if len(paths) < 2:
            return reports, None
        traffic = Traffic(io, files, [report.file_bytes for report in reports], buffers)
        rates = {}
        for kind, share in _SHARES_TOGETHER.items():
            progress(f"SSD {kind}, {len(paths)} directories together")
            rates[kind] = Rate.of(traffic.run(kind, phase_s, share * limits.write_bytes * len(paths)))
        return reports, SsdRates(**rates)
    finally:
        io.close()
        pool.close()


def _measure_directory(io: FileIo, path: str, file: SsdFile, buffers: Sequence[torch.Tensor], limits: SsdLimits,
                       phase_s: float, progress: Callable[[str], None]) -> SsdReport:
    """Reads only what was written: space that was only reserved is not read from the drive."""
    progress(f"SSD write, {path}")
    samples = Traffic(io, [file], [file.nbytes], [buffers]).run("write", 2 * phase_s,
                                                                _WRITE_SHARE * limits.write_bytes)
    steady_write, sustained_per_s = sustained(samples)
    used_bytes = min(file.nbytes, file.bytes_written)
    rates = {"write": steady_write}
    for kind, share in _SHARES_ALONE.items():
        progress(f"SSD {kind}, {path}")
        traffic = Traffic(io, [file], [used_bytes], [buffers])
        rates[kind] = Rate.of(traffic.run(kind, phase_s, share * limits.write_bytes))
    return SsdReport(path=path, file_system=file_system_type(path), direct=file.direct, file_bytes=used_bytes,
                     written_bytes=file.bytes_written, rates=SsdRates(**rates),
                     sustained_write_per_s=sustained_per_s)


def _file_sizes(paths: Sequence[str], limits: SsdLimits) -> list[int]:
    """Bytes of each directory's file, whole chunks. Directories on one drive share what may be taken of it."""
    drives = [drive_of(path) for path in paths]
    sizes = []
    for path, drive in zip(paths, drives):
        free = free_bytes(path)
        allowed = min(limits.file_bytes, limits.write_bytes, int(limits.free_share * free / drives.count(drive)))
        num_chunks = allowed // limits.chunk_bytes
        if num_chunks < _MIN_FILE_CHUNKS:
            needed = int(_MIN_FILE_CHUNKS * limits.chunk_bytes * drives.count(drive) / limits.free_share)
            raise CapacityError(f"{path}: to measure it needs {format_bytes(needed)} free, of which it uses "
                                f"{limits.free_share:.0%}; free {format_bytes(free)}: free space, or name another "
                                "directory")
        sizes.append(num_chunks * limits.chunk_bytes)
    return sizes


def _open_unlinked(io: FileIo, directory: str, nbytes: int) -> SsdFile:
    path = os.path.join(directory, f"{FILE_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        return io.open(path, nbytes)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _random_buffer(pool: PinnedPool, nbytes: int) -> torch.Tensor:
    """(nbytes,) uint8 that no drive can compress."""
    return pool.alloc(nbytes, "SSD measurement").random_()
