"""CPU Adam side by side: torch's fused AdamW, ours, DeepSpeed's; in one process, interleaved, on the same arrays.

    python -m integration_tests.bench_adam [--numel 20000000] [--rounds 15] [--threads 1 2] [--json FILE]

Every round calls every side once, in a new random order. A ratio is the median over rounds of the two rates of one
round, so what slows the machine for longer than a round slows both. "bytes/param" is what one update must move at
least; a 16-bit output costs two more, because its cache lines are read before they are written.
"""
from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lohan_ds.adam import AdamHyper, adam_update_
from lohan_ds.ops.loader import native

HYPER = AdamHyper(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True)
BASELINE = "torch fused, fp32 grad"
STEP = 10


def sides(numel: int) -> dict[str, tuple[Callable[[int], None], int]]:
    """By name: what updates `numel` parameters with a number of threads, and its bytes per parameter."""
    master, exp_avg = torch.randn(2, numel)
    grad, exp_avg_sq = torch.randn(numel), torch.rand(numel)
    half_grad, half_param = grad.bfloat16(), torch.zeros(numel, dtype=torch.bfloat16)
    step = torch.tensor(float(STEP))

    def torch_fused(num_threads: int) -> None:
        torch._fused_adamw_([master], [grad], [exp_avg], [exp_avg_sq], [], [step], lr=HYPER.lr, beta1=HYPER.beta1,
                            beta2=HYPER.beta2, weight_decay=HYPER.weight_decay, eps=HYPER.eps, amsgrad=False,
                            maximize=False)

    def ours(gradient: Tensor, out: Tensor | None) -> Callable[[int], None]:
        return lambda num_threads: adam_update_(master, gradient, exp_avg, exp_avg_sq, STEP, HYPER, 0.5, out=out,
                                                num_threads=num_threads)

    found = {
        BASELINE: (torch_fused, 28),
        "ours, fp32 grad": (ours(grad, None), 28),
        "ours, bf16 grad": (ours(half_grad, None), 26),
        "ours, bf16 grad + bf16 out": (ours(half_grad, half_param), 28),
    }
    deepspeed_adam = _deepspeed_adam(master, grad, exp_avg, exp_avg_sq)
    if deepspeed_adam is not None:
        found["DeepSpeed CPUAdam, fp32 grad"] = (deepspeed_adam, 28)
    return found


def _deepspeed_adam(master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> Callable[[int], None] | None:
    """None, with a line that says why, where DeepSpeed's operator does not build."""
    try:
        from deepspeed.ops.op_builder.cpu.cpu_adam import CPUAdamBuilder
        operator = CPUAdamBuilder().load()
        operator.create_adam(0, HYPER.lr, HYPER.beta1, HYPER.beta2, HYPER.eps, HYPER.weight_decay, True, False)
    except Exception as error:  # noqa: BLE001 - a missing side is said, not fatal
        print(f"no DeepSpeed side: {str(error).splitlines()[0]}")
        return None
    return lambda num_threads: operator.adam_update(0, STEP, HYPER.lr, HYPER.beta1, HYPER.beta2, HYPER.eps,
                                                    HYPER.weight_decay, True, master, grad, exp_avg, exp_avg_sq)


def measure(numel: int, num_rounds: int, num_threads: int) -> dict[str, dict[str, float]]:
    """By side: parameters per second (median, lowest, highest) and ratio to BASELINE."""
    torch.set_num_threads(num_threads)
    updates = sides(numel)
    rates: dict[str, list[float]] = {name: [] for name in updates}
    for round_index in range(-2, num_rounds):            # the first two warm up
        for name in random.sample(list(updates), len(updates)):
            start = time.perf_counter()
            updates[name][0](num_threads)
            if round_index >= 0:
                rates[name].append(numel / (time.perf_counter() - start))
    return {name: {"params_per_s": statistics.median(rates[name]), "lowest": min(rates[name]),
                   "highest": max(rates[name]), "bytes_per_param": updates[name][1],
                   "ratio": statistics.median(x / y for x, y in zip(rates[name], rates[BASELINE]))}
            for name in updates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if native("cpu_adam") is None:
        print("the native operator is missing: 'ours' is the fallback")
    results = {}
    for num_threads in arguments.threads:
        results[num_threads] = measure(arguments.numel, arguments.rounds, num_threads)
        print(f"\n{num_threads} threads, {arguments.numel:,} parameters, median of {arguments.rounds} rounds\n"
              f"{'side':32}{'Gparam/s':>10}{'lowest':>9}{'highest':>9}{'GB/s':>7}{'ratio':>7}")
        for name, row in results[num_threads].items():
            print(f"{name:32}{row['params_per_s'] / 1e9:10.3f}{row['lowest'] / 1e9:9.3f}{row['highest'] / 1e9:9.3f}"
                  f"{row['params_per_s'] * row['bytes_per_param'] / 1e9:7.1f}{row['ratio']:7.2f}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()
