"""Algorithm 1 and its continuous optimum: order, cases, tiers, convexity."""
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan_ds.planner.activation_search import (
    ActivationSearch, benefit_order, recompute_flops, slope_flops_per_byte)
from lohan_ds.planner.gpt_profile import GptShape, gpt_profile
from lohan_ds.planner.machines import load
from lohan_ds.planner.placement import group
from lohan_ds.planner.time_model import Schedule
from lohan_ds.tests.planner_cases import MB, machine, small_model

GIB = 2**30
GPT_13B = GptShape(40, 40, 5120, 50257, 1024)


def search_13b(micro_batch: int, host_room: int = 10**13, device_room: int = 0, **changes) -> ActivationSearch:
    hardware = machine(**{"device_flops_per_s": 143e12, "h2d_bytes_per_s": 21e9, "d2h_bytes_per_s": 21e9,
                          "ssd_read_bytes_per_s": 18e9, "ssd_write_bytes_per_s": 18e9,
                          "cpu_update_params_per_s": 1e10, **changes})
    groups = group(gpt_profile(GPT_13B, micro_batch, 1024, with_head=False))
    return ActivationSearch(groups, hardware, Schedule("barrier"), host_room, device_room)


def test_activations_of_13b_at_batch_32_are_the_papers():
    """213 GB and 12.5 GB, which are GiB; ours have one final hidden state more."""
    search, hidden_gib = search_13b(32), 2 * 1024 * 32 * 5120 / GIB
    assert search.all_bytes / GIB == pytest.approx(212.5 + hidden_gib)
    assert search.least_bytes / GIB == pytest.approx(12.5 + hidden_gib)


def test_order_is_inputs_then_down_projection_then_the_other_products():
    order = [item.name for item in benefit_order(group(gpt_profile(GPT_13B, 1, 1024)).items)]
    assert order[:3] == ["input", "input", "fc2"]
    assert set(order[3:6]) == {"qkv", "proj", "fc1"}
    assert order[6] == "attention"


def test_bandwidth_bound_saves_only_inputs():
    """Case 1: the SSD binds even when all is recomputed."""
    search = search_13b(8)
    assert search.convex_optimum().saved_bytes == pytest.approx(search.least_bytes, rel=1e-6)
    assert search.algorithm_1()[0].saved_bytes == search.least_bytes


def test_compute_bound_saves_all_that_costs_flops():
    """Case 2: fast links and SSD."""
    search = search_13b(64, d2h_bytes_per_s=1e12, h2d_bytes_per_s=1e12, ssd_read_bytes_per_s=1e13,
                        ssd_write_bytes_per_s=1e13)
    optimum, counts = search.algorithm_1()
    assert optimum.recompute_flops == pytest.approx(0, abs=1)
    assert all(count == len(item.places) for item, count in zip(search.order, counts) if item.recompute_flops)


def test_balanced_stops_where_link_time_reaches_compute_time():
    """Case 3: A / BW_G = T_f of the device."""
    optimum = search_13b(60).convex_optimum()
    assert optimum.swapped_bytes / 21e9 == pytest.approx(group(
        gpt_profile(GPT_13B, 60, 1024, with_head=False)).forward_flops / 143e12, rel=1e-6)


@pytest.mark.parametrize(("micro_batch", "published_s"), [(24, 28.1), (36, 27.7), (48, 32.1), (60, 39.7)])
def test_the_papers_optima_are_within_15_percent(micro_batch, published_s):
    """Figure 9b, with the rates of the machine file; examples/paper_tables.py prints the whole comparison."""
    groups = group(gpt_profile(GPT_13B, micro_batch, 1024, with_head=False))
    search = ActivationSearch(groups, load("rtx4090-768gb-12ssd").profile, Schedule("barrier"), 700 * 10**9)
    assert search.convex_optimum().step_s == pytest.approx(published_s, rel=0.15)


def test_first_bytes_are_kept_next_go_to_the_host_rest_to_the_ssd():
    search = search_13b(60, host_room=50 * 10**9, device_room=10 * 10**9)
    amount = search.amount(100e9)
    assert (amount.kept_bytes, amount.swapped_bytes, amount.spilled_bytes) == (10e9, 90e9, 40e9)


def test_room_on_the_device_saves_time():
    assert search_13b(60, device_room=10 * 10**9).convex_optimum().step_s < search_13b(60).convex_optimum().step_s


def test_slope_is_the_benefit_of_the_next_item():
    order = benefit_order(group(small_model(items=((4 * MB, 8e9), (1 * MB, 1e9)))).items)
    for saved, benefit in ((4 * MB, 2000), (12 * MB - 1, 2000), (12 * MB, 1000), (14 * MB, 0)):
        assert slope_flops_per_byte(order, saved) == benefit
    assert recompute_flops(order, 5 * MB) - recompute_flops(order, 6 * MB) == pytest.approx(2000 * MB)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 8), st.integers(0, 9)), min_size=1, max_size=4), st.integers(0, 20),
       st.integers(0, 10), st.sampled_from(["serial", "barrier", "deferred", "eager"]),
       st.sampled_from([2e9, 2e10]), st.sampled_from([1e9, 1e10]))
def test_seconds_are_convex_and_the_optimum_is_the_least(items, host_room, device_room, update, link, ssd):
    groups = group(small_model(items=tuple((size * MB, flops * 1e9) for size, flops in items)))
    hardware = machine(d2h_bytes_per_s=link, h2d_bytes_per_s=link, ssd_read_bytes_per_s=ssd, ssd_write_bytes_per_s=ssd,
                       cpu_update_params_per_s=1e12)
    search = ActivationSearch(groups, hardware, Schedule(update), host_room * MB, device_room * MB)
    cuts = [search.least_bytes + (search.all_bytes - search.least_bytes) * i / 40 for i in range(41)]
    seconds = [search.amount(cut).step_s for cut in cuts]
    for before, here, after in zip(seconds, seconds[1:], seconds[2:]):
        assert here <= (before + after) / 2 * (1 + 1e-12)
    optimum = search.convex_optimum().step_s
    assert optimum <= min(seconds) * (1 + 1e-12)
    assert search.algorithm_1()[0].step_s >= optimum * (1 - 1e-12)
