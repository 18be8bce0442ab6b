"""`LohanOptimizer`: what DeepSpeed, Hugging Face and LR schedulers see as the optimizer.

It decides whether a step happens and with which hyper-parameters and coefficient; the gradient pipeline carries
it out. The user's torch Adam or AdamW (or one made from the JSON) only carries the hyper-parameters.
"""
from __future__ import annotations

import functools
import math
import weakref
from collections import deque

import torch
from deepspeed import comm as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from torch import Tensor, nn

from lohan_ds import checkpoint
from lohan_ds.adam import check_supported, hyper_from_group
from lohan_ds.errors import ConfigError, StepError
from lohan_ds.grad_norm import clip_coefficient
from lohan_ds.offload import Offload
from lohan_ds.runtime.gradient_pipeline import StepTerms

CLIP_HISTORY_STEPS = 20   # "auto" speculates when none of so many last steps clipped
_STATE_KINDS = {None: "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}


def is_decoupled(carrier: torch.optim.Optimizer) -> bool:
    """True for AdamW's weight decay, False for Adam's. Raises ConfigError for any other optimizer or variant."""
    for group in carrier.param_groups:
        check_supported(group)
    name = type(carrier).__name__
    if isinstance(carrier, torch.optim.AdamW):
        return True
    if isinstance(carrier, torch.optim.Adam):
        return bool(carrier.defaults.get("decoupled_weight_decay", False))
    if name in ("FusedAdam", "DeepSpeedCPUAdam"):
        return bool(getattr(carrier, "adam_w_mode", True))
    raise ConfigError(f"lohan updates with Adam or AdamW; got {name}. Use torch.optim.AdamW, or leave the optimizer "
                      "to the JSON (\"optimizer\": {\"type\": \"AdamW\"}) or to Trainer's default")


def _call_weakly(method: weakref.WeakMethod, *args) -> None:
    method()(*args)


class LohanOptimizer(ZeROOptimizer, torch.optim.Optimizer):
    """A `ZeROOptimizer` and a `torch.optim.Optimizer` over an `Offload`. Belongs to the training thread.

    `fp16_groups` has one group per trained parameter, ordered by optimizer group, then block: the order of the
    checkpoint.
    """

    def __init__(self, offload: Offload, carrier: torch.optim.Optimizer, clip_grad: float, dtype: torch.dtype,
                 static_loss_scale: float, dynamic_loss_scale: bool, dynamic_loss_args: dict | None):
        ZeROOptimizer.__init__(self)
        torch.optim.Optimizer.__init__(self, carrier.param_groups, carrier.defaults)
        self.param_groups = carrier.param_groups   # one list: schedulers may hold either object
        self.optimizer, self.offload = carrier, offload
        self.decoupled = is_decoupled(carrier)
        self.clip_grad = clip_grad
        self.dtype = dtype
        self.loss_scaler = CreateLossScaler(dtype, static_loss_scale, dynamic_loss_scale, dynamic_loss_args)
        self.dynamic_loss_scale = self.loss_scaler.dynamic
        self.custom_loss_scaler, self.external_loss_scale, self.torch_autocast_gradscaler = False, None, None
        self.mpu, self.communication_data_type = None, dtype
        self.dp_process_group = dist.get_world_group()
        self.overflow = False
        self._global_grad_norm: float | None = None
        self._coalesce_grad_reduction = False
        self.commit_step = lambda: None      # set by the engine of a durable run: makes the decided step durable
        self.is_committed = True             # whether that has been called since the last step() was decided
        self.export_dir: str | None = None   # where a checkpoint passes state of the SSD tier through
        self._step_is_open = False                                    # its last backward has begun
        self.clip_history: deque[bool] = deque(maxlen=CLIP_HISTORY_STEPS)  # of the last steps, whether they were scaled
        self.steps: dict[tuple[int, int], int] = {}   # updates of each trained parameter so far, by (block, slot)
        self.places = sorted(((block.index, slot) for block in offload.blocks if block.trainable
                              for slot in range(len(block.slots))),
                             key=lambda place: (self._slot(*place).group, place))
        self.steps = dict.fromkeys(self.places, 0)
        self.fp16_groups = [[self._param(*place)] for place in self.places]
        self._handles = []
        self._frozen = {id(param) for members in offload.model_blocks.params for param in members
                        if not param.requires_grad}
        for block, members in zip(offload.blocks, offload.model_blocks.params):
            for slot, param in enumerate(members):
                param._z3_optimizer = self
                if not block.trainable and param.requires_grad:   # in no group of the optimizer: never touched
                    self._handles.append(param.register_post_accumulate_grad_hook(_drop_gradient))
                if block.trainable:
                    # weak: Python's collector does not look into these hooks, so a cycle through one is for ever
                    hook = functools.partial(_call_weakly, weakref.WeakMethod(self._on_gradient), block.index, slot)
                    self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def _slot(self, block_index: int, slot: int):
        return self.offload.blocks[block_index].slots[slot]

    def _param(self, block_index: int, slot: int) -> nn.Parameter:
        return self.offload.model_blocks.params[block_index][slot]

    # -- backward ------------------------------------------------------------------------------------------------

    def _on_gradient(self, block_index: int, slot: int, param: nn.Parameter) -> None:
        if self._backward_active_depth == 0 and self._backward_seen_this_step:
            self.enter_backward()   # a later phase of a reentrant backward
        if not self._coalesce_grad_reduction:
            self._take_gradient(block_index, slot, param)
        self.update_hook_state_and_maybe_run_epilogue(self._max_expected_hooks_seen)

    def _take_gradient(self, block_index: int, slot: int, param: nn.Parameter) -> None:
        with torch._C.DisableTorchFunctionSubclass():   # the parameter is watched now
            grad, param.grad = param.grad, None
        if grad is None:   # an autograd.Function gave none
            return
        if grad.is_sparse:
            raise ConfigError(f"{self._slot(block_index, slot).name} has a sparse gradient; set sparse=False in its "
                              "nn.Embedding")
        boundary = self.is_gradient_accumulation_boundary()
        if boundary and not self._step_is_open:
            self._step_is_open = True
            self._open_step()
        self.offload.gradients.arrive(block_index, slot, grad, boundary)

    def _open_step(self) -> None:
        """The last backward of a step has begun. Speculates when it is asked for or, if it is left to us, when none
        of the last steps clipped."""
        mode, scale = self.offload.plan.update, self.loss_scale
        speculate = mode == "eager" or (mode == "auto" and not any(self.clip_history))
        limit = self.clip_grad * scale if self.clip_grad > 0 else math.inf
        self.offload.gradients.open_step((lambda: self._terms(1.0 / scale)) if speculate else None, limit)

    def _terms(self, coefficient: float) -> StepTerms:
        hypers = [hyper_from_group(group, self.decoupled) for group in self.param_groups]
        return StepTerms(hypers, dict(self.steps), coefficient)

    def reduce_ready_partitions_and_remove_grads(self, param: nn.Parameter) -> None:
        self._take_gradient(*self.offload.place_of(param), param)

    def independent_gradient_partition_epilogue(self) -> None:
        self.offload.end_backward()

    overlapping_partition_gradients_reduce_epilogue = independent_gradient_partition_epilogue

    def backward_prologue(self) -> None:
        self.offload.gradients.updater.check()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients of the step under way, also those held, of earlier micro-steps too."""
        if self._step_is_open or self.offload.gradients.holds_any:
            self._step_is_open = False
            self.offload.gradients.drop()
        for members in self.offload.model_blocks.params:
            for param in members:
                param.grad = None

    # -- step ----------------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        return self.loss_scaler.loss_scale

    cur_scale = loss_scale

    @property
    def loss_scale_config(self):
        return self.loss_scaler

    def step(self, closure=None) -> None:
        """Decides the step; in `deferred` mode its updates go on while the next forward runs.

        A non-finite gradient anywhere skips the whole step. Raises StepError when background work of an earlier
        call failed.
        """
        offload = self.offload
        self.optimizer._opt_called = True   # else torch's schedulers on the carrier warn that nobody steps
        offload.gradients.updater.check()
        if not self.is_committed:   # step() was not called through the engine
            self.commit_step()
        self._refuse_unfrozen()
        if offload.swapper is not None:
            offload.swapper.end_step()
        offload.streamer.release_all()   # first: what it refuses leaves the step as it was
        self._step_is_open = False
        scale = self.loss_scale
        norm = offload.gradients.norm()
        self.overflow = not math.isfinite(norm)
        self.loss_scaler.update_scale(self.overflow)
        self._global_grad_norm = norm / scale
        self.is_committed = False
        if self.overflow:
            offload.gradients.drop()
            return
        coefficient = clip_coefficient(norm, self.clip_grad, scale)
        self.clip_history.append(coefficient != 1.0 / scale)
        terms = self._terms(coefficient)
        for block_index, slot in offload.gradients.present_slots():   # first: `decide` may wait, and be interrupted
            self.steps[block_index, slot] += 1
            offload.streamer.block_changed(block_index)
        offload.gradients.decide(terms)
        offload.streamer.prefetch_first()

    def _refuse_unfrozen(self) -> None:
        for block, members in zip(self.offload.blocks, self.offload.model_blocks.params):
            for slot, param in zip(block.slots, members):
                if id(param) in self._frozen and param.grad is not None:
                    raise StepError(f"{slot.name} got a gradient but was frozen at deepspeed.initialize; unfreeze it "
                                    "before that")

    def reset_step(self) -> None:
        """After an exception in forward or backward: drops this step's gradients, as if it had not begun."""
        self.zero_grad()
        self.offload.reset()
        self._backward_active_depth = 0
        self.clear_backward_seen_flag()

    def add_param_group(self, param_group) -> None:
        if hasattr(self, "offload"):
            raise StepError("parameters cannot be added after deepspeed.initialize: their state has no place in the "
                            "plan; give all groups to the optimizer before")
        super().add_param_group(param_group)

    # -- DeepSpeed's look-ups and edits (deepspeed.utils.safe_get_*, safe_set_*) -----------------------------------

    def _trained_place(self, param: nn.Parameter) -> tuple[int, int] | None:
        place = self.offload.place_of(param)
        return place if place in self.steps else None

    def get_full_hp_param(self, param: nn.Parameter, optim_state_key: str | None = None) -> Tensor | None:
        """The fp32 master, or a moment, in the parameter's shape on the device; None for a frozen parameter."""
        place = self._trained_place(param)
        if place is None:
            return None
        return self.offload.read(*place, _STATE_KINDS[optim_state_key]).to(self.offload.device)

    def set_full_hp_param(self, value: Tensor, param: nn.Parameter, optim_state_key: str | None = None) -> None:
        place = self._trained_place(param)
        if place is not None:
            self.offload.write(*place, _STATE_KINDS[optim_state_key], value)

    get_local_fp32_param = get_full_hp_param
    set_local_hp_param = set_full_hp_param

    def get_fp32_grad_for_param(self, param: nn.Parameter) -> Tensor | None:
        """The gradient held for this step, between backward and step()."""
        place = self._trained_place(param)
        held = self.offload.gradients.gradient(*place) if place is not None else None
        return None if held is None else held.float().clone().view(self._slot(*place).shape).to(self.offload.device)

    def set_fp32_grad_for_param(self, value: Tensor, param: nn.Parameter) -> None:
        place = self._trained_place(param)
        held = self.offload.gradients.gradient(*place) if place is not None else None
        if held is None:
            raise StepError("there is no gradient to set: call between backward and step()")
        self.offload.gradients.gradient_edited(*place)
        held.copy_(value.reshape(-1))

    def update_fp32_grad_for_param_vectorized(self, update_func, params: list[nn.Parameter]) -> None:
        """Replaces the gradient of each by `update_func(gradient, parameter)`."""
        for param in params:
            self.set_fp32_grad_for_param(update_func(self.get_fp32_grad_for_param(param), param), param)

    get_local_fp32_grad_for_param = get_fp32_grad_for_param
    set_local_grad_for_param = set_fp32_grad_for_param

    def get_hp_param_device(self, param: nn.Parameter, optim_state_key: str | None = None) -> torch.device:
        return torch.device("cpu")

    # -- checkpoint ----------------------------------------------------------------------------------------------

    def checkpoint_event_prologue(self) -> None:
        self.offload.flush()
        self.offload.gradients.updater.drain()

    def checkpoint_event_epilogue(self) -> None:
        pass

    def state_dict(self) -> dict:
        return checkpoint.optimizer_state(self)

    def load_state_dict(self, state_dict_list, load_optimizer_states=True, load_from_fp32_weights=False,
                        checkpoint_folder=None, load_serial=None, param_shapes=None) -> None:
        checkpoint.load_optimizer_state(self, state_dict_list[0])

    def _restore_from_bit16_weights(self) -> None:
        """Weights loaded without optimizer state already reached the masters."""

    def refresh_fp32_params(self) -> None:
        """As above."""

    def empty_partition_cache(self) -> None:
        self.offload.end_backward()

    def destroy(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.offload.close()


def _drop_gradient(param: nn.Parameter) -> None:
    param.grad = None
