"""Trainers on DeepSpeed's engine: its own offloads, and lohan."""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lohan_ds.bench.case import SIZES, Case, Side
from lohan_ds.bench.trainers import TORCH_HYPER
from lohan_ds.testing.harness import ds_config, init_one_rank

_QUIET_S = 0.1     # without a byte moved: nothing is under way


class EngineTrainer:
    """Any `deepspeed.initialize`d engine."""

    def __init__(self, model: nn.Module, config: dict[str, Any], expect: Callable[[Any], str]):
        """`expect`: says of an engine what is wrong with it, "" if nothing is."""
        import deepspeed
        init_one_rank()
        self.engine, *_ = deepspeed.initialize(model=model, config=config)
        problem = expect(self.engine)
        if problem:
            raise RuntimeError(problem)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.engine(**batch).loss

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def grad_norm(self) -> float | None:
        norm = self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def settle(self) -> None:
        """DeepSpeed's own offloads are over when step() is."""

    def close(self) -> None:
        self.engine.destroy()


class LohanTrainer(EngineTrainer):
    def settle(self) -> None:
        offload = self.engine.offload
        offload.gradients.updater.drain()
        moved = None
        while moved != (moved := (offload.store.bytes_read, offload.store.bytes_written)):   # what is read ahead
            time.sleep(_QUIET_S)


def lohan_trainer(model: nn.Module, case: Case, side: Side, folder: str) -> LohanTrainer:
    tier = side.kind.removeprefix("lohan-")
    section: dict[str, Any] = {"param_tier": tier, "optimizer_tier": tier}
    if tier == "ssd":
        section["ssd_paths"] = [folder]
    if side.variant:
        section["update"] = side.variant
    if side.host_memory:
        section["host_memory"] = side.host_memory
    config = _config(case, lohan=section)
    return LohanTrainer(model, config, lambda engine: "" if "offload" in vars(engine) else "lohan is not attached")


def deepspeed_trainer(model: nn.Module, case: Case, side: Side, folder: str) -> EngineTrainer:
    """`side.settings`: see deepspeed_settings.py."""
    settings = side.settings
    optimizer: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    zero: dict[str, Any] = {"stage": 2 if side.kind == "zero2-cpu" else 3, "offload_optimizer": optimizer}
    if side.kind != "zero2-cpu":
        zero.update(sub_group_size=settings["sub_group_size"])
    if side.kind == "zero3-cpu":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    more: dict[str, Any] = {}
    if side.kind in ("zero3-nvme", "zero-infinity"):
        optimizer.update(device="nvme", nvme_path=folder, buffer_count=settings["buffer_count"], fast_init=False,
                         pipeline_read=settings["pipeline"], pipeline_write=settings["pipeline"])
        more["aio"] = {"block_size": settings["aio_block_size"], "queue_depth": settings["aio_queue_depth"],
                       "intra_op_parallelism": settings["aio_threads"], "single_submit": False,
                       "overlap_events": True}
    if side.kind == "zero-infinity":
        size = SIZES[case.size]
        zero["offload_param"] = {"device": "nvme", "nvme_path": folder, "pin_memory": True,
                                 "buffer_count": settings["param_buffer_count"],
                                 "buffer_size": size.vocab * size.hidden}   # elements of the largest parameter
    config = _config(case, zero_optimization=zero, **more)
    return EngineTrainer(model, config, lambda engine: "lohan has attached" if "offload" in vars(engine) else "")


def _config(case: Case, lohan: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    hyper = {**TORCH_HYPER, "betas": list(TORCH_HYPER["betas"])}
    return ds_config(lohan, dtype=case.dtype, clip=case.clip_limit, batch=case.batch,
                     optimizer={"type": "AdamW", "params": hyper}, **more)
