"""The search: the best plan that fits, and changes that really make one fit."""
from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lohan_ds.block import chunk_numel_for
from lohan_ds.errors import CapacityError
from lohan_ds.plan import LossTiles
from lohan_ds.planner.memory_model import NOT_INCLUDED, missing_bytes, needs, total_bytes
from lohan_ds.planner.search import PlanRequest, apply_changes, cheapest_change, make_plan, plan_table
from lohan_ds.profile import Budgets, ModelSize
from lohan_ds.tests.test_memory_model import build_model, specs

AUTO = PlanRequest(None, None, None, None, None, 1)
HUGE = 10**12
MODEL_50MB = build_model([(1000, "bfloat16", True)] * 12)  # 24.6 M parameters, 49 MB; 295 MB of optimizer state
RAM = "available RAM under the cgroup limit"


def budgets_of(host=HUGE, device=HUGE, ssd=0, unified=False, host_source="lohan.host_memory",
               ssd_source="free space of lohan.ssd_paths") -> Budgets:
    return Budgets(host, device, ssd, unified, host_source, "free device memory", ssd_source)


def is_allowed(request: PlanRequest) -> bool:
    """What the config lets through."""
    return not (request.update == "eager" and request.durability == "in_place")


def fits(model: ModelSize, request: PlanRequest, budgets: Budgets) -> bool:
    try:
        make_plan(model, request, budgets)
    except CapacityError:
        return False
    return True


requests = st.builds(
    PlanRequest, st.sampled_from([None, "host", "ssd"]), st.sampled_from([None, "host", "ssd"]),
    st.sampled_from([None, "eager", "deferred", "serial"]), st.sampled_from([None, 0, 1, 4]),
    st.sampled_from([None, 24576, 10**5]), st.sampled_from([1, 4]))
durable_requests = st.builds(
    PlanRequest, st.sampled_from([None, "ssd"]), st.sampled_from([None, "ssd"]),
    st.sampled_from([None, "eager", "deferred", "serial"]), st.sampled_from([None, 0, 4]),
    st.sampled_from([None, 24576]), st.sampled_from([1, 4]), st.sampled_from([None, "shadow", "in_place"])
).filter(is_allowed)
any_requests = st.one_of(requests, durable_requests)
sizes = st.one_of(st.just(0), st.integers(0, 10**6), st.just(HUGE))
budgets_any = st.builds(budgets_of, sizes, sizes, sizes, st.booleans(), st.sampled_from(["lohan.host_memory", RAM]),
                        st.sampled_from(["lohan.ssd_space", "free space of lohan.ssd_paths"]))


@settings(max_examples=50, deadline=None)
@given(specs, requests, budgets_any)
def test_a_plan_fits_and_honours_what_was_forced(spec, request, budgets):
    model = build_model(spec)
    try:
        plan, blocks = make_plan(model, request, budgets)
    except CapacityError:
        return
    assert not any(missing_bytes(needs(model, plan, budgets.unified), budgets).values())
    assert request.param_tier in (None, plan.param_tier[0]) and len(set(plan.param_tier)) == 1
    assert request.optimizer_tier in (None, plan.state_tier[0]) and len(set(plan.state_tier)) == 1
    assert request.prefetch_depth in (None, plan.prefetch_depth)
    assert request.chunk_bytes is None or plan.chunk_numel == chunk_numel_for(request.chunk_bytes)
    assert plan.accumulate_fp32 == (request.accumulation > 1)
    assert plan.update in ((request.update,) if request.update else ("auto", "deferred"))
    assert plan.shadow == (plan.update in ("auto", "eager"))
    assert plan.num_chunk_buffers == 3
    assert blocks == tuple(replace(block, chunk_numel=plan.chunk_numel) for block in model.blocks)


@settings(max_examples=50, deadline=None)
@given(specs, any_requests, budgets_any, st.sampled_from(["host_bytes", "device_bytes", "ssd_bytes"]),
       st.integers(1, 10**6))
def test_more_memory_never_turns_a_fit_into_a_no_fit(spec, request, budgets, tier, more_bytes):
    model = build_model(spec)
    more = replace(budgets, **{tier: getattr(budgets, tier) + more_bytes})
    assert fits(model, request, more) or not fits(model, request, budgets)


@settings(max_examples=80, deadline=None)
@given(specs, requests, budgets_any)
def test_nothing_gives_way_to_automatic_shadow_slots(spec, request, budgets):
    model = build_model(spec)
    automatic, deferred = replace(request, update=None), replace(request, update="deferred")
    assert fits(model, automatic, budgets) == fits(model, deferred, budgets)
    if not fits(model, deferred, budgets):
        return
    without = replace(make_plan(model, deferred, budgets)[0], num_read_ahead_chunks=0)   # that comes after the slots
    with_shadow = replace(without, update="auto", shadow=True)
    items = needs(model, with_shadow, budgets.unified)
    has_room = not any(missing_bytes(items, budgets).values()) and 2 * total_bytes(items)["host"] <= budgets.host_bytes
    pays = not budgets.unified or "ssd" in without.param_tier + without.state_tier
    plan, _ = make_plan(model, automatic, budgets)
    assert replace(plan, num_read_ahead_chunks=0) == (with_shadow if has_room and pays else without)
    assert plan == make_plan(model, replace(request, update="auto"), budgets)[0]


@settings(max_examples=80, deadline=None)
@given(specs, any_requests, budgets_any)
@example([(1, "bfloat16", True)], PlanRequest(None, None, "eager", None, None, 1, "shadow"), budgets_of(0, 0, 0))
def test_the_named_change_really_fits_and_all_of_it_is_needed(spec, request, budgets):
    model = build_model(spec)
    changes = cheapest_change(model, request, budgets)
    assert bool(changes) != fits(model, request, budgets)
    assert fits(model, *apply_changes(request, budgets, changes))
    for left_out in changes:
        fewer = tuple(change for change in changes if change is not left_out)
        request_of_fewer, budgets_of_fewer = apply_changes(request, budgets, fewer)
        assert not (is_allowed(request_of_fewer) and fits(model, request_of_fewer, budgets_of_fewer)), changes
    if changes:
        with pytest.raises(CapacityError) as error:
            make_plan(model, request, budgets)
        assert all(str(change) in str(error.value) for change in changes)


@settings(max_examples=50, deadline=None)
@given(specs, st.integers(0, 10**6), st.booleans())
def test_a_named_budget_is_the_least_that_fits(spec, host, unified):
    model, budgets = build_model(spec), budgets_of(host, unified=unified)
    for change in cheapest_change(model, AUTO, budgets):
        assert change.key == "lohan.host_memory"
        assert fits(model, AUTO, replace(budgets, host_bytes=change.value))
        assert not fits(model, AUTO, replace(budgets, host_bytes=change.value - 1))


def test_automatic_tiers_move_state_first_then_params():
    def tiers(host: int) -> tuple[str, str]:
        plan, _ = make_plan(MODEL_50MB, replace(AUTO, chunk_bytes=2**20), budgets_of(host, ssd=HUGE, unified=True))
        return plan.param_tier[0], plan.state_tier[0]

    assert tiers(HUGE) == ("host", "host")
    assert tiers(150 * 10**6) == ("host", "ssd")
    assert tiers(100 * 10**6) == ("ssd", "ssd")


def test_automatic_settings_shrink_only_when_no_tier_fits():
    roomy, _ = make_plan(MODEL_50MB, AUTO, budgets_of(ssd=HUGE))
    assert (roomy.prefetch_depth, roomy.chunk_numel) == (2, chunk_numel_for(16 * 2**20))
    small_device, _ = make_plan(MODEL_50MB, AUTO, budgets_of(device=21 * 10**6))  # 3 layers and 2 gradients of 4.1 MB
    assert small_device.prefetch_depth == 1
    tight, blocks = make_plan(MODEL_50MB, AUTO, budgets_of(host=90 * 10**6, ssd=HUGE))
    assert tight.chunk_numel < roomy.chunk_numel and blocks[0].chunk_numel == tight.chunk_numel


def test_shadow_slots_take_the_room_that_is_left_and_eager_asks_for_it():
    def decided(update: str | None, host: int, ssd: int, unified: bool = True) -> tuple:
        plan, _ = make_plan(MODEL_50MB, replace(AUTO, update=update, chunk_bytes=2**20),
                            budgets_of(host, ssd=ssd, unified=unified))
        return plan.update, plan.shadow, plan.param_tier[0], plan.state_tier[0]

    assert decided(None, HUGE, 0, unified=False) == ("auto", True, "host", "host")
    assert decided(None, HUGE, 0) == ("deferred", False, "host", "host")   # nothing is idle in backward
    assert decided(None, 500 * 10**6, HUGE) == ("deferred", False, "host", "host")   # the SSD would have room
    assert decided("eager", 500 * 10**6, HUGE) == ("eager", True, "host", "ssd")
    assert decided(None, 150 * 10**6, HUGE) == ("deferred", False, "host", "ssd")
    assert decided(None, 100 * 10**6, HUGE) == ("deferred", False, "ssd", "ssd")   # no half of the host is left
    assert make_plan(MODEL_50MB, replace(AUTO, param_tier="ssd", optimizer_tier="ssd"),
                     budgets_of(500 * 10**6, ssd=HUGE, unified=True))[0].shadow
    assert decided(None, 100 * 10**6, 500 * 10**6) == ("deferred", False, "ssd", "ssd")
    for update in ("deferred", "serial"):
        assert decided(update, HUGE, HUGE) == (update, False, "host", "host")


def test_d14_too_little_memory_is_refused_with_a_table_and_a_change():
    with pytest.raises(CapacityError) as error:
        make_plan(MODEL_50MB, AUTO, budgets_of(host=60 * 10**6, unified=True))
    summary, _, *rows = str(error.value).splitlines()
    assert summary.startswith("the model does not fit: host needs ") and "has 60.00 MB (60000000 bytes" in summary
    assert rows[0].split() == ["tier", "what", "needed", "available", "verdict"]
    assert any("sum" in row and "60.00 MB (lohan.host_memory)" in row and "MISSING" in row for row in rows)
    assert rows[-2] == NOT_INCLUDED
    (change,) = cheapest_change(MODEL_50MB, AUTO, budgets_of(host=60 * 10**6, unified=True))
    assert rows[-1].startswith(f'The cheapest change that would fit: "lohan.host_memory": {change.value} (')


def keys_of(request: PlanRequest, budgets: Budgets) -> dict:
    return {change.key: change.value for change in cheapest_change(MODEL_50MB, request, budgets)}


def test_settings_are_named_before_hardware():
    tight = budgets_of(host=150 * 10**6, ssd=HUGE, host_source=RAM)
    assert keys_of(replace(AUTO, optimizer_tier="host"), tight) == {"lohan.optimizer_tier": "ssd"}
    assert keys_of(replace(AUTO, optimizer_tier="host", param_tier="host"), replace(tight, host_bytes=100 * 10**6)) == {
        "lohan.optimizer_tier": "ssd", "lohan.param_tier": "ssd"}
    small = replace(tight, host_bytes=80 * 10**6)
    assert list(keys_of(replace(AUTO, chunk_bytes=2**26), small)) == ["lohan.chunk_bytes"]
    assert keys_of(replace(AUTO, prefetch_depth=5), budgets_of(device=21 * 10**6)) == {"lohan.prefetch_depth": 1}
    eager = replace(AUTO, update="eager")
    assert keys_of(eager, budgets_of(host=500 * 10**6, host_source=RAM)) == {"lohan.update": "deferred"}
    assert keys_of(eager, budgets_of(host=500 * 10**6)) == {"lohan.update": "deferred"}
    assert keys_of(replace(eager, optimizer_tier="host"), replace(tight, host_bytes=500 * 10**6)) == {
        "lohan.update": "deferred"}   # rather than the SSD
    assert keys_of(replace(eager, param_tier="host", optimizer_tier="host"), tight) == {
        "lohan.update": "deferred", "lohan.optimizer_tier": "ssd"}
    assert keys_of(replace(AUTO, accumulation=4), replace(tight, host_bytes=87 * 10**6)) == {
        "gradient_accumulation_steps": 1}


def test_hardware_is_named_with_bytes_an_ssd_before_ram():
    no_ssd = budgets_of(host=150 * 10**6, host_source=RAM)
    assert keys_of(AUTO, no_ssd) == {"lohan.ssd_paths": 12 * 1000 * 2048 * 12}
    assert keys_of(replace(AUTO, update="eager"), no_ssd) == {  # on the SSD shadow slots would be as much again
        "lohan.update": "deferred", "lohan.ssd_paths": 12 * 1000 * 2048 * 12}
    assert keys_of(replace(AUTO, optimizer_tier="host", param_tier="host"), no_ssd) == {
        "lohan.optimizer_tier": "ssd", "lohan.ssd_paths": 12 * 1000 * 2048 * 12}
    assert list(keys_of(AUTO, replace(no_ssd, host_bytes=10**6, ssd_bytes=HUGE))) == ["lohan.host_memory"]
    assert list(keys_of(AUTO, replace(no_ssd, device_bytes=10**6, host_bytes=HUGE))) == ["lohan.device_memory"]
    assert list(keys_of(AUTO, replace(no_ssd, host_bytes=10**6))) == ["lohan.host_memory", "lohan.ssd_paths"]
    limited = replace(no_ssd, ssd_bytes=10**6, ssd_source="lohan.ssd_space")
    assert keys_of(AUTO, limited) == {"lohan.ssd_space": 12 * 1000 * 2048 * 12}
    message = str(cheapest_change(MODEL_50MB, AUTO, replace(no_ssd, host_bytes=10**6, ssd_bytes=HUGE))[0])
    assert RAM in message and "more than there is" in message


@pytest.mark.parametrize("update, shown", [
    (None, "update auto, shadow slots yes"), ("eager", "update eager, shadow slots yes"),
    ("deferred", "update deferred"), ("serial", "update serial")])
def test_plan_table_shows_decisions_and_budgets(update, shown):
    budgets = budgets_of(ssd=HUGE)
    plan, _ = make_plan(MODEL_50MB, replace(AUTO, update=update), budgets)
    text = plan_table(MODEL_50MB, plan, budgets)
    assert text.startswith(
        f"lohan plan: parameters on host, optimizer state on host, {shown}, prefetch_depth 2 units, chunk_bytes ")
    assert text.count("shadow slots") == (2 if plan.shadow else 0)   # the headline and the table
    assert "free device memory" in text and text.count("fits") == 3 and text.endswith(NOT_INCLUDED)


@pytest.mark.parametrize("tiles, said", [
    (None, None), (LossTiles(64), "head and loss in tiles of 64 tokens"),
    (LossTiles(512, 1_500_000_000), "head and loss in tiles of 512 tokens where logits take more than 1.50 GB")])
def test_a_plan_keeps_the_tiles_of_its_request_and_says_so(tiles, said):
    plan, _ = make_plan(MODEL_50MB, replace(AUTO, loss_tiles=tiles), budgets_of(ssd=HUGE))
    headline = plan_table(MODEL_50MB, plan, budgets_of(ssd=HUGE)).splitlines()[0]
    assert plan.loss_tiles == tiles and ("tiles" not in headline if said is None else headline.endswith(said))


@settings(max_examples=80, deadline=None)
@given(specs, durable_requests, budgets_any)
def test_a_durable_plan_keeps_all_on_ssd_and_has_slots_where_they_fit(spec, request, budgets):
    model = build_model(spec)
    if not fits(model, request, budgets):
        return
    plan, _ = make_plan(model, request, budgets)
    assert {*plan.param_tier, *plan.state_tier} == {"ssd"}
    assert plan.durability == (request.durability or plan.durability) != "none"
    assert plan.shadow == (plan.durability == "shadow")
    assert plan.update in ((request.update,) if request.update else ("auto", "deferred"))
    if request.durability is None and plan.durability == "in_place":
        assert not fits(model, replace(request, durability="shadow"), budgets)
    assert not any(missing_bytes(needs(model, plan, budgets.unified), budgets).values())


def test_durability_is_chosen_by_the_room_on_ssd_and_said_with_its_cost():
    twice = 2 * 12000 * 2048 * 14
    for ssd, durability, said in ((twice, "shadow", "one sync per step"), (twice - 1, "in_place", "good order")):
        budgets = budgets_of(ssd=ssd)
        plan, _ = make_plan(MODEL_50MB, replace(AUTO, durability=None), budgets)
        assert plan.durability == durability and said in plan_table(MODEL_50MB, plan, budgets).splitlines()[0]
    assert keys_of(replace(AUTO, durability="shadow"), budgets_of(ssd=twice - 1)) == {"lohan.durability": "in_place"}


def test_state_is_read_ahead_into_what_is_left_of_the_share_and_no_further():
    on_ssd = replace(AUTO, param_tier="ssd", optimizer_tier="ssd", update="deferred", chunk_bytes=2**20)

    def chunks(request: PlanRequest, host: int, unified: bool = False) -> int:
        budgets = budgets_of(host, ssd=HUGE, unified=unified)
        plan, _ = make_plan(MODEL_50MB, request, budgets)
        used = total_bytes(needs(MODEL_50MB, plan, unified))["host"]
        assert not plan.num_read_ahead_chunks or used <= (0.5 if unified else 0.9) * host
        return plan.num_read_ahead_chunks

    everything = sum(len(block.chunks) for block in make_plan(MODEL_50MB, on_ssd, budgets_of(ssd=HUGE))[1])
    assert chunks(on_ssd, HUGE) == everything
    assert 0 < chunks(on_ssd, 300 * 10**6) < everything
    assert chunks(on_ssd, 150 * 10**6, unified=True) == 0
    assert chunks(replace(on_ssd, update="serial"), HUGE) == 0
    assert chunks(replace(on_ssd, optimizer_tier="host"), HUGE) == 0
