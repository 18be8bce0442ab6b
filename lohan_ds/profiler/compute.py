"""How many FLOPs a device does per second in the matrix products of a transformer layer, forward and backward."""
from __future__ import annotations

import time

import torch
from torch import Tensor

from lohan_ds.profiler.rates import Rate, sample_rate

_SMALLEST = 128
_LARGEST = {"cpu": 2048}
_LARGEST_ON_ACCELERATOR = 4096
_MAX_PASS_SHARE = 0.1   # of the time there is, so that it can be repeated


class LayerProducts:
    """The products of one layer of width N on N tokens: QKV (N, 3N), output (N, N), up (N, 4N), down (4N, N)."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device):
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=torch.float32).to(dtype) / width ** 0.5

        self._device = device
        self._triples = [(random(width, inputs), random(outputs, inputs), random(width, outputs)) for inputs, outputs in
                         ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))]
        self._flops = sum(3 * 2 * x.numel() * weight.shape[0] for x, weight, _ in self._triples)

    def run(self) -> float:
        """One pass, waited for: each product and the two of its backward. Returns its FLOPs."""
        for x, weight, grad in self._triples:
            torch.nn.functional.linear(x, weight)
            grad @ weight
            grad.t() @ x
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._flops


@torch.no_grad()
def measure_compute(device: torch.device, dtype: torch.dtype, seconds: float) -> Rate:
    """FLOP per second. The width doubles from 128 while a pass is short beside `seconds`: small products are slow."""
    largest = _LARGEST.get(device.type, _LARGEST_ON_ACCELERATOR)
    deadline = time.perf_counter() + seconds
    width = _SMALLEST
    while True:
        products = LayerProducts(width, dtype, device)
        products.run()
        start = time.perf_counter()
        products.run()
        pass_s = time.perf_counter() - start
        if width >= largest or 8 * pass_s > _MAX_PASS_SHARE * seconds:
            break
        width *= 2
    return sample_rate(products.run, max(0.0, deadline - time.perf_counter()))
