"""What DeepSpeed leaves to its user, and which values are tried: every DeepSpeed side runs at the best of them.

sub_group_size: elements updated at a time. pipeline: reads and writes of optimizer state overlap its update.
buffer_count: optimizer states in flight; with a pipeline up to three sub groups of four.
param_buffer_count: parameters in flight. aio_*: block bytes, requests in flight and threads of its I/O. native_pin:
memory that is really locked, DS_PIN_MEMORY_BACKEND=native.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lohan_ds.bench.case import Side

Settings = dict[str, Any]

_MEMORY: Settings = {"sub_group_size": 100_000_000, "native_pin": False}
_DISK: Settings = {**_MEMORY, "pipeline": True, "buffer_count": 12, "param_buffer_count": 5,
                   "aio_block_size": 1 << 20, "aio_queue_depth": 16, "aio_threads": 1, "native_pin": True}
START: dict[str, Settings] = {"zero2-cpu": {"native_pin": False}, "zero3-cpu": _MEMORY, "zero3-nvme": _DISK,
                              "zero-infinity": _DISK}
# One setting at a time, in this order; each keeps its best value.
_TRIED: dict[str, tuple[Any, ...]] = {
    "native_pin": (False, True), "pipeline": (True, False), "sub_group_size": (25_000_000, 100_000_000),
    "aio_threads": (1, 4), "aio_queue_depth": (16, 64), "buffer_count": (12, 8)}


def start_settings(side: Side) -> Settings:
    """{} for a side that has none."""
    return dict(START.get(side.kind, {}))


def sweep(side: Side, seconds_of: Callable[[Settings], float | None]) -> Iterator[tuple[Settings, float | None]]:
    """Every settings tried with its seconds per step, None if it does not run. `best_of` them is the side's."""
    best, best_s = start_settings(side), None
    if not best:
        return
    best_s = seconds_of(best)
    yield best, best_s
    for key, values in _TRIED.items():
        for value in values:
            if key not in best or value == best[key]:
                continue
            tried = {**best, key: value}
            seconds = seconds_of(tried)
            yield tried, seconds
            if seconds is not None and (best_s is None or seconds < best_s):
                best, best_s = tried, seconds


def best_of(tried: list[tuple[Settings, float | None]]) -> Settings:
    """The fastest that ran; the first if none did."""
    ran = [entry for entry in tried if entry[1] is not None]
    return min(ran, key=lambda entry: entry[1])[0] if ran else tried[0][0]
