"""What an engine's model costs to run, worked out on a twin of it that has no memory. For models of transformers."""
from __future__ import annotations

import copy

import torch
from torch import nn

from lohan_ds.errors import ConfigError
from lohan_ds.integrations.admission import unchecked
from lohan_ds.integrations.model_sources import example_inputs
from lohan_ds.plan import WHOLE_LOGITS_SHARE, LossTiles
from lohan_ds.profile import ModelProfile
from lohan_ds.profiler.model import profile_model


def profile_live(model: nn.Module, micro_batch: int, sequence_length: int, device_type: str,
                 tiles: LossTiles | None = None) -> ModelProfile:
    """`model` is only looked at: its class, config, mode, and the dtypes and `requires_grad` of its parameters.
    `tiles`: those of the run's loss; None: its logits are always whole.

    ConfigError if it is not of transformers, computes its activations again by itself, or cannot be profiled.
    """
    from transformers import PreTrainedModel
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(f"{name} is no model of transformers, whose cost its config tells")
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ConfigError(f"{name} has gradient checkpointing switched on, which decides about its activations")
    try:
        from transformers.initialization import no_init_weights
        with unchecked(), torch.device("meta"), no_init_weights():
            twin = type(model)(copy.deepcopy(model.config))
        twin.tie_weights()
        live = dict(model.named_parameters())
        for param_name, param in twin.named_parameters():
            param.data = param.data.to(live[param_name].dtype)
            param.requires_grad_(live[param_name].requires_grad)
    except Exception as error:
        raise ConfigError(f"{name} cannot be built from its config: {error!r}") from error
    twin.train(model.training)
    dtype = next(twin.parameters()).dtype
    inputs = example_inputs(twin, micro_batch, sequence_length, dtype)
    if tiles is None:
        return profile_model(twin, inputs, micro_batch, sequence_length, device_type)[0]
    device_bytes = int(tiles.whole_logits_bytes / WHOLE_LOGITS_SHARE)
    return profile_model(twin, inputs, micro_batch, sequence_length, device_type, device_bytes=device_bytes,
                         loss_tile_tokens=None if tiles.is_automatic else tiles.tile_tokens)[0]
