"""Can a directory do direct I/O? Asked once, by trying.

tmpfs takes O_DIRECT since Linux 6.6, but it is RAM all the same: it is told apart by the mount table.
"""
from __future__ import annotations

import mmap
import os
import tempfile

from lohan_ds.errors import StoreError
from lohan_ds.memory.pinned_pool import PAGE_BYTES
from lohan_ds.store.filenames import DIRECT_PROBE_PREFIX

RAM_FILE_SYSTEMS = ("tmpfs", "ramfs")


def why_not_direct(directory: str) -> str | None:
    """None if files in `directory` can be read and written past the page cache, else the reason they cannot.

    Writes and removes one small file, blocks on the disk. StoreError if the directory cannot be written at all.
    """
    file_system = file_system_type(directory)
    if file_system in RAM_FILE_SYSTEMS:
        return f"it is on {file_system}"
    try:
        fd, path = tempfile.mkstemp(prefix=DIRECT_PROBE_PREFIX, dir=directory)
    except OSError as error:
        raise StoreError(error.errno, f"cannot create files: {error.strerror}", directory) from error
    try:
        os.close(fd)
        return _try_direct(path, file_system)
    finally:
        os.unlink(path)


def _try_direct(path: str, file_system: str) -> str | None:
    pattern = bytes(range(256)) * (PAGE_BYTES // 256)
    with mmap.mmap(-1, PAGE_BYTES) as page:
        page[:] = pattern
        try:
            fd = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
            try:
                written = os.pwrite(fd, page, 0)
                page[:] = bytes(PAGE_BYTES)
                read = os.preadv(fd, [page], 0)
            finally:
                os.close(fd)
        except OSError as error:
            return f"{error.strerror} on {file_system}"
        same = page[:] == pattern
    return None if written == read == PAGE_BYTES and same else f"a direct read gave other bytes on {file_system}"


def file_system_type(directory: str) -> str:
    """The type ("ext4", "tmpfs", ...) of the file system a directory is on, "unknown" if the mount table hides it."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            before, _, after = line.partition(" - ")
            if before.split()[2] == wanted:
                return after.split()[0]
    return "unknown"
