"""The program against exhaustive search, against LoHan's optimum, and against what must hold for every plan."""
from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lohan_ds.errors import CapacityError
from lohan_ds.planner import footprint
from lohan_ds.planner.activation_search import ActivationSearch
from lohan_ds.planner.footprint import HELD_GRADIENTS, fixed_needs
from lohan_ds.planner.gpt_profile import GptShape, gpt_profile
from lohan_ds.planner.linear_program import LinearProgram
from lohan_ds.planner.memory_model import total_bytes
from lohan_ds.planner.placement import block_tiers, group, item_tiers, spread, with_micro_batch
from lohan_ds.planner.program import SLACK, solve
from lohan_ds.planner.shortage import shortage
from lohan_ds.planner.solution import Batch, Choices
from lohan_ds.planner.time_model import Schedule
from lohan_ds.tests.planner_cases import MB, exhaustive_s_per_token, machine, small_model

GIB = 2**30
EXACT = 1e-5   # the solver's tolerance on seconds, relative
GPT_13B = GptShape(40, 40, 5120, 50257, 1024)
GPT_175B = GptShape(96, 96, 12288, 50257, 1024)
few_examples = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])

rates = st.fixed_dictionaries({
    "h2d_bytes_per_s": st.sampled_from([1e9, 5e9, 2e10]), "d2h_bytes_per_s": st.sampled_from([1e9, 5e9, 2e10]),
    "ssd_read_bytes_per_s": st.sampled_from([0.0, 1e9, 6e9]), "ssd_write_bytes_per_s": st.sampled_from([5e8, 3e9]),
    "cpu_update_params_per_s": st.sampled_from([1e8, 1e9]), "device_flops_per_s": st.sampled_from([1e12, 1e13])})
sizes = st.fixed_dictionaries({
    "host_bytes": st.integers(10, 130).map(lambda n: n * MB), "device_bytes": st.integers(14, 50).map(lambda n: n * MB),
    "ssd_bytes": st.integers(0, 80).map(lambda n: n * MB)})
updates = st.sampled_from(["serial", "barrier", "deferred", "eager"])


def paper_machine(**changes):
    return machine(**{"device_flops_per_s": 143e12, "h2d_bytes_per_s": 21e9, "d2h_bytes_per_s": 21e9,
                      "ssd_read_bytes_per_s": 18e9, "ssd_write_bytes_per_s": 18e9, "cpu_update_params_per_s": 1e10,
                      "host_bytes": 256 * GIB, "device_bytes": 23 * GIB, "ssd_bytes": 46 * 10**12, **changes})


def test_buffers_for_every_drive_are_counted():
    model, host_bytes = gpt_profile(GPT_13B, 16, 1024), []
    for num_ssds in (1, 12):
        needed = fixed_needs(model, Schedule("deferred"), machine(num_ssds=num_ssds))
        host_bytes.append(sum(need.nbytes for need in needed if need.what.startswith("update buffers")))
    chunk_bytes = 14 * model.size.blocks[0].chunk_numel
    assert host_bytes == [3 * chunk_bytes, 25 * chunk_bytes]


@few_examples
@given(rates, sizes, updates, st.sampled_from([0, 1, 2]), st.sampled_from([1, 3]), st.booleans())
def test_brute_force_finds_nothing_faster_and_nothing_slower(rates, sizes, update, depth, accumulation, unified):
    model, hardware = small_model(), machine(**rates, **sizes, unified=unified)
    choices = Choices((Batch(2, accumulation),), (update,), (depth,))
    expected = exhaustive_s_per_token(model, hardware, choices)
    if expected is None:
        with pytest.raises(CapacityError):
            solve(model, hardware, choices, slack=0)
        return
    solution = solve(model, hardware, choices, slack=0)
    assert solution.fits
    assert solution.step_s / solution.tokens_per_step == pytest.approx(expected, rel=EXACT)
    assert solution.gap <= EXACT


def test_brute_force_over_several_schedules_and_items():
    model = small_model(items=((4 * MB, 8e9), (2 * MB, 1e9)))
    hardware = machine(host_bytes=40 * MB, device_bytes=26 * MB)
    choices = Choices((Batch(2),), prefetch_depths=(2, 0), updates=("eager",), param_tiers=("host",))
    solution = solve(model, hardware, choices, slack=0)
    assert solution.step_s / solution.tokens_per_step == pytest.approx(
        exhaustive_s_per_token(model, hardware, choices), rel=EXACT)


@pytest.mark.parametrize("host_gib", [64, 128, 768])
@pytest.mark.parametrize("micro_batch", [24, 36, 48, 60])
def test_bound_is_lohans_convex_optimum(monkeypatch, micro_batch, host_gib):
    """States and parameters on the SSD, nothing kept on the device, spills without buffers, the paper's order."""
    monkeypatch.setattr(footprint, "num_spill_buffers", lambda num_ssds: 0)
    monkeypatch.setattr(footprint, "TENSORS_PER_ITEM", 1)
    model, schedule = gpt_profile(GPT_13B, micro_batch, 1024, with_head=False), Schedule("barrier")
    hardware = paper_machine(device_bytes=200 * GIB, host_bytes=host_gib * GIB)
    choices = Choices((Batch(micro_batch),), ("barrier",), (2,), ("ssd",), ("ssd",), ("host", "ssd", "recompute"))
    room = hardware.host_bytes - total_bytes(fixed_needs(model, schedule, hardware))["host"]
    search = ActivationSearch(group(model), hardware, schedule, room)
    optimum, (in_items, _) = search.convex_optimum(), search.algorithm_1()
    relaxed_s = LinearProgram(model, group(model), hardware, schedule, choices.tiers).bound_s()
    assert relaxed_s == pytest.approx(optimum.step_s, rel=1e-6)
    solution = solve(model, hardware, choices, slack=0)
    # Algorithm 1 lets the last item lie half on the host and half on the SSD.
    part_of_an_item = 0.002 if in_items.spilled_bytes else EXACT
    assert relaxed_s * (1 - EXACT) <= solution.bound_s <= solution.step_s <= in_items.step_s * (1 + part_of_an_item)


@few_examples
@given(rates, sizes, updates, st.sampled_from(["host_bytes", "device_bytes", "ssd_bytes", "h2d_bytes_per_s",
                                              "d2h_bytes_per_s", "ssd_read_bytes_per_s", "ssd_write_bytes_per_s",
                                              "cpu_update_params_per_s", "device_flops_per_s"]), st.floats(1.01, 3))
def test_more_of_anything_never_makes_a_plan_slower(rates, sizes, update, what, factor):
    model, hardware = small_model(3, ((4 * MB, 8e9), (1 * MB, 0.0))), machine(**rates, **sizes)
    choices = Choices((Batch(2), Batch(4)), (update,))
    try:
        before = solve(model, hardware, choices, slack=0)
    except CapacityError:
        return
    amount = getattr(hardware, what) * factor
    more = replace(hardware, **{what: int(amount) if what.endswith("bytes") else amount})
    assert solve(model, more, choices, slack=0).tokens_per_s >= before.tokens_per_s * (1 - EXACT)


@pytest.mark.parametrize(("shape", "micro_batch", "host_gib"), [(GPT_13B, 32, 128), (GPT_13B, 32, 256),
                                                                (GPT_175B, 8, 768)])
def test_gap_is_certified_and_small(shape, micro_batch, host_gib):
    hardware = paper_machine(host_bytes=host_gib * GIB, ssd_write_bytes_per_s=3e9)
    choices = Choices((Batch(micro_batch // 2), Batch(micro_batch)))
    solution = solve(gpt_profile(shape, micro_batch, 1024), hardware, choices)
    assert solution.fits
    assert solution.bound_s <= solution.step_s
    assert solution.gap <= 0.005


def test_slack_goes_into_deeper_prefetch_and_fewer_writes():
    model, hardware = gpt_profile(GPT_13B, 32, 1024, with_head=False), paper_machine()
    choices = Choices((Batch(32),))
    fastest, calm = solve(model, hardware, choices, slack=0), solve(model, hardware, choices)
    assert calm.schedule.prefetch_depth >= fastest.schedule.prefetch_depth
    assert calm.step_s <= fastest.step_s * (1 + SLACK + EXACT)


def test_counts_spread_evenly_over_depth():
    assert spread({"host": 2, "ssd": 4}) == ("ssd", "host", "ssd", "ssd", "host", "ssd")
    assert spread({"host": 3}) == ("host",) * 3
    solution = solve(gpt_profile(GPT_13B, 32, 1024, with_head=False), paper_machine(), Choices((Batch(32),)))
    for classes, counts in ((solution.groups.blocks, solution.placement.params),
                            (solution.groups.blocks, solution.placement.states)):
        assert len(block_tiers(classes, counts)) == 42
    tiers = item_tiers(solution.groups.items, solution.placement.activations)
    assert len(tiers) == 40 * 9 + 1
    for item, counts in zip(solution.groups.items, solution.placement.activations):
        assert {tier: n for tier, n in counts.items()} == {
            tier: [tiers[place] for place in item.places].count(tier) for tier in counts}


@few_examples
@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(1, 20), min_size=1))
def test_spread_keeps_the_counts_and_no_part_waits_long(counts):
    tiers = spread(counts)
    total = sum(counts.values())
    for tier, count in counts.items():
        assert tiers.count(tier) == count
        for end in range(total + 1):
            assert abs(tiers[:end].count(tier) - count * end / total) <= 1.5


def test_frozen_model_moves_no_state_and_no_gradient():
    solution = solve(small_model(trainable=False), machine(), Choices((Batch(2),)))
    moved = solution.step_traffic
    assert moved.gradient_d2h_bytes == moved.update_params == moved.ssd_write_bytes == 0
    assert all(not counts for counts in solution.placement.states)


def test_unified_memory_charges_the_host_and_adds_update_to_compute():
    solution = solve(small_model(), machine(unified=True, device_bytes=0, h2d_bytes_per_s=float("inf"),
                                            d2h_bytes_per_s=float("inf")), Choices((Batch(2),), ("serial",)))
    assert solution.used_bytes["device"] == 0
    assert [phase.binding for phase in solution.time.phases] == ["device"] * 3
    assert all(not counts.get("host") for counts in solution.placement.activations)


def test_profile_at_another_micro_batch_grows_in_proportion():
    small, large = (group(gpt_profile(GPT_13B, batch, 1024)) for batch in (2, 8))
    scaled = group(with_micro_batch(gpt_profile(GPT_13B, 2, 1024), 8))
    assert [item.nbytes for item in scaled.items] == [item.nbytes for item in large.items]
    assert scaled.forward_flops == pytest.approx(large.forward_flops) == pytest.approx(4 * small.forward_flops)


def test_only_the_papers_order_holds_no_gradients():
    model = small_model()
    held = [HELD_GRADIENTS in {need.what for need in fixed_needs(model, Schedule(update), machine())}
            for update in ("serial", "barrier", "deferred", "eager")]
    assert held == [True, False, True, True]


@pytest.mark.parametrize(("hardware", "choices", "lacking", "expected"), [
    (machine(device_bytes=15 * MB), Choices((Batch(2),), ("deferred",), (0,)), "device", "micro-batch 1 with 2"),
    (machine(host_bytes=30 * MB), Choices((Batch(1),), ("deferred",), (0,), ("host",), ("host",)), "host",
     "every tier allowed"),
    (machine(host_bytes=3 * MB), Choices((Batch(1),)), "host", "more host memory"),
    (machine(host_bytes=20 * MB, ssd_read_bytes_per_s=0.0, ssd_bytes=0), Choices((Batch(1),)), "ssd", "more SSD space"),
])
def test_shortage_names_missing_bytes_and_a_change_that_fits(hardware, choices, lacking, expected):
    model = small_model()
    with pytest.raises(CapacityError):
        solve(model, hardware, choices)
    found = shortage(model, hardware, choices)
    assert found.missing_bytes[lacking] > 0
    assert expected in found.change
    assert f"{lacking} lacks" in str(found)
    assert solve(model, found.hardware, found.choices, slack=0).fits
