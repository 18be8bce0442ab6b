"""The norm depends on the gradients only, not on threads, alignment, cut or order; and clipping is DeepSpeed's."""
from __future__ import annotations

import math
import random

import pytest
import torch

from lohan_ds.grad_norm import SEGMENT_NUMEL, accumulate_, clip_coefficient, global_norm, sum_of_squares

NUMELS = [0, 1, 7, 31, 100, SEGMENT_NUMEL - 1, SEGMENT_NUMEL, SEGMENT_NUMEL + 1, 2 * SEGMENT_NUMEL, 200_003,
          64 * SEGMENT_NUMEL, 65 * SEGMENT_NUMEL + 5]


def gradient(numel: int, dtype: torch.dtype) -> torch.Tensor:
    grad, spread = torch.randn(2, numel, generator=torch.Generator().manual_seed(3))
    return (grad * spread.exp()).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_do_not_depend_on_threads_alignment_or_cut(dtype):
    before = torch.get_num_threads()
    try:
        for numel in NUMELS:
            flat = gradient(numel, dtype)
            torch.set_num_threads(1)
            want = sum_of_squares(flat)
            assert len(want) == -(-numel // SEGMENT_NUMEL)
            for num_threads, offset in ((1, 1), (2, 0), (2, 3), (4, 7)):
                torch.set_num_threads(num_threads)
                moved = torch.empty(numel + offset, dtype=dtype)[offset:].copy_(flat)
                assert sum_of_squares(moved) == want, (numel, num_threads, offset)
            for num_segments in (1, 2, 5):
                pieces = flat.split(num_segments * SEGMENT_NUMEL)
                assert [part for piece in pieces for part in sum_of_squares(piece)] == want, (numel, num_segments)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_taking_a_gradient_gives_the_same_parts(dtype):
    flat = gradient(70_001, dtype)
    held, total = torch.empty_like(flat), torch.ones(70_001)
    assert accumulate_(held, flat, add=False) == sum_of_squares(flat) and torch.equal(held, flat)
    assert accumulate_(total, flat, add=True, num_threads=3) == sum_of_squares(total)
    assert torch.equal(total, torch.ones(70_001) + flat.float())
    assert accumulate_(total, flat, add=False, sums=False) is None and torch.equal(total, flat.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_is_right(dtype):
    flat = gradient(100_003, dtype)
    norm = global_norm(sum_of_squares(flat))
    assert norm == pytest.approx(flat.double().norm().item(), rel=1e-14)
    assert global_norm(sum_of_squares(torch.full((3,), 3e38))) == pytest.approx(3e38 * math.sqrt(3))


def test_norm_does_not_depend_on_order():
    parts = [random.Random(0).lognormvariate(0, 20) for _ in range(1000)]
    want = global_norm(parts)
    for seed in range(5):
        random.Random(seed).shuffle(parts)
        assert global_norm(iter(parts)) == want
    assert global_norm([]) == 0.0


def test_non_finite_values_come_through():
    for bad, parts in ((math.inf, [1.0, math.inf]), (math.inf, [1e308, 1e308]), (math.nan, [math.nan, 1.0]),
                       (math.nan, [math.inf, math.nan]), (math.nan, [math.inf, -math.inf])):
        assert global_norm(parts) == bad or (bad != bad and math.isnan(global_norm(parts)))
    grad = torch.ones(40_000, dtype=torch.bfloat16)
    grad[20_000] = math.inf
    assert sum_of_squares(grad)[1] == math.inf
    grad[20_001] = math.nan
    assert math.isnan(global_norm(sum_of_squares(grad)))


def deepspeed_coefficient(norm: float, clip: float, scale: float) -> float:
    """`unscale_and_clip_grads` of deepspeed 0.19.8, runtime/zero/stage3.py, in fp64."""
    combined_scale = torch.tensor(scale, dtype=torch.float64)
    if clip > 0.:
        combined_scale = torch.clamp((torch.tensor(norm, dtype=torch.float64) / scale + 1e-6) / clip, min=1.0) * scale
    return (1. / combined_scale).item()


@pytest.mark.parametrize("scale", [1.0, 1024.0, 3.0])
@pytest.mark.parametrize("clip", [0.0, -1.0, 0.3, 1.0])
def test_coefficient_is_deepspeeds(scale, clip):
    for norm in (0.0, 0.1, 0.3, 0.9999995, 1.0, 1.0000001, 7.7, 5e3, math.inf):
        assert clip_coefficient(norm, clip, scale) == deepspeed_coefficient(norm, clip, scale)
    assert clip <= 0 or math.isnan(clip_coefficient(math.nan, clip, scale))


def test_nothing_to_scale_is_exactly_one():
    assert clip_coefficient(123.0, 0.0) == 1.0
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(1.0 - 2e-6, 1.0) == 1.0
    assert clip_coefficient(1.0, 1.0) != 1.0     # DeepSpeed's 1e-6
