"""What a plan needs, against numbers worked out by hand, and properties of the sums and of the table."""
from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan_ds.block import PAGE_NUMEL, make_block
from lohan_ds.memory.budget import MemoryBudget
from lohan_ds.memory.pinned_pool import PinnedPool
from lohan_ds.plan import LossTiles, OffloadPlan
from lohan_ds.planner.memory_model import (MEMORY_TIERS, Need, format_bytes, missing_bytes, needs, num_chunk_buffers,
                                            num_spill_buffers, table, total_bytes)
from lohan_ds.profile import Budgets, ModelSize
from lohan_ds.store.block_store import BlockStore
from lohan_ds.store.ssd_io import ThreadSsdIo

PAGE = PAGE_NUMEL


def build_model(specs: list[tuple[int, str, bool]]) -> ModelSize:
    """One unit per (pages, dtype, trainable); each is one block of one parameter."""
    blocks = tuple(make_block(i, f"layer.{i}", dtype, [("weight", (pages * PAGE,), 0 if trainable else None)], PAGE)
                   for i, (pages, dtype, trainable) in enumerate(specs))
    return ModelSize(blocks, tuple((i,) for i in range(len(blocks))), max(pages for pages, _, _ in specs) * PAGE)


def build_plan(model: ModelSize, param="host", state="host", depth=0, chunk_numel=PAGE, fp32=False,
               shadow=False) -> OffloadPlan:
    count = len(model.blocks)
    return OffloadPlan((param,) * count, (state,) * count, "eager" if shadow else "deferred", depth, chunk_numel, 3,
                       fp32, shadow)


def budgets_of(host: int, device: int, ssd: int, unified: bool = False) -> Budgets:
    return Budgets(host, device, ssd, unified, "lohan.host_memory", "free device memory", "lohan.ssd_paths")


specs = st.lists(st.tuples(st.integers(1, 6), st.sampled_from(["bfloat16", "float16", "float32"]), st.booleans()),
                 min_size=1, max_size=6)
plan_choices = st.fixed_dictionaries({
    "param": st.sampled_from(["host", "ssd"]), "state": st.sampled_from(["host", "ssd"]), "depth": st.integers(0, 4),
    "chunk_numel": st.integers(1, 8).map(lambda pages: pages * PAGE), "fp32": st.booleans(),
    "shadow": st.booleans()})


def test_numbers_of_a_small_model_on_a_gpu():
    model = build_model([(4, "bfloat16", True), (2, "bfloat16", True), (3, "bfloat16", False)])
    found = needs(model, build_plan(model, "host", "ssd", depth=0, chunk_numel=3 * PAGE), unified=False)
    assert found == [
        Need("host", "parameters", 9 * PAGE * 2),
        Need("ssd", "optimizer state", 6 * PAGE * 12),
        Need("host", "staging buffer of the store (1 chunk)", 3 * PAGE * 12),
        Need("host", "gradients held until the update", 6 * PAGE * 2),
        Need("host", "update buffers (3 chunks)", 3 * 3 * PAGE * (12 + 2)),
        Need("host", "fp32 gradient of one chunk", 3 * PAGE * 4),
        Need("host", "staging buffers (2 blocks)", 2 * 4 * PAGE * 2),
        Need("host", "staging buffers (2 gradients)", 2 * 4 * PAGE * 4),
        Need("device", "resident parameters (2 units)", (4 + 3) * PAGE * 2),
        Need("device", "gradients of the largest parameter", 2 * 4 * PAGE * 2)]


def test_unified_memory_charges_the_host_and_stages_nothing():
    model = build_model([(4, "bfloat16", True), (2, "bfloat16", True)])
    found = needs(model, build_plan(model), unified=True)
    assert {need.tier for need in found} == {"host"}
    by_name = {need.what: need.nbytes for need in found}
    assert not any(name.startswith(("staging", "update buffers")) for name in by_name)
    assert by_name["resident parameters (2 units)"] == 6 * PAGE * 2
    assert by_name["gradients of the largest parameter"] == 4 * PAGE * 2


def test_a_loss_in_tiles_works_on_the_device_where_it_always_does():
    model = build_model([(4, "bfloat16", True)])
    plan = build_plan(model)
    for unified in (False, True):
        without = needs(model, plan, unified)
        always = needs(model, replace(plan, loss_tiles=LossTiles(64, 0, 12345)), unified)
        assert [need for need in always if need not in without] == [
            Need("host" if unified else "device", "loss: one tile's logits, fp32 gradient of the head", 12345)]
        assert needs(model, replace(plan, loss_tiles=LossTiles(64, 1, 12345)), unified) == without   # by the batch


def test_fp32_accumulation_holds_four_bytes_and_fp32_blocks_have_no_separate_master():
    model = build_model([(1, "bfloat16", True), (1, "float32", True)])
    held = {fp32: next(n.nbytes for n in needs(model, build_plan(model, fp32=fp32), False) if "held" in n.what)
            for fp32 in (False, True)}
    assert held == {False: PAGE * (2 + 4), True: PAGE * (4 + 4)}
    assert Need("host", "optimizer state", PAGE * (12 + 8)) in needs(model, build_plan(model), False)


def test_shadow_slots_are_the_trained_blocks_once_more_in_their_tier():
    model = build_model([(4, "bfloat16", True), (2, "float32", True), (3, "bfloat16", False)])
    for param, state in product(("host", "ssd"), repeat=2):
        without = needs(model, build_plan(model, param, state), unified=False)
        found = needs(model, build_plan(model, param, state, shadow=True), unified=False)
        more = [need for need in found if need not in without]
        assert [need for need in found if need in without] == without
        expected = {"host": 0, "ssd": 0}
        expected[param] += (4 * 2 + 2 * 4) * PAGE
        expected[state] += (4 * 12 + 2 * 8) * PAGE
        assert more == [Need(tier, "shadow slots", nbytes) for tier, nbytes in expected.items() if nbytes]


def test_the_stores_staging_buffer_takes_what_lies_on_ssd_of_the_largest_chunk():
    def staging(*pages_and_trainable: tuple[int, bool], **where: str) -> int:
        model = build_model([(pages, "bfloat16", trainable) for pages, trainable in pages_and_trainable])
        found = needs(model, build_plan(model, chunk_numel=3 * PAGE, **where), unified=True)
        return sum(need.nbytes for need in found if need.what == "staging buffer of the store (1 chunk)")

    assert staging((4, True), (2, True)) == 0
    assert staging((4, True), (2, True), state="ssd") == 3 * PAGE * 12
    assert staging((4, True), (2, True), param="ssd") == 3 * PAGE * 2
    assert staging((2, True), (1, True), param="ssd", state="ssd") == 2 * PAGE * (2 + 12)
    assert staging((4, False), (1, True), param="ssd") == 3 * PAGE * 2   # the frozen block's chunk is the largest
    assert staging((4, False), (1, True), state="ssd") == PAGE * 12      # a frozen block has no state


@pytest.mark.parametrize("param", ["host", "ssd"])
@pytest.mark.parametrize("state", ["host", "ssd"])
@pytest.mark.parametrize("shadow", [False, True])
def test_the_store_takes_what_is_counted_for_it(param, state, shadow, tmp_path):
    model = build_model([(4, "bfloat16", True), (2, "float32", True), (5, "bfloat16", False)])
    plan = build_plan(model, param, state, chunk_numel=3 * PAGE, shadow=shadow)
    blocks = tuple(replace(block, chunk_numel=plan.chunk_numel) for block in model.blocks)
    found = needs(model, plan, unified=False)
    of_the_store = ("parameters", "optimizer state", "shadow slots", "staging buffer of the store (1 chunk)")
    counted = {tier: sum(need.nbytes for need in found if need.tier == tier and need.what in of_the_store)
               for tier in ("host", "ssd")}
    pool = PinnedPool(MemoryBudget("host", counted["host"]), pin=False)
    io = ThreadSsdIo(1)
    store = BlockStore(blocks, plan, pool, io, [str(tmp_path / "run")])
    try:
        assert (store.host_bytes, store.ssd_bytes) == (counted["host"], counted["ssd"])
    finally:
        store.close()
        io.close()


def test_units_that_share_blocks_are_never_more_than_the_model():
    model = build_model([(4, "bfloat16", True)])
    tied = ModelSize(model.blocks, ((0,), (0,), (0,)), model.largest_param_numel)
    resident = next(n.nbytes for n in needs(tied, build_plan(tied, depth=2), False) if "resident" in n.what)
    assert resident == 4 * PAGE * 2


def test_a_frozen_model_needs_no_update_memory():
    model = build_model([(4, "bfloat16", False)])
    assert {n.what.split(" (")[0] for n in needs(model, build_plan(model, "ssd", "ssd"), False)} == {
        "parameters", "staging buffer of the store", "staging buffers", "resident parameters"}
    assert needs(model, build_plan(model, shadow=True), False) == needs(model, build_plan(model), False)


@settings(max_examples=60, deadline=None)
@given(specs, plan_choices, st.booleans())
def test_sums_of_the_table_equal_the_needs(spec, choices, unified):
    model = build_model(spec)
    found = needs(model, build_plan(model, **choices), unified)
    totals = total_bytes(found)
    assert sum(totals.values()) == sum(need.nbytes for need in found)
    exact = budgets_of(totals["host"], totals["device"], totals["ssd"], unified)
    assert not any(missing_bytes(found, exact).values()) and "MISSING" not in table(found, exact)
    text = table(found, budgets_of(max(0, totals["host"] - 1), totals["device"], totals["ssd"], unified))
    assert "MISSING 1 B" in text and "lohan.host_memory" in text and "activations, logits and your own data" in text
    rows = text.splitlines()
    for tier in MEMORY_TIERS:
        sums = [row for row in rows if row.split()[:2] == [tier, "sum"]]
        assert all(format_bytes(totals[tier]) in row for row in sums) and len(sums) == (tier != "device" or not unified)
    assert all(any(need.what in row and format_bytes(need.nbytes) in row for row in rows) for need in found)


@settings(max_examples=60, deadline=None)
@given(specs, plan_choices, st.booleans())
def test_needs_never_shrink_with_depth_chunks_fp32_gradients_or_shadow_slots(spec, choices, unified):
    model = build_model(spec)
    before = total_bytes(needs(model, build_plan(model, **choices), unified))
    for more in ({"depth": choices["depth"] + 1}, {"chunk_numel": choices["chunk_numel"] + PAGE}, {"fp32": True},
                 {"shadow": True}):
        after = total_bytes(needs(model, build_plan(model, **{**choices, **more}), unified))
        assert all(after[tier] >= before[tier] for tier in MEMORY_TIERS)


def test_every_drive_has_buffers_to_read_and_to_write():
    """A chunk, and a piece of an activation, lies on one drive."""
    assert [num_chunk_buffers(n) for n in (0, 1, 2, 12)] == [3, 3, 5, 25]
    assert [num_spill_buffers(n) for n in (0, 1, 2, 12)] == [4, 4, 6, 26]


def test_format_bytes():
    assert [format_bytes(n) for n in (0, 999, 1500, 50 * 10**6, 744 * 10**9)] == [
        "0 B", "999 B", "1.50 kB", "50.00 MB", "744.00 GB"]
