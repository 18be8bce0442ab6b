"""What `lohan plan` predicts of small real runs on this machine against what they take: seconds and bytes per step.

    python -m integration_tests.bench_prediction [--ssd DIR] [--steps 8] [--cases NAME ...]

Measures the machine first (kept for 30 days, as by `lohan profile`), then trains Llamas with random weights, each in a
process of its own, with the plan that the engine makes for itself: all in host memory, or with `host_memory` so small
that most of it lies on the SSD. The rows are `LohanEngine.lohan_comparison()`. Two things are in no prediction: Python
and kernel launches, which weigh the more the smaller the model, and how much slower a model's own operators are than
the large matrix products whose rate was measured; `compute` is the model's FLOPs over the seconds of forward and
backward that were no stall, against that rate.
"""
from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from typing import NamedTuple

import torch

from lohan_ds.profiler.hardware import profile_hardware
from lohan_ds.testing.harness import ds_config, engine_for
from lohan_ds.testing.models import lm_batch, loss_of

SEQUENCE_LENGTH = 128   # tokens
LLAMAS = {"30M": dict(vocab_size=8192, hidden_size=512, intermediate_size=1376, num_hidden_layers=8,
                      num_attention_heads=8, num_key_value_heads=8),
          "134M": dict(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
                       num_attention_heads=9, num_key_value_heads=3)}


class Case(NamedTuple):
    llama: str
    micro_batch: int             # sequences
    host_memory: str | None      # None: what is free


CASES = {"30M-host-1": Case("30M", 1, None), "30M-host-4": Case("30M", 4, None), "30M-ssd-1": Case("30M", 1, "450MB"),
         "30M-ssd-4": Case("30M", 4, "600MB"), "134M-host-1": Case("134M", 1, None),
         "134M-ssd-1": Case("134M", 1, "1900MB"), "134M-ssd-4": Case("134M", 4, "2300MB")}


def run(case: Case, ssd: str, num_steps: int) -> dict:
    """Trains, and returns the rows and what explains them."""
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMAS[case.llama], tie_word_embeddings=True, use_cache=False,
                                         max_position_embeddings=SEQUENCE_LENGTH))
    section = {"ssd_paths": [ssd], "sequence_length": SEQUENCE_LENGTH, "host_memory": case.host_memory or "auto"}
    config = ds_config(section, batch=case.micro_batch, clip=1.0, optimizer={"type": "AdamW", "params": {"lr": 1e-4}})
    vocab_size = model.config.vocab_size
    with engine_for(model, config, model_parameters=model.parameters()) as engine:
        run_plan, busy_s = engine.offload.run_plan, []
        if run_plan.file is None:
            raise SystemExit(f"the engine made no plan by rates: {run_plan.remark}")
        for step in range(num_steps):
            engine.backward(loss_of(engine, lm_batch(vocab_size, case.micro_batch, SEQUENCE_LENGTH, step)))
            engine.step()
            last = engine.lohan_step_summary()
            busy_s.append(last.forward_s + last.backward_s - sum(last.stall_s.values()) + last.stall_s["step"])
        engine.offload.gradients.updater.drain()
        flops = 3 * sum(unit.forward_flops for unit in run_plan.profile.units)
        states = [block.optimizer_state for block in run_plan.file.blocks.values()]
        return {"rows": [dataclasses.asdict(row) | {"error": row.error} for row in engine.lohan_comparison()],
                "states": {tier: states.count(tier) for tier in set(states)},
                "compute": flops / sorted(busy_s)[len(busy_s) // 2] / run_plan.file.hardware.device_flops_per_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ssd", default=tempfile.gettempdir(), help="directory on the SSD")
    parser.add_argument("--steps", type=int, default=8, help="of each run; the first two do not count")
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--only", choices=CASES, help=argparse.SUPPRESS)   # in this process, as JSON
    args = parser.parse_args()
    if args.only:
        print("\n" + json.dumps(run(CASES[args.only], args.ssd, args.steps)))
        return
    hardware, report, _ = profile_hardware([args.ssd], "float32", progress=lambda what: print(f"measuring {what}"))
    print(f"{hardware.name}: {hardware.device_flops_per_s:.3g} FLOP/s, SSD {hardware.ssd_read_bytes_per_s:.3g} B/s "
          f"read, {hardware.ssd_write_bytes_per_s:.3g} B/s written, update {hardware.cpu_update_params_per_s:.3g} "
          "params/s" + ("" if report.is_steady else "; unsteady: others were using this machine"))
    for name in args.cases:
        words = [sys.executable, "-m", "integration_tests.bench_prediction", "--only", name, "--ssd", args.ssd,
                 "--steps", str(args.steps)]
        done = subprocess.run(words, capture_output=True, text=True, env=os.environ)
        if done.returncode:
            print(f"{name} failed:\n{done.stderr[-2000:]}")
            continue
        found = json.loads(done.stdout.splitlines()[-1])
        print(f"\n{name}: optimizer state of blocks on {found['states']}, compute at {found['compute']:.2f} of its "
              "rate")
        for row in found["rows"]:
            values = [("" if value is None else f"{value / 1e6:,.1f} MB" if row["is_bytes"] else f"{value:.3f} s")
                      for value in (row["predicted"], row["measured"])]
            error = "" if row["error"] is None else f"{row['error']:+.0%}"
            print(f"  {row['what']:<40}{values[0]:>12}{values[1]:>12}{error:>8}")


if __name__ == "__main__":
    main()
