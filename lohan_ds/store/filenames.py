"""The names of all files and directories of a run, in one place.

    <ssd_path>/lohan-<pid>-<token>/LOCK
                                   block-0007.params
                                   block-0007.state
    with shadow slots, of trained blocks:
                                   block-0007.params.0  block-0007.params.1
                                   block-0007.state.0   block-0007.state.1
"""
from __future__ import annotations

import re

KINDS = ("params", "state")
LOCK = "LOCK"   # held by the process of the run
DIRECT_PROBE_PREFIX = ".lohan-direct-probe-"  # of the short-lived file by which a directory is asked for O_DIRECT


def run_dir_name(pid: int, token: str) -> str:
    """Of one run's directory below an SSD path: `pid` tells whether its process still lives, `token` is unique."""
    return f"lohan-{pid}-{token}"


def is_run_dir_name(name: str) -> bool:
    return re.fullmatch(r"lohan-\d+-[0-9a-f]+", name) is not None


def block_file_name(block_index: int, kind: str, slot: int | None = None) -> str:
    """Of the file with one directory's chunks of a block; `kind` is "params" or "state"; `slot` None: the only one."""
    if kind not in KINDS:
        raise AssertionError(f"no file kind {kind!r}")
    return f"block-{block_index:04d}.{kind}" + ("" if slot is None else f".{slot}")
