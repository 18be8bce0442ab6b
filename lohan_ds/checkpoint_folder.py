"""Checkpoint folders that appear as a whole: written under another name, synced, and only then given their own.

    <save_dir>/<tag>~new/...   ->   <save_dir>/<tag>/...   ->   <save_dir>/latest

So whatever ends the process or the power, at whatever moment, `latest` names a checkpoint that is complete and on disk.
"""
from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Iterator

from lohan_ds.errors import StepError, StoreError

LATEST = "latest"
NEW_SUFFIX = "~new"   # of what is being written
OLD_SUFFIX = "~old"   # of what is being replaced by a checkpoint of the same tag

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def whole_checkpoint(save_dir: str, tag: str, save_latest: bool) -> Iterator[str]:
    """The tag under which the body is to write the checkpoint `tag`. Afterwards that is on disk and, if `save_latest`,
    the one that is loaded by default. Blocks on the disk.

    If the body or the disk fails, nothing is left of it and checkpoints before stay as they are. StoreError with path,
    bytes written and bytes free for OSError and RuntimeError, which is what torch.save makes of a full disk.
    """
    new, path = os.path.join(save_dir, tag + NEW_SUFFIX), os.path.join(save_dir, tag)
    restore_replaced(save_dir)
    shutil.rmtree(new, ignore_errors=True)   # of a process that ended while it was saving
    try:
        yield tag + NEW_SUFFIX
        _sync_tree(new)
        _sync_directory(save_dir)
    except BaseException as error:
        message = _what_failed(error, new)
        shutil.rmtree(new, ignore_errors=True)
        if isinstance(error, StepError) or not isinstance(error, (OSError, RuntimeError)):
            raise
        raise StoreError(error.errno if isinstance(error, OSError) else errno.EIO, message, path) from error
    _replace(new, path)
    if save_latest:
        _write_latest(save_dir, tag)


def restore_replaced(save_dir: str) -> None:
    """Before loading: a process that ended while it replaced a checkpoint by one of the same tag has moved the old one
    away. StoreError."""
    try:
        names = os.listdir(save_dir)
        for name in names:
            tag = name.removesuffix(OLD_SUFFIX)
            if tag != name and tag not in names:
                os.rename(os.path.join(save_dir, name), os.path.join(save_dir, tag))
                logger.warning("%s: checkpoint %s is the one from before a save that was cut off", save_dir, tag)
            elif tag != name:
                shutil.rmtree(os.path.join(save_dir, name), ignore_errors=True)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(error.errno, f"cannot restore a checkpoint: {error.strerror}", save_dir) from error


def _replace(new: str, path: str) -> None:
    try:
        if os.path.lexists(path):
            os.rename(path, path + OLD_SUFFIX)
        os.rename(new, path)
        _sync_directory(os.path.dirname(path))
    except OSError as error:
        raise StoreError(error.errno, f"cannot name a checkpoint: {error.strerror}", path) from error
    shutil.rmtree(path + OLD_SUFFIX, ignore_errors=True)


def _write_latest(save_dir: str, tag: str) -> None:
    path = os.path.join(save_dir, LATEST)
    try:
        with open(path + NEW_SUFFIX, "w") as file:
            file.write(tag)
            file.flush()
            os.fsync(file.fileno())
        os.rename(path + NEW_SUFFIX, path)
        _sync_directory(save_dir)
    except OSError as error:
        raise StoreError(error.errno, f"cannot write: {error.strerror}", path) from error


def _sync_tree(folder: str) -> None:
    for path, _, names in os.walk(folder, topdown=False):
        for name in names:
            fd = os.open(os.path.join(path, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        _sync_directory(path)


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _what_failed(error: BaseException, folder: str) -> str:
    """Before the folder is removed."""
    written = sum(os.lstat(os.path.join(path, name)).st_size for path, _, names in os.walk(folder) for name in names)
    free = shutil.disk_usage(os.path.dirname(folder)).free
    return (f"this checkpoint was not saved: {error}; {written} bytes of it were written, free {free}. "
            "Checkpoints before it are as they were")
