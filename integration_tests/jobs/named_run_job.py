"""A plain DeepSpeed loop that knows nothing of its past. One argument: a JSON of what to do.

`kill_at`: [step, moment], dies by SIGKILL there: "step" right after step(), "backward" before step(), "save" while a
checkpoint is being written (before its `latest` moves), or a number of seconds after that step.
"""
import json
import os
import signal
import sys
import threading

import deepspeed
import torch

import lohan_ds  # noqa: F401
from lohan_ds.testing.harness import engine_for, engine_state
from lohan_ds.testing.models import lm_batch, loss_of, tiny_llama

job = json.loads(sys.argv[-1])
torch.set_num_threads(1)
torch.manual_seed(0)
kill_step, moment = job.get("kill_at", (None, None))


def die(at):
    if engine.global_steps == kill_step and moment == at:
        os.kill(os.getpid(), signal.SIGKILL)


config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": job["accumulation"],
          "gradient_clipping": job["clip"], "steps_per_print": 10**6,
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
          "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 8}}, **job["ds_config"]}
model = tiny_llama()
model.config.attention_dropout = 0.1   # needs the random numbers of an unbroken run
with engine_for(model, config) as engine:
    begun_at = engine.global_steps
    while engine.global_steps < job["steps"]:
        for micro_step in range(job["accumulation"]):
            engine.backward(loss_of(engine, lm_batch(128, seed=100 * engine.global_steps + micro_step)))
            if micro_step + 1 == job["accumulation"]:
                die("backward")
            engine.step()
        die("step")
        if engine.global_steps == kill_step and isinstance(moment, float):
            threading.Timer(moment, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        if engine.global_steps % 2 == 0 and "checkpoint" in job:
            if engine.global_steps == kill_step and moment == "save":
                torch.save = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
                deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine.torch.save = torch.save
            engine.save_checkpoint(job["checkpoint"])
    state = {f"{name} {kind}": value if isinstance(value, torch.Tensor) else torch.tensor(value)
             for name, entry in engine_state(engine).items() for kind, value in entry.items()}
    torch.save({"state": state, "lr": engine.get_lr(), "begun_at": begun_at,
                "random": torch.rand(3)}, job["out"])
