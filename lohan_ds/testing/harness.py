"""One-process engines on the CPU, for tests and `lohan verify`: made from a few words, compared by their state."""
from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import lohan_ds  # noqa: F401 - attaches to deepspeed
from lohan_ds.step_protocol import Stage
from lohan_ds.testing.twin import State

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}


def init_one_rank() -> None:
    """Makes this process rank 0 of 1 on the CPU accelerator, unless a launcher already made it something.

    One rank needs no collectives over shared memory, for which DeepSpeed would compile an op (30 s, and a compiler).
    """
    launched = "RANK" in os.environ
    if not launched:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import deepspeed
    if os.environ["WORLD_SIZE"] == "1":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed()


def ds_config(lohan: dict[str, Any] | None, *, dtype: str = "fp32", clip: float = 0.0, accumulation: int = 1,
              optimizer: dict | None = None, batch: int = 2, **more: Any) -> dict[str, Any]:
    """A DeepSpeed config; `lohan` None leaves the section out (and asks for plain ZeRO-3)."""
    config = {"train_micro_batch_size_per_gpu": batch, "gradient_accumulation_steps": accumulation,
              "gradient_clipping": clip, "steps_per_print": 1_000_000, "zero_optimization": {"stage": 3}, **more}
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    if optimizer is not None:
        config["optimizer"] = optimizer
    if lohan is not None:
        config["lohan"] = lohan
    return config


@contextlib.contextmanager
def engine_for(model: nn.Module, config: dict, optimizer: Any = None, lr_scheduler: Any = None,
               make_offload: Callable[..., Any] | None = None, **kwargs: Any) -> Iterator[Any]:
    """`deepspeed.initialize` in this process; destroys the engine at the end. `make_offload`: instead of `Offload`."""
    import deepspeed
    init_one_rank()
    from lohan_ds.engine import LohanEngine
    seam = patch.object(LohanEngine, "make_offload", staticmethod(make_offload)) if make_offload is not None else \
        contextlib.nullcontext()
    with seam:
        engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer, lr_scheduler=lr_scheduler,
                                          **kwargs)
    try:
        yield engine
    finally:
        engine.destroy()


def finish_speculation(engine: Any, timeout_s: float = 30.0) -> list[Stage]:
    """Waits until the engine has updated all the blocks that it may update before step(): their stages.

    StepError when background work failed, TimeoutError when it takes too long.
    """
    gradients, deadline = engine.offload.gradients, time.monotonic() + timeout_s
    gradients.wait_collected()
    while True:
        gradients.updater.check()
        stages = gradients.updater.stages()
        if not {Stage.READY, Stage.SPECULATING, Stage.DROPPED}.intersection(stages):
            return stages
        if time.monotonic() > deadline:
            raise TimeoutError(f"speculation still under way: {stages}")
        time.sleep(0.001)


def engine_state(engine: Any) -> State:
    """Everything an engine holds of its parameters, as `Twin.state` gives it."""
    offload, optimizer = engine.offload, engine.optimizer
    offload.gradients.updater.drain()
    offload.streamer.release_all()
    state: State = {}
    for block in offload.blocks:
        for slot, info in enumerate(block.slots):
            entry: dict[str, Any] = {"param": offload.read(block.index, slot, "param")}
            if block.trainable:
                for kind in ("master", "exp_avg", "exp_avg_sq"):
                    entry[kind] = offload.read(block.index, slot, kind)
                entry["step"] = optimizer.steps[block.index, slot]
            state[info.name] = entry
    return state
