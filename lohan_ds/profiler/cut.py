"""Where the graph of a unit is cut from the rest, and stand-ins for the outputs of units that did not run."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Cut(torch.autograd.Function):
    """The same storage, with no way back. Not a leaf, so it may be changed in place like any activation."""

    @staticmethod
    def forward(ctx, anchor: Tensor, tensor: Tensor) -> Tensor:
        return tensor.detach()   # autograd takes it for a new tensor, not for a view

    @staticmethod
    def backward(ctx, grad: Tensor):
        return None, None


def make_anchor() -> Tensor:
    """() meta: what makes a cut tensor require a gradient. Autograd never reaches it."""
    return torch.empty((), device="meta", requires_grad=True)


def cut(tensor: Any, anchor: Tensor) -> Any:
    """A differentiable tensor without its graph; anything else as it is."""
    return _Cut.apply(anchor, tensor.detach()) if isinstance(tensor, Tensor) and tensor.requires_grad else tensor


def is_cut(tensor: Tensor) -> bool:
    return tensor.grad_fn is not None and tensor.grad_fn.name() == "_CutBackward"


def run_backward(tensors: list[Any], retain_graph: bool = False) -> None:
    """The backward of the part of the graph that leads to those of `tensors` that have one, up to the cuts."""
    roots = [t for t in tensors if isinstance(t, Tensor) and t.grad_fn is not None and not is_cut(t)]
    if roots:
        torch.autograd.backward(roots, [torch.empty_like(t) for t in roots], retain_graph=retain_graph)
