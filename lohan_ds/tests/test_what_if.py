"""What one more drive, more RAM or a bigger batch brings, and drive life."""
from __future__ import annotations

from dataclasses import replace

import pytest

from lohan_ds.planner.gpt_profile import GptShape, gpt_profile
from lohan_ds.planner.machines import load
from lohan_ds.planner.program import solve
from lohan_ds.planner.solution import Batch, Choices
from lohan_ds.planner.what_if import drive_life, what_if, with_ssds
from lohan_ds.tests.planner_cases import MB, machine, small_model

GPT_13B = GptShape(40, 40, 5120, 50257, 1024)


def test_each_change_is_a_new_plan():
    box, model, choices = load("rtx4090-128gb-2ssd"), gpt_profile(GPT_13B, 16, 1024), Choices((Batch(16),))
    solution = solve(model, box.profile, choices)
    answers = what_if(model, box.profile, choices, solution, box.num_ssds)
    assert [answer.change.split(" (")[0] for answer in answers] == [
        "one more SSD", "twice the RAM", "micro-batch 32 instead of 16"]
    assert all(answer.tokens_per_s_factor > 1 for answer in answers)
    assert answers[2].solution.batch == Batch(32)


def test_without_known_drives_nothing_is_said_about_them():
    model, choices = small_model(), Choices((Batch(2),))
    answers = what_if(model, machine(), choices, solve(model, machine(), choices), num_ssds=0)
    assert len(answers) == 2


def test_batch_that_does_not_fit_says_why():
    model, choices = small_model(), Choices((Batch(2),), ("deferred",))
    hardware = machine(device_bytes=26 * MB)
    answer = what_if(model, hardware, choices, solve(model, hardware, choices), num_ssds=1)[-1]
    assert answer.solution is None and answer.tokens_per_s_factor == 0
    assert "device lacks" in answer.reason


def test_drives_add_rates_and_space():
    more = with_ssds(machine(), 2, 3)
    assert (more.ssd_read_bytes_per_s, more.ssd_write_bytes_per_s, more.ssd_bytes) == (9e9, 4.5e9, 15 * 10**9)
    assert more.num_ssds == 3


def test_drive_life_is_rated_bytes_over_bytes_written():
    model = small_model()
    choices = Choices((Batch(2),), ("barrier",), state_tiers=("ssd",), param_tiers=("ssd",))
    solution = solve(model, machine(), choices)
    life = drive_life(solution, 1000 * solution.ssd_write_bytes_per_step)
    assert life.steps == 1000
    assert life.days == pytest.approx(1000 * solution.step_s / 86400)
    in_ram = solve(model, machine(), replace(choices, state_tiers=("host",), param_tiers=("host",)))
    assert drive_life(in_ram, 1).steps == float("inf")
