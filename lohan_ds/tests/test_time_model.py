"""Seconds and bytes against the paper's equations written out, and against architecture's worked example."""
from __future__ import annotations

from dataclasses import replace

import pytest

from lohan_ds.planner.gpt_profile import GptShape, gpt_profile
from lohan_ds.planner.placement import Placement, group
from lohan_ds.planner.time_model import PhaseTraffic, ResourceSeconds, Schedule, resource_seconds, step_time
from lohan_ds.planner.traffic import StepTraffic, spilled_bytes, step_traffic
from lohan_ds.tests.planner_cases import machine, small_model

UNIT_RATES = machine(device_flops_per_s=1.0, h2d_bytes_per_s=1.0, d2h_bytes_per_s=1.0, ssd_read_bytes_per_s=1.0,
                     ssd_write_bytes_per_s=1.0, cpu_update_params_per_s=1.0)
# Architecture, section 6: T_f 0.7 s, T_b 1.8 s, all SSD work 2.7 s.
EXAMPLE = StepTraffic(PhaseTraffic(flops=0.7), PhaseTraffic(flops=1.8),
                      PhaseTraffic(state_read_bytes=1.2, state_write_bytes=1.5))


def everywhere(groups, params: str, states: str, activations: str) -> Placement:
    return Placement(tuple({params: len(block.blocks)} for block in groups.blocks),
                     tuple({states: len(block.blocks)} for block in groups.blocks),
                     tuple({"host" if item.is_input and activations == "recompute" else activations: len(item.places)}
                           for item in groups.items))


@pytest.mark.parametrize(("update", "seconds", "binding"), [
    ("serial", 5.2, ["device", "device", "ssd"]), ("deferred", 4.5, ["device", "ssd"]),
    ("barrier", 3.4, ["device", "ssd"]), ("eager", 2.7, ["device", "device", "ssd"])])
def test_update_orders_of_the_worked_example(update, seconds, binding):
    time = step_time(EXAMPLE, UNIT_RATES, Schedule(update))
    assert time.seconds == pytest.approx(seconds)
    assert [phase.binding for phase in time.phases] == binding


def test_eager_hides_the_update_where_compute_is_longer():
    traffic = StepTraffic(PhaseTraffic(flops=2), PhaseTraffic(flops=4), PhaseTraffic(state_read_bytes=5))
    time = step_time(traffic, UNIT_RATES, Schedule("eager"))
    assert [(phase.name, phase.seconds) for phase in time.phases] == [
        ("forward", 2), ("backward", 4), ("update tail", 0)]


@pytest.mark.parametrize(("update", "seconds"), [("serial", 2.5 * 4 + 2.7), ("barrier", 2.5 * 3 + 3.4),
                                                 ("deferred", 2.5 * 3 + 4.5), ("eager", 2.5 * 3 + 2.7)])
def test_only_the_last_micro_step_overlaps_with_the_update(update, seconds):
    assert step_time(EXAMPLE, UNIT_RATES, Schedule(update, accumulation=4)).seconds == pytest.approx(seconds)


@pytest.mark.parametrize("activations", ["recompute", "host", "ssd"])
def test_equations_2_and_5(activations):
    """Everything on the SSD, with distinct rates so that no term hides another."""
    model = gpt_profile(GptShape(4, 4, 64, 1000, 128), 2, 128, with_head=False)
    groups = group(model)
    rates = machine(device_flops_per_s=3e9, h2d_bytes_per_s=2e6, d2h_bytes_per_s=5e6, ssd_read_bytes_per_s=7e5,
                    ssd_write_bytes_per_s=3e5, cpu_update_params_per_s=1e5)
    traffic = step_traffic(groups, everywhere(groups, "ssd", "ssd", activations))
    params = sum(block.numel for block in model.size.blocks)
    swapped = sum(item.nbytes * len(item.places) for item in groups.items
                  if item.is_input or activations != "recompute")
    spilled = swapped if activations == "ssd" else 0
    recomputed = sum(item.recompute_flops * len(item.places) for item in groups.items) * (activations == "recompute")
    forward = max(groups.forward_flops / 3e9, swapped / 5e6, 2 * params / 2e6, 2 * params / 7e5 + spilled / 3e5)
    backward = max((2 * groups.forward_flops + recomputed) / 3e9, 2 * params / 5e6, (2 * params + swapped) / 2e6,
                   (14 * params + spilled) / 7e5 + 14 * params / 3e5, params / 1e5)
    time = step_time(traffic, rates, Schedule("barrier"))
    assert [phase.seconds for phase in time.phases] == pytest.approx([forward, backward])
    assert [phase.name for phase in time.phases] == ["forward", "backward + update"]


def test_bytes_per_link_of_one_step():
    """The table in papers/lohan.md section 3: 4P + A up, 2P + A down, 16P read, 14P written."""
    groups = group(small_model(num_units=3, items=()))
    step = step_traffic(groups, everywhere(groups, "ssd", "ssd", "host")).of_step(1)
    params = 3 * groups.blocks[0].numel
    swapped = 3 * groups.items[0].nbytes
    assert (step.h2d_bytes, step.d2h_bytes) == (4 * params + swapped, 2 * params + swapped)
    assert (step.ssd_read_bytes, step.ssd_write_bytes) == (16 * params, 14 * params)
    assert step.update_params == params


def test_parameters_on_the_device_go_up_once_and_on_the_host_are_never_read():
    groups = group(small_model(num_units=1, items=()))
    nbytes = groups.blocks[0].param_bytes
    device = step_traffic(groups, everywhere(groups, "device", "host", "keep"))
    host = step_traffic(groups, everywhere(groups, "host", "host", "keep"))
    assert (device.forward.h2d_bytes, device.backward.h2d_bytes, device.update.h2d_bytes) == (0, 0, nbytes)
    assert (host.forward.h2d_bytes, host.backward.h2d_bytes, host.update.h2d_bytes) == (nbytes, nbytes, 0)
    assert host.of_step(1).ssd_read_bytes == host.of_step(1).ssd_write_bytes == 0


@pytest.mark.parametrize(("swapped", "room", "spilled"), [(10, 4, 6), (4, 4, 0), (3, 4, 0)])
def test_spilled_bytes_are_never_negative(swapped, room, spilled):
    assert spilled_bytes(swapped, room) == spilled


@pytest.mark.parametrize(("depth", "fetch_s"), [(0, 6.0), (1, 5.0), (2, 0.0)])
def test_shallow_prefetch_makes_fetches_serial(depth, fetch_s):
    phase = PhaseTraffic(flops=1, param_h2d_bytes=2, activation_h2d_bytes=9, param_read_bytes=3, state_read_bytes=9)
    assert resource_seconds(phase, UNIT_RATES, depth).fetch == fetch_s


def test_unified_memory_shares_the_cores_between_compute_and_update():
    hardware = machine(unified=True, device_flops_per_s=1.0, cpu_update_params_per_s=1.0)
    seconds = resource_seconds(PhaseTraffic(flops=3, update_params=4), hardware, 2)
    assert (seconds.device, seconds.cpu) == (7, 0)


def test_resources_without_a_rate_are_infinitely_slow_only_if_used():
    hardware = machine(ssd_read_bytes_per_s=0.0)
    assert resource_seconds(PhaseTraffic(), hardware, 2) == ResourceSeconds()
    assert resource_seconds(PhaseTraffic(param_read_bytes=1), hardware, 2).ssd == float("inf")


def test_state_read_ahead_in_backward_fills_the_time_that_compute_leaves():
    """Deferred, T_b + max(T_f, S), with a of S read under T_b: T_b + S - a as long as the SSD is not full there."""
    model, hardware = small_model(), machine(ssd_read_bytes_per_s=1e9, ssd_write_bytes_per_s=1e9)
    groups = group(model)
    placement = Placement(({"host": 2},), ({"ssd": 2},), tuple({"keep": len(item.places)} for item in groups.items))
    block, = groups.blocks
    chunk_s = (block.state_bytes // block.num_chunks) / 1e9
    compute_s = 2 * groups.forward_flops / hardware.device_flops_per_s
    number = int(compute_s / chunk_s)
    seconds = [step_time(step_traffic(groups, replace(placement, read_ahead=(count,))), hardware,
                         Schedule("deferred")).seconds for count in (0, number, number + 5)]
    assert 0 < number < 2 * block.num_chunks
    assert seconds[1] == pytest.approx(seconds[0] - number * chunk_s)
    assert seconds[2] >= seconds[1] - chunk_s   # beyond that it only moves
    assert step_traffic(groups, replace(placement, read_ahead=(3,))).of_step(1) == step_traffic(
        groups, placement).of_step(1)
