"""`ThreadSsdIo`: reads and writes of files in the background, by plain system calls on a few threads.

It knows files, offsets and buffers, not what is in them. Direct I/O (no page cache) wherever the file system has
it. A request is cut into pieces of at most 8 MiB, so that one large read keeps all threads, and the drive's queue,
busy: 405 MB of a Llama-7B layer are 49 pieces.

What is written is safe from a power failure only after `sync`. A sync that failed is never tried again: the kernel
may have dropped the data and would then report success.
"""
from __future__ import annotations

import errno
import functools
import logging
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from lohan_ds.errors import StoreError
from lohan_ds.memory.pinned_pool import PAGE_BYTES
from lohan_ds.store.direct_io import why_not_direct
from lohan_ds.store.filenames import NEW_SUFFIX
from lohan_ds.store.io_threads import IoThreads, Urgency
from lohan_ds.store.pieces import PIECE_BYTES, OnPiece
from lohan_ds.work import Work

MAX_IDLE_RETRIES = 1000  # of EAGAIN without progress, 1 ms apart
_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

logger = logging.getLogger(__name__)


class SsdFile:
    """An open file of fixed size. Made and closed by a ThreadSsdIo, whose lock guards all but the fixed fields."""

    def __init__(self, path: str, fd: int, direct: bool, nbytes: int):
        self.path = path          # fixed
        self.direct = direct      # fixed: offsets, lengths and addresses must be multiples of 4096
        self.nbytes = nbytes      # fixed
        self.fd = fd              # -1 once closed
        self.num_pieces_in_flight = 0
        self.unsynced = False     # written to since the last sync
        self.bytes_read = 0
        self.bytes_written = 0


class ThreadSsdIo:
    """Background I/O on `num_threads` threads. Any thread may call; see each method for what it blocks on.

    Fixed after construction: the threads; before the first request: `on_span`, if somebody wants to know, called in
    the I/O threads as (verb, path, start, end of time.perf_counter, bytes, `for_step` of the request). Under `_lock`
    (a condition, notified when a file comes to rest): everything else. The lock is never held during a system call on
    data.
    """

    on_span: Callable[[str, str, float, float, int, int | None], None] | None = None
    stall_report_s = 30.0   # a request that takes longer is named, again and again until it ends

    def __init__(self, num_threads: int):
        self._threads = IoThreads(num_threads)
        self._lock = threading.Condition()
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
             on_piece: OnPiece | None = None, urgency: Urgency = Urgency.UPDATE) -> Work:
        """Fills `buffer` (contiguous uint8, host) from byte `offset`; Work of `buffer`, or of a StoreError.

        Does not block. The buffer is not to be touched until the work is done. Overlapping requests in flight are
        not ordered. ValueError for a request outside the file, or unaligned on a direct one. `for_step`: for `on_span`.
        `on_piece`: called in the I/O threads with each piece of PIECE_BYTES (the last may be smaller) when it has been
        read; what it raises the work fails with.
        """
        return self._submit(file, offset, buffer, self._read_piece, for_step, on_piece, urgency)

    def write(self, file: SsdFile, offset: int, buffer: torch.Tensor, for_step: int | None = None,
              on_piece: OnPiece | None = None) -> Work:
        """Writes all of `buffer` at byte `offset`; as `read` otherwise. Done means handed to the drive, not synced.
        `on_piece`: called with each piece before it is written."""
        return self._submit(file, offset, buffer, self._write_piece, for_step, on_piece, Urgency.UPDATE)

    def sync(self, files: Iterable[SsdFile]) -> Work:
        """Work that is done when all that has been written to `files` before is safe; StoreError if that failed.

        One request per file written to since its last sync; the drive merges those that come together.
        """
        works = []
        with self._lock:
            self._check_open("sync")
            for file in files:
                if file.unsynced and file.fd >= 0:
                    file.unsynced = False
                    file.num_pieces_in_flight += 1
                    works.append(self._threads.submit(Urgency.UPDATE, self._sync_file, file))
        return Work.all_of(works)

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
            self._lock.wait_for(lambda: file.num_pieces_in_flight == 0)
            if file.fd >= 0:
                os.close(file.fd)
                file.fd = -1
            self._files.discard(file)

    def close(self) -> None:
        """Waits for all requests made so far, then ends the threads and closes all files. Idempotent."""
        with self._lock:
            self._closed = True
        self._ended.set()
        self._watch.join()
        self._threads.close()
        for file in list(self._files):
            self.close_file(file)

    @property
    def bytes_read(self) -> int:
        return self._bytes_read

    @property
    def bytes_written(self) -> int:
        return self._bytes_written

    def _pread(self, fd: int, view: memoryview, offset: int) -> int:
        """The system call, alone so that a test double can put faults in its place."""
        return os.preadv(fd, [view], offset)

    def _pwrite(self, fd: int, view: memoryview, offset: int) -> int:
        return os.pwritev(fd, [view], offset)

    def _fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

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

    def _submit(self, file: SsdFile, offset: int, buffer: torch.Tensor, piece_fn: Callable, for_step: int | None,
                on_piece: OnPiece | None, urgency: Urgency) -> Work:
        nbytes = buffer.numel()
        if buffer.dtype != torch.uint8 or not buffer.is_contiguous():
            raise ValueError(f"{file.path}: needs a contiguous uint8 buffer, got {buffer.dtype} {tuple(buffer.shape)}")
        if offset < 0 or offset + nbytes > file.nbytes:
            raise ValueError(f"{file.path}: bytes {offset} to {offset + nbytes} of a file of {file.nbytes}")
        if file.direct and (offset | nbytes | buffer.data_ptr()) % PAGE_BYTES:
            raise ValueError(f"{file.path}: direct I/O needs multiples of {PAGE_BYTES}, got offset {offset}, "
                             f"{nbytes} bytes at address {buffer.data_ptr():#x}")
        if nbytes == 0:
            return Work.completed(buffer)
        view = memoryview(buffer.detach().numpy()).cast("B")
        with self._lock:
            self._check_open(file.path)
            if file.fd < 0:
                raise StoreError(errno.EBADF, f"{nbytes} bytes at offset {offset} of a file that is closed", file.path)
            starts = range(0, nbytes, PIECE_BYTES)
            works = []
            for number, start in enumerate(starts):
                check = None if on_piece is None else functools.partial(on_piece, number)
                file.num_pieces_in_flight += 1
                works.append(self._threads.submit(urgency, self._run_piece, piece_fn, file,
                                                  view[start:start + PIECE_BYTES], offset + start, for_step, check,
                                                  holds=buffer))
        return Work.all_of(works, value=buffer)

    def _run_piece(self, piece_fn: Callable, file: SsdFile, view: memoryview, offset: int, for_step: int | None,
                   on_piece: Callable[[memoryview], None] | None) -> None:
        try:
            if self.on_span is None:
                piece_fn(file, view, offset, on_piece)
            else:
                start = time.perf_counter()
                piece_fn(file, view, offset, on_piece)
                self.on_span("read" if piece_fn == self._read_piece else "write", file.path, start,
                             time.perf_counter(), len(view), for_step)
        finally:
            self._leave(file)

    def _leave(self, file: SsdFile) -> None:
        with self._lock:
            file.num_pieces_in_flight -= 1
            if file.num_pieces_in_flight == 0:
                self._lock.notify_all()

    def _read_piece(self, file: SsdFile, view: memoryview, offset: int, on_piece) -> None:
        got_bytes = self._transfer("read", self._pread, file, view, offset)
        if on_piece is not None:
            on_piece(view)
        with self._lock:
            self._bytes_read += got_bytes
            file.bytes_read += got_bytes

    def _write_piece(self, file: SsdFile, view: memoryview, offset: int, on_piece) -> None:
        if on_piece is not None:
            on_piece(view)
        file.unsynced = True
        got_bytes = self._transfer("write", self._pwrite, file, view, offset)
        with self._lock:
            self._bytes_written += got_bytes
            file.bytes_written += got_bytes

    def _sync_file(self, file: SsdFile) -> None:
        try:
            with self._watched(f"sync of {file.path}"):
                self._fdatasync(file.fd)
        except OSError as error:
            raise StoreError(error.errno, f"sync failed: {error.strerror}", file.path) from error
        finally:
            self._leave(file)

    @contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        thread = threading.get_ident()
        self._in_flight[thread] = what, time.monotonic()
        try:
            yield
        finally:
            del self._in_flight[thread]

    def _report_stalls(self) -> None:
        for what, since in list(self._in_flight.values()):
            waited_s = time.monotonic() - since
            if waited_s > self.stall_report_s:
                logger.warning("a drive does not answer: %s has been waiting for %.0f s", what, waited_s)

    def _transfer(self, verb: str, syscall: Callable, file: SsdFile, view: memoryview, offset: int) -> int:
        """Repeats `syscall` until all of `view` is moved; returns its length. StoreError if that cannot be."""
        done, idle_retries = 0, 0
        while done < len(view):
            try:
                with self._watched(f"{verb} of {len(view) - done} bytes at offset {offset + done} of {file.path}"):
                    moved = syscall(file.fd, view[done:], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno == errno.EAGAIN and idle_retries < MAX_IDLE_RETRIES:
                    idle_retries += 1
                    time.sleep(0.001)
                    continue
                raise _failure(verb, file.path, offset, done, len(view), error.errno, error.strerror) from error
            if file.direct:
                moved -= moved % PAGE_BYTES  # a tail off the alignment is moved again
            if moved == 0:
                raise _failure(verb, file.path, offset, done, len(view), errno.EIO, f"short {verb}")
            done, idle_retries = done + moved, 0
        return done

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
            if nbytes > _free_bytes(path):
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


def _watch_for_stalls(io_ref: weakref.ref[ThreadSsdIo], ended: threading.Event) -> None:
    """A thread of its own, which does not keep the I/O alive."""
    while (io := io_ref()) is not None:
        io._report_stalls()
        wait_s = io.stall_report_s / 2
        del io
        if ended.wait(wait_s):
            return


def _free_bytes(path: str) -> int:
    return shutil.disk_usage(os.path.dirname(path) or ".").free


def _no_space(path: str, nbytes: int, error: OSError) -> StoreError:
    return StoreError(error.errno, f"cannot reserve disk space: {error.strerror}; needed {nbytes} bytes, "
                                   f"free {_free_bytes(path)}", path)


def _failure(verb: str, path: str, offset: int, got_bytes: int, needed_bytes: int, number: int,
             reason: str | None) -> StoreError:
    free = f", free {_free_bytes(path)}" if number in _SPACE_ERRORS else ""
    return StoreError(number, f"{verb} failed: {reason}; offset {offset}, got {got_bytes} of {needed_bytes} bytes "
                              f"needed{free}", path)
