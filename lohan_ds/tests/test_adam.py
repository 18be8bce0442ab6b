"""adam_update_: the same bits under any cut, thread count and alignment; close to torch.optim over 100 steps."""
from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from lohan_ds.adam import PIECE_NUMEL, AdamHyper, adam_update_, check_supported, hyper_from_group
from lohan_ds.errors import ConfigError
from lohan_ds.ops.cpu_adam_fused import fused_gives_same_bits

HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True)
L2_HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=False)
COEFFICIENT = 0.3712345678


def arrays(numel: int, grad_dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """master, grad, exp_avg, exp_avg_sq, with gradients over many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    master, grad, spread, avg, avg_sq = torch.randn(5, numel, generator=generator)
    return [master.clone(), (grad * (3 * spread).exp()).to(grad_dtype), avg * 0.1, (avg_sq * 0.1).square()]


def at_offset(tensor: Tensor, offset: int) -> Tensor:
    """A copy that starts `offset` elements behind an aligned address."""
    return torch.empty(tensor.numel() + offset, dtype=tensor.dtype)[offset:].copy_(tensor)


def assert_equal_bits(got: list[Tensor], want: list[Tensor], what: object = "") -> None:
    for index, (x, y) in enumerate(zip(got, want)):
        bits = torch.int32 if x.dtype == torch.float32 else torch.int16
        assert torch.equal(x.view(bits), y.view(bits)), (what, index)


@pytest.mark.parametrize("hyper", [HYPER, L2_HYPER], ids=["adamw", "l2"])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_do_not_depend_on_threads_alignment_or_cut(hyper, grad_dtype):
    rng = random.Random(7)
    numels = [*range(1, 131), 33_333, 70_001] if grad_dtype == torch.float32 else [1, 33, 130, 70_001]
    wants = {numel: arrays(numel, grad_dtype) for numel in numels}
    torch.set_num_threads(1)
    for numel, want in wants.items():
        adam_update_(*want, 3, hyper, COEFFICIENT)
        assert_equal_bits([want[1]], [arrays(numel, grad_dtype)[1]], "the gradient was changed")
        got, start = arrays(numel, grad_dtype), 0
        while start < numel:                   # any start and length, more than the multiples of 32 that blocks use
            end = min(numel, start + rng.randint(1, rng.choice((3, 130, 20_000))))
            adam_update_(*[t[start:end] for t in got], 3, hyper, COEFFICIENT)
            start = end
        assert_equal_bits(got, want, (numel, "cut"))
    for num_threads, offset in ((1, 1), (2, 3), (4, 16)):
        torch.set_num_threads(num_threads)
        for numel, want in wants.items():
            got = [at_offset(t, offset) for t in arrays(numel, grad_dtype)]
            adam_update_(*got, 3, hyper, COEFFICIENT)
            assert_equal_bits(got, want, (numel, num_threads, offset))


@pytest.mark.parametrize("numel", [1, 7, 33, 45])
def test_bits_do_not_depend_on_padding(numel):
    want = arrays(numel)
    adam_update_(*want, 1, HYPER)
    got = [torch.zeros(2048) for _ in range(4)]
    for padded, tensor in zip(got, arrays(numel)):
        padded[:numel] = tensor
    adam_update_(*got, 1, HYPER)
    assert_equal_bits([t[:numel] for t in got], want)
    assert all(t[numel:].count_nonzero() == 0 for t in got)


def test_more_than_one_piece_with_and_without_scratch():
    numel = 2 * PIECE_NUMEL + 4_101
    want = arrays(numel)
    want[1].mul_(COEFFICIENT)                  # fp32: what the coefficient means
    grad = want[1]
    adam_update_(*want, 5, HYPER)
    torch.set_num_threads(2)
    for scratch in (None, torch.full((PIECE_NUMEL,), float("nan"))):
        got = arrays(numel)
        adam_update_(*got, 5, HYPER, COEFFICIENT, scratch)
        got[1] = grad
        assert_equal_bits(got, want)


def test_coefficient_of_exactly_one_leaves_the_gradient_alone():
    """Also one that is denormal, and the upcast of a 16-bit gradient is the same update as its fp32 value."""
    for grad_dtype in (torch.bfloat16, torch.float16):
        got, want = arrays(100, grad_dtype), arrays(100, grad_dtype)
        got[1][0] = want[1][0] = 1e-40 if grad_dtype == torch.bfloat16 else 6e-8
        want[1] = want[1].float()
        adam_update_(*got, 1, HYPER, 1.0)
        adam_update_(*want, 1, HYPER, 1.0)
        assert_equal_bits([got[0], *got[2:]], [want[0], *want[2:]])


GRID = [(1e-3, (0.9, 0.999), 1e-8, 0.0), (1e-3, (0.9, 0.999), 1e-8, 0.1), (1e-4, (0.9, 0.95), 1e-6, 0.01),
        (1e-2, (0.5, 0.9), 1e-3, 0.01), (3e-5, (0.0, 0.99), 1e-8, 0.1)]


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("lr, betas, eps, weight_decay", GRID)
def test_tracks_torch_optim_over_100_steps(decoupled, lr, betas, eps, weight_decay):
    """D43. Against torch's fused implementation, which rounds the last few elements of an array in another way, and its
    single-tensor one. Those two differ by up to 1.9e-6 max(|p|, lr) on this grid, so the second limit is wider.
    """
    torch.set_num_threads(1)
    numels = [1, 2, 7, 9, 33, 130, 1_027]
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(n, generator=generator) for n in numels]
    states = [[p.clone(), torch.zeros_like(p), torch.zeros_like(p)] for p in start]
    make = torch.optim.AdamW if decoupled else torch.optim.Adam
    references = {}                            # fused: (optimizer, params)
    for fused in (True, False):
        params = [torch.nn.Parameter(p.clone()) for p in start]
        references[fused] = make(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, foreach=False,
                                 fused=fused), params
    hyper = hyper_from_group(references[True][0].param_groups[0], decoupled)
    for step in range(1, 101):
        for index, (master, exp_avg, exp_avg_sq) in enumerate(states):
            grad = torch.randn(master.numel(), generator=generator)
            adam_update_(master, grad, exp_avg, exp_avg_sq, step, hyper)
            for _, params in references.values():
                params[index].grad = grad
        for optimizer, _ in references.values():
            optimizer.step()
    got = torch.cat([state[0] for state in states]).double()
    for fused, limit in ((True, 1e-6), (False, 4e-6)):
        want = torch.cat([p.detach() for p in references[fused][1]]).double()
        difference = (got - want).abs()
        assert difference.norm() <= 1e-6 * want.norm()
        relative = difference / want.abs().clamp(min=lr)
        assert relative.max() <= limit, (fused, relative.max())


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("lr, betas, eps, weight_decay", GRID)
def test_whole_vectors_have_the_bits_of_torchs_fused_kernel_over_100_steps(decoupled, lr, betas, eps, weight_decay):
    if not fused_gives_same_bits():
        pytest.skip("torch's fused kernel rounds in another way here")
    numel, generator = 16_384, torch.Generator().manual_seed(1)
    want = torch.nn.Parameter(torch.randn(numel, generator=generator))
    make = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = make([want], lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
    hyper = hyper_from_group(optimizer.param_groups[0], decoupled)
    master, exp_avg, exp_avg_sq = want.detach().clone(), torch.zeros(numel), torch.zeros(numel)
    for step in range(1, 101):
        want.grad = torch.randn(numel, generator=generator)
        optimizer.step()
        adam_update_(master, want.grad, exp_avg, exp_avg_sq, step, hyper)
    assert_equal_bits([master], [want.detach()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_parameters_are_written_in_the_same_call(dtype):
    want, got, out = arrays(300_001, dtype), arrays(300_001, dtype), torch.empty(300_001, dtype=dtype)
    adam_update_(*want, 3, HYPER, COEFFICIENT)
    adam_update_(*got, 3, HYPER, COEFFICIENT, out=out, num_threads=3)
    assert_equal_bits([*got, out], [*want, want[0].to(dtype)])


def test_decay_styles_differ():
    decoupled, l2 = arrays(64), arrays(64)
    adam_update_(*decoupled, 1, HYPER)
    adam_update_(*l2, 1, L2_HYPER)
    assert not torch.equal(decoupled[0], l2[0])


def test_hyper_from_group_reads_tensors_and_the_present_value():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=torch.tensor(0.5), betas=(0.8, 0.9))
    group = optimizer.param_groups[0]
    check_supported(group)
    assert hyper_from_group(group, True) == AdamHyper(0.5, 0.8, 0.9, 1e-8, 0.01, True)
    group["lr"] = 0.25
    assert hyper_from_group(group, True).lr == 0.25


@pytest.mark.parametrize("key", ["amsgrad", "maximize", "differentiable", "capturable"])
def test_unsupported_settings_are_named(key):
    group = {**torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))]).param_groups[0], key: True}
    with pytest.raises(ConfigError, match=key):
        check_supported(group)


def test_other_optimizers_are_refused():
    with pytest.raises(ConfigError, match="betas"):
        check_supported(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).param_groups[0])
    with pytest.raises(ConfigError, match="bias_correction"):
        check_supported({"lr": 1.0, "betas": (0, 0), "eps": 1, "weight_decay": 0, "bias_correction": False})
