"""`LazyLogits`: what a head returns while its model computes a loss in tiles. It has the shape of logits and no memory.

Slices and views of tokens, and functions of each element by itself (a scale, a soft cap, a change of dtype), are put
off: they give LazyLogits again. `F.cross_entropy` of them is taken in tiles. Anything else makes all of the logits:

* inside the model's forward they are what the model would have had without tiles, with their graph;
* after it (`outputs.logits` in the user's hands) they are values to look at, computed when asked for. A gradient
  through them is an error, since such a loss would have the logits whole. After step() they are an error, too.

Shapes: (..., V) logits of hidden states (..., H).
"""
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lohan_ds.errors import StepError
from lohan_ds.runtime.released_parameter import VALUE_FREE

Transform = tuple[tuple[Callable, tuple, dict], ...]   # functions of logits, with their further arguments

_T = Tensor
_ELEMENTWISE = frozenset((
    torch.tanh, _T.tanh, torch.mul, _T.mul, _T.__mul__, _T.__rmul__, torch.div, _T.div, _T.__truediv__,
    torch.clamp, _T.clamp, _T.float, _T.double, _T.half, _T.bfloat16))
_VIEWS = frozenset((_T.view, _T.reshape, torch.reshape))
_FLATTENS = frozenset((_T.flatten, torch.flatten))


class HeadCall(Protocol):
    """One forward of a model whose loss is computed in tiles."""
    is_running: bool

    def all_logits(self, hidden: Tensor) -> Tensor:
        """(..., V), as the head computes them."""

    def whole(self, function: Callable) -> None:
        """The model's own forward needs all logits for `function`."""

    def tiled_loss(self, hidden: Tensor, labels: Tensor, transform: Callable[[Tensor], Tensor] | None,
                   **options: Any) -> Tensor:
        """As tiled_loss.tiled_cross_entropy, with this head's weights."""

    def check_current(self) -> None:
        """StepError if the head's weights are not what they were in forward."""


class LazyLogits(torch.Tensor):
    """See the file docstring. One thread."""

    @staticmethod
    def __new__(cls, call: HeadCall, hidden: Tensor, shape: torch.Size, dtype: torch.dtype, transform: Transform = ()):
        lazy = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=hidden.device)
        lazy._call, lazy._hidden, lazy._transform = call, hidden, transform
        lazy._all = None   # the logits, once somebody needed them
        return lazy

    def __repr__(self) -> str:
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}: computed when looked at)"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in VALUE_FREE:
            lazy = args[0] if args else None
            if isinstance(lazy, LazyLogits) and lazy._call.is_running and lazy._all is None:
                later = lazy._put_off(func, args[1:], kwargs)
                if later is not None:
                    return later
            args, kwargs = _computed(args, func), _computed(kwargs, func)
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise StepError(f"{func} got logits that are not computed, because the loss is taken in tiles, and in a way "
                        "in which they cannot be; set lohan.loss_tile_tokens to 0")

    def _put_off(self, func: Callable, more: tuple, kwargs: dict[str, Any]) -> Tensor | None:
        """The result without all logits, if there is a way."""
        if func is F.cross_entropy:
            return self._cross_entropy(*more, **kwargs)
        if func is _T.contiguous:
            return self
        if func is _T.__getitem__ and _keeps_last_axis(more[0], self.dim()):
            return self._of(self._hidden[more[0]], self._transform)
        lead = self._leading_sizes(func, more, kwargs)
        if lead is not None:
            return self._of(self._hidden.reshape(*lead, self._hidden.shape[-1]), self._transform)
        to_dtype = func is _T.to and not kwargs and len(more) == 1 and isinstance(more[0], torch.dtype)
        if to_dtype or (func in _ELEMENTWISE and not _has_tensor((more, kwargs))):
            dtype = func(torch.empty((), dtype=self.dtype, device="meta"), *more, **kwargs).dtype
            return LazyLogits(self._call, self._hidden, self.shape, dtype, (*self._transform, (func, more, kwargs)))
        if func is _T.to and not kwargs and more == (self.device,):
            return self
        return None

    def _of(self, hidden: Tensor, transform: Transform) -> LazyLogits:
        return LazyLogits(self._call, hidden, torch.Size((*hidden.shape[:-1], self.shape[-1])), self.dtype, transform)

    def _leading_sizes(self, func: Callable, more: tuple, kwargs: dict[str, Any]) -> list[int] | None:
        """Of a view that leaves the last axis alone: the sizes of the others, one of them may be -1. Else None."""
        if func in _FLATTENS and len(more) == 2 and not kwargs:
            start, end = (axis % self.dim() for axis in more)
            return [*self.shape[:start], -1, *self.shape[end + 1:-1]] if start <= end < self.dim() - 1 else None
        sizes = more[0] if len(more) == 1 and isinstance(more[0], (tuple, list)) else more
        if func not in _VIEWS or kwargs or not sizes or not all(isinstance(size, int) for size in sizes):
            return None
        *lead, last = sizes
        num_rows, known = math.prod(self.shape[:-1]), math.prod(size for size in lead if size != -1)
        fits = known > 0 and num_rows % known == 0 if -1 in lead else known == num_rows
        return lead if fits and (last == self.shape[-1] or (last == -1 and -1 not in lead)) else None

    def _cross_entropy(self, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
                       label_smoothing=0.0) -> Tensor | None:
        """Arguments of F.cross_entropy. None for what is not taken in tiles."""
        plain = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
        if not plain or reduction == "none" or self.dim() != 2 or target.dim() != 1 or target.is_floating_point():
            return None
        transform = self._transformed if self._transform else None
        loss = self._call.tiled_loss(self._hidden, target, transform, ignore_index=ignore_index, reduction=reduction)
        return loss.to(self.dtype)

    def _transformed(self, logits: Tensor) -> Tensor:
        for func, more, kwargs in self._transform:
            logits = func(logits, *more, **kwargs)
        return logits

    def _compute(self, func: Callable) -> Tensor:
        """All logits, kept for whoever asks again."""
        if self._all is None:
            if self._call.is_running:
                self._call.whole(func)
                self._all = self._transformed(self._call.all_logits(self._hidden))
            else:
                self._call.check_current()
                with torch.no_grad():
                    values = self._transformed(self._call.all_logits(self._hidden))
                self._all = values if not torch.is_grad_enabled() else _OnlyToLookAt.apply(
                    values, torch.empty((), device=values.device, requires_grad=True))
        return self._all


class _OnlyToLookAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, anchor: Tensor) -> Tensor:   # of an anchor that requires a gradient
        return values.view_as(values)

    @staticmethod
    def backward(ctx, grad: Tensor):
        raise StepError("backward through outputs.logits of a model whose loss is computed in tiles: they are only "
                        "there to look at. A loss of your own from logits needs lohan.loss_tile_tokens 0, or a call of "
                        "the model without labels")


def _computed(leaves: Any, func: Callable) -> Any:
    """The same structure of arguments with logits in the place of LazyLogits."""
    if isinstance(leaves, LazyLogits):
        return leaves._compute(func)
    if isinstance(leaves, (tuple, list)) and not hasattr(leaves, "_fields"):
        return type(leaves)(_computed(leaf, func) for leaf in leaves)
    if isinstance(leaves, dict):
        return {key: _computed(value, func) for key, value in leaves.items()}
    return leaves


def _has_tensor(leaves: Any) -> bool:
    if isinstance(leaves, (tuple, list)):
        return any(map(_has_tensor, leaves))
    return any(map(_has_tensor, leaves.values())) if isinstance(leaves, dict) else isinstance(leaves, Tensor)


def _keeps_last_axis(index: Any, num_axes: int) -> bool:
    """Whether an index takes slices and places of the other axes only."""
    index = index if isinstance(index, tuple) else (index,)
    if not all(part is Ellipsis or isinstance(part, (slice, int)) for part in index):
        return False
    if Ellipsis in index or len(index) == num_axes:
        return index[-1] == slice(None) and index.count(Ellipsis) <= 1
    return len(index) < num_axes
