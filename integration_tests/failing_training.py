"""The script that test_failures.py runs and ends in bad ways: plain deepspeed.initialize, slow SSD writes.

usage: failing_training.py SSD_DIR STATUS_FILE HOW. HOW "raise": fails in step 2; "loop": trains for ever, slowly;
"finish": trains 3 steps and forgets to destroy the engine; "edit": the same in a run with the name "edited", of which
it changes two weights last. Appends a line to STATUS_FILE as it gets along.
"""
import os
import sys
import time

os.environ["LOHAN_DS_NATIVE_OPS"] = "0"   # the delay is put into the threads of Python

import deepspeed
import torch
from torch import nn

from lohan_ds.store.ssd_io import ThreadSsdIo

ssd, status_file, how = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
pwrite = ThreadSsdIo._pwrite
write_delay_s = 0.0


def slow_pwrite(self, fd, view, offset):
    time.sleep(write_delay_s)
    return pwrite(self, fd, view, offset)


def say(text):
    with open(status_file, "a") as file:
        file.write(text + "\n")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        if how == "raise" and step == 2:
            raise RuntimeError("step 2 is bad")
        return x.square().mean()


ThreadSsdIo._pwrite = slow_pwrite
step = 0
config = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1.0, "zero_optimization": {"stage": 3},
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
          "lohan": {"ssd_paths": [ssd], "param_tier": "ssd", "optimizer_tier": "ssd", "chunk_bytes": "24KiB"}}
if how == "edit":
    config["lohan"]["run_name"] = "edited"
engine, *_ = deepspeed.initialize(model=Model(), config=config)
if how == "loop":
    write_delay_s = 0.5  # 8 layers of 33 chunks, two writes each, on 4 threads: an update takes more than a minute
while how == "loop" or step < 3:
    engine.backward(engine(torch.randn(2, 256)))
    engine.step()
    say(f"step {step}")
    step += 1
if how == "edit":
    with torch.no_grad():
        for layer in (0, 7):
            engine.module.layers[layer].weight.fill_(0.25)
say("finished")
