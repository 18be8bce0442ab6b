"""How often real fine-tuning clips, and what `"update": "auto"` makes of it: SmolLM2-135M on Python's documentation.

    python -m integration_tests.bench_clipping [--accumulation 1 4 16] [--steps 24 12 8] [--clip 1.0] [--seq 128]

Per accumulation: steps clipped, the norms, after which share of the parameters the running norm crossed the limit (in
arrival order), and how many block updates were made in backward and stood, or were dropped.
"""
from __future__ import annotations

import argparse
import pydoc_data.topics
import statistics
import tempfile

import torch

from integration_tests.test_smollm2 import load
from lohan_ds.grad_norm import clip_coefficient
from lohan_ds.testing.harness import ds_config, engine_for
from lohan_ds.testing.models import loss_of


class Arrivals:
    """Follows the running norm of a step from gradient to gradient."""

    def __init__(self, pipeline, limit: float):
        self.limit, self.numel, self.square, self.crossed_at = limit, 0, 0.0, None
        arrive = pipeline.arrive

        def watched(block_index, slot, grad, want_squares):
            arrive(block_index, slot, grad, want_squares)
            if want_squares:
                held = pipeline.gradient(block_index, slot)
                self.numel += held.numel()
                self.square += held.double().square().sum().item()
                if self.crossed_at is None and self.square > self.limit ** 2:
                    self.crossed_at = self.numel

        pipeline.arrive = watched


def measure(accumulation: int, num_steps: int, clip: float, seq: int) -> str:
    model, tokenizer = load()
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0]
    total_numel = sum(p.numel() for p in model.parameters())
    clipped, norms, crossed_shares = 0, [], []
    with tempfile.TemporaryDirectory(prefix="bench_clipping_") as ssd:
        config = ds_config({"ssd_paths": [ssd], "optimizer_tier": "ssd", "param_tier": "ssd"}, clip=clip,
                           batch=1, accumulation=accumulation,
                           optimizer={"type": "AdamW", "params": {"lr": 2e-5, "weight_decay": 0.01}})
        with engine_for(model, config) as engine:
            for step in range(num_steps):
                arrivals = Arrivals(engine.offload.gradients, clip)
                for micro_step in range(accumulation):
                    start = (step * accumulation + micro_step) * seq % (ids.numel() - seq)
                    batch = {"input_ids": ids[start:start + seq][None], "labels": ids[start:start + seq][None]}
                    engine.backward(loss_of(engine, batch))
                    engine.step()
                del engine.offload.gradients.arrive
                norms.append(engine.get_global_grad_norm())
                clipped += clip_coefficient(norms[-1], clip) != 1.0
                crossed_shares.append(1.0 if arrivals.crossed_at is None else arrivals.crossed_at / total_numel)
            update, stats = engine.offload.plan.update, engine.lohan_stats()
    return (f"accumulation {accumulation:2}: clipped in {clipped} of {num_steps} steps; norm {min(norms):.2f} to "
            f"{max(norms):.2f}, median {statistics.median(norms):.2f}; limit crossed after "
            f"{min(crossed_shares):.1%} to {max(crossed_shares):.1%} of the parameters; plan: update {update}; block "
            f"updates in backward: {stats['updates_speculated']} stood, {stats['updates_dropped']} dropped")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--steps", type=int, nargs="+", default=[24, 12, 8], help="for each of them")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--seq", type=int, default=128)
    args = parser.parse_args()
    for accumulation, num_steps in zip(args.accumulation, args.steps):
        torch.manual_seed(0)
        print(measure(accumulation, num_steps, args.clip, args.seq), flush=True)


if __name__ == "__main__":
    main()
