"""`FoundRun`: the runs that lie below some SSD paths, told from outside, without the model and without training.

Nothing here changes anything but `remove`. Torch is not imported.
"""
from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lohan_ds.errors import StoreError
from lohan_ds.store.filenames import CURRENT, LOCK, MANIFEST, NEW_SUFFIX, is_run_dir_name, run_name_of
from lohan_ds.store.manifest import Commit, Manifest, is_uncommitted, read_json
from lohan_ds.store.run_dirs import check_own_directory, lock, remove_directory


@dataclass(frozen=True)
class FoundRun:
    """One run as far as it was found: `dirs` in the order of striping. Asks the disk once for each answer."""
    name: str | None              # None: scratch of a process
    dirs: tuple[str, ...]
    places: tuple[int, ...]       # of `dirs` in the order of striping; empty before it has a manifest
    num_dirs: int                 # that it has; more than `dirs` where the others were not named or not mounted
    refusal: StoreError | None    # why nothing in it is looked at
    is_ours: bool = True          # directories of our user with lock files, not symbolic links

    @cached_property
    def holder(self) -> str | None:
        """The id of the process that uses it."""
        return next(filter(None, map(_holder, self.dirs)), None) if self.is_ours else None

    @cached_property
    def commit(self) -> Commit | None:
        """What is committed; None if that is not known. StoreError if it is damaged."""
        path = os.path.join(self.dirs[0], CURRENT)
        return read_json(path, Commit) if self.places and os.path.lexists(path) else None

    @property
    def is_partial(self) -> bool:
        return len(self.dirs) < self.num_dirs

    @cached_property
    def may_go(self) -> bool:
        """Whether there is nothing in it that anybody could want: dead scratch, or cut off before its first commit."""
        if self.refusal is not None or self.holder is not None:
            return False
        return not self.places or self.places[0] == 0 and is_uncommitted(self.dirs[0])

    @cached_property
    def disk_bytes(self) -> tuple[int, ...]:
        """That it takes, by directory."""
        return tuple(sum(info.st_blocks * 512 for info in _files(path)) for path in self.dirs)

    @cached_property
    def last_change_s(self) -> float:
        """Of any of its files, seconds since 1970."""
        return max((info.st_mtime for path in self.dirs for info in _files(path)), default=0.0)

    def state(self) -> str:
        """In a few words, for people."""
        if self.refusal is not None:
            return f"not looked at: {self.refusal.strerror}"
        if self.holder is not None:
            return f"in use by process {self.holder}"
        if self.may_go:
            return "unfinished" if self.name is not None else "dead scratch"
        part = f", {len(self.dirs)} of {self.num_dirs} directories" if self.is_partial else ""
        try:
            commit = self.commit
        except StoreError as error:
            return f"{error.strerror}: {os.path.basename(error.filename)}{part}"
        if commit is None:
            return f"at an unknown step{part}"
        return f"dirty after step {commit.step}{part}" if commit.dirty else f"at step {commit.step}{part}"

    def remove(self) -> None:
        """All that was found of it, damaged or not. StoreError if it is in use or not ours, OSError if it cannot be."""
        if not self.is_ours:
            raise self.refusal
        with contextlib.ExitStack() as locks:
            for path in filter(os.listdir, self.dirs):   # without even a lock file its process ended as it began
                locks.callback(os.close, lock(path))
            for path in reversed(self.dirs):   # the first one last: it says what the others are
                remove_directory(path)


def find_runs(dirs: Sequence[str]) -> list[FoundRun]:
    """The runs below SSD paths, and those whose directories `dirs` are. StoreError if one cannot be listed."""
    by_run: dict[tuple[str | None, str], dict[int, tuple[str, int]]] = {}
    runs = []
    for path in dict.fromkeys(found for given in dirs for found in _run_dirs(os.path.abspath(given))):
        name = run_name_of(os.path.basename(path).removesuffix(NEW_SUFFIX))
        try:
            _check_is_ours(path)
        except StoreError as error:
            runs.append(FoundRun(name, (path,), (), 1, error, is_ours=False))
            continue
        try:
            manifest = _manifest(path) if name is not None else None
        except StoreError as error:
            runs.append(FoundRun(name, (path,), (), 1, error))
            continue
        if manifest is None:
            runs.append(FoundRun(name, (path,), (), 1, None))
        else:
            by_run.setdefault((name, manifest.run_id), {})[manifest.directory] = path, manifest.num_directories
    for (name, _), members in by_run.items():
        places = tuple(sorted(members))
        runs.append(FoundRun(name, tuple(members[place][0] for place in places), places, members[places[0]][1], None))
    return sorted(runs, key=lambda run: (run.name is None, run.name or "", run.dirs))


def _check_is_ours(path: str) -> None:
    check_own_directory(path)
    if os.listdir(path) and not os.path.lexists(os.path.join(path, LOCK)):
        raise StoreError(errno.ENOENT, "it has no lock file, so it is no run directory", path)


def _run_dirs(path: str) -> list[str]:
    if _is_run_dir(os.path.basename(path)):
        return [path]
    try:
        return sorted(entry.path for entry in os.scandir(path) if _is_run_dir(entry.name.removesuffix(NEW_SUFFIX)))
    except OSError as error:
        raise StoreError(error.errno, f"cannot list: {error.strerror}", path) from error


def _is_run_dir(name: str) -> bool:
    return is_run_dir_name(name) or run_name_of(name) is not None


def _manifest(path: str) -> Manifest | None:
    path = os.path.join(path, MANIFEST)
    return read_json(path, Manifest) if os.path.lexists(path) else None


def _holder(path: str) -> str | None:
    """Looks for the shortest moment whether the lock of a run directory is held; the process id that it names."""
    with contextlib.suppress(OSError):
        fd = os.open(os.path.join(path, LOCK), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.pread(fd, 20, 0).decode(errors="replace") or "unknown"
        finally:
            os.close(fd)
    return None


def _files(path: str) -> list[os.stat_result]:
    found = []
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):   # a run goes on meanwhile
                found.append(os.lstat(os.path.join(folder, name)))
    return found
