"""Every array of every block comes back bit for bit, in the right order, or not at all (D24, D25, D28, D29, D31)."""
import contextlib
import errno
import itertools
import os
import random
import shutil
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan_ds.block import STATE_KINDS, make_block
from lohan_ds.errors import CapacityError, StepError, StoreError
from lohan_ds.memory.budget import MemoryBudget
from lohan_ds.memory.pinned_pool import PinnedPool
from lohan_ds.plan import OffloadPlan
from lohan_ds.store.block_files import BlockFiles
from lohan_ds.store.block_home import TORCH_DTYPE
from lohan_ds.store.block_order import BlockOrder
from lohan_ds.store.block_store import BlockStore, required_ssd_bytes
from lohan_ds.store.filenames import LOCK
from lohan_ds.store.native_io import make_ssd_io
from lohan_ds.store.ssd_io import ThreadSsdIo
from lohan_ds.stripe import even_stripe
from lohan_ds.testing.faulty_io import FaultyIo
from lohan_ds.work import Work

SIZES = [1, 7, 33, 257, 4097]
WEIGHTED = [(0, 1, 0, 0, 1), (2, 0, 2, 1, 2, 0), (1, 1, 0), (1,)]
TIERS = ["host", "ssd"]


def _block(index, dtype, sizes, chunk_numel=2048, trainable=True):
    params = [(f"p{place}", (size,), 0 if trainable else None) for place, size in enumerate(sizes)]
    return make_block(index, f"layer{index}", dtype, params, chunk_numel)


def _plan(param_tiers, state_tiers, chunk_numel=2048, shadow=False, stripe=()):
    return OffloadPlan(tuple(param_tiers), tuple(state_tiers), "serial", 1, chunk_numel, 3, False, shadow=shadow,
                       stripe=stripe)


@contextlib.contextmanager
def _store(tmp_path, blocks, param_tier="ssd", state_tier="ssd", num_dirs=1, io=None,
           shadow=False, stripe=()):
    pool = PinnedPool(MemoryBudget("host", 1 << 30), pin=False)
    io = io or make_ssd_io(2)
    run_dirs = [str(tmp_path / f"drive{index}" / "run") for index in range(num_dirs)]
    plan = _plan([param_tier] * len(blocks), [state_tier] * len(blocks), shadow=shadow, stripe=stripe)
    store = BlockStore(blocks, plan, pool, io, run_dirs)
    store.pool, store.run_dirs = pool, run_dirs                               # for the tests
    store.scratch = PinnedPool(MemoryBudget("buffers of the test", 1 << 30), pin=False)
    try:
        yield store
    finally:
        store.close()
        io.close()
        store.scratch.close()
        assert pool.budget.used_bytes == 0
        assert not any(os.path.exists(run_dir) for run_dir in run_dirs)


def _values(block, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(block.numel, generator=generator).to(TORCH_DTYPE[block.dtype])


def _read(store, block):
    out = store.scratch.alloc(block.param_bytes, "out").view(TORCH_DTYPE[block.dtype])
    try:
        return store.read_params(block.index, out).wait().clone()
    finally:
        store.scratch.free(out)


def _array(store, block, kind, start=0, numel=None):
    dtype = TORCH_DTYPE[block.dtype] if kind == "param" else torch.float32
    out = torch.full((block.numel - start if numel is None else numel,), float("nan"), dtype=dtype)
    store.read_array(block.index, kind, start, out)
    return out


def _bump(arrays):
    """A stand-in for Adam that shows in every array and depends on all that was read."""
    arrays.exp_avg.mul_(2).add_(1)
    arrays.exp_avg_sq.mul_(3).add_(arrays.exp_avg)
    arrays.master.add_(arrays.exp_avg_sq)
    if arrays.params is not None:
        arrays.params.copy_(arrays.master)


def _update(store, block, announced=False, change=_bump):
    if not announced:
        store.announce_update(block.index)
    _change_chunks(store, block, change)
    store.publish(block.index)


def _change_chunks(store, block, change=_bump, speculative=False, num_chunks=None):
    buffer = store.scratch.alloc(store.chunk_buffer_bytes, "chunk buffer")
    for chunk in block.chunks[:num_chunks]:
        arrays = store.load_chunk(block.index, chunk, buffer, speculative=speculative).wait()
        if arrays.params is not None:
            arrays.params.fill_(float("nan"))  # is not read
        change(arrays)
        store.save_chunk(block.index, chunk, arrays, speculative=speculative).wait()
        buffer.fill_(0xFF)
    store.scratch.free(buffer)


def _expected_after(values, num_updates):
    """Of params, master, exp_avg, exp_avg_sq, by `_bump` on whole arrays."""
    master, exp_avg = values.float(), torch.zeros(values.numel())
    exp_avg_sq = torch.zeros(values.numel())
    for _ in range(num_updates):
        exp_avg = exp_avg * 2 + 1
        exp_avg_sq = exp_avg_sq * 3 + exp_avg
        master = master + exp_avg_sq
    return {"param": master.to(values.dtype), "master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def _check_all(store, block, values, num_updates):
    expected = _expected_after(values, num_updates)
    assert torch.equal(_read(store, block), expected["param"])
    for kind in ("param",) + (STATE_KINDS if block.trainable else ()):
        assert torch.equal(_array(store, block, kind), expected[kind]), kind


@pytest.mark.parametrize("num_dirs", [1, 3])
@pytest.mark.parametrize("param_tier,state_tier", list(itertools.product(TIERS, TIERS)))
@pytest.mark.parametrize("dtype", list(TORCH_DTYPE))
def test_round_trip_and_updates_in_every_tier(tmp_path, dtype, param_tier, state_tier, num_dirs):
    blocks = [_block(0, dtype, SIZES), _block(1, dtype, [4096 * 5 + 1], chunk_numel=4096),
              _block(2, dtype, [1]), _block(3, dtype, SIZES, trainable=False), _block(4, dtype, [9999], 1 << 20)]
    with _store(tmp_path, blocks, param_tier, state_tier, num_dirs) as store:
        for block in blocks:
            store.write_initial(block.index, _values(block, block.index))
        for block in blocks:
            _check_all(store, block, _values(block, block.index), 0)
        for count in (1, 2):
            for block in blocks:
                if block.trainable:
                    _update(store, block)
                    _check_all(store, block, _values(block, block.index), count)
        _check_all(store, blocks[3], _values(blocks[3], 3), 0)
        lent = store.lend_params(1)
        assert (lent is None) == (param_tier == "ssd")
        if lent is not None:
            assert torch.equal(lent.wait(), _read(store, blocks[1]))


@pytest.mark.parametrize("dtype,stride", [("bfloat16", 1), ("float32", 16)])
def test_every_parameter_size_from_1_to_4097(tmp_path, dtype, stride):
    """All sizes, many to a block, so that every size of parameter is read back from SSD, tiny ones included."""
    sizes = list(range(1, 4098, stride))
    random.Random(0).shuffle(sizes)
    blocks = [_block(index, dtype, sizes[start:start + 256], chunk_numel=1 << 16)
              for index, start in enumerate(range(0, len(sizes), 256))]
    with _store(tmp_path, blocks, num_dirs=2) as store:
        for block in blocks:
            values = _values(block, block.index)
            store.write_initial(block.index, values)
            _update(store, block)
            expected = _expected_after(values, 1)
            got = _read(store, block)
            for slot in block.slots:
                piece = slice(slot.offset, slot.offset + slot.numel)
                assert torch.equal(got[piece], expected["param"][piece]), slot
            slot = block.slots[-1]
            for kind in STATE_KINDS:
                out = _array(store, block, kind, slot.offset, slot.numel)
                assert torch.equal(out, expected[kind][slot.offset:slot.offset + slot.numel])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30000), st.sampled_from([2048, 4096, 6144, 1 << 20]), st.integers(0, 5),
       st.sampled_from([*map(even_stripe, range(1, 5)), *WEIGHTED]),
       st.sampled_from(["params", "state"]), st.sampled_from(["bfloat16", "float32"]))
def test_records_are_dense_aligned_and_disjoint(numel, chunk_numel, index, stripe, kind, dtype):
    block = _block(index, dtype, [numel], chunk_numel)
    files, num_dirs = BlockFiles(block, kind, stripe), max(stripe) + 1
    files._files = list(range(num_dirs))  # the place of the directory stands for its file
    ends = [0] * num_dirs
    for chunk in block.chunks:
        directory, offset = files.record(chunk)
        assert directory == stripe[(index + chunk.index) % len(stripe)]
        if stripe == even_stripe(num_dirs):   # as runs of older versions have it
            assert (directory, offset) == ((index + chunk.index) % num_dirs, chunk.index // num_dirs * (
                chunk_numel * files.num_arrays * files.itemsize))
        assert offset == ends[directory] and offset % 4096 == 0
        ends[directory] += chunk.numel * files.num_arrays * files.itemsize
    assert ends == [files.nbytes_in(directory) for directory in range(num_dirs)]


@given(st.integers(1, 40), st.integers(0, 5), st.sampled_from([*map(even_stripe, range(1, 5)), *WEIGHTED]),
       st.sets(st.integers(0, 39), max_size=4))
def test_runs_cover_every_chunk_once_and_each_is_one_stretch_of_a_file(num_chunks, index, stripe, without):
    block = _block(index, "bfloat16", [2048 * num_chunks - 1])
    files = BlockFiles(block, "params", stripe)
    runs = files.runs(without)
    covered = sorted(chunk.index for run in runs for chunk in run)
    assert covered == [chunk.index for chunk in block.chunks if chunk.index not in without]
    for run in runs:
        places = [files.place(chunk) for chunk in run]
        assert len({directory for directory, _ in places}) == 1
        assert [offset - places[0][1] for _, offset in places] == [2048 * 2 * place for place in range(len(run))]
        records = files.records(*run)
        assert [chunk.index for chunk in run] == [records.first + records.step * place for place in range(len(run))]
    if not without and len(set(stripe)) == len(stripe):
        assert len(runs) == min(len(stripe), num_chunks)


@pytest.mark.parametrize("stripe", WEIGHTED)
@pytest.mark.parametrize("make_io", [ThreadSsdIo, make_ssd_io])
def test_a_weighted_stripe_comes_back_whole_and_gives_each_directory_its_share(tmp_path, stripe, make_io):
    blocks = [_block(0, "bfloat16", [30 * 2048]), _block(1, "float32", [7 * 2048 + 1]), _block(2, "bfloat16", [1]),
              _block(3, "bfloat16", [30 * 2048 - 5])]
    io = make_io(3)
    num_requests = []
    with _store(tmp_path, blocks, num_dirs=3, io=io, shadow=True, stripe=stripe) as store:
        for block in blocks:
            store.write_initial(block.index, _values(block, block.index))
            _check_all(store, block, _values(block, block.index), 0)
        for count in (1, 2):
            for block in blocks:
                _update(store, block)
                _check_all(store, block, _values(block, block.index), count)
        io.on_span = lambda *span: num_requests.append(span)
        _read(store, blocks[0])
        assert len(num_requests) == len(store._slots[0][0].param_files.runs()) < len(blocks[0].chunks)
        in_dirs = [sum(os.path.getsize(os.path.join(run_dir, name)) for name in os.listdir(run_dir)
                       if name.startswith(("block-0000", "block-0003"))) for run_dir in store.run_dirs]
        share = [stripe.count(directory) / len(stripe) for directory in range(3)]
        one_chunk_of_each_file = 4 * 2048 * 14
        assert all(abs(nbytes - part * sum(in_dirs)) < one_chunk_of_each_file for nbytes, part in zip(in_dirs, share))
        file, offset = store._slots[0][0].param_files.record(blocks[0].chunks[4])   # two updates: in the first slot
        _flip_bit(file.path, offset + 5)
        with pytest.raises(StoreError, match=rf"params of block 0 .*, chunk 4, in {file.path} at offset {offset}: "):
            _read(store, blocks[0])


def test_a_stripe_over_directories_that_are_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="deals to directory 3, but there are 2"), \
            _store(tmp_path, [_block(0, "bfloat16", [4096])], num_dirs=2, stripe=(0, 2)):
        pass


@pytest.mark.parametrize("param_tier,state_tier", [("ssd", "ssd"), ("host", "ssd"), ("host", "host")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_unaligned_reads_and_edits(tmp_path, dtype, param_tier, state_tier):
    block = _block(0, dtype, [4096 * 3 + 5], chunk_numel=4096)
    generator = random.Random(1)
    with _store(tmp_path, [block], param_tier, state_tier, num_dirs=3) as store:
        store.write_initial(0, _values(block))
        mirror = _expected_after(_values(block), 0)
        if dtype == "float32":
            mirror["master"] = mirror["param"]
        for _ in range(60):
            kind = generator.choice(["param", *STATE_KINDS])
            start = generator.randrange(block.numel)
            numel = generator.choice([0, 1, 7, 2049, block.numel])
            numel = min(numel, block.numel - start)
            values = torch.randn(numel).to(mirror[kind].dtype)
            store.write_array(0, kind, start, values)
            mirror[kind][start:start + numel] = values
            kind = generator.choice(["param", *STATE_KINDS])
            start = generator.randrange(block.numel)
            numel = min(5000, block.numel - start)
            assert torch.equal(_array(store, block, kind, start, numel), mirror[kind][start:start + numel])
        for kind in mirror:
            assert torch.equal(_array(store, block, kind), mirror[kind])
        assert torch.equal(_read(store, block), mirror["param"])


@pytest.mark.parametrize("dtype,read_per_param,written_per_param", [("bfloat16", 12, 14), ("float32", 12, 12)])
def test_traffic_of_an_update(tmp_path, dtype, read_per_param, written_per_param):
    block = _block(0, dtype, [50000], chunk_numel=16384)
    with _store(tmp_path, [block], num_dirs=2) as store:
        store.write_initial(0, _values(block))
        before = store.bytes_read, store.bytes_written
        _update(store, block)
        assert store.bytes_read - before[0] == read_per_param * block.numel
        assert store.bytes_written - before[1] == written_per_param * block.numel


def test_sizes_are_exact(tmp_path):
    blocks = [_block(0, "bfloat16", [50000], 16384), _block(1, "float32", [3000]),
              _block(2, "float16", [3000], trainable=False)]
    with _store(tmp_path, blocks, "ssd", "ssd", num_dirs=3) as store:
        on_disk = sum(os.path.getsize(os.path.join(run_dir, name))
                      for run_dir in store.run_dirs for name in os.listdir(run_dir) if name != LOCK)
        assert on_disk == store.ssd_bytes == sum(block.param_bytes + block.state_bytes for block in blocks)
        assert store.chunk_buffer_bytes == 16384 * 14
        assert store.host_bytes == store.pool.budget.used_bytes == store.chunk_buffer_bytes
        assert all(os.stat(run_dir).st_mode & 0o777 == 0o700 for run_dir in store.run_dirs)
    with _store(tmp_path, blocks, "ssd", "host") as store:
        assert store.ssd_bytes == sum(block.param_bytes for block in blocks)
        assert store.chunk_buffer_bytes == 16384 * 2
    with _store(tmp_path, blocks, "host", "host", num_dirs=0) as store:
        assert store.chunk_buffer_bytes == store.ssd_bytes == 0
        assert store.host_bytes == store.pool.budget.used_bytes
    assert required_ssd_bytes(blocks, _plan(["host"] * 3, ["ssd"] * 3)) == sum(block.state_bytes for block in blocks)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("seed", range(4))
def test_reads_see_exactly_the_updates_announced_before_them(tmp_path, tier, seed):
    """Readers and an updater race under random delays: a read issued after k announcements sees k updates, in full."""
    block = _block(0, "bfloat16", [6 * 2048])
    io = FaultyIo(4, seed=seed, max_delay_s=0.003, short_transfers=True)
    delays = random.Random(seed)
    with _store(tmp_path, [block], tier, tier, num_dirs=2, io=io) as store:
        store.write_initial(0, torch.zeros(block.numel, dtype=torch.bfloat16))

        def step(arrays):  # params count the updates
            arrays.master.add_(1)
            arrays.params.copy_(arrays.master)

        pending = []

        def read_some(count):
            for _ in range(delays.randrange(4)):
                out = store.scratch.alloc(block.param_bytes, "out").view(torch.bfloat16)
                pending.append((count, store.read_params(0, out)))
                time.sleep(delays.uniform(0, 0.002))

        for count in range(12):
            read_some(count)
            store.announce_update(0)
            read_some(count + 1)
            worker = threading.Thread(target=_update, args=(store, block, True, step))
            worker.start()
            read_some(count + 1)
            worker.join()
        for count, work in pending:
            assert torch.equal(work.wait(), torch.full((block.numel,), count, dtype=torch.bfloat16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("tier", TIERS)
def test_an_update_waits_for_older_reads_only(tmp_path, tier, dtype):
    block = _block(0, dtype, [4096])
    with _store(tmp_path, [block], tier, tier) as store:
        store.write_initial(0, _values(block))
        order = store._orders[0]
        with order.reading():  # an older read that takes its time
            store.announce_update(0)
            younger = store.read_params(0, store.scratch.alloc(block.param_bytes, "x").view(TORCH_DTYPE[dtype]))
            buffer = store.scratch.alloc(store.chunk_buffer_bytes, "chunk buffer")
            load = store.load_chunk(0, block.chunks[0], buffer)
            if tier == "host":
                time.sleep(0.02)
                assert not load.done()  # it hands out what the reader reads
            else:
                arrays = load.wait()
                written = store.bytes_written
                save = store.save_chunk(0, block.chunks[0], arrays)
                time.sleep(0.02)
                assert not save.done() and store.bytes_written == written
        load.wait()
        store.save_chunk(0, block.chunks[0], load.wait()).wait()
        assert not younger.done()
        store.publish(0)
        younger.wait()


@pytest.mark.parametrize("tier", TIERS)
def test_failed_update_fails_readers_until_the_next_one(tmp_path, tier):
    block = _block(0, "bfloat16", [4096])
    with _store(tmp_path, [block], tier, tier) as store:
        store.write_initial(0, _values(block))
        store.announce_update(0)
        out = store.scratch.alloc(block.param_bytes, "x").view(torch.bfloat16)
        waiting = store.read_params(0, out)
        cause = OSError(errno.EIO, "broken drive")
        store.fail(0, cause)
        one = torch.ones(1)
        for read in (waiting.wait, store.read_params(0, out).wait, lambda: store.wait_published(0),
                     lambda: _array(store, block, "exp_avg"), lambda: store.write_array(0, "exp_avg", 0, one)):
            with pytest.raises(StepError, match="layer0.*broken drive") as caught:
                read()
            assert caught.value.__cause__ is cause
        _update(store, block)
        _check_all(store, block, _values(block), 1)
        store.announce_update(0)
        store.fail(0, cause)
        store.write_initial(0, _values(block, 5))
        _check_all(store, block, _values(block, 5), 0)


@pytest.mark.parametrize("num_dirs", [1, 2, 3])
@pytest.mark.parametrize("make_io", [ThreadSsdIo, make_ssd_io])
def test_neighbours_in_a_file_are_one_request_and_each_record_is_verified(tmp_path, num_dirs, make_io):
    block = _block(1, "bfloat16", [7 * 4096 - 2048], chunk_numel=4096)
    io, requests = make_io(2), []
    io.on_span = lambda verb, path, start, end, nbytes, for_step: requests.append((verb, nbytes))
    with _store(tmp_path, [_block(0, "bfloat16", [4096]), block], num_dirs=num_dirs, io=io) as store:
        store.write_initial(1, _values(block))
        requests.clear()
        assert torch.equal(_read(store, block), _values(block))
        assert [verb for verb, _ in requests] == ["read"] * num_dirs
        assert sum(nbytes for _, nbytes in requests) == store.bytes_read == block.param_bytes
        file, offset = store._slots[1][0].param_files.record(block.chunks[3])
        _flip_bit(file.path, offset + 5)
        with pytest.raises(StoreError, match=rf"params of block 1 .*, chunk 3, in {file.path} at offset {offset}: "):
            _read(store, block)
        out = store.scratch.alloc(block.param_bytes, "out").view(torch.bfloat16)
        out.fill_(7)
        requests.clear()
        store._slots[1][0].read_params(out, without=[3, 4]).wait()   # so it does not matter
        assert {1: 2, 2: 4, 3: 4}[num_dirs] == len(requests)
        kept = slice(block.chunks[3].start, block.chunks[5].start)
        assert out[kept].eq(7).all()
        out[kept] = _values(block)[kept]
        assert torch.equal(out, _values(block))


def _flip_bit(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
        os.fsync(file.fileno())


def test_disk_errors_reach_the_caller_with_path_and_numbers(tmp_path):
    block = _block(0, "bfloat16", [4096])
    io = FaultyIo(1)
    with _store(tmp_path, [block], io=io) as store:
        store.write_initial(0, _values(block))
        path = os.path.join(store.run_dirs[0], "block-0000.params")
        io.inject("read", errno.EIO, at_call=0)
        with pytest.raises(StoreError, match=r"offset 0, got 0 of 8192 bytes needed") as caught:
            _read(store, block)
        assert caught.value.errno == errno.EIO and path in str(caught.value)
        _check_all(store, block, _values(block), 0)  # a failed read loses nothing
        io.inject("write", errno.ENOSPC, at_call=1)
        with pytest.raises(StoreError, match="free ") as caught:
            store.write_array(0, "param", 0, _values(block, 1))
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(StepError, match="No space left"):
            _read(store, block)
        store.write_initial(0, _values(block, 1))
        os.truncate(path, 4096)
        with pytest.raises(StoreError, match="short read; offset 0, got 4096 of 8192"):
            _read(store, block)


def test_enospc_in_an_update(tmp_path):
    block = _block(0, "bfloat16", [8192])
    io = FaultyIo(1)
    with _store(tmp_path, [block], io=io) as store:
        store.write_initial(0, _values(block))
        io.inject("write", errno.ENOSPC, after_bytes=3 * 2048 * 14)
        with pytest.raises(StoreError) as caught:
            _update(store, block)
        assert caught.value.errno == errno.ENOSPC and "needed" in str(caught.value)
        store.fail(0, caught.value)


def test_too_little_disk_is_said_before_anything_is_made(tmp_path, monkeypatch):
    blocks = [_block(0, "bfloat16", [100000])]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("lohan_ds.store.run_dirs.shutil.disk_usage", lambda path: usage._replace(free=1000))
    threads = threading.active_count()
    pool, io = PinnedPool(MemoryBudget("host", 1 << 30), pin=False), ThreadSsdIo(1)
    with pytest.raises(CapacityError, match=rf"needed {required_ssd_bytes(blocks, _plan(['ssd'], ['ssd']))} bytes"):
        BlockStore(blocks, _plan(["ssd"], ["ssd"]), pool, io, [str(tmp_path / "run")])
    io.close()
    assert os.listdir(tmp_path) == [] and pool.budget.used_bytes == 0 and threading.active_count() == threads


def test_failure_half_way_keeps_nothing(tmp_path):
    blocks = [_block(0, "bfloat16", [4096]), _block(1, "bfloat16", [4096])]
    fds = len(os.listdir("/proc/self/fd"))
    io = ThreadSsdIo(1)
    pool = PinnedPool(MemoryBudget("host", 2048 * 14 + 4096 * 4 + 100), pin=False)
    with pytest.raises(CapacityError, match="exp_avg of block 1"):
        BlockStore(blocks, _plan(["ssd", "ssd"], ["ssd", "host"]), pool, io, [str(tmp_path / "run")])
    os.mkdir(tmp_path / "taken")
    pool = PinnedPool(MemoryBudget("host", 1 << 30), pin=False)
    with pytest.raises(StoreError, match="cannot create the run directory"):
        BlockStore(blocks, _plan(["ssd"] * 2, ["ssd"] * 2), pool, io, [str(tmp_path / "run"), str(tmp_path / "taken")])
    io.close()
    assert os.listdir(tmp_path) == ["taken"] and pool.budget.used_bytes == 0
    assert len(os.listdir("/proc/self/fd")) == fds


@pytest.mark.parametrize("tier", TIERS)
def test_close_leaves_nothing_and_everything_raises(tmp_path, tier):
    block = _block(0, "bfloat16", [4096])
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with _store(tmp_path, [block], tier, tier) as store:
        store.write_initial(0, _values(block))
        store.announce_update(0)
        out = torch.empty(block.numel, dtype=torch.bfloat16)
        waiting = store.read_params(0, out)
        store.close()
        store.close()
        with pytest.raises(StoreError, match="store is closed"):
            waiting.wait()
        one = torch.ones(1)
        for call in (lambda: store.write_initial(0, out), lambda: store.read_params(0, out),
                     lambda: store.lend_params(0), lambda: store.announce_update(0), lambda: store.publish(0),
                     lambda: store.fail(0, OSError()), lambda: store.wait_published(0),
                     lambda: store.load_chunk(0, block.chunks[0], None),
                     lambda: store.save_chunk(0, block.chunks[0], None),
                     lambda: store.read_array(0, "exp_avg", 0, one), lambda: store.write_array(0, "exp_avg", 0, one)):
            with pytest.raises(StoreError, match="store is closed"):
                call()
    assert threading.active_count() == threads and len(os.listdir("/proc/self/fd")) == fds


def test_misuse_is_refused(tmp_path):
    blocks = [_block(0, "bfloat16", [4096]), _block(1, "bfloat16", [4096], trainable=False)]
    with _store(tmp_path, blocks) as store:
        with pytest.raises(ValueError, match="frozen.*no 'exp_avg'"):
            store.read_array(1, "exp_avg", 0, torch.ones(1))
        with pytest.raises(ValueError, match="no 'gradient'"):
            store.read_array(0, "gradient", 0, torch.ones(1))
        for start, out in ((4096, torch.ones(1)), (-1, torch.ones(1)), (0, torch.ones(1, dtype=torch.float64)),
                           (0, torch.ones(2, 2)), (0, torch.ones(4)[::2])):
            with pytest.raises(ValueError, match="contiguous 1-D host tensor"):
                store.read_array(0, "exp_avg", start, out)
        with pytest.raises(ValueError):
            store.write_initial(0, torch.zeros(4000, dtype=torch.bfloat16))
        with pytest.raises(StepError, match="no update is announced"):
            store.load_chunk(0, blocks[0].chunks[0], None)
        with pytest.raises(AssertionError):
            store.publish(0)
        store.announce_update(0)
        with pytest.raises(AssertionError):
            store.announce_update(0)
        store.publish(0)
    with pytest.raises(ValueError, match="no directory"):
        BlockStore(blocks, _plan(["ssd"] * 2, ["ssd"] * 2), store.pool, None, [])


# Shadow slots


def _accept(store, block):
    """Makes what was speculated the block's values."""
    store.announce_update(block.index)
    store.publish(block.index)


SHADOW_CASES = pytest.mark.parametrize(
    "dtype,param_tier,state_tier", [(d, p, s) for d in ("bfloat16", "float32") for p in TIERS for s in TIERS])


@SHADOW_CASES
@pytest.mark.parametrize("num_dirs", [1, 3])
def test_speculations_are_published_or_leave_no_trace(tmp_path, dtype, param_tier, state_tier, num_dirs):
    blocks = [_block(0, dtype, SIZES), _block(1, dtype, [4096 * 5 + 1], 4096), _block(2, dtype, SIZES, trainable=False)]

    with _store(tmp_path, blocks, param_tier, state_tier, num_dirs, shadow=True) as store:
        assert [store.has_shadow(block.index) for block in blocks] == [True, True, False]
        for block in blocks:
            store.write_initial(block.index, _values(block, block.index))
        generator = random.Random(3)
        counts = [0, 0]
        for way in ["update", "accept", "accept", "drop", "update", "drop", "accept", "drop half", "accept", "fail",
                    "drop", "drop half", "update", "update", "finish", "drop", "finish"]:
            for block in generator.sample(blocks[:2], 2):
                if way == "update":
                    _update(store, block)
                elif way == "accept":
                    _change_chunks(store, block, speculative=True)
                    _check_all(store, block, _values(block, block.index), counts[block.index])
                    _accept(store, block)
                elif way == "finish":  # what a speculation has not come to follows once the update is announced
                    _change_chunks(store, block, speculative=True, num_chunks=1)
                    store.announce_update(block.index)
                    _change_chunks(store, block)
                    store.publish(block.index)
                elif way == "fail":
                    store.announce_update(block.index)
                    _change_chunks(store, block, _nonsense, num_chunks=2)
                    store.fail(block.index, OSError(errno.EIO, "broken drive"))
                    with pytest.raises(StepError):
                        _read(store, block)
                    _update(store, block)
                else:
                    _change_chunks(store, block, _nonsense, speculative=True,
                                   num_chunks=1 if way == "drop half" else None)
                counts[block.index] += not way.startswith("drop")
                _check_all(store, block, _values(block, block.index), counts[block.index])
                lent = store.lend_params(block.index)
                assert lent is None or torch.equal(lent.wait(), _read(store, block))
        _check_all(store, blocks[2], _values(blocks[2], 2), 0)
        for block in blocks[:2]:  # the slot that is current by now is the one that is replaced
            store.write_initial(block.index, _values(block, 7))
            _check_all(store, block, _values(block, 7), 0)
            _update(store, block)
            _check_all(store, block, _values(block, 7), 1)


def _nonsense(arrays):
    for array in arrays:
        if array is not None:
            array.fill_(-77)


@SHADOW_CASES
def test_edits_after_a_dropped_speculation(tmp_path, dtype, param_tier, state_tier):
    block = _block(0, dtype, [4096 * 3 + 5], chunk_numel=4096)
    with _store(tmp_path, [block], param_tier, state_tier, num_dirs=3, shadow=True) as store:
        store.write_initial(0, _values(block))
        for _ in range(3):
            mirror = {kind: _array(store, block, kind) for kind in ("param", *STATE_KINDS)}
            _change_chunks(store, block, _nonsense, speculative=True)
            for kind in ("param", *STATE_KINDS):
                array = mirror[kind] if dtype != "float32" or kind != "master" else mirror["param"]
                edit = torch.randn(5000).to(array.dtype)
                store.write_array(0, kind, 4001, edit)
                array[4001:9001] = edit
                assert torch.equal(_array(store, block, kind), array)
            for kind in STATE_KINDS[1:]:
                assert torch.equal(_array(store, block, kind), mirror[kind])
            assert torch.equal(_read(store, block), mirror["param"])
            master = (mirror["param"] if dtype == "float32" else mirror["master"]).clone()
            _update(store, block)  # from the edited values
            exp_avg = mirror["exp_avg"] * 2 + 1
            exp_avg_sq = mirror["exp_avg_sq"] * 3 + exp_avg
            assert torch.equal(_array(store, block, "exp_avg"), exp_avg)
            assert torch.equal(_array(store, block, "exp_avg_sq"), exp_avg_sq)
            assert torch.equal(_array(store, block, "master"), master + exp_avg_sq)
            assert torch.equal(_read(store, block), (master + exp_avg_sq).to(mirror["param"].dtype))


def test_a_speculation_waits_for_no_edit(tmp_path):
    """An edit that is under way, in the training thread, must not be waited for; what is loaded may be a mixture."""
    block = _block(0, "bfloat16", [4096])
    for tier in TIERS:
        with _store(tmp_path, [block], tier, tier, shadow=True) as store:
            store.write_initial(0, _values(block))
            with store._orders[0].editing():
                _change_chunks(store, block, _nonsense, speculative=True)
            _check_all(store, block, _values(block), 0)
            _update(store, block)
            _check_all(store, block, _values(block), 1)


class _HeldIo(ThreadSsdIo):
    """The next `num_held` reads stop half-way until `go` is set; `reached` once for each that has come so far."""

    def __init__(self, num_threads):
        super().__init__(num_threads)
        self.num_held = 0
        self.reached, self.go = threading.Semaphore(0), threading.Event()

    def _pread(self, fd, view, offset):
        with self._lock:
            held = self.num_held > 0
            self.num_held -= held
        if not held:
            return super()._pread(fd, view, offset)
        half = len(view) // 2
        moved = super()._pread(fd, view[:half], offset)
        self.reached.release()
        assert self.go.wait(20)
        return moved + super()._pread(fd, view[half:], offset + half)


@SHADOW_CASES
@pytest.mark.parametrize("num_dirs", [1, 3])
@pytest.mark.parametrize("speculate", [False, True])
def test_a_slow_read_of_the_old_slot_is_not_torn(tmp_path, monkeypatch, dtype, param_tier, state_tier, num_dirs,
                                                 speculate):
    """It is overtaken by the update announced after it; the next update, which writes its slot, waits."""
    block = _block(0, dtype, [3 * 8192], chunk_numel=8192)
    io = _HeldIo(6)

    def slow_copy(source, out):
        half = out.numel() // 2
        out[half:].copy_(source[half:])
        io.reached.release()
        assert io.go.wait(20)
        out[:half].copy_(source[:half])  # what an update would load first
        return out

    values = _values(block)
    with _store(tmp_path, [block], param_tier, state_tier, num_dirs, io=io, shadow=True) as store:
        store.write_initial(0, values)
        out = store.scratch.alloc(block.param_bytes, "out").view(values.dtype)
        with monkeypatch.context() as patch:
            patch.setattr("lohan_ds.store.block_store._copy", slow_copy)
            num_reads = io.num_held = num_dirs if param_tier == "ssd" else 0   # a request per file
            slow = store.read_params(0, out)
            for _ in range(num_reads or 1):
                assert io.reached.acquire(timeout=20)
        if speculate:
            _change_chunks(store, block, speculative=True)
            _accept(store, block)
        else:
            _update(store, block)                                       # nobody waits for the slow read
        expected = _expected_after(values, 1)
        assert torch.equal(_array(store, block, "param"), expected["param"])
        assert not slow.done()
        written = store.bytes_written
        second = threading.Thread(target=_change_chunks, args=(store, block), kwargs={"speculative": speculate})
        if not speculate:
            store.announce_update(0)
        second.start()
        time.sleep(0.1)
        assert second.is_alive() and store.bytes_written == written
        assert not slow.done()
        io.go.set()
        second.join()
        assert torch.equal(slow.wait(), values)
        _accept(store, block) if speculate else store.publish(0)
        _check_all(store, block, values, 2)


@SHADOW_CASES
@pytest.mark.parametrize("seed", range(2))
def test_reads_see_exactly_the_updates_announced_before_them_with_speculations(tmp_path, monkeypatch, dtype, param_tier,
                                                                               state_tier, seed):
    """As the test of that name without: readers race with updates, accepted and dropped speculations."""
    block = _block(0, dtype, [6 * 2048])
    io = FaultyIo(4, seed=seed, max_delay_s=0.003, short_transfers=True)
    delays = random.Random(seed)
    torch_dtype = TORCH_DTYPE[dtype]

    def slow_copy(source, out):
        for first in range(0, out.numel(), 2048):
            time.sleep(delays.uniform(0, 0.001))
            out[first:first + 2048].copy_(source[first:first + 2048])
        return out

    def step(arrays):  # params count the updates
        arrays.master.add_(1)
        if arrays.params is not None:
            arrays.params.copy_(arrays.master)

    monkeypatch.setattr("lohan_ds.store.block_store._copy", slow_copy)
    with _store(tmp_path, [block], param_tier, state_tier, num_dirs=3, io=io, shadow=True) as store:
        store.write_initial(0, torch.zeros(block.numel, dtype=torch_dtype))
        pending = []

        def read_some(count):
            for _ in range(delays.randrange(4)):
                out = store.scratch.alloc(block.param_bytes, "out").view(torch_dtype)
                pending.append((count, store.read_params(0, out)))
                time.sleep(delays.uniform(0, 0.002))

        def in_background(count, *args, **kwargs):
            worker = threading.Thread(target=_change_chunks, args=(store, block, *args), kwargs=kwargs)
            worker.start()
            read_some(count)
            worker.join()

        for count in range(10):
            read_some(count)
            if delays.random() < 0.4:
                in_background(count, _nonsense, speculative=True, num_chunks=delays.choice([1, 3, None]))
            if delays.random() < 0.5:
                in_background(count, step, speculative=True)
                store.announce_update(0)
            else:
                store.announce_update(0)
                read_some(count + 1)
                in_background(count + 1, step)
            store.publish(0)
        for count, work in pending:
            assert torch.equal(work.wait(), torch.full((block.numel,), count, dtype=torch_dtype))


def test_a_read_is_of_the_slot_it_was_issued_for():
    """Also when the next update is published before its turn to start has come."""
    order = BlockOrder("block 0", num_slots=2)
    order.announce()
    slots = []

    def first(slot):
        slots.append(slot)
        order.announce()
        order.publish()
        return Work.completed()

    order.read(first)
    order.read(lambda slot: Work.completed(slots.append(slot)))
    order.publish()
    assert slots == [1, 1] and order.current_slot() == 0


@pytest.mark.parametrize("tier", TIERS)
def test_a_failed_update_with_shadow_has_damaged_nothing(tmp_path, tier):
    block = _block(0, "bfloat16", [4 * 2048])
    with _store(tmp_path, [block], tier, tier, shadow=True) as store:
        store.write_initial(0, _values(block))
        _update(store, block)
        store.announce_update(0)
        waiting = store.read_params(0, store.scratch.alloc(block.param_bytes, "x").view(torch.bfloat16))
        _change_chunks(store, block, _nonsense, num_chunks=3)
        store.fail(0, OSError(errno.EIO, "broken drive"))
        with pytest.raises(StepError, match="broken drive"):
            waiting.wait()
        with pytest.raises(StepError, match="broken drive"):
            store.write_array(0, "exp_avg", 0, torch.ones(1))
        _update(store, block)
        _check_all(store, block, _values(block), 2)


def test_sizes_and_traffic_with_shadow(tmp_path):
    blocks = [_block(0, "bfloat16", [50000], 16384), _block(1, "float32", [3000]),
              _block(2, "float16", [3000], trainable=False)]
    trained = sum(block.param_bytes + block.state_bytes for block in blocks[:2])
    with _store(tmp_path, blocks, num_dirs=3, shadow=True) as store:
        names = [os.path.join(run_dir, name) for run_dir in store.run_dirs for name in os.listdir(run_dir)
                 if name != LOCK]
        assert sum(map(os.path.getsize, names)) == store.ssd_bytes == 2 * trained + blocks[2].param_bytes
        assert {os.path.basename(name) for name in names} == {
            *(f"block-000{b}.{kind}.{slot}" for b in (0, 1) for kind in ("params", "state") for slot in (0, 1)),
            "block-0002.params"}
        assert store.host_bytes == store.pool.budget.used_bytes == store.chunk_buffer_bytes == 16384 * 14
        store.write_initial(0, _values(blocks[0]))
        assert store.bytes_written == blocks[0].param_bytes + blocks[0].state_bytes  # one slot
        for _ in range(2):
            before = store.bytes_read, store.bytes_written
            _update(store, blocks[0])
            assert store.bytes_read - before[0] == 12 * blocks[0].numel
            assert store.bytes_written - before[1] == 14 * blocks[0].numel
    with _store(tmp_path, blocks, "host", "host", num_dirs=0, shadow=True) as store:
        assert store.ssd_bytes == 0
        assert store.host_bytes == store.pool.budget.used_bytes == 2 * trained + blocks[2].param_bytes
    plan = _plan(["host"] * 3, ["ssd"] * 3, shadow=True)
    assert required_ssd_bytes(blocks, plan) == 2 * sum(block.state_bytes for block in blocks)


def test_too_little_disk_counts_both_slots(tmp_path, monkeypatch):
    blocks = [_block(0, "bfloat16", [100000])]
    needed = 2 * (blocks[0].param_bytes + blocks[0].state_bytes)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("lohan_ds.store.run_dirs.shutil.disk_usage", lambda path: usage._replace(free=needed - 1))
    pool, io = PinnedPool(MemoryBudget("host", 1 << 30), pin=False), ThreadSsdIo(1)
    with pytest.raises(CapacityError, match=rf"needed {needed} bytes"):
        BlockStore(blocks, _plan(["ssd"], ["ssd"], shadow=True), pool, io, [str(tmp_path / "run")])
    io.close()


@pytest.mark.parametrize("shadow,trainable", [(False, True), (True, False)])
def test_speculation_needs_a_shadow_slot(tmp_path, shadow, trainable):
    block = _block(0, "bfloat16", [4096], trainable=trainable)
    with _store(tmp_path, [block], shadow=shadow) as store:
        store.write_initial(0, _values(block))
        assert not store.has_shadow(0)
        with pytest.raises(AssertionError, match="layer0.*without shadow"):
            store.load_chunk(0, block.chunks[0], None, speculative=True)
        with pytest.raises(AssertionError, match="layer0.*without shadow"):
            store.save_chunk(0, block.chunks[0], None, speculative=True)
        _check_all(store, block, _values(block), 0)


def test_an_update_with_shadow_needs_an_announcement_all_the_same(tmp_path):
    block = _block(0, "bfloat16", [4096])
    with _store(tmp_path, [block], "host", "host", shadow=True) as store:
        with pytest.raises(StepError, match="no update is announced"):
            store.load_chunk(0, block.chunks[0], None)
        with pytest.raises(AssertionError):
            store.publish(0)
