"""What this machine's drive and memory could do in the same minutes: the lower bounds are made of it."""
from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from lohan_ds.adam import adam_update_
from lohan_ds.bench.trainers import HYPER
from lohan_ds.profiler.rates import sample_rate
from lohan_ds.profiler.ssd import SsdLimits, measure_ssds

_SSD_LIMITS = SsdLimits(seconds=4.0, write_bytes=4 << 30, file_bytes=1 << 30)
_ADAM_S = 1.0
_ADAM_NUMEL, _NUM_ARRAYS = 4 << 20, 6     # 400 MB in fp32: more than any cache keeps


@dataclass(frozen=True)
class Probe:
    """One measurement of each."""
    mixed_bytes_per_s: float        # read and written together, half of each, past the page cache
    read_bytes_per_s: float
    write_bytes_per_s: float
    adam_params_per_s: float        # everything in host memory


def probe(folder: str, dtype: str) -> Probe:
    """Takes about 5 s and up to 4 GiB of writing in `folder`; errors as `measure_ssds`."""
    (report,), _ = measure_ssds([folder], _SSD_LIMITS)
    rates = report.rates
    return Probe(rates.mixed.per_s, rates.read.per_s, rates.write.per_s, adam_params_per_s(dtype, _ADAM_S))


def adam_params_per_s(dtype: str, seconds: float) -> float:
    """With fp32 gradients; or with bf16 ones and a bf16 copy of the result."""
    half = torch.bfloat16 if dtype == "bf16" else None
    arrays = []
    for _ in range(_NUM_ARRAYS):
        grad = torch.randn(_ADAM_NUMEL).to(half or torch.float32)
        arrays.append((torch.randn(_ADAM_NUMEL), grad, torch.zeros(_ADAM_NUMEL), torch.zeros(_ADAM_NUMEL),
                       torch.empty(_ADAM_NUMEL, dtype=half) if half else None))
    turns = itertools.cycle(arrays)

    def update() -> int:
        master, grad, exp_avg, exp_avg_sq, out = next(turns)
        adam_update_(master, grad, exp_avg, exp_avg_sq, 1, HYPER, out=out)
        return _ADAM_NUMEL

    return sample_rate(update, seconds).per_s
