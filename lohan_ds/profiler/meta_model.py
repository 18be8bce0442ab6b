"""A model and its arguments on the meta device: all shapes, no memory."""
from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lohan_ds.errors import ConfigError
from lohan_ds.model_blocks import true_shape


def meta_model(model: nn.Module) -> nn.Module:
    """`model` itself if all of it is on meta already, else a copy that is; tied parameters stay tied.

    Nothing of the size of a parameter or buffer is allocated. ConfigError if the model cannot be copied.
    """
    tensors = [*model.parameters(), *model.buffers()]
    if all(tensor.is_meta for tensor in tensors):
        return model
    memo = {id(tensor): _meta_twin(tensor) for tensor in tensors}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ConfigError(f"{type(model).__name__} cannot be copied to the meta device to work out its cost: {error}; "
                          "build it there: with torch.device(\"meta\")") from error


def meta_arguments(arguments: Any) -> Any:
    """The same structure with every tensor replaced by an empty one on meta."""
    return tree_map(lambda leaf: _meta_like(leaf) if isinstance(leaf, Tensor) else leaf, arguments)


def _meta_twin(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return _meta_like(tensor)
    data = torch.empty(true_shape(tensor), dtype=tensor.dtype, device="meta")
    return nn.Parameter(data, requires_grad=tensor.requires_grad)


def _meta_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(tensor.requires_grad)
