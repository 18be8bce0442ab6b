"""A crash at every event that reaches the disk, in every update mode; killed processes; failing drives; killed saves.

    python -m integration_tests.crash_sweep [--seeds N] [--modes eager,deferred] [--kills N] [--faults N] [--saves N]

Prints the seeds, what was interrupted how often, how many steps were lost, and every loss: a run that cannot be
reopened, or has other bits, or is older than what was durable. Exit status: 0 if there is none.
"""
from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import logging
import tempfile
import time
from collections.abc import Iterator

from integration_tests.crashes import Sweep, crash, fast_folder, make_reference
from integration_tests.failing_drives import fail_drives
from integration_tests.killed_training import kill_processes

LEAST_HITS = 24   # of each kind of event in the undisturbed run: the rare ones get more seeds
LONGEST_S = 120   # that one of them may take


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=2, help="crashes at every event, at least")
    parser.add_argument("--modes", default="eager,deferred", help="update modes, with commas")
    parser.add_argument("--kills", type=int, default=30, help="processes to kill in every mode")
    parser.add_argument("--faults", type=int, default=80, help="failing drives in every mode")
    parser.add_argument("--saves", type=int, default=20, help="processes to kill while they save a checkpoint")
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    begin_s, num_losses = time.monotonic(), 0
    for update in arguments.modes.split(","):
        sweep = Sweep()
        with fast_folder() as folder, tempfile.TemporaryDirectory() as disk:
            reference = make_reference(folder, update)
            num_events = collections.Counter(reference.events)
            for at_event, event in enumerate(reference.events):
                for number in range(max(arguments.seeds, -(-LEAST_HITS // num_events[event]))):
                    with _no_longer_than(LONGEST_S):
                        crash(folder, update, reference, at_event, 1000 * at_event + number, sweep)
            for seed in range(arguments.kills):
                with _no_longer_than(LONGEST_S):
                    kill_processes(disk, update, reference, [seed], sweep)
            for seed in range(arguments.faults):
                with _no_longer_than(LONGEST_S):
                    fail_drives(folder, update, reference, [seed], sweep)
        print(f"{update}: crashes with seeds 1000 * event + 0, 1, ..., kills and faults with seeds 0, 1, ...; {sweep}",
              flush=True)
        num_losses += len(sweep.losses)
    if arguments.saves:
        num_losses += _kill_savers(range(arguments.saves))
    print(f"{time.monotonic() - begin_s:.0f} s")
    raise SystemExit(num_losses > 0)


def _kill_savers(seeds: range) -> int:
    """How many checkpoints were lost."""
    from integration_tests.killed_saving import kill_savers, make_states   # imports deepspeed
    with tempfile.TemporaryDirectory() as folder:
        states, sweep = make_states(folder), Sweep()
        for seed in seeds:
            with _no_longer_than(LONGEST_S + 60):
                kill_savers(folder, states, [seed], sweep)
    print(f"saves: seeds 0, 1, ...; {sweep}", flush=True)
    return len(sweep.losses)


@contextlib.contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    """Nothing may hang: if the body does, where it does is printed and the sweep ends."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
