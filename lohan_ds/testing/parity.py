"""Engine against twin: the same training run out-of-core and in memory, every number compared bit for bit.

`lohan verify` and the tests are lists of `Case`s. A case is one plan of the engine and one kind of training; the twin
knows nothing of the plan, so cases that differ only in it share one twin run. The twin runs first and on its own: the
engine then trains without pauses in which a late update could catch up. (One is meant: in two of four steps of
an `eager` case the engine waits before step() until speculation has come as far as it can, so that it always happens.)
"""
from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations, product
from typing import Any, NamedTuple

import torch
from torch import nn

from lohan_ds.errors import ConfigError
from lohan_ds.grad_norm import clip_coefficient, global_norm, sum_of_squares
from lohan_ds.model_blocks import split_into_blocks
from lohan_ds.testing.harness import DTYPES, ds_config, engine_for, engine_state, finish_speculation, init_one_rank
from lohan_ds.testing.models import OddModel, lm_batch, loss_of, tiny_gpt2, tiny_llama, vocab_of
from lohan_ds.testing.twin import State, Twin, diff_bits

MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama tied": lambda: tiny_llama(tied=True),
    "llama untied": lambda: tiny_llama(tied=False),
    "gpt2": tiny_gpt2,
    "odd": OddModel,
}
TIERS = {"host": ("host", "host"), "ssd": ("ssd", "ssd"), "mixed": ("host", "ssd")}   # of parameters, of state
UPDATES = ("serial", "deferred", "eager")
# "last": every step clips, but the limit is passed only by the block whose gradients come last. "alternating": every
# second step does, the first one too. Both have another limit at every step, found from the twin's gradients.
CLIPS = ("off", "never", "always", "last", "alternating")
FIXED_LIMITS = {"off": 0.0, "never": 1e6, "always": 1e-3}
CHUNK_BYTES = 24 * 1024     # the smallest: even the tiny models' blocks have several chunks
LEARNING_RATE = 2e-3
ACTIVATION_SPACE = "64MB"   # more than the tiny models save


@dataclass(frozen=True)
class Case:
    """One run to compare. `clip`, one of `CLIPS`, says how often the limit on the norm is reached, and when."""
    model: str
    tier: str
    update: str
    clip: str
    accumulation: int
    dtype: str
    steps: int
    loss_tile_tokens: int = 0   # 0: logits as a whole
    activations: str = "keep"

    def __str__(self) -> str:
        return (f"{self.model}, {self.tier}, {self.update}, clip {self.clip}, accumulation {self.accumulation}, "
                f"{self.dtype}, {self.steps} steps"
                + (f", loss tiles of {self.loss_tile_tokens}" if self.loss_tile_tokens else "")
                + (f", activations {self.activations}" if self.activations != "keep" else ""))


@dataclass(frozen=True)
class CaseResult:
    """`num_clipped_steps` is of the engine. `first_difference` is None when all bits are the same and the run did what
    its case says. `num_kept` and `num_dropped`: of the block updates that the engine made in backward."""
    case: Case
    same: bool
    first_difference: str | None
    seconds: float
    num_clipped_steps: int
    num_kept: int = 0
    num_dropped: int = 0


class Run(NamedTuple):
    """What a training run showed."""
    losses: list[float]             # of every micro-step
    norms: list[float]              # of every step, before clipping
    states: dict[int, State]        # by steps done: after the first (where asked for) and after the last
    limits: list[float] = []        # of every step, on the norm; of the twin only
    num_kept: int = 0               # of block updates made in backward
    num_dropped: int = 0


def full_matrix(steps: int = 10, tiers: Sequence[str] = tuple(TIERS), models: Sequence[str] = tuple(MODELS),
                dtypes: Sequence[str] = ("fp32", "bf16"), clips: Sequence[str] = tuple(CLIPS),
                accumulations: Sequence[int] = (1, 3)) -> list[Case]:
    """Every combination; those that share a twin run are neighbours."""
    return [Case(model, tier, update, clip, accumulation, dtype, steps)
            for model, dtype, clip, accumulation, tier, update in product(
                models, dtypes, clips, accumulations, tiers, UPDATES)]


def quick_matrix(steps: int = 5, **values: Any) -> list[Case]:
    """What `lohan verify` runs by default; `values` as for `full_matrix`."""
    return pairwise(full_matrix(steps, **values))


def pairwise(matrix: Iterable[Case]) -> list[Case]:
    """A small part of `matrix` in which every pair of values of two fields occurs that occurs in the whole."""
    cases = list(matrix)
    pairs = {case: set(combinations(enumerate(astuple(case)), 2)) for case in cases}
    missing = set().union(*pairs.values()) if cases else set()
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs[case] & missing))   # the first of equals
        chosen.append(best)
        missing -= pairs[best]
    return sorted(chosen, key=cases.index)


def load_model(folder: str, num_layers: int | None = None) -> nn.Module:
    """A Hugging Face causal LM from a folder, in fp32, with its first `num_layers` layers only."""
    from transformers import AutoConfig, AutoModelForCausalLM, logging
    logging.set_verbosity_error()   # it would warn about the layers left out
    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    if num_layers is not None:
        if num_layers > config.num_hidden_layers:
            raise ConfigError(f"{folder} has {config.num_hidden_layers} layers, got {num_layers}")
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:num_layers]
    config.use_cache = False
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32, local_files_only=True)
    for param in model.parameters():
        param.data = param.data.clone()   # aligned: a mapped file's weights may lie anywhere, which changes GEMM bits
    return model


def run_case(case: Case, ssd_paths: Sequence[str], **more: Any) -> CaseResult:
    return next(run_cases([case], ssd_paths, **more))


def run_cases(cases: Iterable[Case], ssd_paths: Sequence[str], make_model: Callable[[], nn.Module] | None = None,
              chunk_bytes: int | None = CHUNK_BYTES, look_early: bool = True,
              flip_bit: bool = False, device: str = "cpu") -> Iterator[CaseResult]:
    """Trains and compares case by case.

    make_model: instead of the case's built-in model; must give the same weights each time. look_early: compare the
    state also after the first step, not only after the last (needs memory for one more state). flip_bit: changes the
    lowest bit of one weight of the twin, to show that the comparison fails. device: that both compute on.
    """
    init_one_rank()   # before transformers imports deepspeed, which then looks for an accelerator
    twin_key, expected = None, None
    for case in cases:
        start_s = time.perf_counter()
        make = make_model or MODELS[case.model]
        key = (case.model, case.clip, case.accumulation, case.dtype, case.steps, case.loss_tile_tokens)
        if key != twin_key:
            expected = None   # frees the last one first
            twin_key, expected = key, _train_twin(case, make().to(device), look_early, flip_bit)
        got = _train_engine(case, make(), ssd_paths, chunk_bytes, expected.limits, tuple(expected.states))
        num_clipped = sum(clip_coefficient(norm, limit) != 1.0 for norm, limit in zip(got.norms, expected.limits))
        difference = (first_difference(got, expected, case.accumulation) or _wrong_clipping(case, num_clipped)
                      or _wrong_speculation(case, got))
        yield CaseResult(case, difference is None, difference, time.perf_counter() - start_s, num_clipped,
                         got.num_kept, got.num_dropped)


def first_difference(got: Run, expected: Run, accumulation: int) -> str | None:
    """Where the engine's numbers (`got`) leave the twin's, in the order in which they came; None if nowhere."""
    for step, (norm, expected_norm) in enumerate(zip(got.norms, expected.norms, strict=True), start=1):
        for micro in range((step - 1) * accumulation, step * accumulation):
            if _bits(got.losses[micro]) != _bits(expected.losses[micro]):
                return (f"loss of step {step}, micro-step {micro % accumulation + 1}: "
                        f"{got.losses[micro]!r}, twin {expected.losses[micro]!r}")
        if _bits(norm) != _bits(expected_norm):
            return f"gradient norm of step {step}: {norm!r}, twin {expected_norm!r}"
        if step in expected.states:
            lines = diff_bits(got.states[step], expected.states[step])
            if lines:
                return f"state after step {step}: {lines[0]}" + (f" and {len(lines) - 1} more" if lines[1:] else "")
    return None


def _wrong_clipping(case: Case, num_clipped: int) -> str | None:
    """A case whose limit was not reached as its name says shows nothing."""
    wanted = {"always": case.steps, "last": case.steps, "alternating": (case.steps + 1) // 2}.get(case.clip, 0)
    return None if num_clipped == wanted else f"{num_clipped} of {case.steps} steps were clipped, {wanted} expected"


def _wrong_speculation(case: Case, got: Run) -> str | None:
    """Nor does an `eager` case that did not speculate, or kept what it had to drop."""
    told = f"{got.num_kept} block updates made in backward were kept and {got.num_dropped} dropped"
    if case.update != "eager":
        return f"{told}, none may be made" if got.num_kept or got.num_dropped else None
    may_keep = case.clip in ("off", "never", "alternating") and (case.clip != "alternating" or case.steps > 1)
    if may_keep != bool(got.num_kept):
        return f"{told}, {'some' if may_keep else 'none'} should have been kept"
    if case.clip == "last" and not got.num_dropped:
        return f"{told}, some should have been dropped"
    return None


def _train_twin(case: Case, model: nn.Module, look_early: bool, flip_bit: bool) -> Run:
    model.train()
    if flip_bit:
        _flip_lowest_bit(next(model.parameters()), DTYPES[case.dtype])
    twin = Twin(model, _two_groups, DTYPES[case.dtype], accumulation=case.accumulation,
                loss_tile_tokens=case.loss_tile_tokens, lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(twin.optimizer, _lr_factor)
    run = Run([], [], {}, [])
    torch.manual_seed(0)
    device = next(model.parameters()).device
    for step in range(1, case.steps + 1):
        run.losses.extend(twin.micro_step(batch) for batch in _batches(case, model, step, device))
        twin.clip = _limit(case, twin, step)
        run.limits.append(twin.clip)
        run.norms.append(twin.step()[0])
        scheduler.step()
        if step == case.steps or (step == 1 and look_early):
            run.states[step] = twin.state()
    twin.close()
    return run


def _limit(case: Case, twin: Twin, step: int) -> float:
    """Of a step whose gradients the twin holds, for the norm to be above or below as the case wants it."""
    if case.clip in FIXED_LIMITS:
        return FIXED_LIMITS[case.clip]
    norm = global_norm(part for grad in twin.main_grads.values() for part in sum_of_squares(grad.flatten()))
    if case.clip == "alternating":
        return norm / 2 if step % 2 else norm * 2
    return (norm_before_last(twin) + norm) / 2


def norm_before_last(twin: Twin) -> float:
    """Of the gradients the twin holds, but for the block whose gradients came last."""
    blocks = split_into_blocks(twin.model, lambda param: 0 if param.requires_grad else None, chunk_numel=2048).blocks
    names = [{slot.name for slot in block.slots} for block in blocks]
    last = next(block for block in names if list(twin.main_grads)[-1] in block)
    return global_norm(part for name, grad in twin.main_grads.items() if name not in last
                       for part in sum_of_squares(grad.flatten()))


def _train_engine(case: Case, model: nn.Module, ssd_paths: Sequence[str], chunk_bytes: int | None,
                  limits: Sequence[float], look_after: Sequence[int]) -> Run:
    """limits: of every step. look_after: the steps after which to take the state, which makes updates in flight end."""
    model.train()
    param_tier, optimizer_tier = TIERS[case.tier]
    section = {"update": case.update, "param_tier": param_tier, "optimizer_tier": optimizer_tier,
               "chunk_bytes": chunk_bytes or "auto", "loss_tile_tokens": case.loss_tile_tokens,
               "activations": case.activations}
    if case.activations in ("host", "ssd"):
        section["activation_space"] = ACTIVATION_SPACE
    if "ssd" in (param_tier, optimizer_tier, case.activations):
        section["ssd_paths"] = list(ssd_paths)
    config = ds_config(section, dtype=case.dtype, clip=limits[0], accumulation=case.accumulation)
    optimizer = torch.optim.AdamW(_two_groups(model), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _lr_factor)
    run = Run([], [], {})
    with engine_for(model, config, optimizer, scheduler) as engine:
        torch.manual_seed(0)
        for step in range(1, case.steps + 1):
            engine.optimizer.clip_grad = limits[step - 1]
            for batch in _batches(case, model, step, engine.device):
                loss = loss_of(engine, batch)
                engine.backward(loss)
                if case.update == "eager" and step % 4 in (1, 2):
                    finish_speculation(engine)
                engine.step()
                run.losses.append(loss.item())
            run.norms.append(engine.get_global_grad_norm())
            if step in look_after:
                run.states[step] = engine_state(engine)
        stats = engine.lohan_stats()
    return run._replace(num_kept=stats["updates_speculated"], num_dropped=stats["updates_dropped"])


def _batches(case: Case, model: nn.Module, step: int, device: torch.device) -> Iterator[dict]:
    for micro in range(case.accumulation):
        batch = lm_batch(vocab_of(model), seed=step * case.accumulation + micro)
        yield {name: ids.to(device) for name, ids in batch.items()}


def _lr_factor(num_steps: int) -> float:
    """Another learning rate at every step: three of warm-up, then decay."""
    return min((num_steps + 1) / 3, 3 / (num_steps + 1))


def _two_groups(model: nn.Module) -> list[dict]:
    """As Hugging Face makes them: no weight decay for biases and norms."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [{"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0}]


def _flip_lowest_bit(param: nn.Parameter, dtype: torch.dtype) -> None:
    param.data = param.data.to(dtype)
    param.data.view(torch.int32 if dtype == torch.float32 else torch.int16).view(-1)[0] ^= 1


def _bits(value: float) -> bytes:
    return struct.pack("<d", value)
