"""Refuses a Hugging Face model that does not fit before its weights are loaded."""
from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator

import torch

from lohan_ds.config import parse

logger = logging.getLogger(__name__)
_building = threading.local()


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Models that this thread builds meanwhile are nobody's to train."""
    before, _building.active = getattr(_building, "active", False), True
    try:
        yield
    finally:
        _building.active = before


def check_before_loading(model, config) -> None:
    """Called as the construction of `model` (a PreTrainedModel) begins. Raises CapacityError with the plan's table.

    Does nothing unless a lohan config is active under ZeRO-3. The model is built once more on the meta device to
    count its bytes. With peft in use the frozen weights cannot be told yet: then only the weights are counted. A plan
    file of the user's is looked at by the engine only.
    """
    if getattr(_building, "active", False):
        return
    lohan_config, ds_config = _active_config()
    if lohan_config is None or lohan_config.plan is not None:   # a plan is of a dtype, and weights have none yet
        return
    twin = _on_meta(type(model), config)
    if twin is None:
        return
    group = None if "peft" in sys.modules else 0
    accumulation = ds_config.get("gradient_accumulation_steps", 1)
    from deepspeed.accelerator import get_accelerator

    from lohan_ds.run_plan import plan_run  # a process without a lohan config never loads it
    device = torch.device(get_accelerator().current_device_name())
    plan_run(twin, lohan_config, lambda p: group if p.requires_grad else None,
             accumulation if isinstance(accumulation, int) else 1, device)


def _active_config():
    from transformers.integrations.deepspeed import deepspeed_config, is_deepspeed_zero3_enabled
    if not is_deepspeed_zero3_enabled():
        return None, None
    ds_config = deepspeed_config()
    if not ds_config or "lohan" not in ds_config:
        return None, None
    return parse(ds_config), ds_config


def _on_meta(model_class, config):
    """The model without memory, or None when it cannot be built from its config alone."""
    from deepspeed.runtime.zero.partition_parameters import restore_init_context, shutdown_init_context
    shutdown_init_context()
    try:
        with unchecked(), torch.device("meta"):
            return model_class(config)
    except Exception as error:  # noqa: BLE001 - the check at deepspeed.initialize remains
        logger.info("lohan could not size %s before loading it: %s", model_class.__name__, error)
        return None
    finally:
        restore_init_context()

