"""The page of `lohan plan`, its text, its JSON and its picture: complete, and of the planner's own numbers."""
from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from lohan_ds.planner.gpt_profile import GptShape, gpt_profile
from lohan_ds.planner.machines import Machine, load
from lohan_ds.planner.outlook import Request, look_ahead
from lohan_ds.planner.page import make_page
from lohan_ds.planner.page_text import WIDTH, page_text
from lohan_ds.planner.solution import Batch
from lohan_ds.planner.text import RESOURCES
from lohan_ds.planner.time_model import ResourceSeconds
from lohan_ds.planner_plot import draw, timeline
from lohan_ds.tests.planner_cases import MB, machine, small_model

GPT_13B = GptShape(40, 40, 5120, 50257, 1024)
GPT_175B = GptShape(96, 96, 12288, 50257, 1024)


def page_of(shape=GPT_13B, box="rtx4090-128gb-2ssd", micro_batch=16, accumulation=1, clipping=True):
    model, box = gpt_profile(shape, micro_batch, 1024), load(box)
    request = Request(Batch(micro_batch, accumulation), clipping)
    return make_page("GPT", model, box, look_ahead(model, box.profile, box.num_ssds, request), ["a note"])


def test_page_has_the_planners_numbers():
    model, box = gpt_profile(GPT_13B, 16, 1024), load("rtx4090-128gb-2ssd")
    outlook = look_ahead(model, box.profile, box.num_ssds, Request(Batch(16)))
    page, solution = make_page("GPT", model, box, outlook), outlook.solution
    assert page.fits and page.missing is None
    assert (page.plan.step_s, page.plan.tokens_per_s) == (solution.step_s, 16 * 1024 / solution.step_s)
    assert sum(phase.count * phase.seconds for phase in page.plan.phases) == pytest.approx(solution.step_s)
    assert {tier.tier: tier.used_bytes for tier in page.tiers} == solution.used_bytes
    assert all(tier.used_bytes == sum(nbytes for _, nbytes in tier.items) for tier in page.tiers)
    assert page.plan.ssd.write_bytes_per_step == solution.ssd_write_bytes_per_step
    assert page.plan.ssd.life_steps == box.ssd_rated_write_bytes / solution.ssd_write_bytes_per_step
    assert sum(share.num_blocks for share in page.plan.params.values()) == 42
    assert sum(sum(line.policies.values()) for line in page.plan.activations) == 40 * 9 + 1
    assert page.model.num_parameters == sum(slot.numel for block in model.size.blocks for slot in block.slots)


def test_clipping_plans_deferred_updates_and_shows_eager_beside():
    clipped, free = page_of(box="rtx4090-768gb-12ssd"), page_of(box="rtx4090-768gb-12ssd", clipping=False)
    assert (clipped.plan.update, clipped.other_update.change) == ("deferred", "update eager")
    assert free.plan.tokens_per_s >= clipped.plan.tokens_per_s * 0.995
    assert {free.plan.update, free.other_update.change.split()[-1]} == {"eager", "deferred"}


def test_parameters_stay_off_the_device_unless_asked_for():
    model, box = small_model(), Machine(machine(), "", 0, 0, {})
    pages = [make_page("small", model, box, look_ahead(model, box.profile, 0, Request(Batch(2), True, allowed)))
             for allowed in (False, True)]
    assert "device" not in pages[0].plan.params and "--device-parameters" in page_text(pages[0])
    assert "device" in pages[1].plan.params and "does not carry that out yet" in page_text(pages[1])


def test_text_says_it_all_in_a_page():
    text = page_text(page_of())
    lines = text.splitlines()
    assert len(lines) < 75 and max(map(len, lines)) <= WIDTH
    for part in ("GPT (13.1 B parameters, bfloat16)", "16 x 1024 = 16384 tokens per step", "FITS", "tokens/s",
                 "update deferred", "forward + update", "what binds", "host ", "device ", "ssd ", "optimizer state",
                 "saved activations", "recomputed", "SSD per step", "the drives last", "update eager",
                 "one more SSD (3 instead of 2)", "twice the RAM", "micro-batch 32 instead of 16", "a note"):
        assert part in text, part


def test_text_of_what_does_not_fit_names_missing_bytes_and_the_change():
    page = page_of(GPT_175B, "rtx3090-64gb-1ssd", micro_batch=1)
    missing = {tier.tier: tier.missing_bytes for tier in page.tiers}
    text = page_text(page)
    assert not page.fits and page.plan is None and page.what_if == ()
    assert missing["host"] > 0 and f"host lacks {missing['host'] / 1e9:.2f} GB ({missing['host']} bytes)" in text
    assert "DOES NOT FIT" in text and "more host memory" in text and "MISSING" in text
    assert page.missing.step_s > 0


def test_smaller_micro_batch_is_the_cheapest_change():
    page = page_of(micro_batch=128)
    assert not page.fits
    assert "accumulation steps" in page.missing.change and "every tier allowed" not in page.missing.change


def test_json_round_trip():
    for page in (page_of(), page_of(GPT_175B, "rtx3090-64gb-1ssd", micro_batch=1)):
        values = asdict(page)
        text = json.dumps(values, allow_nan=False)
        assert json.loads(text) == as_lists(values)


def as_lists(value):
    if isinstance(value, dict):
        return {key: as_lists(each) for key, each in value.items()}
    return [as_lists(each) for each in value] if isinstance(value, (list, tuple)) else value


def test_shared_memory_is_one_tier_and_has_links_without_a_limit():
    hardware = machine(unified=True, h2d_bytes_per_s=float("inf"), d2h_bytes_per_s=float("inf"))
    model, box = small_model(), Machine(hardware, "", 0, 0, {})
    page = make_page("small", model, box, look_ahead(model, hardware, 0, Request(Batch(2))))
    assert [tier.tier for tier in page.tiers] == ["host", "ssd"]
    assert page.hardware.profile["h2d_bytes_per_s"] is None
    json.dumps(asdict(page), allow_nan=False)
    assert "drive life" not in page_text(page) and "one more SSD" not in page_text(page)


def test_unknown_drive_life_is_said():
    box = replace(load("rtx4090-128gb-2ssd"), ssd_rated_write_bytes=0)
    model = gpt_profile(GPT_13B, 16, 1024)
    page = make_page("GPT", model, box, look_ahead(model, box.profile, 2, Request(Batch(16))))
    assert page.plan.ssd.life_steps is None and "drive life unknown" in page_text(page)


def test_resources_all_have_a_name():
    assert set(RESOURCES) == set(vars(ResourceSeconds()))


@pytest.mark.parametrize(("accumulation", "clipping"), [(1, True), (1, False), (3, True), (3, False)])
def test_timeline_holds_all_work_once_and_nothing_overlaps(accumulation, clipping):
    plan = page_of(micro_batch=4, accumulation=accumulation, clipping=clipping).plan
    bars = timeline(plan)
    for resource in RESOURCES:
        mine = sorted((bar for bar in bars if bar.resource == resource), key=lambda bar: bar.start_s)
        assert all(a.start_s + a.seconds <= b.start_s + 1e-9 for a, b in zip(mine, mine[1:]))
        assert not mine or mine[-1].start_s + mine[-1].seconds <= plan.step_s + 1e-9
        for work, times in (("forward", accumulation), ("backward", accumulation), ("update", 1)):
            drawn_s = sum(bar.seconds for bar in mine if bar.work == work)
            assert drawn_s == pytest.approx(times * plan.work_s[work][resource], abs=1e-9)


def test_eager_update_that_is_too_long_runs_on_into_the_next_forward():
    model = small_model()
    hardware = machine(cpu_update_params_per_s=1e7, device_flops_per_s=1e12, host_bytes=300 * MB)
    page = make_page("small", model, Machine(hardware, "", 0, 0, {}),
                     look_ahead(model, hardware, 0, Request(Batch(2), clipping=False)))
    assert page.plan.update == "eager"
    update = [bar for bar in timeline(page.plan) if bar.resource == "cpu"]
    assert sum(bar.seconds for bar in update) == pytest.approx(page.plan.work_s["update"]["cpu"])
    assert min(bar.start_s for bar in update) == 0.0


def test_picture(tmp_path):
    pytest.importorskip("matplotlib")
    for name, page in (("fits.png", page_of()), ("not.png", page_of(GPT_175B, "rtx3090-64gb-1ssd", micro_batch=1))):
        draw(page, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG\r\n")
