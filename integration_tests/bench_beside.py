"""What updates in the background cost the training thread: compute alone, beside Adam in a loop, beside the product.

    python -m integration_tests.bench_beside [--rounds 7] [--params 100_000_000] [--folder DIR] [--tiers host,ssd]

Two loops stand for the training thread, on one core: a matrix product, and small operations one after the other, that
is what launching kernels is to Python. "Adam alone" is the operator called on large arrays by a thread that does no
more; what it costs is memory bandwidth, no design can cost less. "lohan, TIER" is the update that trails after
step() in mode `deferred`. Every round measures every pair once, the loop alone right before and after it; a speed is
the median over rounds of the pair's rate over the mean of those two.
"""
from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import threading
import time
from collections.abc import Callable

import torch
from torch import nn

from lohan_ds.adam import AdamHyper, adam_update_
from lohan_ds.testing.harness import ds_config, engine_for

ALONE_S = 0.7
HYPER = AdamHyper(lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True)
WIDTH = 2000


def loops() -> dict[str, Callable[[], None]]:
    """By name: one pass of what the training thread does; at most some milliseconds."""
    left, right, product = torch.randn(512, 512), torch.randn(512, 512), torch.empty(512, 512)
    small = torch.zeros(64)

    def matrix_product() -> None:
        torch.mm(left, right, out=product)

    def small_operations() -> None:
        for _ in range(500):
            small.add_(1.0)

    return {"matrix product": matrix_product, "small operations": small_operations}


def rate(one_pass: Callable[[], None], is_over: Callable[[], bool]) -> tuple[float, float]:
    """(passes per second, seconds) until `is_over`."""
    start_s, num = time.perf_counter(), 0
    while not is_over():
        one_pass()
        num += 1
    took_s = time.perf_counter() - start_s
    return num / took_s, took_s


def rate_alone(one_pass: Callable[[], None]) -> float:
    end_s = time.perf_counter() + ALONE_S
    return rate(one_pass, lambda: time.perf_counter() > end_s)[0]


class AdamInALoop:
    """The bound: one call of the operator after the other."""
    num_params = 32_000_000   # far more than the caches hold

    def __init__(self) -> None:
        self.arrays = [torch.rand(self.num_params) for _ in range(4)]

    def begin(self) -> threading.Event:
        """Starts updates; the event is set at their end."""
        done = threading.Event()

        def update() -> None:
            for step in range(1, 6):
                adam_update_(*self.arrays, step, HYPER, 0.5, num_threads=1)
            done.set()

        threading.Thread(target=update, daemon=True).start()
        return done


class Product:
    """An engine of linear layers. What a step computes is tiny; what it updates is not."""

    def __init__(self, engine):
        self.engine = engine

    def begin(self) -> threading.Event:
        self.engine.backward(self.engine(torch.randn(1, WIDTH, dtype=torch.bfloat16)).square().mean())
        self.engine.step()
        done = threading.Event()

        def wait() -> None:
            self.engine.offload.gradients.updater.drain()
            done.set()

        threading.Thread(target=wait, daemon=True).start()
        return done


def measure(side: AdamInALoop | Product, name: str, one_pass: Callable[[], None], num_rounds: int) -> None:
    speeds, seconds = [], []
    for round_index in range(-1, num_rounds):   # the first warms up
        before = rate_alone(one_pass)
        beside, took_s = rate(one_pass, side.begin().is_set)
        after = rate_alone(one_pass)
        if round_index >= 0:
            speeds.append(2 * beside / (before + after))
            seconds.append(took_s)
    print(f"{name:44}{statistics.median(speeds):8.2f}{min(speeds):8.2f}{max(speeds):8.2f}"
          f"{statistics.median(seconds):10.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--params", type=int, default=100_000_000)
    parser.add_argument("--folder", help="on the SSD; default: the folder for temporary files")
    parser.add_argument("--tiers", default="host,ssd")
    arguments = parser.parse_args()
    logging.getLogger("lohan_ds").setLevel(logging.WARNING)
    torch.set_num_threads(1)
    print(f"{'speed of the loop beside it, 1 = alone':44}{'median':>8}{'lowest':>8}{'highest':>8}{'update s':>10}")
    for loop_name, one_pass in loops().items():
        measure(AdamInALoop(), f"{loop_name}: Adam alone", one_pass, arguments.rounds)
        for tier in arguments.tiers.split(","):
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                section = {"param_tier": tier, "optimizer_tier": tier, "update": "deferred", "update_threads": 1}
                if tier == "ssd":
                    section["ssd_paths"] = [folder]
                model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(arguments.params // WIDTH ** 2)))
                config = ds_config(section, dtype="bf16", batch=1, optimizer={"type": "AdamW", "params": {"lr": 1e-4}})
                with engine_for(model.bfloat16(), config) as engine:
                    measure(Product(engine), f"{loop_name}: lohan, {tier}", one_pass, arguments.rounds)


if __name__ == "__main__":
    main()
