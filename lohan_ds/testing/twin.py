"""`Twin`: what out-of-core training must equal bit for bit. Serial, in memory, plain torch, whole tensors. A model on a
GPU computes there; its masters, moments and fp32 gradients are on the host all the same, where our Adam is.

It follows DeepSpeed where DeepSpeed decides the numbers: the loss is divided by the number of micro-steps and then
multiplied by the loss scale before backward, and the clip coefficient is its formula.
"""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lohan_ds.adam import adam_update_, check_supported, hyper_from_group
from lohan_ds.grad_norm import clip_coefficient, global_norm, sum_of_squares
from lohan_ds.testing.models import loss_of, tiled_loss_of

State = dict[str, dict[str, Any]]  # parameter name -> kind -> tensor (of the parameter's shape) or step count
Groups = Iterable[dict[str, Any]]
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element bytes


class Twin:
    """Trains `model` in place.

    `optimizer` is a torch optimizer that never steps: it carries the groups, so learning-rate schedulers attach to it
    and tests may edit `groups`. `loss_scale` may be changed between steps. Parameters in no group, and frozen ones,
    are never touched.
    """

    def __init__(self, model: nn.Module, param_groups: Groups | Callable[[nn.Module], Groups] | None = None,
                 dtype: torch.dtype = torch.float32, clip: float = 0.0, accumulation: int = 1, decoupled: bool = True,
                 loss_scale: float = 1.0, loss_tile_tokens: int = 0, **defaults: Any):
        """param_groups: dicts as for torch.optim, a function that makes them from the model, or None for one group.

        dtype: of the parameters (buffers keep theirs). clip: largest gradient norm, 0 is off. accumulation:
        micro-steps per step. decoupled: AdamW, else Adam with L2. loss_tile_tokens: as lohan's key, 0 is whole; the
        model is then a Hugging Face causal LM. defaults: lr, betas, eps, weight_decay.
        """
        for param in model.parameters():
            if param.is_floating_point():
                param.data = param.data.to(dtype).contiguous()
        if callable(param_groups):
            param_groups = param_groups(model)
        if param_groups is None:
            param_groups = [{"params": [p for p in model.parameters() if p.requires_grad]}]
        carrier = torch.optim.AdamW if decoupled else torch.optim.Adam
        self.model = model
        self.optimizer = carrier(list(param_groups), **defaults)
        self.clip = clip
        self.accumulation = accumulation
        self.loss_scale = loss_scale
        self._decoupled = decoupled
        self._loss_of = functools.partial(tiled_loss_of, tile_tokens=loss_tile_tokens) if loss_tile_tokens else loss_of
        grouped = {id(p) for group in self.groups for p in group["params"]}
        # Tied parameters appear once, under their first name.
        self._params = dict(model.named_parameters())
        self._trained = {n: p for n, p in self._params.items() if p.requires_grad and id(p) in grouped}
        # An fp32 parameter on the CPU is its own master: `to` gives it back.
        self._master = {n: p.data.to("cpu", torch.float32) for n, p in self._trained.items()}
        self._exp_avg = {n: torch.zeros_like(m) for n, m in self._master.items()}      # fp32
        self._exp_avg_sq = {n: torch.zeros_like(m) for n, m in self._master.items()}   # fp32
        self._steps = dict.fromkeys(self._trained, 0)
        self._main_grad: dict[str, Tensor] = {}          # fp32, of the step so far, in the order they first came
        self._hooks = [p.register_post_accumulate_grad_hook(self._accumulate_as(n)) for n, p in self._trained.items()]

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    @property
    def main_grads(self) -> dict[str, Tensor]:
        """By name, of the step so far, in the order in which they first came; fp32, not to be changed."""
        return self._main_grad

    def micro_step(self, batch: Any, loss_fn: Callable[[nn.Module, Any], Tensor] | None = None) -> float:
        """Forward and backward of one micro-batch; returns the loss as `loss_fn` gave it. None: the model's own."""
        loss = (loss_fn or self._loss_of)(self.model, batch)
        (loss / self.accumulation * self.loss_scale).backward()
        return loss.item()

    def step(self) -> tuple[float, bool]:
        """Updates with what was accumulated. Returns the norm of the still loss-scaled gradients before clipping, and
        whether the step was skipped because that is not finite (nothing changes then, also no step count)."""
        self.optimizer._opt_called = True  # else torch's schedulers warn that nobody steps
        grads, self._main_grad = self._main_grad, {}
        norm = global_norm(part for name in self._trained if name in grads
                           for part in sum_of_squares(grads[name].flatten()))
        if norm == float("inf") or norm != norm:
            return norm, True
        coefficient = clip_coefficient(norm, self.clip, self.loss_scale)
        group_of = {id(p): group for group in self.groups for p in group["params"]}
        for name, param in self._trained.items():
            if name not in grads:
                continue
            group = group_of[id(param)]
            check_supported(group)
            self._steps[name] += 1
            state = [t[name].view(-1) for t in (self._master, self._exp_avg, self._exp_avg_sq)]
            adam_update_(state[0], grads[name].view(-1), state[1], state[2], self._steps[name],
                         hyper_from_group(group, self._decoupled), coefficient)
            if param.data_ptr() != self._master[name].data_ptr():
                param.data.copy_(self._master[name])
        return norm, False

    def state(self) -> State:
        """Clones of everything by name: param, master, exp_avg, exp_avg_sq, step; only param for the untrained."""
        state: State = {}
        for name, param in self._params.items():
            state[name] = {"param": param.detach().clone()}
            if name in self._trained:
                state[name].update(master=self._master[name].clone(), exp_avg=self._exp_avg[name].clone(),
                                   exp_avg_sq=self._exp_avg_sq[name].clone(), step=self._steps[name])
        return state

    def close(self) -> None:
        """Takes the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def _accumulate_as(self, name: str) -> Callable[[Tensor], None]:
        """A hook that moves a fresh gradient into fp32: the first one is only upcast, later ones are added.

        Copies, because autograd may let gradients of two parameters share memory.
        """
        def accumulate(param: Tensor) -> None:
            grad, param.grad = param.grad, None
            if grad is None:   # an autograd.Function gave none
                return
            if name in self._main_grad:
                self._main_grad[name] += grad.cpu().float()
            else:
                self._main_grad[name] = torch.empty(grad.shape, dtype=torch.float32).copy_(grad)
        return accumulate


def diff_bits(a: State, b: State) -> list[str]:
    """Where two states differ, a line per parameter and kind with the first differing element. Empty if nowhere.

    Compares bits: nan equals the same nan, 0.0 differs from -0.0. Tensors may lie flat in one state only.
    """
    lines = [f"{name}: only in {'a' if name in a else 'b'}" for name in [*a, *b] if (name in a) != (name in b)]
    for name in a:
        for kind in a[name] if name in b else ():
            if kind not in b[name]:
                lines.append(f"{name}.{kind}: only in a")
                continue
            line = _first_difference(a[name][kind], b[name][kind])
            if line:
                lines.append(f"{name}.{kind}{line}")
        lines += [f"{name}.{kind}: only in b" for kind in b.get(name, ()) if kind not in a[name]]
    return lines


def assert_same_bits(a: State, b: State, max_lines: int = 8) -> None:
    """Raises AssertionError that lists the first differences."""
    lines = diff_bits(a, b)
    if lines:
        more = [f"... and {len(lines) - max_lines} more"] if len(lines) > max_lines else []
        raise AssertionError("\n".join(["states differ (a against b):", *lines[:max_lines], *more]))


def _first_difference(x: Any, y: Any) -> str | None:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return None if x == y else f": {x} against {y}"
    if x.dtype != y.dtype or x.numel() != y.numel():
        return f": {x.dtype} {tuple(x.shape)} against {y.dtype} {tuple(y.shape)}"
    x_flat, y_flat = x.detach().cpu().reshape(-1), y.detach().cpu().reshape(-1)
    bits = _BITS[x_flat.element_size()]
    differs = x_flat.view(bits) != y_flat.view(bits)
    num_different = int(differs.sum())
    if num_different == 0:
        return None
    index = int(differs.nonzero()[0])
    return (f"[{index}] of {x_flat.numel()}: {x_flat[index].item()!r} against {y_flat[index].item()!r} "
            f"({num_different} elements differ)")
