"""Bytes come back as written, whatever the kernel does; failures name path and numbers (user cases D25, D26, D32)."""
import errno
import gc
import logging
import os
import re
import subprocess
import sys
import threading
import time
import types

import pytest
import torch

from lohan_ds.errors import StoreError
from lohan_ds.memory.budget import MemoryBudget
from lohan_ds.memory.pinned_pool import PinnedPool
from lohan_ds.ops.loader import native
from lohan_ds.store import file_io, ssd_io
from lohan_ds.store.direct_io import file_system_type, why_not_direct
from lohan_ds.store.file_io import SsdFile
from lohan_ds.store.native_io import NativeSsdIo
from lohan_ds.store.pieces import PIECE_BYTES
from lohan_ds.store.ssd_io import ThreadSsdIo
from lohan_ds.testing.faulty_io import FaultyIo

PAGE = 4096


@pytest.fixture
def pool():
    pool = PinnedPool(MemoryBudget("host", 1 << 30), pin=False)
    yield pool
    pool.close()


def _random_bytes(pool, nbytes, seed=0):
    buffer = pool.alloc(nbytes, "data")
    return buffer.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8,
                                      generator=torch.Generator().manual_seed(seed)))


def _native_io(num_threads):
    module = native("ssd_io")
    if module is None:
        pytest.skip("ssd_io does not build here")
    return NativeSsdIo(module, num_threads)


MAKERS = {"threads": ThreadSsdIo, "native": _native_io}
both = pytest.mark.parametrize("make_io", MAKERS.values(), ids=MAKERS)


@pytest.mark.parametrize("nbytes", [PAGE, 5 * PAGE, PIECE_BYTES + PAGE, 3 * PIECE_BYTES])
@pytest.mark.parametrize("make_io", [*MAKERS.values(), lambda n: FaultyIo(n, seed=3, short_transfers=True)],
                         ids=[*MAKERS, "short transfers"])
def test_round_trip_and_counters(tmp_path, pool, nbytes, make_io):
    io = make_io(3)
    file = io.open(str(tmp_path / "f"), nbytes + 2 * PAGE)
    assert os.stat(file.path).st_mode & 0o777 == 0o600
    assert os.stat(file.path).st_blocks * 512 >= nbytes + 2 * PAGE
    data, back = _random_bytes(pool, nbytes), pool.alloc(nbytes, "back")
    io.write(file, PAGE, data).wait()
    assert io.read(file, PAGE, back).wait() is back
    assert torch.equal(data, back)
    assert io.bytes_read == io.bytes_written == file.bytes_read == file.bytes_written == nbytes
    io.close()


def test_retries_what_is_to_be_retried(tmp_path, pool):
    io = FaultyIo(1)
    file = io.open(str(tmp_path / "f"), PAGE)
    data, back = _random_bytes(pool, PAGE), pool.alloc(PAGE, "back")
    io.inject("write", errno.EINTR, at_call=0, times=3)
    io.write(file, 0, data).wait()
    io.inject("read", errno.EAGAIN, at_call=0, times=5)
    io.read(file, 0, back).wait()
    assert torch.equal(data, back)
    io.close()


def test_endless_eagain_ends(tmp_path, pool, monkeypatch):
    monkeypatch.setattr(ssd_io, "MAX_IDLE_RETRIES", 5)
    io = FaultyIo(1)
    file = io.open(str(tmp_path / "f"), PAGE)
    io.inject("read", errno.EAGAIN, after_bytes=0)
    with pytest.raises(StoreError) as caught:
        io.read(file, 0, pool.alloc(PAGE, "x")).wait()
    assert caught.value.errno == errno.EAGAIN
    io.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EFBIG])
def test_errors_name_path_offset_got_and_needed(tmp_path, pool, number):
    io = FaultyIo(1)
    file = io.open(str(tmp_path / "f"), 8 * PAGE)
    io.inject("write", number, at_call=0)
    with pytest.raises(StoreError) as caught:
        io.write(file, 2 * PAGE, _random_bytes(pool, 4 * PAGE)).wait()
    message = str(caught.value)
    assert caught.value.errno == number and file.path in message
    assert f"offset {2 * PAGE}, got 0 of {4 * PAGE} bytes needed" in message
    assert ("free " in message) == (number != errno.EIO)
    io.close()


@both
def test_short_read_of_a_truncated_file(tmp_path, pool, make_io):
    io = make_io(2)
    file = io.open(str(tmp_path / "f"), 4 * PAGE)
    os.truncate(file.path, PAGE)
    with pytest.raises(StoreError, match=rf"short read; offset 0, got {PAGE} of {4 * PAGE} bytes needed"):
        io.read(file, 0, pool.alloc(4 * PAGE, "x")).wait()
    os.truncate(file.path, 4 * PAGE - 100)
    with pytest.raises(StoreError, match="short read"):
        io.read(file, 0, pool.alloc(4 * PAGE, "x")).wait()
    io.close()


def test_write_that_moves_nothing_fails(tmp_path, pool):
    io = FaultyIo(1)
    file = io.open(str(tmp_path / "f"), PAGE)
    io.inject("write", 0, at_call=0)
    with pytest.raises(StoreError, match="short write"):
        io.write(file, 0, _random_bytes(pool, PAGE)).wait()
    io.close()


@both
def test_refuses_bad_requests_at_once(tmp_path, pool, make_io):
    io = make_io(1)
    file = io.open(str(tmp_path / "f"), 2 * PAGE)
    buffer = pool.alloc(2 * PAGE, "x")
    with pytest.raises(ValueError, match="of a file of"):
        io.read(file, PAGE, buffer)
    with pytest.raises(ValueError, match="uint8"):
        io.read(file, 0, buffer.view(torch.float32))
    if file.direct:
        with pytest.raises(ValueError, match="direct I/O needs"):
            io.read(file, 0, buffer[1:PAGE + 1])
    with pytest.raises(StoreError) as caught:
        io.open(file.path, PAGE)
    assert caught.value.errno == errno.EEXIST
    io.close()


@both
def test_no_space_at_open_leaves_no_file(tmp_path, monkeypatch, make_io):
    io = make_io(1)
    with pytest.raises(StoreError, match=r"needed \d+ bytes, free \d+") as caught:
        io.open(str(tmp_path / "f"), 1 << 50)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG) and os.listdir(tmp_path) == []

    def no_fallocate(*_):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(file_io.os, "posix_fallocate", no_fallocate)
    with pytest.raises(StoreError) as caught:
        io.open(str(tmp_path / "f"), 1 << 50)
    assert caught.value.errno == errno.ENOSPC and os.listdir(tmp_path) == []
    assert os.path.getsize(io.open(str(tmp_path / "g"), PAGE).path) == PAGE
    io.close()


def test_file_size_limit_of_the_process(tmp_path):
    code = f"""
import resource
from lohan_ds.errors import StoreError
from lohan_ds.store.ssd_io import ThreadSsdIo
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
io = ThreadSsdIo(1)
try:
    io.open({str(tmp_path / "f")!r}, 4 << 20)
except StoreError as error:
    print("refused", error)
io.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(r"refused .*File too large.*needed 4194304 bytes, free \d+.*f'", done.stdout)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.path.isdir("/dev/shm") or file_system_type("/dev/shm") != "tmpfs", reason="no tmpfs")
@both
def test_tmpfs_falls_back_to_buffered_and_says_so_once(pool, caplog, make_io):
    directory = f"/dev/shm/lohan-test-{os.getpid()}"
    os.mkdir(directory)
    io = make_io(1)
    try:
        with caplog.at_level(logging.WARNING):
            files = [io.open(f"{directory}/{name}", PAGE) for name in "ab"]
        assert not any(file.direct for file in files)
        assert [record.message for record in caplog.records] == [
            f"{directory} has no O_DIRECT (RAM-backed or network file system?), using buffered I/O: it is on tmpfs"]
        data = torch.arange(100, dtype=torch.uint8)
        io.write(files[0], 33, data).wait()
        assert torch.equal(io.read(files[0], 33, torch.empty(100, dtype=torch.uint8)).wait(), data)
    finally:
        io.close()
        for name in os.listdir(directory):
            os.unlink(f"{directory}/{name}")
        os.rmdir(directory)


def test_file_system_that_refuses_o_direct(tmp_path, monkeypatch, caplog):
    real_open = os.open

    def no_direct(path, flags, *rest, **named):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *rest, **named)

    monkeypatch.setattr(file_io.os, "open", no_direct)
    io = ThreadSsdIo(1)
    assert not io.open(str(tmp_path / "f"), PAGE).direct
    assert "Invalid argument" in caplog.text
    io.close()
    assert os.listdir(tmp_path) == ["f"]


def test_unwritable_directory():
    with pytest.raises(StoreError):
        why_not_direct("/proc/self")


@pytest.mark.parametrize("make_io", [_native_io, lambda n: FaultyIo(n, max_delay_s=0.05)], ids=["native", "slow"])
def test_close_waits_then_refuses(tmp_path, pool, make_io):
    make_io(1).close()   # whatever is loaded by the first one
    threads_before, fds_before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    io = make_io(2)
    file = io.open(str(tmp_path / "f"), 8 * PAGE)
    works = [io.write(file, index * PAGE, pool.alloc(PAGE, "x")) for index in range(8)]
    io.close()
    io.close()
    assert all(work.done() for work in works) and file.bytes_written == 8 * PAGE
    with pytest.raises(StoreError, match="closed"):
        io.read(file, 0, pool.alloc(PAGE, "x"))
    with pytest.raises(StoreError, match="closed"):
        io.open(str(tmp_path / "g"), PAGE)
    assert threading.active_count() == threads_before
    assert len(os.listdir("/proc/self/fd")) == fds_before


def test_close_file_waits_for_its_requests(tmp_path, pool):
    io = FaultyIo(2, max_delay_s=0.05)
    file = io.open(str(tmp_path / "f"), PAGE)
    work = io.write(file, 0, pool.alloc(PAGE, "x"))
    io.close_file(file)
    io.close_file(file)
    assert work.wait() is not None
    with pytest.raises(StoreError, match="file that is closed"):
        io.write(file, 0, pool.alloc(PAGE, "x"))
    io.close()


# Durability


class _CountedSyncs(ThreadSsdIo):
    def __init__(self, num_threads):
        super().__init__(num_threads)
        self.synced, self.error = [], None

    def _fdatasync(self, fd):
        self.synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        super()._fdatasync(fd)


def test_sync_is_for_what_was_written_since_the_last_one(tmp_path, pool):
    io = _CountedSyncs(2)
    files = [io.open(str(tmp_path / name), 2 * PAGE) for name in "abc"]
    io.sync(files).wait()
    assert io.synced == []
    for file in files[:2]:
        io.write(file, 0, _random_bytes(pool, PAGE)).wait()
    io.read(files[2], 0, pool.alloc(PAGE, "x")).wait()
    io.sync(files).wait()
    assert sorted(io.synced) == ["a", "b"]
    io.sync(files).wait()
    assert len(io.synced) == 2
    io.close()
    with pytest.raises(StoreError, match="closed"):
        io.sync(files)


def test_a_write_that_a_sync_overtook_is_synced_by_the_next_one(tmp_path, pool):
    """It was under way when the first sync came, which need not have had it."""
    io = _StalledIo(2)
    synced, file = [], io.open(str(tmp_path / "f"), 2 * PAGE)
    io._fdatasync = synced.append
    io.go.set()
    io.write(file, 0, _random_bytes(pool, PAGE)).wait()
    io.go.clear()
    write = io.write(file, PAGE, _random_bytes(pool, PAGE))
    _wait_for(lambda: io._waiting())
    io.sync([file]).wait()
    io.go.set()
    write.wait()
    io.sync([file]).wait()
    assert len(synced) == 2
    io.close()


def test_a_native_sync_ends_and_lets_the_file_go(tmp_path, pool):
    io = _native_io(2)
    file = io.open(str(tmp_path / "f"), PAGE)
    io.write(file, 0, _random_bytes(pool, PAGE)).wait()
    assert file.unsynced
    io.sync([file]).wait()
    assert not file.unsynced and file.num_in_flight == 0
    io.close()


def test_a_sync_that_failed_is_not_tried_again(tmp_path, pool):
    """The kernel drops what it could not write, and then says that all is well."""
    io = _CountedSyncs(1)
    file = io.open(str(tmp_path / "f"), PAGE)
    io.write(file, 0, _random_bytes(pool, PAGE)).wait()
    io.error = errno.EIO
    with pytest.raises(StoreError, match="sync failed") as caught:
        io.sync([file]).wait()
    assert caught.value.errno == errno.EIO and caught.value.filename == file.path
    io.error = None
    io.sync([file]).wait()
    assert io.synced == ["f"]
    io.close_file(file)   # nothing is left in flight
    io.close()


@both
def test_reopen_takes_the_file_as_it_is(tmp_path, pool, make_io):
    io = make_io(1)
    data, back = _random_bytes(pool, 2 * PAGE), pool.alloc(2 * PAGE, "back")
    file = io.open(str(tmp_path / "f"), 2 * PAGE)
    io.write(file, 0, data).wait()
    io.close_file(file)
    again = io.reopen(file.path, 2 * PAGE)
    io.read(again, 0, back).wait()
    assert torch.equal(data, back) and again.direct == file.direct
    with pytest.raises(StoreError, match=f"needed a file of {PAGE} bytes, got one of {2 * PAGE}"):
        io.reopen(file.path, PAGE)
    with pytest.raises(StoreError, match="cannot open a file of"):
        io.reopen(str(tmp_path / "none"), PAGE)
    (tmp_path / "link").symlink_to(file.path)
    with pytest.raises(StoreError):
        io.reopen(str(tmp_path / "link"), 2 * PAGE)
    io.close()


def test_a_small_file_is_replaced_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    io = ThreadSsdIo(1)
    path = str(tmp_path / "record")
    calls = []
    for name in ("_write_synced", "_rename", "_fsync_directory"):
        real = getattr(io, name)
        monkeypatch.setattr(io, name, lambda *args, name=name, real=real: calls.append(name) or real(*args))
    io.replace_file(path, b"old")
    assert calls == ["_write_synced", "_rename", "_fsync_directory"]   # in this order it is safe
    assert (tmp_path / "record").read_bytes() == b"old" and os.stat(path).st_mode & 0o777 == 0o600
    for step in calls[:3]:
        with monkeypatch.context() as patch:
            patch.setattr(io, step, _raise_enospc)
            with pytest.raises(StoreError, match=r"cannot write: No space left.*; needed 3 bytes, free \d+") as caught:
                io.replace_file(path, b"new")
        assert caught.value.errno == errno.ENOSPC and caught.value.filename == path
        assert (tmp_path / "record").read_bytes() == (b"new" if step == "_fsync_directory" else b"old")
        io.replace_file(path, b"old")
    assert os.listdir(tmp_path) == ["record"]
    os.symlink(tmp_path / "elsewhere", path + "~new")
    with pytest.raises(StoreError):
        io.replace_file(path, b"new")                                # through no link of anybody
    assert not (tmp_path / "elsewhere").exists()
    io.close()


def _raise_enospc(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _StalledIo(ThreadSsdIo):
    stall_report_s = 0.1

    def __init__(self, num_threads):
        super().__init__(num_threads)
        self.go = threading.Event()

    def _pwrite(self, fd, view, offset):
        assert self.go.wait(20)
        return super()._pwrite(fd, view, offset)

    def _fdatasync(self, fd):
        assert self.go.wait(20)
        super()._fdatasync(fd)


@both
def test_requests_that_have_not_begun_are_cancelled(tmp_path, pool, make_io):
    io = make_io(1)
    file = io.open(str(tmp_path / "f"), 8 * PAGE)
    io.cancel()
    work = io.write(file, 0, _random_bytes(pool, PAGE))
    with pytest.raises(StoreError, match=os.strerror(errno.ECANCELED)):
        work.wait()
    io.close()
    assert file.bytes_written == 0 and (tmp_path / "f").read_bytes() == bytes(8 * PAGE)


def test_a_stalled_request_is_named_until_it_ends(tmp_path, pool, caplog):
    """Which file, what, and for how long (user case D27)."""
    io = _StalledIo(2)
    file = io.open(str(tmp_path / "f"), 8 * PAGE)
    with caplog.at_level(logging.WARNING):
        work = io.write(file, 2 * PAGE, _random_bytes(pool, 3 * PAGE))
        _wait_for(lambda: len(caplog.records) >= 2)
        assert not work.done()
        io.go.set()
        work.wait()
        io.go.clear()
        work = io.sync([file])
        _wait_for(lambda: "sync of" in caplog.text)
        io.go.set()
        work.wait()
        num_reports = len(caplog.records)
        time.sleep(0.2)
    assert len(caplog.records) == num_reports
    assert caplog.records[0].getMessage().startswith(f"a drive does not answer: write of {3 * PAGE} bytes at offset "
                                                     f"{2 * PAGE} of {file.path} has been waiting for ")
    assert f"sync of {file.path} has been waiting" in caplog.records[-1].getMessage()
    io.close()


# What only the operator has


def test_native_errors_are_those_of_the_threads(tmp_path, pool):
    """The same words, so that nobody need know which one it was."""
    said = {}
    for name, make_io in MAKERS.items():
        io = make_io(2)
        full = SsdFile("/dev/full", os.open("/dev/full", os.O_RDWR), False, 4 * PAGE)
        gone = io.open(str(tmp_path / name), 4 * PAGE)
        os.truncate(gone.path, PAGE)
        works = [io.write(full, PAGE, _random_bytes(pool, 2 * PAGE)), io.read(gone, 0, pool.alloc(4 * PAGE, "x"))]
        errors = [work.exception() for work in works]
        assert [error.errno for error in errors] == [errno.ENOSPC, errno.EIO]
        said[name] = [re.sub(r"free \d+", "free", str(error)).replace(gone.path, "path") for error in errors]
        assert full.num_in_flight == gone.num_in_flight == 0
        os.close(full.fd)
        io.close()
    assert said["native"] == said["threads"]


def test_native_spans_are_in_the_time_of_python_and_each_of_a_piece(tmp_path, pool):
    io, spans = _native_io(2), []
    io.on_span = lambda *span: spans.append(span)
    file, data = io.open(str(tmp_path / "f"), 2 * PIECE_BYTES + PAGE), _random_bytes(pool, 2 * PIECE_BYTES + PAGE)
    begin = time.perf_counter()
    io.write(file, 0, data, for_step=3).wait()
    end = time.perf_counter()
    io.close()
    assert sorted(span[4] for span in spans) == [PAGE, PIECE_BYTES, PIECE_BYTES]
    for verb, path, start_s, end_s, _, for_step in spans:
        assert (verb, path, for_step) == ("write", file.path, 3) and begin <= start_s <= end_s <= end


class _SilentPool:
    """The operator's pool, on a drive that answers everything when it is ended."""

    def __init__(self, num_threads, piece_bytes, event_fd):
        self._event_fd, self._calls, self._ending = event_fd, [], False

    def submit(self, number, verb, fd, direct, urgency, offset, nbytes, *_):
        self._calls.append((number, offset, nbytes, time.monotonic() - 40))
        return True

    def waiting(self):
        return list(self._calls)

    def end(self):
        if not self._ending:
            self._ending = True
            os.eventfd_write(self._event_fd, 1)

    def take_done(self):
        calls, self._calls = self._calls, []
        return [(number, None, nbytes, ()) for number, _, nbytes, _ in calls]

    def has_ended(self):
        return self._ending and not self._calls


class _SilentIo(NativeSsdIo):
    stall_report_s = 0.1


def test_a_native_request_that_stalls_is_named(tmp_path, pool, caplog):
    io = _SilentIo(types.SimpleNamespace(IoPool=_SilentPool), 1)
    file = io.open(str(tmp_path / "f"), 8 * PAGE)
    with caplog.at_level(logging.WARNING):
        works = [io.write(file, 2 * PAGE, _random_bytes(pool, 3 * PAGE))]
        file.unsynced = True
        works.append(io.sync([file]))
        _wait_for(lambda: len(caplog.records) >= 2)
        io.close()
    assert all(work.done() for work in works)
    messages = {record.getMessage() for record in caplog.records}
    assert {f"a drive does not answer: {what} has been waiting for 40 s" for what in
            (f"write of {3 * PAGE} bytes at offset {2 * PAGE} of {file.path}", f"sync of {file.path}")} <= messages


def test_a_native_io_that_is_forgotten_ends_and_what_is_in_flight_with_it(tmp_path, pool):
    io = _native_io(2)
    file, data, back = io.open(str(tmp_path / "f"), PAGE), _random_bytes(pool, PAGE), pool.alloc(PAGE, "back")
    io.write(file, 0, data).wait()
    work, thread = io.read(file, 0, back), io._thread
    del io
    gc.collect()
    thread.join(20)
    assert not thread.is_alive() and torch.equal(work.wait(), data)
    os.close(file.fd)


def test_a_process_that_ends_with_requests_in_flight_ends(tmp_path):
    code = f"""
import torch
from lohan_ds.store.native_io import make_ssd_io
io = make_ssd_io(2)
file = io.open({str(tmp_path / "f")!r}, 64 << 20)
buffer = torch.frombuffer(__import__("mmap").mmap(-1, 64 << 20), dtype=torch.uint8)
works = [io.write(file, 0, buffer) for _ in range(4)]
print("submitted", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "submitted" in done.stdout, done.stderr
    assert "terminate" not in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_fork_can_be_left_alone(tmp_path, pool):
    """As a data loader's worker does: it has the object and not the threads."""
    io = _native_io(2)
    file = io.open(str(tmp_path / "f"), PAGE)
    io.write(file, 0, _random_bytes(pool, PAGE)).wait()
    child = os.fork()
    if child == 0:
        try:
            io.read(file, 0, pool.alloc(PAGE, "x"))
        except StoreError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    io.close()


def _wait_for(condition, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
