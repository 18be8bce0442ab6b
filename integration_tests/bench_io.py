"""SSD I/O side by side, in one run, on the same files: fio, DeepSpeed's aio_handle, threads of Python, our operator.

    python -m integration_tests.bench_io [--directory DIR] [--file-bytes 1GiB] [--request-bytes 16MiB] [--seconds 2]
        [--rounds 3] [--threads 4] [--json FILE]

Loads: read; write; mixed, as an update does it: 12 bytes read and 14 written per parameter. Sequential, O_DIRECT where
DIR has it, `--depth` requests in flight, one file that is read and one that is written (fio mixes on the second). Every
round runs every side once per load, in a new random order; a ratio is the median over rounds of the two rates of one
round, so what slows the machine for longer than a round slows both.
"cores": process CPU time per second of wall time (fio: of its process). "+ checksums": each request is a record whose
XXH3 is computed and, when read, compared. fio runs as many threads of pread and pwrite as the others, or, as
"fio io_uring", `--depth` requests on one.
"""
from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lohan_ds.config import AUTOMATIC, parse_bytes
from lohan_ds.memory.budget import MemoryBudget
from lohan_ds.memory.pinned_pool import PAGE_BYTES, PinnedPool
from lohan_ds.ops.loader import native
from lohan_ds.store.checksums import Checksums, Records
from lohan_ds.store.file_io import FileIo
from lohan_ds.store.native_io import NativeSsdIo
from lohan_ds.store.pieces import PIECE_BYTES, parts
from lohan_ds.store.ssd_io import ThreadSsdIo

LOADS = ("read", "write", "mixed")
READ_SHARE = {"read": 1.0, "write": 0.0, "mixed": 12 / 26}
BASELINE = "fio threads"


class Sample(NamedTuple):
    bytes_per_s: float
    cores: float


class Setting(NamedTuple):
    paths: dict[str, str]     # of the file that is read, and of the one that is written
    file_bytes: int           # of each
    request_bytes: int
    num_threads: int
    depth: int                # requests in flight
    seconds: float


def verbs(load: str):
    """"read" or "write", for ever, in the proportion of the load."""
    read, credit = READ_SHARE[load], 0.0
    while True:
        credit += read
        yield "read" if credit >= 1 - 1e-9 else "write"
        credit -= credit >= 1 - 1e-9


class Ours:
    """A FileIo, driven as a store drives it."""

    def __init__(self, io: FileIo, setting: Setting, pool: PinnedPool, with_checksums: bool):
        self._io, self._setting, self._with_checksums = io, setting, with_checksums
        self._files = {verb: io.reopen(path, setting.file_bytes) for verb, path in setting.paths.items()}
        self._num_records = setting.file_bytes // setting.request_bytes
        self._checksums = {verb: Checksums(self._num_records, setting.request_bytes) for verb in self._files}
        self._buffers = [pool.alloc(setting.request_bytes, "buffer").random_() for _ in range(setting.depth)]
        if with_checksums:   # of what lies in the file that is read
            for record in range(self._num_records):
                io.read(self._files["read"], record * setting.request_bytes, self._buffers[0]).wait()
                for part in parts(0, setting.request_bytes, setting.request_bytes, setting.request_bytes):
                    data = self._buffers[0][part.in_memory:part.in_memory + part.nbytes]
                    self._records("read", record).note(part, memoryview(data.numpy()))

    def _records(self, verb: str, record: int) -> Records:
        return Records(self._checksums[verb], record, 1, 1, self._setting.request_bytes, str)

    def _submit(self, verb: str, record: int, buffer: Tensor):
        records = self._records(verb, record) if self._with_checksums else None
        submit = self._io.read if verb == "read" else self._io.write
        return submit(self._files[verb], record * self._setting.request_bytes, buffer, None, records)

    def run(self, load: str) -> Sample:
        flights: deque = deque()
        free, num_done = deque(self._buffers), 0
        places = {verb: itertools.cycle(range(self._num_records)) for verb in self._files}
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        for verb in verbs(load):
            if not free:
                free.append(flights.popleft().wait())
                num_done += 1
            if time.perf_counter() - start_s > self._setting.seconds:
                break
            flights.append(self._submit(verb, next(places[verb]), free.popleft()))
        while flights:
            flights.popleft().wait()
            num_done += 1
        return sample_of(num_done * self._setting.request_bytes, start_s, start_cpu_s)

    def close(self) -> None:
        self._io.close()


class DeepSpeedAio:
    """`aio_handle`: one waits for all that was submitted, so `depth` requests are a batch. In its own locked
    buffers, else it copies."""

    def __init__(self, setting: Setting):
        from deepspeed.ops.op_builder import AsyncIOBuilder
        self._setting = setting
        self._handle = AsyncIOBuilder().load().aio_handle(1 << 20, 32, False, True, setting.num_threads)
        self._buffers = [self._handle.new_cpu_locked_tensor(setting.request_bytes, torch.empty(0, dtype=torch.uint8))
                         for _ in range(setting.depth)]
        for buffer in self._buffers:
            buffer.random_()

    def run(self, load: str) -> Sample:
        size, paths = self._setting.request_bytes, self._setting.paths
        places = {verb: itertools.cycle(range(0, self._setting.file_bytes, size)) for verb in paths}
        turns, num_done = verbs(load), 0
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        while time.perf_counter() - start_s < self._setting.seconds:
            for buffer in self._buffers:
                verb = next(turns)
                submit = self._handle.async_pread if verb == "read" else self._handle.async_pwrite
                if submit(buffer, paths[verb], next(places[verb])) != 0:
                    raise OSError(f"aio_handle refused a {verb}")
            if self._handle.wait() != len(self._buffers):
                raise OSError("aio_handle lost a request")
            num_done += len(self._buffers)
        return sample_of(num_done * size, start_s, start_cpu_s)

    def close(self) -> None:
        for buffer in self._buffers:
            self._handle.free_cpu_locked_tensor(buffer)


class Fio:
    def __init__(self, setting: Setting, engine: str):
        self._setting = setting
        share = setting.file_bytes // setting.num_threads // PIECE_BYTES * PIECE_BYTES   # of a thread alone
        self._arguments = (["--ioengine=psync", f"--numjobs={setting.num_threads}", f"--size={share}",
                            f"--offset_increment={share}"] if engine == "psync" else
                           [f"--ioengine={engine}", f"--iodepth={setting.depth}", f"--size={setting.file_bytes}"])

    def run(self, load: str) -> Sample:
        setting = self._setting
        mix = [f"--rwmixread={100 * READ_SHARE['mixed']:.0f}"] if load == "mixed" else []
        path = setting.paths["read" if load == "read" else "write"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            ["fio", "--name=bench", f"--filename={path}", "--direct=1",
             f"--bs={min(PIECE_BYTES, setting.request_bytes)}", f"--rw={'rw' if load == 'mixed' else load}", "--thread",
             f"--runtime={setting.seconds}", "--time_based", "--group_reporting", "--output-format=json",
             *self._arguments, *mix], capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        (job,) = json.loads(done.stdout[done.stdout.index("{"):])["jobs"]
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Sample(job["read"]["bw_bytes"] + job["write"]["bw_bytes"], cpu_s / setting.seconds)

    def close(self) -> None:
        pass


def sample_of(nbytes: int, start_s: float, start_cpu_s: float) -> Sample:
    wall_s = time.perf_counter() - start_s
    return Sample(nbytes / wall_s, (time.process_time() - start_cpu_s) / wall_s)


def sides(setting: Setting, pool: PinnedPool) -> dict:
    """By name; a missing side is said, not fatal."""
    found: dict = {}
    if shutil.which("fio"):
        found[BASELINE] = Fio(setting, "psync")
        found["fio io_uring"] = Fio(setting, "io_uring")
    else:
        print("no fio: no ratios")
    try:
        found["DeepSpeed aio_handle"] = DeepSpeedAio(setting)
    except Exception as error:  # noqa: BLE001
        print(f"no DeepSpeed side: {str(error).splitlines()[0]}")
    makers: dict[str, Callable[[], FileIo]] = {"threads of Python": lambda: ThreadSsdIo(setting.num_threads)}
    module = native("ssd_io")
    if module is None:
        print("no operator ssd_io")
    else:
        makers["operator ssd_io"] = lambda: NativeSsdIo(module, setting.num_threads)
    for name, make in makers.items():
        found[name] = Ours(make(), setting, pool, False)
        found[f"{name} + checksums"] = Ours(make(), setting, pool, True)
    return found


def measure(setting: Setting, num_rounds: int) -> dict[str, dict[str, list[Sample]]]:
    """By load and side, a sample per round."""
    pool = PinnedPool(MemoryBudget("host", 16 * setting.depth * setting.request_bytes), pin=False)
    found = sides(setting, pool)
    samples: dict = {load: {name: [] for name in found} for load in LOADS}
    try:
        for round_index in range(num_rounds):
            for load in LOADS:
                for name in random.sample(list(found), len(found)):
                    samples[load][name].append(found[name].run(load))
    finally:
        for side in found.values():
            side.close()
        pool.close()
    return samples


def report(samples: dict[str, dict[str, list[Sample]]]) -> dict:
    rows: dict = {}
    for load, by_side in samples.items():
        print(f"\n{load:32}{'GB/s':>8}{'lowest':>8}{'highest':>9}{'to fio':>8}{'cores':>8}{'cores per GB/s':>16}")
        for name, own in by_side.items():
            rates = [sample.bytes_per_s for sample in own]
            cores = statistics.median(sample.cores for sample in own)
            row = {"bytes_per_s": statistics.median(rates), "lowest": min(rates), "highest": max(rates), "cores": cores}
            if BASELINE in by_side:
                row["ratio"] = statistics.median(a.bytes_per_s / b.bytes_per_s for a, b in zip(own, by_side[BASELINE]))
            rows.setdefault(load, {})[name] = row
            per_gb = statistics.median(sample.cores / sample.bytes_per_s * 1e9 for sample in own)
            print(f"{name:32}{row['bytes_per_s'] / 1e9:8.2f}{row['lowest'] / 1e9:8.2f}{row['highest'] / 1e9:9.2f}"
                  f"{row.get('ratio', float('nan')):8.2f}{cores:8.2f}{per_gb:16.3f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=".", help="on the SSD to be measured; a file is made there, and removed")
    parser.add_argument("--file-bytes", default="1GiB")
    parser.add_argument("--request-bytes", default="16MiB")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=AUTOMATIC["ssd_threads"])
    parser.add_argument("--depth", type=int, default=8, help="requests in flight")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    request_bytes = parse_bytes(arguments.request_bytes, "--request-bytes") // PAGE_BYTES * PAGE_BYTES
    file_bytes = parse_bytes(arguments.file_bytes, "--file-bytes") // request_bytes * request_bytes
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix=".lohan-bench-", dir=arguments.directory) as folder:
        paths = {verb: os.path.join(folder, verb) for verb in ("read", "write")}
        setting = Setting(paths, file_bytes, request_bytes, arguments.threads, arguments.depth, arguments.seconds)
        io = ThreadSsdIo(arguments.threads)
        piece = torch.empty(request_bytes + PAGE_BYTES, dtype=torch.uint8).random_()
        piece = piece[-piece.data_ptr() % PAGE_BYTES:][:request_bytes]
        for path in paths.values():
            file = io.open(path, file_bytes)
            for offset in range(0, file_bytes, request_bytes):   # what was only reserved is not read from the drive
                io.write(file, offset, piece).wait()
        print(f"two files of {file_bytes / 1e9:.2f} GB, requests of {request_bytes / 1e6:.2f} MB, "
              f"{arguments.depth} in flight, {arguments.threads} threads, {'O_DIRECT' if file.direct else 'buffered'}, "
              f"median of {arguments.rounds} rounds of {arguments.seconds:g} s")
        io.close()
        rows = report(measure(setting, arguments.rounds))
    if arguments.json:
        with open(arguments.json, "w") as out:
            json.dump({"setting": setting._asdict(), "loads": rows}, out, indent=2)


if __name__ == "__main__":
    main()
