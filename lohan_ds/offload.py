"""`Offload`: everything one run keeps off the accelerator, put together in the right order and closed in one place."""
from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import resource
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import psutil
import torch
from torch import Tensor, nn

from lohan_ds.block import Block, ParamSlot
from lohan_ds.config import LohanConfig
from lohan_ds.cpu_threads import num_update_threads
from lohan_ds.errors import ConfigError, StepError, StoreError
from lohan_ds.memory.budget import MemoryBudget
from lohan_ds.memory.pinned_pool import PinnedPool
from lohan_ds.model_blocks import values_of
from lohan_ds.ops.loader import native
from lohan_ds.plan import OffloadPlan
from lohan_ds.plan_check import PlanCheck
from lohan_ds.plan_sources import RunFacts
from lohan_ds.planner.plan_file import PlanFile
from lohan_ds.planner.plan_layout import offload_plan
from lohan_ds.planner.search import plan_table
from lohan_ds.profile import Budgets, HardwareProfile, MemoryTier, ModelProfile
from lohan_ds.run_plan import model_size, plan_run
from lohan_ds.runtime.activation_swapper import ActivationSwapper
from lohan_ds.runtime.gradient_pipeline import GradientPipeline
from lohan_ds.runtime.param_streamer import ParamStreamer
from lohan_ds.runtime.recorder import Recorder
from lohan_ds.runtime.saved_weights import WeightHooks
from lohan_ds.runtime.staged_streams import StagedStreams
from lohan_ds.runtime.streams import Streams, make_streams
from lohan_ds.runtime.swap_space import SwapSpace
from lohan_ds.runtime.tiled_head import TiledHead, UnknownHead, find_head
from lohan_ds.step_protocol import StepProtocol
from lohan_ds.store.block_store import BlockStore
from lohan_ds.store.file_io import FileIo
from lohan_ds.store.filenames import named_run_dirs, run_dir_name
from lohan_ds.store.manifest import read_manifests
from lohan_ds.store.native_io import make_ssd_io
from lohan_ds.store.run_dirs import RunDirs
from lohan_ds.stripe import bytes_by_directory, even_stripe
from lohan_ds.updater import Updater

logger = logging.getLogger(__name__)
_M_MMAP_THRESHOLD = -3   # of malloc.h


class Offload:
    """Owns pool, store, streams, gradient pipeline and parameter streamer of one engine.

    Built from the model's live parameters: their values move into the store, block by block, and the parameters
    are released. `close()` ends all threads and removes all files; it is idempotent and safe at exit.
    """

    def __init__(self, model: nn.Module, config: LohanConfig, group_of, accumulation: int, device: torch.device,
                 set_status=lambda param, available: None, streams: Streams | None = None,
                 make_io=make_ssd_io, report: Callable[[str], None] | None = None, facts: RunFacts | None = None,
                 announce: Callable[[str], None] | None = None, compare_every_steps: int | None = None,
                 make_plan=plan_run, make_protocol=StepProtocol):
        """`report`: for the line of a step. `facts`: of the training; without, the plan is made of bytes alone.
        `announce`: for what is predicted, and later compared with what is measured, again every so many steps.
        `make_plan` has the arguments and results of `plan_run`, `make_protocol` those of `StepProtocol`."""
        self.device = device
        self._make_protocol = make_protocol
        self.resumed_details: bytes | None = None   # what was given with the commit that this run goes on from
        self.run_plan = make_plan(model, config, group_of, accumulation, device, facts)
        self.model_blocks, self.plan, budgets = self.run_plan[:3]
        self.blocks = self.model_blocks.blocks
        self._tiled_head = _tiled_head(model, self.plan, config)
        self.plan_table = plan_table(model_size(self.model_blocks), self.plan, budgets)
        self.closers: list = []   # the last one first; none of them holds the model, and through it the engine, alive
        self.streamer: ParamStreamer | None = None
        self.swapper: ActivationSwapper | None = None   # None: the plan keeps all activations
        self._finish: Callable[[], None] | None = None   # the first of them, of a durable run
        self.recorder: Recorder | None = None   # None: nobody asked for a report or a trace
        self._others_bytes = psutil.Process().memory_info().rss - self.run_plan.model_bytes   # of libraries and data
        self.plan_check = None if announce is None else self._make_plan_check(announce, compare_every_steps)
        if config.step_report or config.trace_path or self.plan_check is not None:
            self.recorder = Recorder(report if config.step_report else None, config.trace_path)
            self.recorder.on_final = self.plan_check.add if self.plan_check is not None else None
            self.closers.append(self.recorder.close)
        try:
            self._build(config, budgets, streams or make_streams(device), make_io, set_status)
        except BaseException:
            self.close()
            raise

    def _build(self, config: LohanConfig, budgets: Budgets, streams: Streams, make_io, set_status) -> None:
        if streams.unified and config.host_memory:
            _give_large_tensors_back_when_freed()
        self.budget = MemoryBudget("host", budgets.host_bytes)
        self.pool = PinnedPool(self.budget, pin=device_needs_pinning(self.device))
        self.streams = streams = streams if streams.unified else StagedStreams(streams, self.pool)
        self.closers += [self.pool.close, streams.close]
        if self.recorder is not None:
            streams.on_copy = self.recorder.copy_span
        self.io, run_dirs = None, []
        if "ssd" in self.plan.param_tier + self.plan.state_tier or self.plan.activations.ssd_bytes:
            self.io = make_io(config.with_defaults().ssd_threads)
            self.closers.append(self.io.close)
            if self.recorder is not None:
                self.io.on_span = self.recorder.ssd_span
            run_dirs = (named_run_dirs(config.ssd_paths, config.run_name) if config.run_name else
                        _scratch_dirs(config))
        reopen = config.run_name is not None and read_manifests(run_dirs) is not None
        self.store = BlockStore(self.blocks, self.plan, self.pool, self.io, run_dirs, reopen)
        self.closers.append(self.store.close)
        for block, params in zip(self.blocks, self.model_blocks.params):
            if reopen:
                _drop_values(params)
            else:
                self.store.write_initial(block.index, _take_values(block, params))
        if reopen:
            self.resumed_details = self.store.last_commit[1]
        elif self.is_durable:
            self.store.commit(0, b"")
        _return_freed_memory()
        for operator in ("cpu_adam", "grad_accumulate"):
            native(operator)   # compiles now, if ever, and not in the first step
        self.gradients = GradientPipeline(self.blocks, self.plan, self.store, self.streams, self.pool, self.recorder,
                                          num_update_threads(self.device, config.update_threads), self.device,
                                          self._make_protocol)
        self.closers += [self.gradients.close, functools.partial(_cut_off, self.gradients, self.io)]
        if self.recorder is not None:
            self.closers.append(functools.partial(_end_recording, self.recorder, self.gradients.updater))
        take_staging = None if streams.unified else (lambda nbytes: self.pool.alloc(nbytes, "parameter staging"))
        self.streamer = ParamStreamer(self.model_blocks.units, self.blocks, self.model_blocks.params, self.store,
                                      self.streams, self.device, self.plan.prefetch_depth, take_staging,
                                      self._on_edit, self.gradients.updater.check, set_status, self.recorder)
        self.streamer.attach()
        if self._tiled_head is not None:
            self._attach_tiled_head(self._tiled_head)
        if self.plan.activations.policies:
            self._attach_swapper(config)
        if self.is_durable:
            flush = weakref.WeakMethod(self.flush)
            self._finish = functools.partial(_finish, self.gradients.updater, self.store, flush)
            self.closers.append(self._finish)

    def _attach_tiled_head(self, tiled_head: TiledHead) -> None:
        unit = next(index for index, unit in enumerate(self.model_blocks.units)
                    if any(module is tiled_head.head for module in unit.module.modules()))
        tiled_head.attach(functools.partial(self.streamer.run_in_unit, unit),
                          functools.partial(self.streamer.weights_version, unit))

    def _attach_swapper(self, config: LohanConfig) -> None:
        swap, dirs = self.plan.activations, []
        if swap.ssd_bytes:   # scratch, whatever the store is
            stripe = self.plan.stripe or even_stripe(len(config.ssd_paths))
            scratch = RunDirs(_scratch_dirs(config), bytes_by_directory(swap.ssd_bytes, stripe, len(config.ssd_paths)))
            self.closers.append(scratch.close)
            dirs = scratch.paths
        space = SwapSpace(swap, self.pool, self.io, dirs, self.streams, self.plan.stripe)
        self.closers.append(space.close)
        saved = self.streamer.saved
        weights = WeightHooks(saved.pack_weight, saved.unpack, self.streamer.weights_version,
                              self.streamer.running_again)
        self.swapper = ActivationSwapper([(unit.name, unit.module) for unit in self.model_blocks.units], swap,
                                         space.tiers, self.streams, self.device, weights, self.recorder)
        self.swapper.attach()
        saved.use_hooks(*self.swapper.saved_tensors_hooks)

    def _make_plan_check(self, announce: Callable[[str], None], every_steps: int | None) -> PlanCheck | None:
        """None if nothing was predicted of this plan."""
        file, profile = self.run_plan.file, self.run_plan.profile
        if file is None or not file.is_as_planned:
            return None
        return PlanCheck(file, announce, _weakly(self._peak_bytes, {}), every_steps,
                         None if profile is None else functools.partial(_replan, profile),
                         _weakly(self._change_activations, None))

    def _peak_bytes(self) -> dict[MemoryTier, int]:
        """What `PlanCheck` compares. Where the host's memory is the device's, all that the process has taken since."""
        if self.streams.unified:
            return {"host": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - self._others_bytes}
        return {"host": self.budget.peak_bytes, "device": torch.cuda.max_memory_allocated(self.device)}

    def _change_activations(self, file: PlanFile) -> bool | None:
        """As `PlanCheck` wants it: other policies for activations, in the space that was taken at the start."""
        names = [unit.name for unit in self.model_blocks.units]
        new, old = offload_plan(file, self.blocks, names, file.accumulation, None, "plan").activations, \
            self.plan.activations
        if self.swapper is None or new.host_bytes > old.host_bytes or new.ssd_bytes > old.ssd_bytes:
            return None
        changed = self.swapper.change_policies(new.policies or ((),) * len(names))
        if changed:
            self.plan = replace(self.plan, activations=replace(old, policies=new.policies))
        return changed

    def flush(self) -> None:
        """Parameters that user code changed in place reach the store."""
        for block in self.blocks:
            self.streamer.flush(block.index)

    def end_backward(self) -> None:
        self.streamer.end_backward()
        if self.swapper is not None:
            self.swapper.end_backward()

    def reset(self) -> None:
        """After an exception in forward or backward."""
        self.streamer.reset()
        if self.swapper is not None:
            self.swapper.reset()

    def close(self) -> None:
        if self.streamer is not None and self.closers:
            if self.closers[-1] is self._finish:
                self.end_run()   # before the update is stopped
            if self.recorder is not None:
                _end_recording(self.recorder, self.gradients.updater)
            if self.plan_check is not None:
                self.plan_check.end()
            self.gradients.stop()   # else a fetch that waits for the update would hold up `detach`
            self.closers.append(self.streamer.detach)
            if self._tiled_head is not None:
                self.closers.append(self._tiled_head.detach)
            if self.swapper is not None:   # wrapped last
                self.closers.append(self.swapper.detach)
        close_all(self.closers)

    # -- runs with a name ----------------------------------------------------------------------------------------

    @property
    def is_durable(self) -> bool:
        return self.plan.durability != "none"

    def commit(self, step: int, details: bytes, checkpoint: str | None = None) -> None:
        """`step` has been decided: once its updates are published, it is made durable. `checkpoint`: one was saved, and
        the run is made durable before this returns; raises then what `Updater.check` does, or StoreError."""
        durable = self.store.commit(step, details, clean=checkpoint is not None, last_checkpoint=checkpoint)
        durable.on_done(lambda: durable.exception() is None or self.gradients.updater.fail(durable.exception()))
        if checkpoint is not None:
            durable.wait()

    @contextlib.contextmanager
    def as_a_whole(self, what: str) -> Iterator[None]:
        """For changes of values that belong together: if they are cut off after the first one, a run with a name ends
        at its last commit, since what lies in the store then is of no step."""
        before = self.store.num_edits
        try:
            yield
        except BaseException as error:
            if self.is_durable and self.store.num_edits != before:
                self.gradients.updater.fail(StepError(f"{what} was cut off, the run ends at its last commit: "
                                                      f"{error!r}"))
            raise

    def end_run(self) -> None:
        """Makes all that was decided and edited durable; no later commit counts. Idempotent."""
        if self._finish in self.closers:
            self.closers.remove(self._finish)
            self._finish()

    @property
    def has_ended(self) -> bool:
        return self.is_durable and self._finish not in self.closers

    # -- values by parameter -------------------------------------------------------------------------------------

    def place_of(self, param: nn.Parameter) -> tuple[int, int]:
        """(block, slot) of a live parameter."""
        block = param.lohan_block
        return block, next(s for s, p in enumerate(self.model_blocks.params[block]) if p is param)

    def read(self, block_index: int, slot: int, kind: str) -> Tensor:
        """A copy of one parameter's `param`, `master`, `exp_avg` or `exp_avg_sq`, in its shape, on the host."""
        self.streamer.flush(block_index)
        return self._read(block_index, slot, kind)

    def _read(self, block_index: int, slot: int, kind: str) -> Tensor:
        block = self.blocks[block_index]
        info = block.slots[slot]
        dtype = getattr(torch, block.dtype) if kind == "param" else torch.float32
        out = torch.empty(info.numel, dtype=dtype)
        self.store.read_array(block_index, kind, info.offset, out)
        return out.view(info.shape)

    def write(self, block_index: int, slot: int, kind: str, values: Tensor) -> None:
        """Overwrites one array of one parameter; a new master also gives the parameter its new value."""
        block = self.blocks[block_index]
        info = block.slots[slot]
        if values.numel() != info.numel:
            raise ValueError(f"{kind} of {info.name}: got {values.numel()} elements, needed {info.numel}")
        self.streamer.invalidate(block_index)
        self.gradients.updater.spoil(block_index, wait=True)
        with self.as_a_whole(f"the change of {info.name}"):
            self._write_arrays(block, info, kind, values)

    def _write_arrays(self, block: Block, info: ParamSlot, kind: str, values: Tensor) -> None:
        values = values.detach().reshape(-1).to(device="cpu", dtype=torch.float32)
        if kind == "param":
            kind, values = "master", values.to(getattr(torch, block.dtype)).float()
        if kind == "master":
            self.store.write_array(block.index, "param", info.offset, values.to(getattr(torch, block.dtype)))
            if not block.trainable or not block.has_separate_master:
                return
        self.store.write_array(block.index, kind, info.offset, values)

    def _on_edit(self, block_index: int, slot: int, values: Tensor) -> None:
        """User code changed a resident parameter. Where it did, the master follows; else it keeps its precision."""
        block = self.blocks[block_index]
        info = block.slots[slot]
        self.gradients.updater.spoil(block_index, wait=True)
        with self.as_a_whole(f"an edit of {info.name}"):
            if block.trainable and block.has_separate_master:
                master = self._read(block_index, slot, "master").reshape(-1)
                changed = master.to(values.dtype).view(torch.int16) != values.view(torch.int16)
                self.store.write_array(block_index, "master", info.offset, torch.where(changed, values.float(), master))
            self.store.write_array(block_index, "param", info.offset, values)

    def end_step(self, label: int) -> None:
        """For the recorder: step() of a step is over, which the user calls `label`."""
        updater = self.gradients.updater
        self.recorder.end_step(label, updater.num_speculated, updater.num_dropped, updater.oldest_due_step())

    def stats(self) -> dict[str, int]:
        """Bytes so far: read from and written to the SSDs; bytes at rest on host and SSD; peak of the host pool.
        Block updates made in backward that stood, and that were dropped. `ActivationSwapper.stats`, if there is one."""
        return {"ssd_bytes_read": self.store.bytes_read, "ssd_bytes_written": self.store.bytes_written,
                "host_bytes": self.budget.used_bytes, "host_peak_bytes": self.budget.peak_bytes,
                "ssd_bytes": self.store.ssd_bytes, "param_bytes_fetched": self.streamer.bytes_fetched,
                "updates_speculated": self.gradients.updater.num_speculated,
                "updates_dropped": self.gradients.updater.num_dropped,
                **(self.swapper.stats() if self.swapper is not None else {})}


def _tiled_head(model: nn.Module, plan: OffloadPlan, config: LohanConfig) -> TiledHead | None:
    """Not attached yet. ConfigError if the user asked for it and the model cannot."""
    try:
        if plan.loss_tiles is not None:
            return TiledHead(model, plan.loss_tiles)
        if config.loss_tile_tokens != 0:
            find_head(model)
    except UnknownHead as error:
        if config.loss_tile_tokens:
            raise ConfigError(f"lohan.loss_tile_tokens: got {config.loss_tile_tokens}, but {error}; remove "
                              "it") from None
        if error.head is not None:
            logger.warning("logits will be whole, not in tiles: %s", error)
    return None


def _finish(updater: Updater, store: BlockStore, flush: weakref.WeakMethod) -> None:
    """All that step() has decided and the user has edited becomes durable, unless something has failed: then what was
    committed stays."""
    try:
        if flush() is not None:
            flush()()
    except (StoreError, StepError) as error:
        logger.warning("the last edits of parameters are not kept: %s", error)
    try:
        updater.drain()
        store.finish()
    except (StoreError, StepError) as error:
        logger.warning("the run ends at its last commit: %s", error)


def _weakly(method: Callable, otherwise) -> Callable:
    """The method, for somebody who must not keep its object alive; `otherwise` once that is gone."""
    weak = weakref.WeakMethod(method)

    def call(*args):
        bound = weak()
        return otherwise if bound is None else bound(*args)

    return call


def _replan(profile: ModelProfile, file: PlanFile, hardware: HardwareProfile) -> PlanFile | None:
    from lohan_ds.planner.automatic import plan_at_rates   # it imports scipy
    return plan_at_rates(file, hardware, profile)


def _cut_off(gradients: GradientPipeline, io: FileIo | None) -> None:
    """What is to last is on the SSDs by now; the rest may be gigabytes that wait to be written."""
    gradients.stop()
    if io is not None:
        io.cancel()


def _end_recording(recorder: Recorder, updater) -> None:
    recorder.end(updater.oldest_due_step())


def close_all(closers: list) -> None:
    """Calls the last one first and empties the list, so a second call does nothing.

    In one of our own threads, where the collector may find a forgotten engine, it cannot wait: another one closes.
    """
    taken = []
    while closers:
        taken.append(closers.pop())
    if taken and threading.current_thread().name.startswith("lohan-"):
        threading.Thread(target=_close_each, args=(taken,), name="lohan-close").start()
    else:
        _close_each(taken)


def _close_each(closers: list) -> None:
    for closer in closers:
        try:
            closer()
        except Exception:  # noqa: BLE001 - the others must be closed too
            logger.exception("while closing")


def _scratch_dirs(config: LohanConfig) -> list[str]:
    return [os.path.join(path, run_dir_name(os.getpid(), uuid.uuid4().hex[:8])) for path in config.ssd_paths]


def device_needs_pinning(device: torch.device) -> bool:
    return device.type == "cuda"


def _take_values(block: Block, params: Sequence[nn.Parameter]) -> Tensor:
    """(numel,) the block's initial values, gaps zero; frees the parameters' own memory as it goes."""
    flat = torch.zeros(block.numel, dtype=getattr(torch, block.dtype))
    for slot, param in zip(block.slots, params):
        source = values_of(param)
        flat[slot.offset:slot.offset + slot.numel].copy_(source.detach().reshape(-1)[:slot.numel])
        source.data = torch.empty(0, dtype=source.dtype, device=source.device)
    return flat


def _drop_values(params: Sequence[nn.Parameter]) -> None:
    """As `_take_values`, of values that the store has already."""
    for param in params:
        source = values_of(param)
        source.data = torch.empty(0, dtype=source.dtype, device=source.device)


def _return_freed_memory() -> None:
    """The model's tensors are freed now, but glibc keeps what is below its mmap threshold."""
    with contextlib.suppress(OSError, AttributeError):   # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _give_large_tensors_back_when_freed() -> None:
    """Where tensors are host memory, those of a MiB and more leave the process when freed; left to itself, glibc takes
    them from a heap that grows with every gradient. A little slower, so only for a budget that somebody named."""
    with contextlib.suppress(OSError, AttributeError):   # not glibc
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
