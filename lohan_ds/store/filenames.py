"""The names of all files and directories of a run, in one place.

    <ssd_path>/lohan-<pid>-<token>/     scratch of one process, or of a run that has a name:
               lohan-run-<name>/LOCK
                                MANIFEST.json                              what lies here, written once
                                CURRENT.json  commit.0  commit.1           in the first directory: what is committed
                                block-0007.params      block-0007.state
               with shadow slots, of trained blocks:
                                block-0007.params.0    block-0007.params.1
                                block-0007.state.0     block-0007.state.1
"""
from __future__ import annotations

import os
import re
from collections.abc import Sequence

from lohan_ds.run_name import is_run_name

KINDS = ("params", "state")
LOCK = "LOCK"   # held by the process of the run
MANIFEST = "MANIFEST.json"
CURRENT = "CURRENT.json"
NEW_SUFFIX = "~new"   # of what gets its name when it is complete; no name of a run has a "~"
DIRECT_PROBE_PREFIX = ".lohan-direct-probe-"  # of the short-lived file by which a directory is asked for O_DIRECT
_NAMED_PREFIX = "lohan-run-"


def run_dir_name(pid: int, token: str) -> str:
    """Of one run's scratch directory below an SSD path: `pid` is for people, `token` is unique."""
    return f"lohan-{pid}-{token}"


def is_run_dir_name(name: str) -> bool:
    """Whether it is scratch: worth nothing once its process is gone."""
    return re.fullmatch(r"lohan-\d+-[0-9a-f]+", name) is not None


def named_run_dir_name(run_name: str) -> str:
    """Of a directory that outlives its process."""
    return _NAMED_PREFIX + run_name


def named_run_dirs(ssd_paths: Sequence[str], run_name: str) -> list[str]:
    return [os.path.join(path, named_run_dir_name(run_name)) for path in ssd_paths]


def run_name_of(directory_name: str) -> str | None:
    """The inverse of `named_run_dir_name`; None for anything else."""
    name = directory_name.removeprefix(_NAMED_PREFIX)
    return name if name != directory_name and is_run_name(name) else None


def commit_file_name(number: int) -> str:
    """Of the details of a commit; two take turns, so that the one CURRENT names is never written."""
    return f"commit.{number % 2}"


def block_file_name(block_index: int, kind: str, slot: int | None = None) -> str:
    """Of the file with one directory's chunks of a block; `kind` is "params" or "state"; `slot` None: the only one."""
    if kind not in KINDS:
        raise AssertionError(f"no file kind {kind!r}")
    return f"block-{block_index:04d}.{kind}" + ("" if slot is None else f".{slot}")
