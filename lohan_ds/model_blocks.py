"""Cuts a model into units (modules that run as a whole) and blocks (their parameters). The one size table of a run."""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from lohan_ds.block import DTYPE_BYTES, Block, make_block
from lohan_ds.errors import ConfigError
from lohan_ds.runtime.param_streamer import Unit


class ModelBlocks(NamedTuple):
    units: tuple[Unit, ...]
    blocks: tuple[Block, ...]
    params: tuple[tuple[nn.Parameter, ...], ...]   # [block][slot], the live objects


def true_shape(param: nn.Parameter) -> tuple[int, ...]:
    """The shape of a parameter, also when ZeRO-3 has partitioned it."""
    return tuple(param.ds_shape if hasattr(param, "ds_shape") else param.shape)


def values_of(param: nn.Parameter) -> Tensor:
    """The tensor that holds a parameter's values before the store does: ZeRO-3's partition or its own data."""
    return param.ds_tensor if getattr(param, "ds_tensor", None) is not None else param.data


def split_into_blocks(model: nn.Module, group_of: Callable[[nn.Parameter], int | None],
                      chunk_numel: int) -> ModelBlocks:
    """Units in the order their modules are registered, which is forward order for all common models.

    `group_of(param)` is the optimizer group of a trained parameter and None for a frozen one. A parameter with
    several owners (tied weights) belongs to the block of its first; the other units need that block too.
    Works on meta tensors and on partitioned parameters. Raises ConfigError for a dtype that has no block form.
    """
    names = {id(param): name for name, param in model.named_parameters()}
    units: list[Unit] = []
    blocks: list[Block] = []
    params: list[tuple[nn.Parameter, ...]] = []
    home: dict[int, int] = {}  # id of a parameter -> index of its block
    for unit_name, module, unit_params in _find_units(model, ""):
        fresh: dict[tuple[str, bool], list[nn.Parameter]] = {}
        for param in unit_params:
            if id(param) not in home:
                home[id(param)] = -1
                fresh.setdefault((_dtype_name(param, names[id(param)]), group_of(param) is not None), []).append(param)
        for (dtype, _), members in fresh.items():
            index = len(blocks)
            rows = [(names[id(p)], true_shape(p), group_of(p)) for p in members]
            blocks.append(make_block(index, unit_name or type(model).__name__, dtype, rows, chunk_numel))
            params.append(tuple(members))
            home.update((id(p), index) for p in members)
        needed = tuple(dict.fromkeys(home[id(p)] for p in unit_params))
        units.append(Unit(unit_name or type(model).__name__, module, needed))
    if not blocks:
        raise ConfigError("the model has no parameters, so there is nothing for lohan to train")
    return ModelBlocks(tuple(units), tuple(blocks), tuple(params))


def _find_units(module: nn.Module, name: str):
    """(name, module, parameters): each child of a ModuleList or Sequential is one unit with all that is inside it;
    elsewhere every module with parameters of its own is one."""
    own = list(module.parameters(recurse=False))
    if own:
        yield name, module, own
    for child_name, child in module.named_children():
        full_name = f"{name}.{child_name}" if name else child_name
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            inside = list(child.parameters())
            if inside:
                yield full_name, child, inside
        else:
            yield from _find_units(child, full_name)


def _dtype_name(param: nn.Parameter, name: str) -> str:
    dtype = str(param.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"parameter {name} is {dtype}; lohan stores {', '.join(DTYPE_BYTES)}")
    return dtype
