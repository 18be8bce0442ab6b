"""Activations kept, swapped, recomputed: same bits in every mix, memory really free, nothing left, no deadlock.

Models stand alone here; integration_tests/test_activations.py has them in engines.
"""
from __future__ import annotations

import contextlib
import copy
import errno
import gc
import inspect
import logging
import random
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lohan_ds.errors import CapacityError, ConfigError, StepError, StoreError
from lohan_ds.memory.pinned_pool import PAGE_BYTES
from lohan_ds.runtime.activation_items import is_swappable
from lohan_ds.runtime.swapped_storage import SwappedStorage
from lohan_ds.store.ssd_io import ThreadSsdIo
from lohan_ds.testing.delayed_streams import DelayedStreams
from lohan_ds.testing.faulty_io import FaultyIo
from lohan_ds.testing.models import AlbertLike, OddModel, lm_batch, loss_of, tiny_gpt2, tiny_llama, vocab_of
from lohan_ds.testing.swapping import Swapped, swapping, unit_names, units_of

MODELS = {
    "llama": lambda: tiny_llama(attention_dropout=0.1),
    "llama sdpa": lambda: tiny_llama(attention_dropout=0.1, attn_implementation="sdpa"),
    "gpt2": lambda: tiny_gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1),
    "plain": lambda: Plain(),
}
POLICIES = {
    "keep": {"": "keep"},
    "host": {"": "swap_host"},
    "ssd": {"": "swap_ssd"},
    "recompute": {"": "recompute"},
    "recompute from host": {"": "recompute", "input": "swap_host"},
    "recompute from ssd": {"": "recompute", "input": "swap_ssd"},
}
LAYER_MIXES = {
    "llama": [{"": "recompute", "input": "swap_ssd", "self_attn.q_proj": "swap_host", "self_attn.k_proj": "swap_ssd",
               "self_attn.v_proj": "keep", "mlp.gate_proj": "swap_host", "mlp.up_proj": "swap_ssd"},
              {"": "swap_ssd", "self_attn": "recompute", "mlp.act_fn": "recompute", "mlp": "keep"}],
    "gpt2": [{"": "recompute", "input": "swap_host", "attn": "swap_ssd", "mlp.c_fc": "swap_host"},
             {"": "swap_host", "mlp": "recompute", "attn.resid_dropout": "recompute"}],
    "plain": [{"": "recompute", "input": "swap_ssd", "up": "swap_host", "drop": "swap_ssd"},
              {"": "swap_host", "forward": "recompute", "norm": "recompute"}],
}


@pytest.fixture
def no_collector():
    """Nothing may need Python's collector of cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class PlainLayer(nn.Module):
    def __init__(self, hidden: int, p: float = 0.1):
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(hidden), nn.Dropout(p)
        self.up, self.down = nn.Linear(hidden, 3 * hidden), nn.Linear(3 * hidden, hidden)

    def forward(self, x_BTH: Tensor) -> Tensor:
        return x_BTH + self.drop(self.down(self.drop(F.gelu(self.up(self.norm(x_BTH))))))


class Plain(nn.Module):
    """No config, nothing that offloaders could look for."""

    def __init__(self, vocab: int = 64, hidden: int = 24, num_layers: int = 3, p: float = 0.1):
        super().__init__()
        self.vocab_size = vocab
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed = nn.Embedding(vocab, hidden)
            self.layers = nn.ModuleList(PlainLayer(hidden, p) for _ in range(num_layers))
            self.head = nn.Linear(hidden, vocab)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x_BTH = self.embed(input_ids)
        for layer in self.layers:
            x_BTH = layer(x_BTH)
        return F.cross_entropy(self.head(x_BTH).flatten(0, 1), labels.flatten())


Gradients = dict[str, Tensor]


def gradients_of(model: nn.Module, run, batch: Any = None, backward=None, seed: int = 3) -> Gradients:
    """Clones, with the loss as ""; `run` is the model, or a Swapped around it."""
    batch = batch if batch is not None else lm_batch(vocab_of(model))
    for param in model.parameters():
        param.grad = None
    torch.manual_seed(seed)
    loss = loss_of(run, batch)
    if backward is None:
        backward = run.backward if isinstance(run, Swapped) else Tensor.backward
    backward(loss)
    found = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    return {**found, "": loss.detach(), "next random number": torch.rand(1)}


def assert_equal(ours: Gradients, theirs: Gradients) -> None:
    assert ours.keys() == theirs.keys()
    different = [name for name in ours if not torch.equal(ours[name], theirs[name])]
    assert not different, different


def at_rest(swapped: Swapped) -> bool:
    """Whether nothing is held, once copies under way have ended."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        held = swapped.swapper.held()
        used = [tier.used_bytes for tier in swapped.space.tiers.values()]
        if not held and not any(used):
            return True
        time.sleep(0.002)
    raise AssertionError((held, used))


# -- same bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_results_do_not_depend_on_the_policy(tmp_path, kind, unified):
    """Checkpointing and swapping change nothing: identical losses and gradients with dropout, the random generator
    where it would be."""
    model = MODELS[kind]()
    expected = gradients_of(model, model)
    mixes = LAYER_MIXES.get(kind, [])
    for number, policies in enumerate([*POLICIES.values(), *mixes]):
        is_mix = number >= len(POLICIES)
        layers = [name for name in unit_names(model) if name.split(".")[-1].isdigit()]
        of_units = {name: policies for name in layers} if is_mix else {"*": policies}
        streams = None if unified else DelayedStreams(number, 0.001)
        with swapping(model, of_units, [tmp_path], streams) as swapped:
            for _ in range(2):
                assert_equal(gradients_of(model, swapped), expected)
            assert at_rest(swapped)
            stats = swapped.swapper.stats()
            values = set(policies.values())
            assert bool(stats.get("swap_ssd_bytes_out")) == ("swap_ssd" in values)
            assert bool(stats.get("swap_host_bytes_out")) == ("swap_host" in values and not unified)
            assert bool(stats.get("host_is_device_bytes")) == ("swap_host" in values and unified)
            assert bool(stats.get("reruns")) == ("recompute" in values)


@pytest.mark.parametrize("kind", ["llama sdpa", "gpt2", "albert"])
def test_random_mixes_by_item(tmp_path, kind):
    make = {**MODELS, "albert": AlbertLike}[kind]
    model = make()
    expected = gradients_of(model, model)
    for seed in range(8):
        rng = random.Random(f"{kind}/{seed}")
        policies = {}
        for unit in units_of(model):
            items = ["", "input", "forward", *(path for path, _ in unit.module.named_modules() if path)]
            policies[unit.name] = {
                item: rng.choice(["keep", "swap_host", "swap_ssd", *(["recompute"] * 2 if item != "input" else [])])
                for item in items if rng.random() < 0.7}
        streams = DelayedStreams(seed, 0.0005) if seed % 2 else None
        with swapping(model, policies, [tmp_path], streams) as swapped:
            assert_equal(gradients_of(model, swapped), expected)
            assert at_rest(swapped)


def test_what_was_saved_is_not_computed_again():
    """Selective recomputation: the products whose results were kept do not run in backward."""
    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return func(*args, **(kwargs or {}))

    model, counts = Plain(num_layers=1, p=0.0), {}
    for name, policies in {"keep": {"": "keep"}, "all": {"": "recompute"},
                           "selective": {"": "recompute", "up": "swap_host"}}.items():
        with swapping(model, {"layers.0": policies}, streams=DelayedStreams(0, 0.0)) as swapped:
            torch.manual_seed(0)
            loss = loss_of(swapped, lm_batch(64))
            with Products() as products:
                swapped.backward(loss)
            counts[name] = products.count
            stats = swapped.swapper.stats()
    assert counts["all"] == counts["keep"] + 1, "`up`; the run ends before `down`"
    assert counts["selective"] == counts["keep"]
    assert stats["operations_reused"] >= 1 and stats["swap_host_bytes_out"] > 0


def test_random_operations_that_are_not_computed_again_still_draw(tmp_path):
    """Two dropouts in a row: the first one's result is kept, the second runs again and must draw what it drew."""
    class Drop(nn.Module):
        def forward(self, x):
            return torch.native_dropout(x, 0.5, True)[0]   # what nn.Dropout is on an accelerator

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.weight = Drop(), Drop(), nn.Parameter(torch.randn(40, 40))

        def forward(self, x):
            return self.second(F.gelu(self.first(F.gelu(x @ self.weight)))) @ self.weight

    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    x = torch.randn(8, 40)

    def run(target):
        return lambda **_: target(x).square().mean()

    expected = gradients_of(model, run(model), {})
    with swapping(model, {"*": {"": "recompute", "first": "swap_ssd"}}, [tmp_path]) as swapped:
        assert_equal(gradients_of(model, run(swapped), {}, swapped.backward), expected)
        assert swapped.swapper.stats()["operations_reused"] > 0


@pytest.mark.parametrize("policies", [{"": "recompute"}, {"": "recompute", "up": "swap_ssd"}, {"": "swap_ssd"}])
def test_autocast_is_restored(tmp_path, policies):
    model = Plain()

    def run(target):
        def forward(**batch):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return target(**batch)
        return forward

    expected = gradients_of(model, run(model), lm_batch(64))
    plain = gradients_of(model, model)
    assert not torch.equal(expected[""], plain[""])
    with swapping(model, {f"layers.{i}": policies for i in range(3)}, [tmp_path]) as swapped:
        assert_equal(gradients_of(model, run(swapped), lm_batch(64), swapped.backward), expected)


def test_a_second_run_with_other_operations_is_not_wrong():
    """Under autocast one layer used six times casts its weights once in forward, but each time it runs again."""
    class Shared(Plain):
        def forward(self, input_ids, labels):
            x_BTH = self.embed(input_ids)
            for _ in range(6):
                x_BTH = self.layers[0](x_BTH)
            return F.cross_entropy(self.head(x_BTH).flatten(0, 1), labels.flatten())

    model = Shared(num_layers=1)

    def run(target):
        def forward(**batch):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return target(**batch)
        return forward

    expected = gradients_of(model, run(model), lm_batch(64))
    for policies in ({"": "recompute", "norm": "keep", "up": "keep"}, {"": "keep", "drop": "recompute"}):
        with swapping(model, {"layers.0": policies}) as swapped:
            assert_equal(gradients_of(model, run(swapped), lm_batch(64), swapped.backward), expected)
            assert 0 < swapped.swapper.stats()["operations_reused"] < 12, "until they differ"


@pytest.mark.parametrize("policy", ["recompute", "swap_ssd"])
def test_a_cache_of_keys_and_values_is_not_filled_twice(tmp_path, policy):
    """`use_cache=True`, the default of most Hugging Face configs, in training."""
    model = tiny_llama(use_cache=True)
    expected = gradients_of(model, model)
    with swapping(model, {"*": {"": policy}}, [tmp_path]) as swapped:
        assert_equal(gradients_of(model, swapped), expected)


def test_the_gradient_of_a_gradient(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    x = torch.randn(4, 8, requires_grad=True)

    def penalty(run):
        grad, = torch.autograd.grad(run(x).sum(), x, create_graph=True)
        return grad.square().sum()

    expected = gradients_of(model, lambda **_: penalty(model), {})
    for policy in ("keep", "swap_ssd", "recompute"):
        with swapping(model, {"*": {"": policy}}, [tmp_path]) as swapped:
            assert_equal(gradients_of(model, lambda **_: penalty(swapped), {}, swapped.backward), expected)


# -- what passes through -----------------------------------------------------------------------------------------------


class SaveAll(torch.autograd.Function):
    """Saves what it is given, and keeps what it gets back."""
    came_back: list[Tensor] = []

    @staticmethod
    def forward(ctx, x, *others):
        ctx.save_for_backward(*others)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        SaveAll.came_back = list(ctx.saved_tensors)
        return (grad * 2, *[None] * len(SaveAll.came_back))


def test_odd_tensors_pass_through_untouched(tmp_path):
    """Tensors of odd kinds, parameters and views of them are never swapped."""
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))
            self.register_buffer("table", torch.randn(6))
            self.odd = [torch.tensor([True, False]), torch.arange(5), torch.empty(0), torch.tensor(2.5),
                        torch.tensor([1 + 2j]), torch.ones(3, dtype=torch.int8), torch.eye(3).to_sparse(),
                        torch.randn(4, requires_grad=True), torch.randn(3).to(torch.float8_e4m3fn)]

        def forward(self, x):
            mine = [self.weight, self.weight[1:3].t(), self.weight.detach(), self.table, self.table[2:]]
            return SaveAll.apply(x, *self.odd, *mine)

    model = nn.Sequential(nn.Linear(3, 3), Layer())
    for policy in ("swap_host", "swap_ssd"):
        with swapping(model, {"1": {"": policy}}, [tmp_path], DelayedStreams(0)) as swapped:
            loss = swapped(torch.randn(2, 3)).sum()
            assert not any("bytes_out" in key for key in swapped.swapper.stats())
            swapped.backward(loss)
            layer = model[1]
            given = [*layer.odd, layer.weight, layer.weight[1:3], layer.weight, layer.table, layer.table[2:]]
            for tensor, back in zip(given, SaveAll.came_back, strict=True):
                assert back.dtype == tensor.dtype and back.layout == tensor.layout
                if tensor.layout is torch.strided:
                    assert back.data_ptr() == tensor.data_ptr()


def test_only_large_floats_of_the_device_can_leave():
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    tensor = torch.randn(64, 64)
    assert is_swappable(tensor, cpu, 4096) and not is_swappable(tensor, cpu, 4 * 64 * 64 + 1)
    assert not is_swappable(tensor, cuda, 0), "it was on the CPU before"
    assert not is_swappable(torch.randn(3, 3, dtype=torch.complex64).conj().imag, cpu, 0)
    assert is_swappable(tensor[3:5].t(), cpu, 4096), "a view goes with its storage"


def test_a_storage_goes_out_once_and_comes_back_with_its_strides(tmp_path):
    """q, k and v are slices of one product, and four saved tensors are its views."""
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24)

        def forward(self, x):
            q, k, v = self.qkv(x).view(4, 3, 8).unbind(1)
            return SaveAll.apply(x, q, k.t(), v[1:3], v.expand(2, 4, 8))

    model = nn.Sequential(Layer())
    with swapping(model, {"0": {"qkv": "swap_ssd"}}, [tmp_path]) as swapped:
        x = torch.randn(4, 8, requires_grad=True)
        loss = swapped(x).sum()
        assert swapped.swapper.stats()["swap_ssd_bytes_out"] == 4 * 24 * 4
        swapped.backward(loss)
    q, k, v = model[0].qkv(x).view(4, 3, 8).unbind(1)
    for tensor, back in zip((q, k.t(), v[1:3], v.expand(2, 4, 8)), SaveAll.came_back, strict=True):
        assert torch.equal(tensor, back) and tensor.stride() == back.stride()


@pytest.mark.parametrize("policy", ["keep", "swap_ssd", "swap_host"])
def test_a_change_in_place_after_saving_is_refused_as_in_torch(tmp_path, policy):
    class Layer(nn.Linear):
        def forward(self, x):
            y = super().forward(x).exp()
            out = y * 2
            y.add_(1)
            return out

    model = nn.Sequential(Layer(4, 4))
    with pytest.raises(RuntimeError, match="inplace"):
        model(torch.randn(2, 4)).sum().backward()
    with swapping(model, {"0": {"": policy}}, [tmp_path], DelayedStreams(0, 0.05)) as swapped:
        if policy == "swap_ssd":   # its way out was over before the change, or not: exact or refused
            with contextlib.suppress(StepError):
                swapped.backward(swapped(torch.randn(2, 4)).sum())
        else:
            with pytest.raises(StepError, match="in place"):
                swapped.backward(swapped(torch.randn(2, 4)).sum())


# -- order and overlap -------------------------------------------------------------------------------------------------


class SlowWrites(ThreadSsdIo):
    seconds = 0.2

    def _pwrite(self, fd, view, offset):
        time.sleep(self.seconds)
        return super()._pwrite(fd, view, offset)


def test_backward_that_comes_before_the_write_is_over(tmp_path):
    """A drive that takes 200 ms for each write, one layer, so that backward starts at once, 20 times."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64))
    model[0].forward = lambda x, layer=model[0]: (F.linear(x, layer.weight) ** 2).exp()
    batches = [torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)) * 0.1 for seed in range(20)]
    expected = [gradients_of(model, lambda **_: model(x).sum(), {}) for x in batches]  # noqa: B023
    with swapping(model, {"0": {"": "swap_ssd", "input": "keep"}}, [tmp_path], make_io=SlowWrites) as swapped:
        for x, theirs in zip(batches, expected, strict=True):
            start = time.monotonic()
            ours = gradients_of(model, lambda **_: swapped(x).sum(), {}, swapped.backward)  # noqa: B023
            assert_equal(ours, theirs)
            assert time.monotonic() - start < 10
        assert at_rest(swapped)


@pytest.mark.parametrize("kind", ["h2d", "d2h"])
def test_a_wait_left_out_gives_a_wrong_result(kind):
    """So the tests on delayed streams can fail: the last wait of the way out, most of the way back."""
    model = Plain(num_layers=1, p=0.0)
    expected = gradients_of(model, model)

    def run(drop_at: int | None) -> tuple[Gradients, int, int]:
        streams = DelayedStreams(1, 0.0005, held_delay_s=0.2)
        if drop_at is not None:
            streams.drop_one_wait_at(drop_at, kind)
        with swapping(model, {"layers.0": {"": "swap_host"}}, streams=streams) as swapped:
            watcher = swapped.space._watcher
            watch = watcher.watch

            def late_watch(event):   # so that compute waits first
                if event._lane.kind == "h2d":
                    watcher._executor.submit(time.sleep, 0.02)
                return watch(event)

            def backward(loss):
                while not all(storage.is_out for storage in swapped.swapper._table._held()):
                    time.sleep(0.001)
                swapped.backward(loss)

            watcher.watch = late_watch
            ours = gradients_of(model, swapped, backward=backward)
            return ours, streams.num_waits("d2h"), streams.num_waits("h2d")

    ours, num_out, num_in = run(None)
    assert_equal(ours, expected)
    assert num_out == num_in >= 4
    wrong = []
    for n in [num_out] if kind == "d2h" else range(1, num_in):
        ours, *_ = run(n)
        wrong.append(any(not torch.equal(ours[name], expected[name]) for name in ours))
    assert sum(wrong) > len(wrong) // 2, wrong   # a copy is also over when a later one was waited for


def test_backward_of_a_layer_starts_the_way_back_of_the_one_before(tmp_path, monkeypatch):
    model, events = Plain(num_layers=4), []
    start_fetch, restore = SwappedStorage.start_fetch, SwappedStorage.restore

    def logged_start(storage):
        began = start_fetch(storage)
        if began:
            events.append(("start", storage.unit_pass.name))
        return began

    def logged_restore(storage, view):
        events.append(("use", storage.unit_pass.name))
        return restore(storage, view)

    monkeypatch.setattr(SwappedStorage, "start_fetch", logged_start)
    monkeypatch.setattr(SwappedStorage, "restore", logged_restore)
    with swapping(model, {f"layers.{i}": {"": "swap_ssd"} for i in range(4)}, [tmp_path]) as swapped:
        loss = loss_of(swapped, lm_batch(64))
        time.sleep(0.1)   # all is written
        swapped.backward(loss)
    for layer in range(3):
        starts = [place for place, event in enumerate(events) if event == ("start", f"layers.{layer}")]
        first_use_of_next = events.index(("use", f"layers.{layer + 1}"))
        first_use = events.index(("use", f"layers.{layer}"))
        last_use_of_next = max(p for p, event in enumerate(events) if event == ("use", f"layers.{layer + 1}"))
        assert starts and max(starts) < first_use_of_next + 1 < last_use_of_next < first_use, (layer, events)


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unified", [True, False])
def test_the_smallest_pool_is_enough(tmp_path, unified):
    """One buffer of one page between device and SSD; tensors of many pages pass in pieces."""
    model = Plain(num_layers=3)
    batch = lm_batch(64, batch=4, seq=33)
    expected = gradients_of(model, model, batch)
    streams = None if unified else DelayedStreams(0, 0.0002)
    with swapping(model, {"*": {"": "swap_ssd"}, "layers.1": {"": "recompute", "input": "swap_ssd"}}, [tmp_path],
                  streams, num_buffers=1, buffer_bytes=PAGE_BYTES, host_bytes=0) as swapped:
        assert_equal(gradients_of(model, swapped, batch), expected)
        assert at_rest(swapped)


def test_pinned_memory_is_what_the_plan_says_and_depends_on_nothing_else(tmp_path):
    """The SSD tier pins its few buffers, not some number times the largest layer."""
    model = Plain()
    with swapping(model, {"*": {"": "swap_ssd"}}, [tmp_path], DelayedStreams(0), num_buffers=3,
                  buffer_bytes=2 * PAGE_BYTES, host_bytes=5 * PAGE_BYTES) as swapped:
        assert swapped.budget.used_bytes == 3 * 2 * PAGE_BYTES + 5 * PAGE_BYTES
        gradients_of(model, swapped, lm_batch(64, batch=8, seq=64))
        assert swapped.budget.peak_bytes == 3 * 2 * PAGE_BYTES + 5 * PAGE_BYTES
    assert swapped.budget.used_bytes == 0
    with pytest.raises(CapacityError, match="buffer of activations"):
        with swapping(model, {"*": {"": "swap_ssd"}}, [tmp_path], num_buffers=3, budget_bytes=4 * PAGE_BYTES):
            pass


@pytest.mark.parametrize("tier", ["swap_host", "swap_ssd"])
def test_bytes_follow_the_planned_space(tmp_path, tier, caplog):
    """More space, more swapped, never beyond it; what finds none stays on the device, which is said once."""
    model = Plain(num_layers=4)
    batch = lm_batch(64, batch=4, seq=16)
    expected = gradients_of(model, model, batch)
    used, kept = [], []
    sizes = {"swap_host": "host_bytes", "swap_ssd": "ssd_bytes"}
    for num_pages in (0, 8, 20, 40, 70, 100):
        caplog.clear()
        policies = {"*": {"": tier}} if num_pages else {}
        space = {"host_bytes": 0, "ssd_bytes": 0, sizes[tier]: num_pages * PAGE_BYTES}
        with swapping(model, policies, [tmp_path], DelayedStreams(0, 0.0), **space) as swapped:
            assert_equal(gradients_of(model, swapped, batch), expected)
            used.append(max((each.peak_bytes for each in swapped.space.tiers.values()), default=0))
            kept.append(swapped.swapper.stats().get("unplanned_kept_bytes", 0))
            assert used[-1] <= num_pages * PAGE_BYTES
            said = [record for record in caplog.records if "stays on the device" in record.message]
            assert len(said) == (kept[-1] > 0)
    assert used == sorted(used) and len(set(used)) == 6, used
    assert kept[1:] == sorted(kept[1:], reverse=True) and kept[-1] == 0, kept


# -- memory ------------------------------------------------------------------------------------------------------------


class Watch(nn.Module):
    """Notes the storages of what its layers compute."""

    def __init__(self, **options):
        super().__init__()
        self.inner = Plain(**options)
        self.vocab_size, self.refs = self.inner.vocab_size, []
        for layer in self.inner.layers:
            layer.up.register_forward_hook(lambda module, args, out: self.refs.append(
                StorageWeakRef(out.untyped_storage())))

    def forward(self, **batch):
        return self.inner(**batch)

    def num_alive(self) -> int:
        return sum(not ref.expired() for ref in self.refs)


@pytest.mark.parametrize("policies", [{"": "swap_ssd"}, {"": "swap_host"}, {"": "recompute"},
                                      {"": "recompute", "up": "swap_ssd"}])
def test_what_left_is_really_gone(tmp_path, no_collector, policies):
    """Weak references of swapped and recomputed tensors die between forward and backward, without a collector."""
    model = Watch(num_layers=6)
    with swapping(model, {f"inner.layers.{i}": policies for i in range(6)}, [tmp_path],
                  DelayedStreams(0, 0.0005)) as swapped:
        loss = loss_of(swapped, lm_batch(64))
        deadline = time.monotonic() + 5
        while model.num_alive() and time.monotonic() < deadline:
            time.sleep(0.002)
        assert model.num_alive() == 0
        swapped.backward(loss)
        del loss
        assert at_rest(swapped)
    model.refs.clear()
    loss_of(model, lm_batch(64))
    kept = loss_of(model, lm_batch(64))
    assert model.num_alive() == 6, "plain torch keeps the last six"
    del kept


def test_what_the_user_holds_stays_valid(tmp_path):
    """Hidden states kept over the step have their values afterwards, and their memory is not used again."""
    model, seen = Plain(p=0.0), []
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.no_grad():
        loss_of(model, lm_batch(64))
    expected = list(seen)
    with swapping(model, {"*": {"": "swap_ssd"}}, [tmp_path]) as swapped:
        for _ in range(2):
            seen.clear()
            gradients_of(model, swapped)
            held = list(seen)
            gradients_of(model, swapped, lm_batch(64, seed=9))
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(held, expected, strict=True))


@pytest.mark.parametrize("policies", [{"": "swap_ssd"}, {"": "swap_host"}, {"": "recompute", "input": "swap_ssd"},
                                      {"": "keep"}])
def test_a_graph_that_is_dropped_frees_everything(tmp_path, no_collector, policies):
    model = tiny_llama()
    with swapping(model, {"*": policies}, [tmp_path], DelayedStreams(0, 0.0005)) as swapped:
        watched: list[StorageWeakRef] = []
        model.model.layers[1].mlp.act_fn.register_forward_hook(
            lambda module, args, out: watched.append(StorageWeakRef(out.untyped_storage())))
        for _ in range(3):
            loss = loss_of(swapped, lm_batch(257))
            del loss
        assert at_rest(swapped)
        assert all(ref.expired() for ref in watched)
        assert swapped.swapper.stats().get("unplanned_kept_bytes", 0) == 0


@pytest.mark.parametrize("policies", [{"": "swap_ssd"}, {"": "swap_host"}, {"": "recompute", "input": "swap_ssd"},
                                      {"": "recompute", "up": "swap_host"}])
def test_backward_twice_over_one_graph(tmp_path, policies):
    model = Plain()
    expected = gradients_of(model, model, backward=lambda loss: (loss.backward(retain_graph=True), loss.backward()))
    with swapping(model, {f"layers.{i}": policies for i in range(3)}, [tmp_path], DelayedStreams(0, 0.0005)) as swapped:
        def twice(loss):
            swapped.backward(loss, retain_graph=True)
            swapped.backward(loss)

        assert_equal(gradients_of(model, swapped, backward=twice), expected)
        assert at_rest(swapped)


def test_what_a_partial_backward_did_not_use_is_let_go_of(tmp_path):
    """Only the last layer's gradients are asked for: the layer before it was brought back for nothing."""
    model = Plain(p=0.0)
    expected = gradients_of(model, model)
    policies = {"layers.1": {"": "swap_ssd"}, "layers.2": {"": "recompute", "up": "swap_ssd"}}
    with swapping(model, policies, [tmp_path]) as swapped:
        def backward(loss):
            time.sleep(0.1)   # all is written
            grad, = torch.autograd.grad(loss, model.layers[2].down.weight, retain_graph=True)
            storages = swapped.swapper._table._held()
            assert any(storage._resident is not None for storage in storages)
            swapped.swapper.end_backward()
            assert all(storage._resident is None for storage in storages)
            assert torch.equal(grad, expected["layers.2.down.weight"])
            swapped.backward(loss)

        assert_equal(gradients_of(model, swapped, backward=backward), expected)
        assert at_rest(swapped)


@pytest.mark.parametrize("before", [{"": "swap_ssd"}, {"": "recompute"}, {"": "recompute", "up": "swap_ssd"}])
def test_policies_change_between_steps_and_not_under_a_graph(tmp_path, before):
    model = Plain()
    expected = gradients_of(model, model)
    with swapping(model, {"layers.1": before}, [tmp_path]) as swapped:
        swapper = swapped.swapper
        other = [(("", "recompute"), ("up", "swap_ssd")) if policies.name == "layers.2" else ()
                 for policies in swapper.policies]
        loss = loss_of(swapped, lm_batch(64))   # a graph that needs the old ones
        table = swapper.table()
        assert not swapper.change_policies(other) and swapper.table() == table
        swapped.backward(loss)
        del loss
        assert_equal(gradients_of(model, swapped), expected)
        assert at_rest(swapped)
        assert swapper.change_policies(other) and swapper.table().startswith("layers.2: ")
        moved_before = swapper.stats().get("layers.1: bytes_out")
        assert_equal(gradients_of(model, swapped), expected)
        assert at_rest(swapped)
        assert swapper.stats()["layers.2: bytes_out"] and swapper.stats().get("layers.1: bytes_out") == moved_before


def test_evaluation_packs_nothing(tmp_path):
    model = Plain()
    with swapping(model, {"*": {"": "swap_ssd"}, "layers.1": {"": "recompute"}}, [tmp_path]) as swapped:
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                loss_of(swapped, lm_batch(64))
        model.eval()
        with torch.no_grad():
            loss_of(swapped, lm_batch(64))
        assert not swapped.swapper.stats() and not swapped.swapper.held()
        expected = gradients_of(model, model)
        assert_equal(gradients_of(model, swapped), expected)   # eval() with gradients


def test_what_a_graph_still_holds_is_named(tmp_path, caplog):
    model = Plain()
    with swapping(model, {"layers.1": {"up": "swap_ssd"}}, [tmp_path]) as swapped:
        losses = [loss_of(swapped, lm_batch(64)), loss_of(swapped, lm_batch(64))]
        swapped.backward(losses.pop())
        held = swapped.swapper.held()
        assert {(each.unit, each.item, each.tier) for each in held} == {("layers.1", "up", "swap_ssd")}
        assert sum(each.nbytes for each in held) > 0
        for _ in range(2):
            swapped.swapper.end_step()
        said = [record.message for record in caplog.records]
        assert len(said) == 1 and "layers.1" in said[0] and "up" in said[0]
        losses.clear()
        assert at_rest(swapped)
        swapped.swapper.end_step()


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policies", [{"": "swap_ssd"}, {"": "swap_host"}, {"": "recompute", "input": "swap_ssd"},
                                      {"": "recompute"}])
@pytest.mark.parametrize("moment", ["forward", "backward"])
def test_an_exception_and_a_reset_leave_nothing(tmp_path, policies, moment):
    model = Plain()
    expected = gradients_of(model, model)

    def explode(*_):
        raise ZeroDivisionError

    with swapping(model, {"*": policies}, [tmp_path], DelayedStreams(0, 0.0005)) as swapped:
        loss = loss_of(swapped, lm_batch(64))
        if moment == "forward":
            handle = model.layers[2].down.register_forward_hook(explode)
            with pytest.raises(ZeroDivisionError):
                loss_of(swapped, lm_batch(64))
        else:
            handle = model.layers[0].up.weight.register_hook(explode)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
            loss = loss_of(swapped, lm_batch(64))
        handle.remove()
        swapped.swapper.reset()
        for tier in swapped.space.tiers.values():
            deadline = time.monotonic() + 5
            while tier.used_bytes and time.monotonic() < deadline:
                time.sleep(0.002)
            assert tier.used_bytes == 0
        with pytest.raises(StepError, match="reset_step"):
            loss.backward()
        del loss
        assert_equal(gradients_of(model, swapped), expected)
        assert at_rest(swapped)


def test_a_failed_write_is_an_error_of_backward_and_costs_no_buffer(tmp_path):
    model = Plain()
    expected = gradients_of(model, model)
    with swapping(model, {"*": {"": "swap_ssd"}}, [tmp_path], make_io=FaultyIo, num_buffers=1) as swapped:
        io = swapped.space.tiers["swap_ssd"].spill._io
        for operation in ("write", "read"):
            io.inject(operation, errno.EIO, at_call=2)
            with pytest.raises(StoreError, match="act-0.bin"):
                gradients_of(model, swapped)
            io.heal()
            swapped.swapper.reset()
        assert_equal(gradients_of(model, swapped), expected)
        assert at_rest(swapped)


def test_a_weight_that_changed_is_not_used_to_compute_again():
    model = Plain()
    with swapping(model, {"*": {"": "recompute"}}) as swapped:
        loss = loss_of(swapped, lm_batch(64))
        with torch.no_grad():
            model.layers[1].up.bias.mul_(2)   # which autograd does not save
        with pytest.raises(StepError, match="a weight of unit layers.1"):
            loss.backward()


def test_another_path_in_the_second_run_is_noticed():
    class Flaky(nn.Linear):
        width = 4

        def forward(self, x):
            return super().forward(x.exp()).view(-1)[:self.width].exp().exp()

    model = nn.Sequential(Flaky(4, 4))
    with swapping(model, {"0": {"": "recompute"}}) as swapped:
        loss = swapped(torch.randn(2, 4)).sum()
        Flaky.width = 6
        with pytest.raises(StepError, match="another path"):
            loss.backward()


@pytest.mark.parametrize(("policies", "message"), [
    ({"layers.0": {"attention": "keep"}}, "'attention', which unit layers.0 has not"),
    ({"layers.0": {"input": "recompute"}}, "can be kept or swapped"),
    ({"layers.0": {"": "swap_ssd"}}, "has no space"),
])
def test_a_plan_that_does_not_fit_the_model_is_refused(policies, message):
    with pytest.raises(ConfigError, match=message):
        with swapping(Plain(), policies):
            pass


def test_units_inside_a_recomputed_unit_have_no_policy_of_their_own(tmp_path):
    model = OddModel()
    with pytest.raises(ConfigError, match="inside"):
        with swapping(model, {"OddModel": {"": "recompute"}, "layers.1": {"": "swap_ssd"}}, [tmp_path]):
            pass
    expected = gradients_of(model, model)
    with swapping(model, {"OddModel": {"": "recompute"}}, [tmp_path]) as swapped:
        assert_equal(gradients_of(model, swapped), expected)
    with swapping(model, {"OddModel": {"": "swap_ssd"}, "layers.1": {"": "recompute"}}, [tmp_path]) as swapped:
        assert_equal(gradients_of(model, swapped), expected)


# -- living with others ------------------------------------------------------------------------------------------------


class Checkpointed(Plain):
    """Checkpoints by hand, around its layers or inside them."""

    def __init__(self, use_reentrant: bool, place: str):
        super().__init__(p=0.1)
        if place == "inside":
            for layer in self.layers:
                layer.forward = lambda x, layer=layer: x + checkpoint(
                    lambda y: layer.drop(layer.down(F.gelu(layer.drop(layer.up(y))))), layer.norm(x),
                    use_reentrant=use_reentrant)
        else:
            self.layers = nn.ModuleList(self.layers)
            self.use_reentrant = use_reentrant

    def forward(self, input_ids, labels):
        x_BTH = self.embed(input_ids)
        for layer in self.layers:
            x_BTH = checkpoint(layer, x_BTH, use_reentrant=self.use_reentrant) \
                if hasattr(self, "use_reentrant") else layer(x_BTH)
        return F.cross_entropy(self.head(x_BTH).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("place", ["around", "inside"])
def test_checkpoints_by_hand_are_harmless(tmp_path, use_reentrant, place, caplog):
    model = Checkpointed(use_reentrant, place)
    expected = gradients_of(model, model)
    for policies in ({"": "recompute"}, {"": "recompute", "input": "swap_ssd", "norm": "swap_ssd"}, {"": "swap_ssd"}):
        caplog.clear()
        with swapping(model, {"*": {"": "keep"}, **{f"layers.{i}": policies for i in range(3)}}, [tmp_path]) as swapped:
            for _ in range(2):
                assert_equal(gradients_of(model, swapped), expected)
            assert at_rest(swapped)
        said = [record for record in caplog.records if "checkpointed by the model or by user code" in record.message]
        assert len(said) == (place == "around"), "once"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_hugging_face_checkpointing_is_detected_and_harmless(tmp_path, use_reentrant, caplog):
    model = tiny_llama(attention_dropout=0.1)
    expected = gradients_of(model, model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    for policies in ({"": "recompute", "input": "swap_ssd"}, {"": "swap_ssd", "mlp": "recompute"}):
        caplog.clear()
        with swapping(model, {f"model.layers.{i}": policies for i in range(3)}, [tmp_path]) as swapped:
            for _ in range(2):
                assert_equal(gradients_of(model, swapped), expected)
            stats = swapped.swapper.stats()
            assert "reruns" not in stats and stats["swap_ssd_bytes_out"] > 0, "only the layers' inputs leave"
            assert at_rest(swapped)
        assert [r.levelno for r in caplog.records if "checkpointed by the model" in r.message] == [logging.WARNING]
    model.gradient_checkpointing_disable()
    caplog.clear()
    with swapping(model, {f"model.layers.{i}": policies for i in range(3)}, [tmp_path]) as swapped:
        assert_equal(gradients_of(model, swapped), expected)
        assert swapped.swapper.stats()["reruns"] == 3 and not caplog.records


def test_hooks_of_the_user_win(tmp_path, caplog):
    model = Plain()
    expected = gradients_of(model, model)
    with swapping(model, {"*": {"": "recompute"}}) as swapped:
        def run(**batch):
            with torch.autograd.graph.saved_tensors_hooks(*swapped.swapper.saved_tensors_hooks):
                with torch.autograd.graph.save_on_cpu():
                    return model(**batch)

        assert_equal(gradients_of(model, run, lm_batch(64), swapped.backward), expected)
        assert "reruns" not in swapped.swapper.stats()
    assert len([record for record in caplog.records if "by user code" in record.message]) == 1


def test_a_copied_model_has_its_own_parameters(tmp_path):
    model = Plain(p=0.0)
    with swapping(model, {"*": {"": "recompute"}}) as swapped:
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.layers[0].up.weight.zero_()
        expected = gradients_of(model, swapped)
        ours = gradients_of(twin, twin)
        assert not torch.equal(ours[""], expected[""])
        assert inspect.signature(model.layers[0].forward) == inspect.signature(PlainLayer(4).forward)
    assert "forward" not in vars(model.layers[0])
    model.layers[0].forward = own = lambda x: x
    with swapping(model, {"*": {"": "recompute"}}):
        assert model.layers[0].forward is not own
    assert model.layers[0].forward is own


def test_the_end_with_a_graph_alive(tmp_path):
    model = Plain()
    with swapping(model, {"*": {"": "swap_ssd"}, "layers.2": {"": "recompute"}}, [tmp_path]) as swapped:
        loss = loss_of(swapped, lm_batch(64))
    assert not list(tmp_path.rglob("*")) and swapped.budget.used_bytes == 0
    with pytest.raises(StepError):
        loss.backward()


def test_the_table_says_what_becomes_of_each_layer(tmp_path):
    model = tiny_llama()
    policies = {"": "recompute", "input": "swap_ssd", "mlp.down_proj": "keep"}
    with swapping(model, {"model.layers.1": policies}, [tmp_path]) as swapped:
        gradients_of(model, swapped)
        assert swapped.swapper.table() == ("model.layers.1: input swap_ssd; forward recompute; mlp.down_proj keep")
        stats = swapped.swapper.stats()
        assert stats["model.layers.1: bytes_out"] == stats["swap_ssd_bytes_out"] > 0
