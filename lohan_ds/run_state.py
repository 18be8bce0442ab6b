"""What a commit keeps beside the blocks' bytes, so that a run goes on as if it had not ended: counters, hyper-
parameters, loss scale, LR schedule and random number generators. In msgpack: nothing is unpickled when it is read.
"""
from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import msgpack
import torch
from deepspeed.accelerator import get_accelerator

from lohan_ds.errors import ConfigError

if TYPE_CHECKING:
    from lohan_ds.engine import LohanEngine

RUN_MARK = "lohan_run"   # a file that marks a directory as standing for the run itself, not for a checkpoint of it
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


def pack_state(engine: LohanEngine) -> bytes:
    """Of an engine between two steps. ConfigError for an LR scheduler whose state is more than plain values."""
    optimizer = engine.optimizer
    scheduler = engine.lr_scheduler
    state = {
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
        "steps": [optimizer.steps[place] for place in optimizer.places],
        "groups": [{key: _plain(value) for key, value in group.items() if key != "params"}
                   for group in optimizer.param_groups],
        "loss_scaler": _scalars(optimizer.loss_scaler),
        "clipped": list(optimizer.clip_history),
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "random": engine.random_state or get_random_state(),   # the one that is yet to be put back, if any
    }
    try:
        return msgpack.packb(state)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"lohan.run_name: the state of {type(scheduler).__name__} cannot be kept over a crash "
                          f"({error}); use a scheduler whose state_dict() has plain values only, or no run_name"
                          ) from None


def unpack_state(engine: LohanEngine, data: bytes) -> dict[str, Any]:
    """Puts everything back but the random number generators, whose state is returned for `set_random_state`."""
    state = msgpack.unpackb(data, strict_map_key=False)
    optimizer = engine.optimizer
    for name, value in state["counters"].items():
        setattr(engine, name, value)
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    optimizer.steps.update(zip(optimizer.places, state["steps"]))
    for group, saved in zip(optimizer.param_groups, state["groups"]):
        for key, value in saved.items():
            old = group.get(key)
            if isinstance(old, torch.Tensor):
                old.fill_(value)
            else:
                group[key] = tuple(value) if isinstance(old, tuple) else value
    vars(optimizer.loss_scaler).update(state["loss_scaler"])
    optimizer.clip_history.extend(state["clipped"])
    if engine.lr_scheduler is not None and state["scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(state["scheduler"])
    return state["random"]


def get_random_state() -> dict[str, Any]:
    """Of torch on host and device, Python, and NumPy where it is in use."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"torch": _bytes_of(torch.get_rng_state()), "python": [version, list(numbers), gauss]}
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        state["device"] = _bytes_of(accelerator.get_rng_state())
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, keys.tobytes(), position, has_gauss, cached]
    return state


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(_tensor_of(state["torch"]))
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "device" in state and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(_tensor_of(state["device"]))
    if "numpy" in state and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _scalars(thing: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(thing).items() if isinstance(value, (bool, int, float, str, type(None)))}


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
