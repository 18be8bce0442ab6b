"""`LohanEngine`: a `DeepSpeedEngine` whose parameters and optimizer state live in an `Offload`.

It only wires: everything users know of DeepSpeed's engine is inherited.
"""
from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable

import deepspeed
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import ZERO_OPTIMIZATION, DeepSpeedEngine

from lohan_ds import process_end
from lohan_ds.checkpoint import check_fits
from lohan_ds.checkpoint_folder import restore_replaced, whole_checkpoint
from lohan_ds.config import effective_ds_config, ignored_keys, parse
from lohan_ds.errors import ConfigError, StepError, StoreError
from lohan_ds.offload import Offload
from lohan_ds.optimizer import LohanOptimizer, is_decoupled
from lohan_ds.plan import LossTiles
from lohan_ds.plan_sources import RunFacts
from lohan_ds.planner.comparison import Row, prediction_text
from lohan_ds.profile import ModelProfile
from lohan_ds.run_state import RUN_MARK, pack_state, set_random_state, unpack_state
from lohan_ds.step_summary import StepSummary
from lohan_ds.zero_params import ZeroParams, convert_to_zero3, set_status

logger = logging.getLogger(__name__)


def _print_line(line: str) -> None:
    """What the user asked to see; DeepSpeed's logger shows warnings only, unless it is told otherwise."""
    print(line, flush=True)


def _announce(line: str) -> None:
    """What he should see before training; `logging.getLogger("lohan_ds").setLevel(logging.WARNING)` silences it."""
    if logging.getLogger("lohan_ds").level <= logging.INFO:
        _print_line(line)


class LohanEngine(DeepSpeedEngine):
    """Made by `deepspeed.initialize` when the config has an enabled "lohan" section; see integrations/deepspeed.py.

    Raises ConfigError or CapacityError before any parameter is moved. `make_offload`: with the arguments of `Offload`;
    tests and rehearsals put doubles of streams and drives into it.
    """
    make_offload: Callable[..., Offload] = Offload
    profile_live = None   # set by integrations: profile_live of live_model.py

    def __init__(self, *args, config=None, config_class=None, mpu=None, mesh_device=None, **kwargs):
        self.__dict__["offload"] = None
        given = config_class._param_dict
        self.__dict__["lohan_config"] = parse(given)
        ignored = [key for key in ignored_keys(given) if key != "zero_optimization.memory_efficient_linear"]   # ours
        if ignored:
            _announce(f"lohan does without these keys of the DeepSpeed config: {', '.join(ignored)}")
        config = effective_ds_config(given)
        config_class = DeepSpeedConfig(config, mpu, mesh_device=mesh_device)
        world_size = deepspeed.comm.get_world_size()
        if world_size > 1:
            raise ConfigError(f"lohan runs on one rank so far, got {world_size}; launch with --num_gpus 1")
        kwargs["dont_change_device"] = True   # a model larger than the device never goes there as a whole
        try:
            super().__init__(*args, config=config, config_class=config_class, mpu=mpu, mesh_device=mesh_device,
                             **kwargs)
        except BaseException:
            if self.offload is not None:   # whatever failed after it: no thread and no file stays
                self.offload.close()
            raise
        self.__dict__["random_state"] = None      # to be put back when training goes on
        self.__dict__["_boundary_state"] = b""    # as of the last step boundary, of a run with a name
        if self.offload is not None:
            if self.global_rank == 0:
                _announce(self.offload.plan_table)
                run_plan = self.offload.run_plan
                if run_plan.page_text is not None:
                    _announce(run_plan.page_text())
                elif run_plan.file is not None and run_plan.file.predicted is not None:
                    _announce(prediction_text(run_plan.file))
                if run_plan.remark:
                    _announce(f"lohan plan: {run_plan.remark}")
            if self.offload.is_durable:
                self._begin_or_resume()

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
        self.__dict__["offload"] = offload = self.make_offload(
            self.module, self.lohan_config, lambda p: group_index.get(id(p)), self.gradient_accumulation_steps(),
            torch.device(self.device), set_status, report=_print_line if self.global_rank == 0 else None,
            facts=self._run_facts(), announce=_announce if self.global_rank == 0 else None,
            compare_every_steps=self.steps_per_print() if self.lohan_config.step_report else None)
        process_end.close_at_end(self, offload)
        params = [p for members in offload.model_blocks.params for p in members]
        self.__dict__["zero_params"] = ZeroParams(offload.streamer, params)
        dtype = torch.float16 if self.fp16_enabled() else torch.bfloat16 if self.bfloat16_enabled() else torch.float32
        return LohanOptimizer(offload, optimizer, self.gradient_clipping(), dtype, self.loss_scale(),
                              self.dynamic_loss_scale(), self.dynamic_loss_scale_args())

    def _run_facts(self) -> RunFacts:
        micro_batch, device_type = self.train_micro_batch_size_per_gpu(), torch.device(self.device).type

        def profile_model(sequence_length: int, tiles: LossTiles | None) -> ModelProfile:
            return self.profile_live(self.module, micro_batch, sequence_length, device_type, tiles)

        return RunFacts(micro_batch, self.gradient_clipping() > 0, profile_model if self.profile_live else None)

    def _begin_or_resume(self) -> None:
        """A run with a name: goes on after its last committed step, if it has one."""
        offload, name = self.offload, self.lohan_config.run_name
        if offload.resumed_details:
            self.random_state = unpack_state(self, offload.resumed_details)
            if self.global_rank == 0:
                _announce(f"lohan: run {name!r} goes on after step {self.global_steps}")
        elif self.global_rank == 0:
            _announce(f"lohan: run {name!r} begins")
        self._boundary_state = pack_state(self)   # refuses now what could not be kept later
        engine = weakref.ref(self)
        self.optimizer.commit_step = lambda: engine()._commit_step()

    def _commit_step(self, checkpoint: str | None = None) -> None:
        """Between two steps; with `checkpoint` also inside of one, of which nothing counts yet."""
        if self.offload is not None and self.offload.is_durable:
            self._refuse_ended()
            if checkpoint is None:
                self._boundary_state = pack_state(self)
            self.offload.commit(self.global_steps, self._boundary_state, checkpoint)
        self.optimizer.is_committed = True

    def _refuse_ended(self) -> None:
        """Before anything of a step happens that no commit would follow."""
        if self.offload is not None and self.offload.has_ended:
            raise StepError("this run has ended, by destroy() or because Trainer loaded its best checkpoint; to train "
                            "on, start the script again")

    def end_run(self) -> None:
        """A run with a name stays at the step it has reached, whatever is loaded from now on; no step may follow.

        With durability "in_place" there is no second slot for what is loaded: the run goes back with it.
        """
        if self.offload is not None and self.offload.plan.durability == "shadow":
            self.offload.end_run()

    # -- running -------------------------------------------------------------------------------------------------

    def _forward_prologue(self, inputs, kwargs):
        modified = super()._forward_prologue(inputs, kwargs)
        if self.offload is not None:
            for module in self.module.modules():
                module._parameters._in_forward = False   # a released parameter fetches itself
            if self.random_state is not None and self.module.training:
                set_random_state(self.random_state)
        return modified

    def _forward_epilogue(self):
        super()._forward_epilogue()
        if self.module.training:
            self.random_state = None

    def forward(self, *inputs, **kwargs):
        if self.offload is None:
            return super().forward(*inputs, **kwargs)
        self._enter_phase("forward")
        try:
            with self.offload.streamer.saved_tensors_hooks():
                return super().forward(*inputs, **kwargs)
        except BaseException:
            if torch.is_grad_enabled():
                self.reset_step()
            else:   # an evaluation: the step under way has nothing to do with it
                self.offload.reset()
            raise
        finally:
            self._enter_phase("other")

    def _enter_phase(self, name: str) -> None:
        if self.offload is not None and self.offload.recorder is not None:
            self.offload.recorder.phase(name)

    def _backward_prologue(self):   # of loss.backward() too
        self._refuse_ended()
        self._enter_phase("backward")
        super()._backward_prologue()

    def _backward_epilogue(self):
        super()._backward_epilogue()
        self._enter_phase("other")

    def step(self, *args, **kwargs):
        if self.offload is None:
            return super().step(*args, **kwargs)
        self._refuse_ended()
        ends_step = self.is_gradient_accumulation_boundary()
        self._enter_phase("step")
        try:
            super().step(*args, **kwargs)
            if ends_step and self.offload.recorder is not None:
                self.offload.end_step(self.global_steps)
            if not self.optimizer.is_committed:
                self._commit_step()
        except BaseException as error:
            if self.offload.is_durable and not self.optimizer.is_committed:   # half of it has happened
                self.offload.gradients.updater.fail(StepError(f"step() was cut off, the run ends at its last commit: "
                                                              f"{error!r}"))
            raise
        finally:
            self._enter_phase("other")

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
        self._enter_phase("other")
        if self.offload is not None and isinstance(self.optimizer, LohanOptimizer):
            self.optimizer.reset_step()
            self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()   # their gradients are gone too

    def lohan_stats(self) -> dict[str, int]:
        """Bytes moved and held so far; see `Offload.stats`."""
        return self.offload.stats() if self.offload is not None else {}

    def lohan_step_summary(self) -> StepSummary | None:
        """Of the last step, as far as its update has come; None before the first, and unless "step_report" or
        "trace_path" is set."""
        if self.offload is None or self.offload.recorder is None:
            return None
        return self.offload.recorder.step_summary(self.offload.gradients.updater.oldest_due_step())

    def lohan_comparison(self) -> list[Row]:
        """What the plan predicted of a step against what was measured, over the last steps but the first two. Empty
        before there are any, and where nothing was predicted of the plan that is carried out."""
        check = self.offload.plan_check if self.offload is not None else None
        return check.rows() if check is not None else []

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
        for name, value in weights.items():   # all of them before the first write
            here = params.get(name, buffers.get(name))
            if here is None and strict:
                raise ConfigError(f"the checkpoint has {name}, which this model has not")
            if here is not None and here.numel() != value.numel():
                raise StoreError(f"the checkpoint's {name}: got {value.numel()} elements, needed {here.numel()}; it is "
                                 "damaged, or of a model of other sizes")
        for name, value in weights.items():
            if name in params:
                self.offload.write(*self.offload.place_of(params[name]), "master", value)
            elif name in buffers:
                buffers[name].copy_(value)

    def load_checkpoint(self, load_dir, *args, **kwargs):
        if os.path.exists(os.path.join(load_dir, RUN_MARK)):
            return load_dir, {}   # stands for this run, which is there already
        self.reset_step()   # what was accumulated belongs to the state that is replaced
        restore_replaced(load_dir)
        step_before = self.global_steps
        whole = contextlib.nullcontext() if self.offload is None else self.offload.as_a_whole("load_checkpoint()")
        with whole:
            result = super().load_checkpoint(load_dir, *args, **kwargs)
        if result[0] is not None and self.offload is not None and self.offload.is_durable:
            self.random_state = None
            if not self.offload.has_ended:
                self._boundary_state = pack_state(self)
                self._commit_step(result[0])
                if self.global_rank == 0:
                    _announce(f"lohan: load_checkpoint() replaces step {step_before} of run "
                              f"{self.lohan_config.run_name!r} by step {self.global_steps} of {result[0]}")
        return result

    def _load_checkpoint(self, load_dir, tag, load_optimizer_states=True, load_module_only=False, **kwargs):
        if self.offload is not None and load_optimizer_states and not load_module_only:
            self._refuse_misfit(load_dir, tag)
        return super()._load_checkpoint(load_dir, tag, load_optimizer_states=load_optimizer_states,
                                        load_module_only=load_module_only, **kwargs)

    def _refuse_misfit(self, load_dir, tag) -> None:
        """Before counters, schedule or weights have changed. StoreError."""
        self.loaded_checkpoint_dp_world_size = 1
        states = self._get_all_zero_checkpoints(load_dir, tag)
        if not states:
            raise StoreError(f"there is no optimizer state of a {self.optimizer.dtype} run in "
                             f"{os.path.join(load_dir, tag)}; load the weights only: "
                             "load_checkpoint(..., load_optimizer_states=False)")
        check_fits(self.optimizer, states[0])

    def save_checkpoint(self, save_dir, tag=None, client_state={}, save_latest=True,  # noqa: B006 - as DeepSpeed's
                        exclude_frozen_parameters=False):
        """As DeepSpeed's; but the checkpoint appears as a whole, on disk, before `latest` names it."""
        if self.offload is None or not save_dir:
            return super().save_checkpoint(save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        with whole_checkpoint(save_dir, tag, save_latest) as new_tag:
            super().save_checkpoint(save_dir, new_tag, client_state, False, exclude_frozen_parameters)
        if not self.offload.has_ended:
            self._commit_step(os.path.abspath(save_dir))
        return True

    def _save_zero_checkpoint(self, save_path, tag):
        if self.offload is not None:
            self.optimizer.export_dir = os.path.join(save_path, tag)
        super()._save_zero_checkpoint(save_path, tag)

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

