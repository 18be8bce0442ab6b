"""How many parameters per second the product's own CPU Adam updates, everything in host RAM."""
from __future__ import annotations

import itertools

import torch

from lohan_ds.adam import PIECE_NUMEL, AdamHyper, adam_update_
from lohan_ds.block import chunk_numel_for
from lohan_ds.memory.budget import available_host_bytes
from lohan_ds.profiler.rates import Rate, sample_rate

_BYTES_PER_PARAM = 16          # master, two moments, 16-bit gradient and parameter
_WORKING_SET_BYTES = 384 << 20   # more than any cache keeps
_MEMORY_SHARE = 0.25           # of what is available
_HYPER = AdamHyper(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True)


class _Chunk:
    """One chunk's arrays, (numel,) on the host."""

    def __init__(self, numel: int):
        self.master = torch.randn(numel)
        self.exp_avg = torch.zeros(numel)
        self.exp_avg_sq = torch.zeros(numel)
        self.grad = torch.randn(numel).to(torch.bfloat16)
        self.params = torch.empty(numel, dtype=torch.bfloat16)

    def update(self, scratch: torch.Tensor) -> int:
        adam_update_(self.master, self.grad, self.exp_avg, self.exp_avg_sq, 1, _HYPER, scratch=scratch)
        self.params.copy_(self.master)
        return self.params.numel()


def measure_cpu_update(seconds: float, chunk_bytes: int) -> Rate:
    """Parameters per second, with bf16 gradients and chunks as `chunk_bytes` cuts them, on as many threads as torch
    has. The chunks take turns, so that every one comes from memory."""
    numel = chunk_numel_for(chunk_bytes)
    budget = min(_WORKING_SET_BYTES, int(_MEMORY_SHARE * available_host_bytes()))
    chunks = [_Chunk(numel) for _ in range(max(2, budget // (numel * _BYTES_PER_PARAM)))]
    scratch = torch.empty(min(numel, PIECE_NUMEL))
    turns = itertools.cycle(chunks)
    return sample_rate(lambda: next(turns).update(scratch), seconds)
