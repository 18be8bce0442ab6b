"""`TiledHead`: an unmodified language model computes its head and loss in tiles, because its head puts off its work.

The head's forward is wrapped: inside a forward of the model with labels it returns `LazyLogits`, and whatever loss the
model has then meets them. Nothing of the model's own code is copied or replaced: shifted labels, num_items_in_batch and
auxiliary losses are its own. Without labels, or without gradients (evaluation, generation), the head works as ever.

[Note: the head's work]
The head's forward has returned when the loss is due. What is then computed with its weights goes through `run_head`,
which makes it a call of the head as far as fetching and releasing of weights is concerned, there and in backward.
"""
from __future__ import annotations

import inspect
import logging
import types
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from lohan_ds.errors import ConfigError, StepError
from lohan_ds.plan import LossTiles
from lohan_ds.runtime.lazy_logits import LazyLogits
from lohan_ds.runtime.tiled_loss import tiled_cross_entropy

logger = logging.getLogger(__name__)
RunHead = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


class UnknownHead(ValueError):
    """The model has no head that can be computed in tiles. `head`: the one it has, if any."""

    def __init__(self, text: str, head: nn.Module | None = None):
        super().__init__(text)
        self.head = head


def find_head(model: nn.Module) -> tuple[nn.Module, nn.Linear]:
    """The module whose forward takes labels, and its head. UnknownHead with the reason if there is none."""
    for module in model.modules():
        if hasattr(type(module), "get_output_embeddings") and _place_of_labels(module) is not None:
            head = module.get_output_embeddings()
            if head is None:
                continue
            if type(head) is not nn.Linear or "forward" in vars(head):
                kind = f"{type(head).__module__}.{type(head).__name__}"
                raise UnknownHead(f"the head of {type(module).__name__} is a {kind}, not an nn.Linear as torch has it",
                                  head)
            return module, head
    raise UnknownHead(f"{type(model).__name__} is no Hugging Face model with an output embedding and a forward that "
                      "takes labels")


def _place_of_labels(module: nn.Module) -> int | None:
    """Among the arguments of its forward, without self; None if it takes none."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return names.index("labels") if "labels" in names else None


def _run_at_once(function: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    return function(hidden)


def _never_changes() -> Hashable:
    return None


class TiledHead:
    """Of one model. Fixed after construction, but for `_call` and what was said: of the thread that runs forward."""

    def __init__(self, model: nn.Module, tiles: LossTiles):
        """UnknownHead if `model` has no such head."""
        self.language_model, self.head = find_head(model)
        self.tiles = tiles
        self.run_head, self.weights_version = _run_at_once, _never_changes
        self._call: _Call | None = None   # the forward that is running, if it is to be tiled
        self._has_said = False
        self._wrapped: list[tuple[nn.Module, Any, Any]] = []   # modules, our `forward`, and their own before, if any

    def attach(self, run_head: RunHead = _run_at_once,
               weights_version: Callable[[], Hashable] = _never_changes) -> None:
        """Wraps two forwards. A model that is copied afterwards keeps working, on its own parameters.

        `run_head(function, hidden)` calls function(hidden) with the head's weights there. `weights_version` changes
        whenever they do.
        """
        self.run_head, self.weights_version = run_head, weights_version
        place = _place_of_labels(self.language_model)
        for module, make in ((self.language_model, lambda bound: self._model_forward(bound, place)),
                             (self.head, self._head_forward)):
            before, bound = vars(module).get("forward"), module.forward
            module.forward = wrapped = types.MethodType(make(bound), module)
            self._wrapped.append((module, wrapped, before))

    def detach(self) -> None:
        for module, wrapped, before in self._wrapped:
            if vars(module).get("forward") is wrapped:   # else somebody wrapped it again: then ours only hands on
                del module.forward
                if before is not None:
                    module.forward = before
        self._wrapped = []

    def _model_forward(self, bound: Callable, place: int) -> Callable:
        def forward(module: nn.Module, *args, **kwargs):
            labels = args[place] if len(args) > place else kwargs.get("labels")
            original = _rebound(bound, module)
            if labels is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            outer, self._call = self._call, _Call(self, module.get_output_embeddings())
            try:
                return original(*args, **kwargs)
            finally:
                self._call.is_running = False
                self._call = outer
        return _named_like(bound, forward)

    def _head_forward(self, bound: Callable) -> Callable:
        def forward(module: nn.Module, hidden: Tensor):
            if self._call is None or self._call.head is not module or not self.tiles.apply_to(
                    hidden.numel() // module.in_features, module.out_features, hidden.dtype.itemsize):
                return _rebound(bound, module)(hidden)
            return LazyLogits(self._call, hidden, torch.Size((*hidden.shape[:-1], module.out_features)), hidden.dtype)
        return _named_like(bound, forward)

    def whole(self, function: Callable) -> None:
        """The model needs all logits. ConfigError if the user asked for tiles by name."""
        text = (f"{type(self.language_model).__name__} needs all logits for {getattr(function, '__name__', function)} "
                "in its forward, so they cannot be computed in tiles")
        if not self.tiles.is_automatic:
            raise ConfigError(f"lohan.loss_tile_tokens: got {self.tiles.tile_tokens}, but {text}; remove it")
        if not self._has_said:
            self._has_said = True
            logger.warning("%s: leave room for them", text)


class _Call:
    """One forward of a model with labels; kept alive by the LazyLogits that it made."""

    def __init__(self, tiled_head: TiledHead, head: nn.Linear):
        self.head = head
        self.is_running = True
        self._of, self._version = tiled_head, tiled_head.weights_version()

    def whole(self, function: Callable) -> None:
        self._of.whole(function)

    def all_logits(self, hidden: Tensor) -> Tensor:
        return self._of.run_head(lambda hidden: nn.Linear.forward(self.head, hidden), hidden)

    def tiled_loss(self, hidden: Tensor, labels: Tensor, transform: Callable[[Tensor], Tensor] | None,
                   **options: Any) -> Tensor:
        head, tile_tokens = self.head, self._of.tiles.tile_tokens
        return self._of.run_head(
            lambda hidden: tiled_cross_entropy(hidden, head.weight, labels, tile_tokens, head.bias,
                                               transform=transform, **options), hidden)

    def check_current(self) -> None:
        if self._of.weights_version() != self._version:
            raise StepError("outputs.logits are computed when they are looked at, because the loss is computed in "
                            "tiles; after step() the weights are others: look at them before")


def _rebound(bound: Callable, module: nn.Module) -> Callable:
    """The forward `bound` of the module itself, or of a copy of it."""
    return types.MethodType(bound.__func__, module) if isinstance(bound, types.MethodType) else bound


def _named_like(bound: Callable, forward: Callable) -> Callable:
    """With the signature of the forward that it wraps: Trainer looks at it to learn what a model takes."""
    forward.__wrapped__ = getattr(bound, "__func__", bound)
    forward.__name__, forward.__doc__ = "forward", bound.__doc__
    return forward
