"""`ReleasedParameter`: what a parameter is while its values are not in accelerator memory.

It keeps its identity, true shape, dtype and device; its data is one NaN expanded to the shape. Reading facts
about it costs nothing. Any torch operation on its *values* first fetches its block, so user code that looks at
`layer.weight` between steps, or a fused loss that reads `lm_head.weight` itself, sees the real numbers.

The class of a live `nn.Parameter` is switched to `ReleasedParameter` and back; the object stays the same.
"""
from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

_FACTS = ("shape", "dtype", "device", "requires_grad", "grad", "_grad", "is_leaf", "layout", "ndim", "grad_fn", "name",
          "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mps", "is_xpu", "is_xla",
          "itemsize", "nbytes", "output_nr", "retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks",
          "_base", "_version", "names")
_FACT_METHODS = ("size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "__len__",
                 "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "__hash__",
                 "get_device", "ndimension", "is_signed", "is_inference")


def _value_free_functions() -> frozenset:
    functions = set()
    for name in _FACTS:
        attribute = getattr(torch.Tensor, name, None)
        if hasattr(attribute, "__get__"):
            functions.add(attribute.__get__)
    for name in ("grad", "requires_grad", "_backward_hooks", "_grad"):
        functions.add(getattr(torch.Tensor, name).__set__)
    functions.add(torch.Tensor.grad.__delete__)
    functions.update(getattr(torch.Tensor, name) for name in _FACT_METHODS if hasattr(torch.Tensor, name))
    functions.update((torch.numel, torch.is_floating_point, torch.is_complex))
    return frozenset(functions)


VALUE_FREE = _value_free_functions()


class ReleasedParameter(nn.Parameter):
    """See the file docstring. Instances carry `lohan_access(params)`, called before their values are used,
    `lohan_handed_out(params)`, after a use that may have changed them without a trace or let somebody do so later, and
    `lohan_saved_tensors_hooks`: a context in which autograd can save them (it keeps a leaf itself, not its values)."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in VALUE_FREE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        released = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is ReleasedParameter]
        by_owner: dict = {}
        for param in released:
            by_owner.setdefault(param.lohan_access, []).append(param)
        for access, params in by_owner.items():
            access(params)
        is_saving = released and torch.is_grad_enabled()
        saving = released[0].lohan_saved_tensors_hooks() if is_saving else contextlib.nullcontext()
        result = None
        try:
            with torch._C.DisableTorchFunctionSubclass(), saving:
                result = func(*args, **kwargs)
            return result
        finally:
            if _hands_out(result, released):
                for params in by_owner.values():
                    params[0].lohan_handed_out(params)

    def __deepcopy__(self, memo):
        copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied


def _hands_out(result: Any, params: list[nn.Parameter]) -> bool:
    """Whether what an operation gave allows to change these parameters' values unseen: `_version` counts neither what
    is done through `.data`, `.detach().numpy()` or an address, of a view too, nor what torch's fused optimizers do."""
    tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    if not tensors:
        return True
    with torch._C.DisableTorchFunctionSubclass():
        storages = {param.untyped_storage().data_ptr() for param in params}
        return any(tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in storages
                   for tensor in tensors)


def mark_released(param: nn.Parameter, placeholder: torch.Tensor) -> None:
    """Drops the values of `param`; `placeholder` is a tensor of its shape, dtype and device without memory."""
    with torch._C.DisableTorchFunctionSubclass():
        param.data = placeholder
    param.__class__ = ReleasedParameter


def mark_resident(param: nn.Parameter, values: torch.Tensor) -> None:
    """Gives `param` its values back. `values`: its shape, dtype, device; a view of the block's buffer."""
    param.__class__ = nn.Parameter
    param.data = values


def mark_watched(param: nn.Parameter, watched: bool) -> None:
    """While a parameter has its values: whether its uses are noticed, as those of a released one are."""
    param.__class__ = ReleasedParameter if watched else nn.Parameter
