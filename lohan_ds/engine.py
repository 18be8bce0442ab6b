"""`LohanEngine`: a `DeepSpeedEngine` whose parameters and optimizer state live in an `Offload`.

It only wires: everything users know of DeepSpeed's engine is inherited.
"""
from __future__ import annotations

import logging
import os

import deepspeed
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine
from deepspeed.utils import log_dist

from lohan_ds import process_end
from lohan_ds.config import effective_ds_config, ignored_keys, parse
from lohan_ds.errors import ConfigError
from lohan_ds.offload import Offload
from lohan_ds.optimizer import LohanOptimizer, is_decoupled
from lohan_ds.zero_params import ZeroParams, convert_to_zero3, set_status

logger = logging.getLogger(__name__)


class LohanEngine(DeepSpeedEngine):
    """Made by `deepspeed.initialize` when the config has an enabled "lohan" section; see integrations/deepspeed.py.

    Raises ConfigError or CapacityError before any parameter is moved.
    """

    def __init__(self, *args, config=None, config_class=None, mpu=None, mesh_device=None, **kwargs):
        self.__dict__["offload"] = None
        given = config_class._param_dict
        self.__dict__["lohan_config"] = parse(given)
        ignored = ignored_keys(given)
        if ignored:
            log_dist(f"lohan does without these keys of the DeepSpeed config: {', '.join(ignored)}", ranks=[0])
        config = effective_ds_config(given)
        config_class = DeepSpeedConfig(config, mpu, mesh_device=mesh_device)
        world_size = deepspeed.comm.get_world_size()
        if world_size > 1:
            raise ConfigError(f"lohan runs on one rank so far, got {world_size}; launch with --num_gpus 1")
        kwargs["dont_change_device"] = True   # a model larger than the device never goes there as a whole
        super().__init__(*args, config=config, config_class=config_class, mpu=mpu, mesh_device=mesh_device, **kwargs)
        if self.offload is not None:
            log_dist(f"lohan: update mode {self.offload.plan.update}\n{self.offload.plan_table}", ranks=[0])

    # -- building ------------------------------------------------------------------------------------------------

    def _configure_distributed_model(self, model):
        super()._configure_distributed_model(model)
        for module in self.module.modules():
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = buffer.to(self.device)

    def _broadcast_model(self):
        """One rank: nothing to broadcast, and the parameters are not on the device."""

    def _configure_basic_optimizer(self, model_parameters):
        """A torch optimizer that carries the hyper-parameters; DeepSpeed's own would compile an op for nothing."""
        params = dict(self.optimizer_params() or {})
        decoupled = params.pop("adam_w_mode", True) or self.optimizer_name() == "adamw"
        if not params.pop("torch_adam", False):
            params.setdefault("weight_decay", 0.0)   # of DeepSpeed's Adams; torch's AdamW decays by default
        for key in ("fused", "foreach", "fp32_optimizer_states", "bias_correction", "set_grad_none"):
            params.pop(key, None)
        return (torch.optim.AdamW if decoupled else torch.optim.Adam)(model_parameters, **params)

    def _do_optimizer_sanity_check(self, basic_optimizer):
        is_decoupled(basic_optimizer)
        return ZERO_OPTIMIZATION

    def _configure_zero_optimizer(self, optimizer):
        if optimizer is None:   # evaluation only: nothing to update, DeepSpeed's own parameter offload serves
            convert_to_zero3(self.module, self.config)
            return super()._configure_zero_optimizer(optimizer)
        group_index = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]
                       if p.requires_grad}
        convert_to_zero3(self.module, self.config)
        self.__dict__["offload"] = offload = Offload(
            self.module, self.lohan_config, lambda p: group_index.get(id(p)), self.gradient_accumulation_steps(),
            torch.device(self.device), set_status)
        process_end.close_at_end(self, offload)
        params = [p for members in offload.model_blocks.params for p in members]
        self.__dict__["zero_params"] = ZeroParams(offload.streamer, params)
        dtype = torch.float16 if self.fp16_enabled() else torch.bfloat16 if self.bfloat16_enabled() else torch.float32
        return LohanOptimizer(offload, optimizer, self.gradient_clipping(), dtype, self.loss_scale(),
                              self.dynamic_loss_scale(), self.dynamic_loss_scale_args())

    # -- running -------------------------------------------------------------------------------------------------

    def _forward_prologue(self, inputs, kwargs):
        modified = super()._forward_prologue(inputs, kwargs)
        if self.offload is not None:
            for module in self.module.modules():
                module._parameters._in_forward = False   # a released parameter fetches itself
        return modified

    def forward(self, *inputs, **kwargs):
        if self.offload is None:
            return super().forward(*inputs, **kwargs)
        try:
            with self.offload.streamer.saved_tensors_hooks():
                return super().forward(*inputs, **kwargs)
        except BaseException:
            self.reset_step()
            raise

    def backward(self, loss, **kwargs):
        if self.offload is None:
            return super().backward(loss, **kwargs)
        try:
            with self.offload.streamer.saved_tensors_hooks():   # for what reentrant checkpoints compute again
                return super().backward(loss, **kwargs)
        except BaseException:
            self.reset_step()
            raise

    def reset_step(self) -> None:
        """After an exception in forward or backward: the step under way is as if it had not begun."""
        if self.offload is not None and isinstance(self.optimizer, LohanOptimizer):
            self.optimizer.reset_step()
            self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()   # their gradients are gone too

    def lohan_stats(self) -> dict[str, int]:
        """Bytes moved and held so far; see `Offload.stats`."""
        return self.offload.stats() if self.offload is not None else {}

    # -- weights out ---------------------------------------------------------------------------------------------

    def zero_gather_16bit_weights_on_model_save(self):
        return True   # a file of placeholders is never written

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters=False):
        """name -> full tensor on the host, tied names sharing one; read block by block from the store."""
        if self.offload is None:
            return super()._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters)
        self.offload.streamer.release_all()
        state, seen = {}, {}
        for name, param in self.module.named_parameters(remove_duplicate=False):
            if exclude_frozen_parameters and not param.requires_grad:
                continue
            if id(param) not in seen:
                seen[id(param)] = self.offload.read(*self.offload.place_of(param), "param")
            state[name] = seen[id(param)]
        state.update(self._persistent_buffers())
        return state

    def _persistent_buffers(self) -> dict[str, torch.Tensor]:
        names = set(self._get_buffer_names())
        return {name: buffer.detach().cpu() for name, buffer in self.module.named_buffers() if name in names}

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def module_state_dict(self, destination=None, prefix="", keep_vars=False, exclude_frozen_parameters=False):
        """Buffers only: the weights of a checkpoint are the masters in the optimizer state's file."""
        if self.offload is None:
            return super().module_state_dict(destination, prefix, keep_vars, exclude_frozen_parameters)
        return self._persistent_buffers()

    def load_module_state_dict(self, checkpoint, strict=True, custom_load_fn=None, **_):
        if self.offload is None:
            return super().load_module_state_dict(checkpoint, strict, custom_load_fn, **_)
        if custom_load_fn:
            custom_load_fn(src=checkpoint["module"], dst=self.module)
            return
        weights = {**checkpoint["module"], **(checkpoint.get("frozen_param_fragments") or {})}
        buffers = dict(self.module.named_buffers())
        params = dict(self.module.named_parameters(remove_duplicate=False))
        for name, value in weights.items():
            if name in params:
                self.offload.write(*self.offload.place_of(params[name]), "master", value)
            elif name in buffers:
                buffers[name].copy_(value)
            elif strict:
                raise ConfigError(f"the checkpoint has {name}, which this model has not")

    def _get_zero_frozen_param_attributes(self, attr_func):
        if self.offload is None:
            return super()._get_zero_frozen_param_attributes(attr_func)
        return {slot.name: attr_func(param) for block, members in zip(self.offload.blocks,
                                                                      self.offload.model_blocks.params)
                if not block.trainable for slot, param in zip(block.slots, members)}

    def _get_param_fragment_func(self, param):
        if self.offload is None:
            return super()._get_param_fragment_func(param)
        return self.offload.read(*self.offload.place_of(param), "param").reshape(-1)

    def _get_all_zero_checkpoint_state_dicts(self, zero_ckpt_names):
        """Mapped, not read: resuming needs no second copy of the optimizer state in RAM."""
        if self.offload is None:
            return super()._get_all_zero_checkpoint_state_dicts(zero_ckpt_names)
        return [torch.load(name, map_location="cpu", mmap=True, weights_only=False)["optimizer_state_dict"]
                for name in zero_ckpt_names if os.path.exists(name)]

    def destroy(self):
        super().destroy()
        if self.offload is not None:
            self.offload.close()
            self.module_forward_pre_hook.remove()   # DeepSpeed leaves them, and with them the engine, on the model
            self.module_forward_post_hook.remove()

