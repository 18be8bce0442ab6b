"""`FileIo`: open files, requests that are checked, and whose turn it is to say that a drive does not answer.

What moves the bytes is a subclass: threads of Python (ssd_io.py) or of C++ (native_io.py). It knows files, offsets and
buffers, not what is in them. Direct I/O (no page cache) wherever the file system has it. See [Note: pieces] in
pieces.py for how a request is cut.

What is written is safe from a power failure only after `sync`. A sync that failed is never tried again: the kernel
may have dropped the data and would then report success.
"""
from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from lohan_ds.errors import StoreError
from lohan_ds.memory.pinned_pool import PAGE_BYTES
from lohan_ds.store.checksums import Records
from lohan_ds.store.direct_io import why_not_direct
from lohan_ds.store.filenames import NEW_SUFFIX
from lohan_ds.store.io_threads import Urgency
from lohan_ds.work import Work

_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

logger = logging.getLogger(__name__)


class SsdFile:
    """An open file of fixed size. Made and closed by a FileIo, whose lock guards all but the fixed fields."""

    def __init__(self, path: str, fd: int, direct: bool, nbytes: int):
        self.path = path          # fixed
        self.direct = direct      # fixed: offsets, lengths and addresses must be multiples of 4096
        self.nbytes = nbytes      # fixed
        self.fd = fd              # -1 once closed
        self.num_in_flight = 0    # requests, or pieces of them
        self.unsynced = False     # written to since the last sync
        self.bytes_read = 0
        self.bytes_written = 0


class Request(NamedTuple):
    """What is to be read or written, checked."""
    verb: str                 # "read" or "write"
    file: SsdFile
    offset: int               # bytes, in the file
    nbytes: int               # in the file
    buffer: torch.Tensor      # (any,) uint8, host; nbytes of it, if the records have no gaps between them
    for_step: int | None      # for `on_span`
    records: Records | None
    urgency: Urgency


class FileIo:
    """Background I/O. Any thread may call; see each method for what it blocks on.

    Before the first request: `on_span`, if somebody wants to know, called in threads of the I/O as (verb, path, start,
    end of time.perf_counter, bytes, `for_step` of the request) for each piece. Under `_lock`: all other fields but the
    fixed ones. The lock is never held during a system call on data. `_at_rest` is notified when nothing of a file is
    in flight any more.
    """

    on_span: Callable[[str, str, float, float, int, int | None], None] | None = None
    stall_report_s = 30.0   # a request that takes longer is named, again and again until it ends

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at_rest = threading.Condition(self._lock)
        self._closed = False
        self._files: set[SsdFile] = set()
        self._direct_by_directory: dict[str, bool] = {}
        self._bytes_read = 0
        self._bytes_written = 0
        self._in_flight: dict[int, tuple[str, float]] = {}   # by thread: what its system call is, and since when
        self._ended = threading.Event()
        self._watch = threading.Thread(target=_watch_for_stalls, args=(weakref.ref(self), self._ended),
                                       name="lohan-ssd-watch", daemon=True)
        self._watch.start()
        weakref.finalize(self, self._ended.set).atexit = False   # closed or not

    def open(self, path: str, nbytes: int) -> SsdFile:
        """Creates `path` (mode 0600, must not exist) with `nbytes` of disk space behind it. Blocks on the disk.

        StoreError, and no file left, if the space or the file cannot be had. Contents read as zeros at first.
        """
        direct = self._is_direct(os.path.dirname(path) or ".")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0)
        try:
            fd = os.open(path, flags, 0o600)
        except OSError as error:
            raise StoreError(error.errno, f"cannot create a file of {nbytes} bytes: {error.strerror}", path) from error
        try:
            self._preallocate(fd, path, nbytes)
            file = SsdFile(path, fd, direct, nbytes)
            with self._lock:
                self._check_open(path)
                self._files.add(file)
            return file
        except BaseException:
            os.close(fd)
            os.unlink(path)
            raise

    def reopen(self, path: str, nbytes: int) -> SsdFile:
        """Opens a file that `open` made, of that size. StoreError if there is none or its size is another."""
        direct = self._is_direct(os.path.dirname(path) or ".")
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_DIRECT if direct else 0)
        try:
            fd = os.open(path, flags)
        except OSError as error:
            raise StoreError(error.errno, f"cannot open a file of {nbytes} bytes: {error.strerror}", path) from error
        found_bytes = os.fstat(fd).st_size
        if found_bytes != nbytes:
            os.close(fd)
            raise StoreError(errno.EIO, f"needed a file of {nbytes} bytes, got one of {found_bytes}", path)
        file = SsdFile(path, fd, direct, nbytes)
        with self._lock:
            self._files.add(file)
        return file

    def read(self, file: SsdFile, offset: int, buffer: torch.Tensor, for_step: int | None = None,
             records: Records | None = None, urgency: Urgency = Urgency.UPDATE) -> Work:
        """Fills `buffer` (contiguous uint8, host) from byte `offset`; Work of `buffer`, or of a StoreError.

        Does not block. The buffer is not to be touched until the work is done. Overlapping requests in flight are
        not ordered. ValueError for a request outside the file, or unaligned on a direct one. `for_step`: for `on_span`.
        `records`: what is read, if it is to be verified; gaps that these have in memory stay as they are.
        """
        return self._submit("read", file, offset, buffer, for_step, records, urgency)

    def write(self, file: SsdFile, offset: int, buffer: torch.Tensor, for_step: int | None = None,
              records: Records | None = None) -> Work:
        """Writes all of `buffer` at byte `offset`; as `read` otherwise. Done means handed to the drive, not synced.
        `records`: what is written, if its checksums are to be noted."""
        return self._submit("write", file, offset, buffer, for_step, records, Urgency.UPDATE)

    def sync(self, files: Iterable[SsdFile]) -> Work:
        """Work that is done when all that has been written to `files` before is safe; StoreError if that failed.

        Written is what has ended by now. One request per file written to since its last sync; the drive merges those
        that come together.
        """
        with self._lock:
            self._check_open("sync")
            written = [file for file in files if file.unsynced and file.fd >= 0]
            for file in written:
                file.unsynced = False
            return Work.all_of([self._start_sync(file) for file in written])

    def replace_file(self, path: str, data: bytes) -> None:
        """Writes a small file, mode 0600, so that after a crash `path` holds all of the old or all of the new, and
        after this call the new. Blocks on the disk. StoreError, the old file untouched, with needed and free bytes."""
        unnamed = path + NEW_SUFFIX
        try:
            with self._watched(f"write of {len(data)} bytes to {path}"):
                self._write_synced(unnamed, data)
                self._rename(unnamed, path)
                self._fsync_directory(os.path.dirname(path))
        except OSError as error:
            free = f", free {_free_bytes(path)}" if error.errno in _SPACE_ERRORS else ""
            raise StoreError(error.errno, f"cannot write: {error.strerror}; needed {len(data)} bytes{free}",
                             path) from error

    def sync_directory(self, path: str) -> None:
        """Makes the names in a directory safe. Blocks on the disk. StoreError."""
        try:
            with self._watched(f"sync of {path}"):
                self._fsync_directory(path)
        except OSError as error:
            raise StoreError(error.errno, f"sync failed: {error.strerror}", path) from error

    def close_file(self, file: SsdFile) -> None:
        """Waits for the file's requests, then closes it; the file stays on disk. Idempotent."""
        with self._lock:
            self._at_rest.wait_for(lambda: file.num_in_flight == 0)
            if file.fd >= 0:
                os.close(file.fd)
                file.fd = -1
            self._files.discard(file)

    def cancel(self) -> None:
        """Before `close`, where nobody wants the data any more: requests that have not begun end with a StoreError."""
        raise NotImplementedError

    def close(self) -> None:
        """Waits for all requests made so far, then ends the threads and closes all files. Idempotent."""
        with self._lock:
            self._closed = True
        self._ended.set()
        self._watch.join()
        self._end_threads()
        for file in list(self._files):
            self.close_file(file)

    @property
    def bytes_read(self) -> int:
        return self._bytes_read

    @property
    def bytes_written(self) -> int:
        return self._bytes_written

    # What a subclass does. Both `_start` are called under `_lock` and do not block. They count what they start in the
    # file's `num_in_flight`; `_leave` comes before a work ends.

    def _start(self, request: Request) -> Work:
        """Work of the request's buffer, or of a StoreError."""
        raise NotImplementedError

    def _start_sync(self, file: SsdFile) -> Work:
        raise NotImplementedError

    def _end_threads(self) -> None:
        """Waits for all that was started."""
        raise NotImplementedError

    # The system calls that are not on the data of requests, each alone so that a test double can put faults there.

    def _write_synced(self, path: str, data: bytes) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view):]
            os.fsync(fd)
        finally:
            os.close(fd)

    def _rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def _fsync_directory(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _submit(self, verb: str, file: SsdFile, offset: int, buffer: torch.Tensor, for_step: int | None,
                records: Records | None, urgency: Urgency) -> Work:
        nbytes = buffer.numel()
        if records is not None:   # in the file there are no gaps
            nbytes -= (records.count - 1) * (records.stride_bytes - records.record_bytes)
        if buffer.dtype != torch.uint8 or not buffer.is_contiguous():
            raise ValueError(f"{file.path}: needs a contiguous uint8 buffer, got {buffer.dtype} {tuple(buffer.shape)}")
        if offset < 0 or offset + nbytes > file.nbytes:
            raise ValueError(f"{file.path}: bytes {offset} to {offset + nbytes} of a file of {file.nbytes}")
        unit = 0 if records is None or records.count == 1 else records.record_bytes
        if file.direct and (offset | nbytes | buffer.data_ptr() | unit) % PAGE_BYTES:
            raise ValueError(f"{file.path}: direct I/O needs multiples of {PAGE_BYTES}, got offset {offset}, "
                             f"{nbytes} bytes at address {buffer.data_ptr():#x}")
        if nbytes == 0:
            return Work.completed(buffer)
        with self._lock:
            self._check_open(file.path)
            if file.fd < 0:
                raise StoreError(errno.EBADF, f"{nbytes} bytes at offset {offset} of a file that is closed", file.path)
            return self._start(Request(verb, file, offset, nbytes, buffer, for_step, records, urgency))

    def _leave(self, file: SsdFile, verb: str, moved_bytes: int) -> None:
        """Something of a file has ended, well or not."""
        with self._lock:
            if verb == "read":
                self._bytes_read += moved_bytes
                file.bytes_read += moved_bytes
            elif verb == "write":
                self._bytes_written += moved_bytes
                file.bytes_written += moved_bytes
                file.unsynced = True   # now, not before: a sync meanwhile may not have had it
            file.num_in_flight -= 1
            if file.num_in_flight == 0:
                self._at_rest.notify_all()

    @contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        thread = threading.get_ident()
        self._in_flight[thread] = what, time.monotonic()
        try:
            yield
        finally:
            del self._in_flight[thread]

    def _waiting(self) -> list[tuple[str, float]]:
        """What has not been answered, and since when (time.monotonic)."""
        return list(self._in_flight.values())

    def _report_stalls(self) -> None:
        for what, since in self._waiting():
            waited_s = time.monotonic() - since
            if waited_s > self.stall_report_s:
                logger.warning("a drive does not answer: %s has been waiting for %.0f s", what, waited_s)

    def _preallocate(self, fd: int, path: str, nbytes: int) -> None:
        if nbytes == 0:
            return
        try:
            os.posix_fallocate(fd, 0, nbytes)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise _no_space(path, nbytes, error) from error
        try:  # the file system cannot promise space: at least look whether there is any
            if nbytes > shutil.disk_usage(os.path.dirname(path) or ".").free:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(fd, nbytes)
        except OSError as error:
            raise _no_space(path, nbytes, error) from error

    def _is_direct(self, directory: str) -> bool:
        with self._lock:
            self._check_open(directory)
            known = self._direct_by_directory.get(directory)
        if known is not None:
            return known
        reason = why_not_direct(directory)
        with self._lock:
            first = directory not in self._direct_by_directory
            self._direct_by_directory[directory] = reason is None
        if first and reason is not None:
            logger.warning("%s has no O_DIRECT (RAM-backed or network file system?), using buffered I/O: %s",
                           directory, reason)
        return reason is None

    def _check_open(self, path: str) -> None:
        if self._closed:
            raise StoreError(errno.EBADF, "the I/O threads are closed", path)


def _watch_for_stalls(io_ref: weakref.ref[FileIo], ended: threading.Event) -> None:
    """A thread of its own, which does not keep the I/O alive."""
    while (io := io_ref()) is not None:
        io._report_stalls()
        wait_s = io.stall_report_s / 2
        del io
        if ended.wait(wait_s):
            return


def _free_bytes(path: str) -> int | str:
    try:
        return shutil.disk_usage(os.path.dirname(path) or ".").free
    except OSError:   # the directory is gone: what is being reported matters more
        return "unknown"


def _no_space(path: str, nbytes: int, error: OSError) -> StoreError:
    return StoreError(error.errno, f"cannot reserve disk space: {error.strerror}; needed {nbytes} bytes, "
                                   f"free {_free_bytes(path)}", path)


def transfer_name(verb: str, nbytes: int, offset: int, path: str) -> str:
    """Of a system call that may stall."""
    return f"{verb} of {nbytes} bytes at offset {offset} of {path}"


def transfer_failure(verb: str, path: str, offset: int, got_bytes: int, needed_bytes: int, number: int,
                     reason: str | None) -> StoreError:
    free = f", free {_free_bytes(path)}" if number in _SPACE_ERRORS else ""
    return StoreError(number, f"{verb} failed: {reason}; offset {offset}, got {got_bytes} of {needed_bytes} bytes "
                              f"needed{free}", path)


def sync_failure(path: str, number: int) -> StoreError:
    return StoreError(number, f"sync failed: {os.strerror(number)}", path)
