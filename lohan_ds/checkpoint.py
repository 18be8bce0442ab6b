"""Optimizer state to and from DeepSpeed's ZeRO-3 checkpoint layout, so that its own tools read what we write.

One sub group per trained parameter, in the order of `LohanOptimizer.places`. Tensors of the host tier are views
of the store, those of the SSD tier lie in an unlinked file that is mapped, in the checkpoint's own directory: writing
a checkpoint needs no copy of the state in RAM and none within `ssd_space`.
"""
from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lohan_ds.errors import StoreError

if TYPE_CHECKING:
    from lohan_ds.optimizer import LohanOptimizer

_KINDS = ("master", "exp_avg", "exp_avg_sq")


def optimizer_state(optimizer: LohanOptimizer) -> dict:
    """The state dict that DeepSpeed saves for ZeRO-3. Waits for all updates under way."""
    offload = optimizer.offload
    offload.flush()
    offload.gradients.updater.drain()
    masters, states = [], {}
    numel = sum(optimizer._slot(*place).numel for place in optimizer.places)
    export = _Export(optimizer.export_dir or offload.store.scratch_dir, len(_KINDS) * numel)
    for index, place in enumerate(optimizer.places):
        info = optimizer._slot(*place)
        arrays = {}
        for kind in _KINDS:
            array = offload.store.array_view(place[0], kind, info.offset, info.numel)
            if array is None:
                array = export.take(info.numel)
                offload.store.read_array(place[0], kind, info.offset, array)
            arrays[kind] = array
        masters.append(arrays["master"])
        states[index] = {"step": torch.tensor(float(optimizer.steps[place])),
                         "exp_avg": arrays["exp_avg"], "exp_avg_sq": arrays["exp_avg_sq"]}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {
        "zero_stage": 3,
        "loss_scaler": optimizer.loss_scaler,
        "dynamic_loss_scale": optimizer.dynamic_loss_scale,
        "overflow": optimizer.overflow,
        "partition_count": 1,
        "optimizer_state_dict": {"state": states, "param_groups": groups},
        "fp32_flat_groups": masters,
        "param_names": [optimizer._slot(*place).name for place in optimizer.places],
    }


def load_optimizer_state(optimizer: LohanOptimizer, state: dict) -> None:
    """Puts masters, moments, step counts, hyper-parameters and the loss scaler back, bit for bit.

    Raises what `check_fits` does, before anything is written.
    """
    check_fits(optimizer, state)
    saved = state["optimizer_state_dict"]
    for index, place in enumerate(optimizer.places):
        for kind, values in _arrays_of(state, index).items():
            optimizer.offload.write(*place, kind, values)
        optimizer.steps[place] = int(saved["state"][index]["step"])
    for group, loaded in zip(optimizer.param_groups, saved["param_groups"]):
        group.update((key, value) for key, value in loaded.items() if key != "params")
    optimizer.loss_scaler = state["loss_scaler"]
    optimizer.dynamic_loss_scale = state["dynamic_loss_scale"]
    optimizer.overflow = state["overflow"]


def check_fits(optimizer: LohanOptimizer, state: dict) -> None:
    """Raises StoreError, naming the first difference, when the checkpoint is of other parameters or of other sizes."""
    names = [optimizer._slot(*place).name for place in optimizer.places]
    saved_names = state.get("param_names")
    if saved_names is None:
        raise StoreError("this checkpoint was not written by lohan: it has no list of its parameters. Load the "
                         "weights only: load_checkpoint(..., load_optimizer_states=False)")
    if saved_names != names:
        odd = next((f"{a} / {b}" for a, b in zip(saved_names, names) if a != b), "one has more than the other")
        raise StoreError(f"the checkpoint holds {len(saved_names)} trained parameters, this run {len(names)}; first "
                         f"difference (saved / here): {odd}. The same model and optimizer groups are needed")
    for index, place in enumerate(optimizer.places):
        needed = optimizer._slot(*place).numel
        for kind, values in _arrays_of(state, index).items():
            if values.numel() != needed:
                raise StoreError(f"the checkpoint's {kind} of {names[index]}: got {values.numel()} elements, needed "
                                 f"{needed}; it is damaged, or of a model of other sizes")


def _arrays_of(state: dict, index: int) -> dict[str, Tensor]:
    moments = state["optimizer_state_dict"]["state"][index]
    return {"master": state["fp32_flat_groups"][index], "exp_avg": moments["exp_avg"],
            "exp_avg_sq": moments["exp_avg_sq"]}


class _Export:
    """fp32 tensors in a mapped file that has no name, hence nothing to clean up; made when first needed."""

    def __init__(self, directory: str | None, numel: int):
        self._directory, self._numel, self._used = directory, numel, 0
        self._flat: Tensor | None = None

    def take(self, numel: int) -> Tensor:
        if self._flat is None:
            fd, path = tempfile.mkstemp(dir=self._directory, prefix="export-")
            try:
                os.posix_fallocate(fd, 0, max(1, self._numel) * 4)
                self._flat = torch.from_file(path, shared=True, size=max(1, self._numel), dtype=torch.float32)
            except OSError as error:
                raise StoreError(error.errno, f"no room for the {self._numel * 4} bytes of optimizer state that a "
                                 f"checkpoint passes through in {self._directory}: {error.strerror}") from error
            finally:
                os.close(fd)
                os.unlink(path)
        taken = self._flat[self._used:self._used + numel]
        self._used += numel
        return taken
