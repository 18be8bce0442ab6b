"""The stand-in of a model: blocks, items and seconds as the profile has them, also where items are computed again."""
from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from lohan_ds.model_blocks import split_into_blocks
from lohan_ds.planner.placement import group
from lohan_ds.planner.time_model import Schedule, step_time
from lohan_ds.planner.traffic import compute_traffic
from lohan_ds.rehearsal.scale import Scale, find_scale
from lohan_ds.rehearsal.timed_model import Clockwork, TimedModel
from lohan_ds.testing.swapping import swapping
from lohan_ds.tests.planner_cases import MB, machine, small_model

FLOPS_PER_S = 1e10


class CountedStreams:
    """Adds up what it is asked to compute."""

    def __init__(self):
        self.seconds = Counter()

    def compute(self, name, seconds):
        self.seconds[name] += seconds


@pytest.fixture
def streams():
    return CountedStreams()


@pytest.fixture
def clock(streams):
    clock = Clockwork(streams)
    yield clock
    clock.close()


def profile(items=((4 * MB, 8e9), (2 * MB, 4e9)), num_units=3):
    return Scale(0.01, 1.0).model(small_model(num_units, items))


def test_blocks_are_those_of_the_profile(clock):
    scaled = profile()
    model = TimedModel(scaled, FLOPS_PER_S, clock)
    blocks = split_into_blocks(model, lambda param: 0 if param.requires_grad else None,
                               scaled.size.blocks[0].chunk_numel).blocks
    assert [(b.numel, b.dtype, b.trainable, len(b.slots), b.chunk_numel) for b in blocks] == \
        [(b.numel, b.dtype, b.trainable, len(b.slots), b.chunk_numel) for b in scaled.size.blocks]


def test_tied_units_share_a_parameter(clock):
    scaled = profile(num_units=2)
    tied = replace(scaled.size, units=((0,), (1, 0)))
    scaled = replace(scaled, size=tied, units=tuple(map(replace, scaled.units)))
    model = TimedModel(scaled, FLOPS_PER_S, clock)
    units = split_into_blocks(model, lambda param: 0, scaled.size.blocks[0].chunk_numel).units
    assert [unit.blocks for unit in units][0] == (0,) and set(units[1].blocks) == {0, 1}


def test_forward_and_backward_take_the_seconds_of_their_flops(clock, streams):
    scaled = profile()
    loss = TimedModel(scaled, FLOPS_PER_S, clock)(torch.zeros(8, dtype=torch.bfloat16))
    loss.backward()
    expected_s = sum(unit.forward_flops for unit in scaled.units) / FLOPS_PER_S
    assert streams.seconds == {"forward": pytest.approx(expected_s), "backward": pytest.approx(2 * expected_s)}


@pytest.mark.parametrize("policies,again_flops", [
    ({"input": "keep", "item.0": "recompute", "item.1": "keep"}, 8e9),
    ({"input": "keep", "item.0": "keep", "item.1": "recompute"}, 4e9),
    ({"input": "swap_ssd", "": "recompute"}, 12e9),
    ({"input": "swap_ssd", "item.0": "swap_ssd", "item.1": "recompute"}, 4e9),
])
def test_only_what_is_recomputed_takes_its_seconds_again(policies, again_flops, clock, streams, tmp_path):
    scaled = profile()
    model = TimedModel(scaled, FLOPS_PER_S, clock)
    with swapping(model, {"*": policies}, [tmp_path]) as swapped:
        swapped.backward(swapped(torch.zeros(model.input_numel, dtype=torch.bfloat16)))
        stats = swapped.swapper.stats()
    once_s = sum(unit.forward_flops for unit in scaled.units) / FLOPS_PER_S
    assert streams.seconds["forward"] == pytest.approx(once_s + 3 * again_flops / FLOPS_PER_S)
    assert streams.seconds["backward"] == pytest.approx(2 * once_s)
    moved = sum(item.nbytes for unit in scaled.units for item in unit.items if policies.get(item.name) == "swap_ssd")
    assert stats.get("swap_ssd_bytes_out", 0) == moved >= stats.get("swap_ssd_bytes_in", 0)   # or is not out yet


def test_gradients_are_zeros_of_every_trained_parameter(clock):
    model = TimedModel(profile(), FLOPS_PER_S, clock)
    frozen = next(model.parameters()).requires_grad_(False)
    model(torch.zeros(4, dtype=torch.bfloat16)).backward()
    assert frozen.grad is None
    trained = [param for param in model.parameters() if param.requires_grad]
    assert trained and all(param.grad is not None and not param.grad.any() for param in trained)


def test_a_scale_leaves_every_share_of_a_step_as_it_is():
    model, hardware, scale = small_model(), machine(), Scale(1 / 64, 3.0)
    small, slow = scale.model(model), scale.hardware(hardware)
    for ours, theirs in zip(small.size.blocks, model.size.blocks):
        assert ours.param_bytes / slow.h2d_bytes_per_s == pytest.approx(
            3 * theirs.param_bytes / hardware.h2d_bytes_per_s, rel=0.05)   # padding
        assert ours.numel / slow.cpu_update_params_per_s == pytest.approx(
            3 * theirs.numel / hardware.cpu_update_params_per_s, rel=0.05)
    assert small.units[0].items[1].nbytes / slow.ssd_write_bytes_per_s == pytest.approx(
        3 * model.units[0].items[1].nbytes / hardware.ssd_write_bytes_per_s)
    seconds = [step_time(compute_traffic(group(each)), rates, Schedule("eager")).seconds
               for each, rates in ((model, hardware), (small, slow))]
    assert seconds[1] == pytest.approx(3 * seconds[0])


def test_the_scale_is_found_where_nobody_names_it():
    model, hardware = small_model(pages=50_000), machine()   # 205M parameters of 14 bytes, layers of 1.8 ms
    scale = find_scale(model, hardware)
    small = scale.model(model)
    assert sum(block.param_bytes + block.state_bytes for block in small.size.blocks) == pytest.approx(160e6, rel=0.01)
    assert small.units[0].forward_flops / scale.hardware(hardware).device_flops_per_s == pytest.approx(0.05)
    assert find_scale(small_model(pages=1), hardware).bytes == 1.0   # never blown up
    assert find_scale(model, hardware, 0.5, 7.0) == Scale(0.5, 7.0)
