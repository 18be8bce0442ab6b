"""The whole matrix of `lohan verify --full` with random delays in every copy and every read and write.

    python -m integration_tests.parity_sweep [--seed 0] [--steps 6] [--part 1/4] [--no-delays]

Prints each case that differs from training in memory, and the counts. Exit status 1 if there is one.
"""
from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
import tempfile
import time

import pytest
import torch

from integration_tests.doubles import use_doubles
from lohan_ds.testing import parity
from lohan_ds.testing.delayed_streams import DelayedStreams
from lohan_ds.testing.faulty_io import FaultyIo

MAX_COPY_DELAY_S, MAX_IO_DELAY_S = 0.0005, 0.0005


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--part", default="1/1", help="which of how many equal parts of the matrix")
    parser.add_argument("--no-delays", action="store_true")
    args = parser.parse_args()
    logging.getLogger("lohan_ds").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    part, num_parts = map(int, args.part.split("/"))
    cases = parity.full_matrix(args.steps)
    cases = cases[(part - 1) * len(cases) // num_parts:part * len(cases) // num_parts]
    start_s, num_different, kept, dropped = time.monotonic(), 0, 0, 0
    with tempfile.TemporaryDirectory(prefix="parity_sweep_") as folder, pytest.MonkeyPatch.context() as patch:
        paths = [os.path.join(folder, name) for name in "ab"]
        for path in paths:
            os.mkdir(path)
        for number, case in enumerate(cases):
            if not args.no_delays:
                seed = 1000 * args.seed + number
                use_doubles(patch, DelayedStreams(seed, max_delay_s=MAX_COPY_DELAY_S),
                            functools.partial(FaultyIo, seed=seed, max_delay_s=MAX_IO_DELAY_S, short_transfers=True))
            result = parity.run_case(case, paths)
            kept, dropped = kept + result.num_kept, dropped + result.num_dropped
            if not result.same:
                num_different += 1
                print(f"DIFFERS (seed {args.seed}): {case}: {result.first_difference}", flush=True)
    delays = "no" if args.no_delays else "random"
    print(f"{len(cases)} cases, seed {args.seed}, {args.steps} steps each, {delays} delays: {num_different} differ; "
          f"block updates in backward: {kept} stood, {dropped} dropped; {time.monotonic() - start_s:.0f} s")
    sys.exit(num_different > 0)


if __name__ == "__main__":
    main()
