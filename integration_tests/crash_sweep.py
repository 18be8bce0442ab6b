"""A crash at every event that reaches the disk, in every mode; killed processes; failing drives; killed saves.

    python -m integration_tests.crash_sweep [--modes eager,deferred,read-ahead,in_place] [--bytes N] [--seeds N]
                                            [--hits N] [--kills N] [--faults N] [--saves N]

Prints the seeds, what was interrupted how often, how many steps were lost, and every loss: a run that cannot be
reopened, or has other bits, or is older than what was durable. Exit status: 0 if there is none, and every phase of a
step that can be in a mode was interrupted `--hits` times.
"""
from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import logging
import random
import tempfile
import time
from collections.abc import Iterator

from integration_tests.crashes import MODES, PHASES, Mode, Reference, Sweep, crash, fast_folder, make_reference
from integration_tests.failing_drives import fail_drives
from integration_tests.killed_training import kill_processes

MOST_TRIES = 10   # for each hit that a phase still needs: where it is luck whether it comes so late
LONGEST_S = 120   # that a crash may take


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bytes", type=int, default=100, help="crashes at a byte drawn from all that are written")
    parser.add_argument("--seeds", type=int, default=2, help="crashes at every event, at least")
    parser.add_argument("--hits", type=int, default=20, help="crashes in every phase, at least")
    parser.add_argument("--modes", default=",".join(MODES), help="with commas")
    parser.add_argument("--kills", type=int, default=30, help="processes to kill in every mode")
    parser.add_argument("--faults", type=int, default=100, help="failing drives in every mode")
    parser.add_argument("--saves", type=int, default=20, help="processes to kill during a save, at least")
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    begin_s, problems = time.monotonic(), []
    for mode in [MODES[name] for name in arguments.modes.split(",") if name]:
        mode_begin_s, sweep = time.monotonic(), Sweep()
        with fast_folder() as folder, tempfile.TemporaryDirectory() as disk:
            reference = make_reference(folder, mode)
            for seed in range(arguments.bytes):
                with _no_longer_than(LONGEST_S):
                    at = random.Random(seed).randrange(reference.bytes_written)
                    crash(folder, mode, reference, at, seed, sweep)
            sweep_phases(folder, mode, reference, arguments.seeds, arguments.hits, sweep)
            for seed in range(arguments.kills):
                with _no_longer_than(LONGEST_S):
                    kill_processes(disk, mode, reference, [seed], sweep)
            for seed in range(arguments.faults):
                with _no_longer_than(LONGEST_S):
                    fail_drives(folder, mode, reference, [seed], sweep)
        cannot_be = "".join(f"\n  cannot be: {phase}, because {why}" for phase, why in mode.impossible().items())
        print(f"{mode.name}: bytes, crashes at each event, kills and faults with seeds 0, 1, ...; {sweep}{cannot_be}"
              f"\n{time.monotonic() - mode_begin_s:.0f} s", flush=True)
        problems += sweep.losses + sweep.check_phases(mode, arguments.hits)
    if arguments.saves:
        problems += _kill_savers(arguments.saves)
    print("\n".join([*problems, f"{len(problems)} problems, {time.monotonic() - begin_s:.0f} s"]))
    raise SystemExit(bool(problems))


def sweep_phases(folder: str, mode: Mode, reference: Reference, num_seeds: int, least_hits: int, sweep: Sweep) -> None:
    """`num_seeds` crashes at every event of the undisturbed run, and more in phases that were not hit often enough.

    How often a phase comes differs from run to run, so a crash may find nothing to interrupt; the tries are bounded."""
    num_events = collections.Counter(reference.events)
    for kind, count in num_events.items():
        for seed in range(max(num_seeds, -(-least_hits // count))):
            for number in range(count):
                with _no_longer_than(LONGEST_S):
                    crash(folder, mode, reference, (kind, number), seed, sweep)
    draw = random.Random(0)
    for phase in (phase for phase in PHASES if phase not in mode.impossible()):
        for seed in range(1000, 1000 + MOST_TRIES * max(least_hits - sweep.hits[phase], 0)):
            if sweep.hits[phase] >= least_hits:
                break
            number = draw.randrange(draw.randrange(max(sweep.seen[phase], 1)) + 1)   # the first ones come more often
            with _no_longer_than(LONGEST_S):
                crash(folder, mode, reference, (phase, number), seed, sweep)


def _kill_savers(least_hits: int) -> list[str]:
    """The checkpoints that were lost. Some processes have ended their save when they are killed."""
    from integration_tests.killed_saving import DURING, kill_savers, make_states   # imports deepspeed
    with tempfile.TemporaryDirectory() as folder:
        states, sweep, num_hits = make_states(folder), Sweep(), 0
        for seed in range(2 * least_hits):
            with _no_longer_than(LONGEST_S + 60):
                kill_savers(folder, states, [seed], sweep)
            num_hits = sum(count for what, count in sweep.hits.items() if DURING in what)
            if num_hits == least_hits:
                break
    print(f"saves: seeds 0, 1, ...; {sweep}", flush=True)
    return sweep.losses + ([] if num_hits == least_hits else [f"saves hit {num_hits} times, needed {least_hits}"])


@contextlib.contextmanager
def _no_longer_than(seconds: float) -> Iterator[None]:
    """Nothing may hang: if the body does, where it does is printed and the sweep ends."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
