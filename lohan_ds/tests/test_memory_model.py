"""What a plan needs, against numbers worked out by hand, and properties of the sums and of the table."""
from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lohan_ds.block import PAGE_NUMEL, make_block
from lohan_ds.plan import OffloadPlan
from lohan_ds.planner.memory_model import MEMORY_TIERS, Need, format_bytes, missing_bytes, needs, table, total_bytes
from lohan_ds.profile import Budgets, ModelSize

PAGE = PAGE_NUMEL


def build_model(specs: list[tuple[int, str, bool]]) -> ModelSize:
    """One unit per (pages, dtype, trainable); each is one block of one parameter."""
    blocks = tuple(make_block(i, f"layer.{i}", dtype, [("weight", (pages * PAGE,), 0 if trainable else None)], PAGE)
                   for i, (pages, dtype, trainable) in enumerate(specs))
    return ModelSize(blocks, tuple((i,) for i in range(len(blocks))), max(pages for pages, _, _ in specs) * PAGE)


def build_plan(model: ModelSize, param="host", state="host", depth=0, chunk_numel=PAGE, fp32=False) -> OffloadPlan:
    count = len(model.blocks)
    return OffloadPlan((param,) * count, (state,) * count, "deferred", depth, chunk_numel, 3, fp32)


def budgets_of(host: int, device: int, ssd: int, unified: bool = False) -> Budgets:
    return Budgets(host, device, ssd, unified, "lohan.host_memory", "free device memory", "lohan.ssd_paths")


specs = st.lists(st.tuples(st.integers(1, 6), st.sampled_from(["bfloat16", "float16", "float32"]), st.booleans()),
                 min_size=1, max_size=6)
plan_choices = st.fixed_dictionaries({
    "param": st.sampled_from(["host", "ssd"]), "state": st.sampled_from(["host", "ssd"]), "depth": st.integers(0, 4),
    "chunk_numel": st.integers(1, 8).map(lambda pages: pages * PAGE), "fp32": st.booleans()})


def test_numbers_of_a_small_model_on_a_gpu():
    model = build_model([(4, "bfloat16", True), (2, "bfloat16", True), (3, "bfloat16", False)])
    found = needs(model, build_plan(model, "host", "ssd", depth=0, chunk_numel=3 * PAGE), unified=False)
    assert found == [
        Need("host", "parameters", 9 * PAGE * 2),
        Need("ssd", "optimizer state", 6 * PAGE * 12),
        Need("host", "gradients held until the update", 6 * PAGE * 2),
        Need("host", "update buffers (3 chunks)", 3 * 3 * PAGE * (12 + 2)),
        Need("host", "fp32 gradient of one chunk", 3 * PAGE * 4),
        Need("host", "staging buffers (2 blocks)", 2 * 4 * PAGE * 2),
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


def test_fp32_accumulation_holds_four_bytes_and_fp32_blocks_have_no_separate_master():
    model = build_model([(1, "bfloat16", True), (1, "float32", True)])
    held = {fp32: next(n.nbytes for n in needs(model, build_plan(model, fp32=fp32), False) if "held" in n.what)
            for fp32 in (False, True)}
    assert held == {False: PAGE * (2 + 4), True: PAGE * (4 + 4)}
    assert Need("host", "optimizer state", PAGE * (12 + 8)) in needs(model, build_plan(model), False)


def test_units_that_share_blocks_are_never_more_than_the_model():
    model = build_model([(4, "bfloat16", True)])
    tied = ModelSize(model.blocks, ((0,), (0,), (0,)), model.largest_param_numel)
    resident = next(n.nbytes for n in needs(tied, build_plan(tied, depth=2), False) if "resident" in n.what)
    assert resident == 4 * PAGE * 2


def test_a_frozen_model_needs_no_update_memory():
    model = build_model([(4, "bfloat16", False)])
    assert {n.what.split(" (")[0] for n in needs(model, build_plan(model, "ssd", "ssd"), False)} == {
        "parameters", "staging buffers", "resident parameters"}


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
def test_needs_never_shrink_with_depth_chunks_or_fp32_gradients(spec, choices, unified):
    model = build_model(spec)
    before = total_bytes(needs(model, build_plan(model, **choices), unified))
    for more in ({"depth": choices["depth"] + 1}, {"chunk_numel": choices["chunk_numel"] + PAGE}, {"fp32": True}):
        after = total_bytes(needs(model, build_plan(model, **{**choices, **more}), unified))
        assert all(after[tier] >= before[tier] for tier in MEMORY_TIERS)


def test_format_bytes():
    assert [format_bytes(n) for n in (0, 999, 1500, 50 * 10**6, 744 * 10**9)] == [
        "0 B", "999 B", "1.50 kB", "50.00 MB", "744.00 GB"]
