"""`RunDirs`: one run's directories on the SSDs, locked while it lives. What dead runs left behind is removed.

A process that is killed with kill -9 leaves its files, but the kernel drops its lock on the file LOCK in each
directory. So whoever can take that lock knows that the run is over, whatever its process id means by now. A new
directory is locked under another name before it gets its own, so it is never met unlocked.

Scratch is removed at the end, by its own process or by the next run. A run with a name stays: its directories hold the
only copy of what was trained.
"""
from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
from collections.abc import Sequence

from lohan_ds.errors import CapacityError, StoreError
from lohan_ds.store.filenames import LOCK, NEW_SUFFIX, is_run_dir_name
from lohan_ds.store.manifest import is_unfinished

logger = logging.getLogger(__name__)
GIB = 1 << 30


class RunDirs:
    """`keep`: whether `close` leaves the directories. All else is fixed after construction; `close` from any thread."""

    def __init__(self, paths: Sequence[str], needed_bytes: Sequence[int]):
        """Creates the directories, mode 0700, all or none, after dead scratch beside them was removed. `needed_bytes`:
        of each directory's files. StoreError if one exists (unless that run was cut off before its first commit) or
        cannot be made, CapacityError with needed and free bytes if a drive has too little."""
        self.keep = False
        self.paths: list[str] = []
        self._locks: list[int] = []
        for parent in dict.fromkeys(os.path.dirname(path) for path in paths):
            remove_dead_runs(parent)
        try:
            _remove_unfinished(paths)
            for path in paths:
                self._make(path)
            _check_free_space(paths, needed_bytes)
        except BaseException:
            self.close()
            raise

    @classmethod
    def reopen(cls, paths: Sequence[str]) -> RunDirs:
        """Directories that a run left. StoreError if one is not there, is not a directory of our own user, or is in
        use by another process."""
        dirs = cls.__new__(cls)
        dirs.keep, dirs.paths, dirs._locks = True, [], []
        try:
            for path in paths:
                check_own_directory(path)
                dirs._locks.append(lock(path))
                dirs.paths.append(path)
        except BaseException:
            dirs.close()
            raise
        return dirs

    def _make(self, path: str) -> None:
        try:
            unnamed = path + NEW_SUFFIX
            if os.path.lexists(unnamed):
                _remove_unnamed(unnamed)
            os.makedirs(unnamed, mode=0o700)
            self.paths.append(unnamed)
            fd = os.open(os.path.join(unnamed, LOCK), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            self._locks.append(fd)
            with contextlib.suppress(OSError):   # a file system without locks: the run is never taken for dead
                fcntl.flock(fd, fcntl.LOCK_EX)
            os.write(fd, str(os.getpid()).encode())
            os.rename(unnamed, path)
            self.paths[-1] = path
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(error.errno, f"cannot create the run directory: {error.strerror}", path) from error

    def close(self) -> None:
        """Removes the directories with all that is in them, unless they are to be kept; idempotent."""
        if not self.keep:
            for path in self.paths:
                with contextlib.suppress(OSError):
                    remove_directory(path)
        for fd in self._locks:
            os.close(fd)
        self.paths, self._locks = [], []


def check_own_directory(path: str) -> None:
    """StoreError unless `path` is a directory (not a symbolic link to one) that belongs to our user."""
    try:
        info = os.lstat(path)
    except OSError as error:
        raise StoreError(error.errno, f"cannot open the run directory: {error.strerror}", path) from error
    if not stat.S_ISDIR(info.st_mode):
        raise StoreError(errno.ENOTDIR, "refused as a run directory: it is no directory, or a symbolic link", path)
    if info.st_uid != os.geteuid():
        raise StoreError(errno.EPERM, f"refused as a run directory: it belongs to user id {info.st_uid}, this process "
                                      f"to {os.geteuid()}", path)


def lock(path: str) -> int:
    """Takes the lock of a run directory; the file descriptor that holds it. StoreError if another process has it."""
    try:
        fd = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(error.errno, f"no run directory, its lock file cannot be opened: {error.strerror}",
                         path) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.pread(fd, 20, 0).decode(errors="replace") or "unknown"
        os.close(fd)
        raise StoreError(error.errno, f"this run is in use by process {holder}: end that first, or choose another "
                                      "lohan.run_name", path) from error
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def _remove_unfinished(paths: Sequence[str]) -> None:
    """A run that died before its first commit has trained nothing. StoreError for any other."""
    existing = [path for path in paths if os.path.lexists(path)]
    for path in existing:
        if not os.path.lexists(os.path.join(path, LOCK)) or not is_unfinished(paths):
            raise StoreError(errno.EEXIST, "cannot create the run directory: File exists", path)
    for path in reversed(existing):   # the first one last: what says that the run is unfinished
        remove_dead(path)


def _remove_unnamed(path: str) -> None:
    if not os.path.islink(path) and not os.listdir(path):   # its process ended before it made the lock file
        os.rmdir(path)
    else:
        remove_dead(path)


def remove_dead(path: str) -> None:
    """Removes a run directory. StoreError if it is not our own, is in use, or is none. OSError if it cannot be."""
    check_own_directory(path)
    fd = lock(path)
    try:
        remove_directory(path)
    finally:
        os.close(fd)


def remove_directory(path: str) -> None:
    """The lock file at last: cut off before, what is left is a dead run still. OSError."""
    for entry in list(os.scandir(path)):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        elif entry.name != LOCK:
            os.unlink(entry.path)
    shutil.rmtree(path)


def remove_dead_runs(parent: str) -> list[str]:
    """Removes the run directories in `parent` that no process holds any more; returns their paths.

    Only directories of our own user, never through a symbolic link, and only those with a lock file that can be
    taken. Nothing else in `parent` is touched.
    """
    removed = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        for entry in list(os.scandir(parent)):
            if is_run_dir_name(entry.name) and _is_dead(entry.path):
                with contextlib.suppress(OSError):
                    remove_directory(entry.path)
                logger.warning("removed %s: its run ended without cleaning up", entry.path)
                removed.append(entry.path)
    return removed


def _is_dead(path: str) -> bool:
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        return False
    try:
        fd = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False   # no run of this version
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _check_free_space(run_dirs: Sequence[str], needed_bytes: Sequence[int]) -> None:
    needed_by_drive: dict[int, int] = {}
    dir_by_drive: dict[int, str] = {}
    for run_dir, needed in zip(run_dirs, needed_bytes):
        drive = os.stat(run_dir).st_dev
        needed_by_drive[drive] = needed_by_drive.get(drive, 0) + needed
        dir_by_drive.setdefault(drive, run_dir)
    for drive, needed in needed_by_drive.items():
        free = shutil.disk_usage(dir_by_drive[drive]).free
        if needed > free:
            raise CapacityError(f"{dir_by_drive[drive]}: needed {needed} bytes ({needed / GIB:.3f} GiB) on this drive, "
                                f"free {free} ({free / GIB:.3f} GiB); {needed - free} bytes are missing: free space, "
                                f"add an SSD directory, or keep more blocks in host RAM")
