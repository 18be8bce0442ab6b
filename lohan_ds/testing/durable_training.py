"""Training without a model: gradients made up by step and parameter, through the product's own pipeline and store.

For tests of what a crash leaves: small enough to be killed at every single event.
"""
from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from lohan_ds.adam import AdamHyper
from lohan_ds.block import Block, make_block
from lohan_ds.grad_norm import clip_coefficient
from lohan_ds.memory.budget import MemoryBudget
from lohan_ds.memory.pinned_pool import PinnedPool
from lohan_ds.plan import OffloadPlan, UpdateMode
from lohan_ds.runtime.gradient_pipeline import GradientPipeline, StepTerms
from lohan_ds.runtime.streams import make_streams
from lohan_ds.step_protocol import Stage
from lohan_ds.store.block_store import BlockStore
from lohan_ds.store.filenames import named_run_dirs
from lohan_ds.store.manifest import read_manifests
from lohan_ds.store.file_io import FileIo
from lohan_ds.store.native_io import make_ssd_io

State = dict[tuple[int, str], Tensor]   # (block, kind) -> whole array
CLIP = 11.0   # of gradients whose norm is about 10 in even steps; in odd ones the last to arrive takes it to 22
_KINDS = ("param", "master", "exp_avg", "exp_avg_sq")


def tiny_blocks() -> tuple[Block, ...]:
    """Two trained bf16 blocks of two chunks, a trained fp32 one, a frozen one."""
    return (make_block(0, "embedding", "float32", [("e", (40,), 0)], 2048),
            make_block(1, "layer 0", "bfloat16", [("a", (2048,), 0), ("b", (60,), 0)], 2048),
            make_block(2, "frozen", "bfloat16", [("f", (50,), None)], 2048),
            make_block(3, "layer 1", "bfloat16", [("c", (2100,), 0), ("d", (7,), 0)], 2048))


def gradient(step: int, block: Block, slot: int) -> Tensor:
    """(numel,) in the block's dtype: the same in every run. Every other step is clipped."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * block.index + slot)
    scale = 3.0 if step % 2 and block.index == 0 else 0.15
    values = torch.randn(block.slots[slot].numel, generator=generator) * scale
    return values.to(getattr(torch, block.dtype))


class DurableTraining:
    """Opens the run "test" under `paths`, or begins it; `step` is the number of steps that its state has seen.

    `on_phase` is called as ("backward", step) before a step's backward and as ("decided", step) before its updates are
    decided; the first step is 1. For the test to set.
    """
    on_phase: Callable[[str, int], None] = staticmethod(lambda phase, step: None)

    def __init__(self, paths: Sequence[str], update: UpdateMode, io: FileIo, durability: str = "shadow",
                 num_read_ahead_chunks: int = 1):
        self.blocks, self._io = tiny_blocks(), io
        shadow = durability == "shadow"
        plan = OffloadPlan(("ssd",) * 4, ("ssd",) * 4, update, 1, 2048, 3, False, shadow, durability=durability,
                           num_read_ahead_chunks=num_read_ahead_chunks)
        self.pool = PinnedPool(MemoryBudget("host", 1 << 28), pin=False)
        run_dirs = named_run_dirs(paths, "test")
        reopen = read_manifests(run_dirs) is not None
        self._closers = contextlib.ExitStack()
        self._closers.callback(self.pool.close)
        self._closers.callback(io.close)
        self._update, self.step = update, 0
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self.store = BlockStore(self.blocks, plan, self.pool, io, run_dirs, reopen)
            self._closers.callback(self.store.close)
            if reopen:
                self.step = int(self.store.last_commit[1])
                assert self.step == self.store.last_commit[0]
            else:
                for block in self.blocks:
                    values = torch.randn(block.numel, generator=torch.Generator().manual_seed(block.index))
                    self.store.write_initial(block.index, values.to(getattr(torch, block.dtype)))
                self.store.commit(0, b"0")
            streams = make_streams(torch.device("cpu"))
            self._closers.callback(streams.close)
            self.pipeline = GradientPipeline(self.blocks, plan, self.store, streams, self.pool)
            self._closers.callback(self.pipeline.close)
            undo.pop_all()

    def run(self, until_step: int) -> None:
        """Steps with everything a real one does: arrival newest first, norm, decision, commit, next forward."""
        while self.step < until_step:
            self._one_step()

    def _one_step(self) -> None:
        hyper = AdamHyper(1e-2, 0.9, 0.99, 1e-8, 0.01, True)
        steps = {(b.index, slot): self.step for b in self.blocks for slot in range(len(b.slots)) if b.trainable}

        def terms(coefficient: float) -> StepTerms:
            return StepTerms([hyper], steps, coefficient)

        self.on_phase("backward", self.step + 1)
        self.pipeline.open_step((lambda: terms(1.0)) if self._update == "eager" else None, CLIP)
        for block in reversed(self.blocks):
            if block.index == 0:
                self._settle()
            for slot in reversed(range(len(block.slots))) if block.trainable else ():
                self.pipeline.arrive(block.index, slot, gradient(self.step, block, slot), True)
        norm = self.pipeline.norm()
        self.on_phase("decided", self.step + 1)
        self.pipeline.decide(terms(clip_coefficient(norm, CLIP)))
        self.step += 1
        durable = self.store.commit(self.step, str(self.step).encode())
        durable.on_done(lambda: durable.exception() is None or self.pipeline.updater.fail(durable.exception()))
        for block in self.blocks:   # the next forward
            out = self.pool.alloc(block.param_bytes, "params")
            self.store.read_params(block.index, out.view(getattr(torch, block.dtype))).wait()
            self.pool.free(out)
        self.pipeline.updater.check()

    def _settle(self) -> None:
        """Until everything is updated that may be before step()."""
        self.pipeline.wait_collected()
        while {Stage.READY, Stage.SPECULATING, Stage.DROPPED}.intersection(self.pipeline.updater.stages()):
            self.pipeline.updater.check()
            time.sleep(0.0005)

    def finish(self) -> None:
        """Waits until all steps so far are durable; a clean commit."""
        self.pipeline.updater.drain()
        self.store.commit(self.step, str(self.step).encode(), clean=True).wait()

    def state(self) -> State:
        """Everything the store holds."""
        self.pipeline.updater.drain()
        state: State = {}
        for block in self.blocks:
            for kind in _KINDS if block.trainable else ("param",):
                dtype = getattr(torch, block.dtype) if kind == "param" else torch.float32
                state[block.index, kind] = torch.empty(block.numel, dtype=dtype)
                self.store.read_array(block.index, kind, 0, state[block.index, kind])
        return state

    def close(self) -> None:
        self._closers.close()


@contextlib.contextmanager
def durable_training(paths: Sequence[str], update: UpdateMode, io: FileIo | None = None,
                     durability: str = "shadow", num_read_ahead_chunks: int = 1) -> Iterator[DurableTraining]:
    """Closed at the end as it is, which is what a killed process leaves. One compute thread: for tiny operations it is
    fastest."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    training = None
    try:
        training = DurableTraining(paths, update, io or make_ssd_io(2), durability, num_read_ahead_chunks)
        yield training
    finally:
        torch.set_num_threads(num_threads)
        if training is not None:
            training.close()


def same(a: State, b: State) -> bool:
    """Bit for bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a)
