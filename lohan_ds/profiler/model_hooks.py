"""What is hooked into a model while it is profiled, and taken out again: module names, calls of units, gradients."""
from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.nn.modules import module as module_hooks

from lohan_ds.runtime.param_streamer import Unit


class ModulePaths:
    """The full name of the deepest module that is running. One thread. `on_change` is called when `current` changes."""

    def __init__(self, model: nn.Module, on_change: Callable[[], None]):
        self._names = {id(module): name for name, module in model.named_modules()}
        self._on_change = on_change
        self._running: list[str] = []

    @property
    def current(self) -> str:
        return self._running[-1] if self._running else ""

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, `current` is right. After an exception it stays at the module that raised it."""
        def enter(module: nn.Module, args) -> None:
            self._running.append(self._names.get(id(module), self.current))
            self._on_change()

        def leave(module: nn.Module, args, output) -> None:
            self._running.pop()
            self._on_change()

        handles = [module_hooks.register_module_forward_pre_hook(enter),
                   module_hooks.register_module_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextlib.contextmanager
def calls_through(units: Sequence[Unit], call: Callable[..., Any]) -> Iterator[None]:
    """Inside, a call of a unit that has no other units in it is `call(index, its forward, arguments)`."""
    modules = {id(unit.module) for unit in units}
    restores: list[tuple[nn.Module, Any]] = []
    try:
        for index, unit in enumerate(units):
            if any(id(m) in modules for m in unit.module.modules() if m is not unit.module):
                continue
            own = vars(unit.module).get("forward")
            unit.module.forward = functools.partial(call, index, unit.module.forward)
            restores.append((unit.module, own))
        yield
    finally:
        for module, own in restores:
            del module.forward
            if own is not None:
                module.forward = own


@contextlib.contextmanager
def gradients_taken(model: nn.Module) -> Iterator[None]:
    """Inside, a parameter's gradient is gone as soon as it is there, as under the gradient pipeline."""
    def take(param: nn.Parameter) -> None:
        param.grad = None

    handles = [p.register_post_accumulate_grad_hook(take) for p in model.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
