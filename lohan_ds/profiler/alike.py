"""Are two calls of units alike, so that one of them tells what the other costs? Compared by what decides shapes."""
from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

_PLACE_IN_MODEL = ("idx", "index", "layer_id", "layer_num")   # in names of attributes that only count the layers


def module_key(module: nn.Module) -> tuple:
    """Equal for modules of the same classes, parameters, buffers, settings and mode, all the way down."""
    return tuple((name, type(child), child.training, _settings(child), _tensors(child._parameters),
                  _tensors(child._buffers)) for name, child in module.named_modules())


def inputs_key(args: tuple, kwargs: dict[str, Any]) -> tuple:
    """Equal for arguments of the same structure, shapes, dtypes and plain values; other objects count by class."""
    leaves, structure = tree_flatten((args, kwargs))
    return repr(structure), tuple(_leaf_key(leaf) for leaf in leaves)


def is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
    return (type(leaf), leaf) if is_plain(leaf) else type(leaf)


def _settings(module: nn.Module) -> tuple:
    """A rate counts as zero or not: one that grows with depth, as of stochastic depth, changes no shape."""
    found = []
    for name, value in vars(module).items():
        if name.startswith("_") or not is_plain(value) or any(part in name for part in _PLACE_IN_MODEL):
            continue
        found.append((name, bool(value) if isinstance(value, float) else value))
    return tuple(found)


def _tensors(named: dict[str, Tensor | None]) -> tuple:
    return tuple((name, t.shape, t.dtype, t.requires_grad) for name, t in named.items() if t is not None)
