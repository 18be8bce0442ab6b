"""`ReleasedParameter`: what a parameter is while its values are not in accelerator memory.

It keeps its identity, true shape, dtype and device; its data is one NaN expanded to the shape. Reading facts
about it costs nothing. Any torch operation on its *values* first fetches its block, so user code that looks at
`layer.weight` between steps, or a fused loss that reads `lm_head.weight` itself, sees the real numbers.

The class of a live `nn.Parameter` is switched to `ReleasedParameter` and back; the object stays the same.
"""
from __future__ import annotations

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
_DATA_GET = torch.Tensor.data.__get__


class ReleasedParameter(nn.Parameter):
    """See the file docstring. Instances carry `lohan_access`: a callable (list of parameters, via_data) -> None, and
    `lohan_saved_tensors_hooks`: a context in which autograd can save them (it keeps a leaf itself, not its values)."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in VALUE_FREE:
            released = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is ReleasedParameter]
            by_owner: dict = {}
            for param in released:
                by_owner.setdefault(param.lohan_access, []).append(param)
            for access, params in by_owner.items():
                access(params, func == _DATA_GET)
            if released and torch.is_grad_enabled():
                with torch._C.DisableTorchFunctionSubclass(), released[0].lohan_saved_tensors_hooks():
                    return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo):
        copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied


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
