"""A store striped evenly and one striped by speed, side by side in one run, on directories paced to be of some speeds.

    python -m integration_tests.bench_stripe [--speeds 40e6,20e6] [--rounds 3] [--blocks 6] [--block-bytes 12MiB]
        [--directory DIR]

Loads: update, every chunk of every block read, changed and written, with as many buffers as a plan gives; fetch, the
params of every block, two blocks ahead. A round runs both sides of each load, in random order; the ratio is the median
over rounds of the two times of one round. Beside it what the drives' speeds alone would make of it. The pace is a
double's (rehearsal/paced_io.py), the rest is the store's own I/O in threads of Python.
"""
from __future__ import annotations

import argparse
import os
import queue
import random
import statistics
import tempfile
import time
from collections import deque

import torch

from lohan_ds.block import Block, chunk_numel_for, make_block
from lohan_ds.config import AUTOMATIC, parse_bytes
from lohan_ds.memory.budget import MemoryBudget
from lohan_ds.memory.pinned_pool import PinnedPool
from lohan_ds.plan import OffloadPlan
from lohan_ds.planner.memory_model import num_chunk_buffers
from lohan_ds.rehearsal.paced_io import PacedDrive, PacedIo
from lohan_ds.store.block_store import BlockStore
from lohan_ds.stripe import Stripe, even_stripe, shares_text, stripe_for, stripe_rate

NUM_FETCHED_AHEAD = 2   # blocks
CHUNKS_PER_BLOCK = 24


class Side:
    """A store of its own, on drives of its own."""

    def __init__(self, folder: str, stripe: Stripe, speeds: list[float], blocks: list[Block]):
        self._blocks, self._pool = blocks, PinnedPool(MemoryBudget("host", 1 << 32), pin=False)
        paths = [os.path.join(folder, str(place)) for place in range(len(speeds))]
        for path in paths:
            os.makedirs(path)
        self._io = PacedIo(AUTOMATIC["ssd_threads"] * len(paths),
                           [(path, PacedDrive(speed, speed)) for path, speed in zip(paths, speeds)])
        tiers = ("ssd",) * len(blocks)
        plan = OffloadPlan(tiers, tiers, "deferred", NUM_FETCHED_AHEAD, blocks[0].chunk_numel,
                           num_chunk_buffers(len(paths)), False, stripe=stripe)
        self._store = BlockStore(blocks, plan, self._pool, self._io, [os.path.join(path, "run") for path in paths])
        for block in blocks:
            self._store.write_initial(block.index, torch.zeros(block.numel, dtype=torch.bfloat16))
        self._chunk_buffers = [self._pool.alloc(self._store.chunk_buffer_bytes, "chunk")
                               for _ in range(plan.num_chunk_buffers)]
        self._fetch_buffers = [self._pool.alloc(blocks[0].param_bytes, "params").view(torch.bfloat16)
                               for _ in range(NUM_FETCHED_AHEAD)]

    def run(self, load: str) -> float:
        start_s = time.perf_counter()
        self._update() if load == "update" else self._fetch()
        return time.perf_counter() - start_s

    def _update(self) -> None:
        """Half of the buffers on their way in, the others on their way out."""
        free: queue.SimpleQueue = queue.SimpleQueue()
        for buffer in self._chunk_buffers:
            free.put(buffer)
        loads, saves = deque(), []

        def save_oldest() -> None:
            block, chunk, buffer, load = loads.popleft()
            saves.append(self._store.save_chunk(block.index, chunk, load.wait()))
            saves[-1].on_done(lambda: free.put(buffer))

        for block in self._blocks:
            self._store.announce_update(block.index)
            for chunk in block.chunks:
                buffer = free.get()
                loads.append((block, chunk, buffer, self._store.load_chunk(block.index, chunk, buffer)))
                if len(loads) > len(self._chunk_buffers) // 2:
                    save_oldest()
        while loads:
            save_oldest()
        for save in saves:
            save.wait()
        for block in self._blocks:
            self._store.publish(block.index)

    def _fetch(self) -> None:
        reads = deque()
        for turn, block in enumerate(self._blocks):
            if len(reads) == NUM_FETCHED_AHEAD:
                reads.popleft().wait()
            reads.append(self._store.read_params(block.index, self._fetch_buffers[turn % NUM_FETCHED_AHEAD]))
        for read in reads:
            read.wait()

    def close(self) -> None:
        self._store.close()
        self._io.close()
        self._pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", default=None, help="for the files; the system's temporary one by default")
    parser.add_argument("--speeds", default="40e6,20e6", help="bytes/s of each directory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--block-bytes", default="12MiB", help="of a block's optimizer state")
    arguments = parser.parse_args()
    speeds = [float(speed) for speed in arguments.speeds.split(",")]
    block_bytes = parse_bytes(arguments.block_bytes, "--block-bytes")
    chunk_numel = chunk_numel_for(block_bytes // CHUNKS_PER_BLOCK)
    params = [("w", (CHUNKS_PER_BLOCK * chunk_numel,), 0)]
    blocks = [make_block(index, f"layer {index}", "bfloat16", params, chunk_numel)
              for index in range(arguments.blocks)]
    stripes = {"evenly": even_stripe(len(speeds)), "by speed": stripe_for(speeds)}
    torch.set_num_threads(1)
    seconds: dict[str, dict[str, list[float]]] = {load: {name: [] for name in stripes} for load in ("update", "fetch")}
    with tempfile.TemporaryDirectory(prefix="lohan_stripe_", dir=arguments.directory) as folder:
        sides = {name: Side(os.path.join(folder, name), stripe, speeds, blocks) for name, stripe in stripes.items()}
        try:
            for _ in range(arguments.rounds):
                for load, by_side in seconds.items():
                    for name in random.sample(list(sides), len(sides)):
                        by_side[name].append(sides[name].run(load))
        finally:
            for side in sides.values():
                side.close()
    by_rates = stripe_rate(stripes["evenly"], speeds) / stripe_rate(stripes["by speed"], speeds)
    print(f"{len(blocks)} blocks of {CHUNKS_PER_BLOCK} chunks, drives of {arguments.speeds} bytes/s; by speed: "
          f"{shares_text(stripes['by speed'], len(speeds))} {stripes['by speed']}; median of {arguments.rounds} rounds")
    for load, by_side in seconds.items():
        ratio = statistics.median(ours / even for ours, even in zip(by_side["by speed"], by_side["evenly"]))
        print(f"{load:8}" + "".join(f"{name} {statistics.median(own):.2f} s, " for name, own in by_side.items())
              + f"ratio {ratio:.2f}, of the drives' rates alone {by_rates:.2f}")


if __name__ == "__main__":
    main()
