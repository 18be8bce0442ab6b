"""A plan against what its run measures: the table, a link's drift, and what is planned anew. Nothing has a clock."""
from __future__ import annotations

from dataclasses import replace

import pytest

from lohan_ds.plan_check import FIRST_AFTER_STEPS, NUM_WARM_UP_STEPS, PlanCheck
from lohan_ds.planner.automatic import automatic_plan, plan_at_rates
from lohan_ds.planner.comparison import compare, predicted_phases, prediction_text
from lohan_ds.planner.rate_watch import NUM_STEPS, RateWatch, rate_factors
from lohan_ds.step_summary import PHASES, RESOURCES, STALL_CAUSES, StepSummary
from lohan_ds.tests.planner_cases import MB, machine, small_model

MODEL = small_model(num_units=8, items=((4 * MB, 8e9), (3 * MB, 1e6)))
# A link so slow that it pays to compute more again than to swap; and a faster one, where it does not.
SLOW, FAST = (machine(device_bytes=35 * MB, device_flops_per_s=1e13, h2d_bytes_per_s=rate, d2h_bytes_per_s=rate)
              for rate in (4e8, 4e9))


def plan_of(hardware, accumulation=1, updates=("deferred",)):
    return automatic_plan(MODEL, hardware, accumulation, updates, None, "small").file


def summary(step=1, total=1.0, busy=0.5, **nbytes):
    """Every resource busy for `busy` seconds; the SSD's reads and writes beside each other."""
    seconds = dict.fromkeys(RESOURCES, busy)
    return StepSummary(step, 0.3 * total, 0.5 * total, 0.1 * total, total, seconds,
                       {**dict.fromkeys(RESOURCES, 0), **nbytes}, 0, None, None, dict.fromkeys(STALL_CAUSES, 0.0),
                       0, 0, True, busy)


def at_rate(hardware, factor, step=1):
    """A step on whose links everything went at `factor` times the rate of `hardware`, for half a second."""
    return summary(step, ssd_read=int(0.25 * factor * hardware.ssd_read_bytes_per_s),
                   ssd_write=int(0.25 * factor * hardware.ssd_write_bytes_per_s),
                   d2h=int(0.5 * hardware.d2h_bytes_per_s))


# -- the table ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("accumulation", "updates"), [
    (1, ("deferred",)), (3, ("deferred",)), (1, ("serial",)), (2, ("eager",))])
def test_every_predicted_second_is_in_one_phase(accumulation, updates):
    predicted = plan_of(FAST, accumulation, updates).predicted
    phases = predicted_phases(predicted)
    assert sum(phases.values()) == pytest.approx(predicted.step_s)
    assert phases["forward"] and phases["backward"] and bool(phases["step"]) == (updates == ("serial",))
    assert {f"{name}_s" for name in phases} < set(StepSummary.__dataclass_fields__) and set(phases) < set(PHASES)


def test_rows_are_means_beside_the_prediction():
    file = plan_of(FAST)
    steps = [replace(summary(step, total, h2d=nbytes), stall_s={**dict.fromkeys(STALL_CAUSES, 0.0), "update": 0.2})
             for step, total, nbytes in ((3, 1.0, 100), (4, 3.0, 300))]
    rows = {row.what: row for row in compare(file, steps, {"host": 50 * MB, "device": 30 * MB})}
    assert rows["step"].measured == 2.0 and rows["step"].predicted == file.predicted.step_s
    assert rows["step"].error == pytest.approx(file.predicted.step_s / 2 - 1)
    assert (rows["to the device"].measured, rows["to the device"].is_bytes) == (200, True)
    assert rows["  of that waiting: update"].measured == pytest.approx(0.2)
    assert "  of that waiting: gradient" not in rows and "read from the SSD" not in rows   # neither said nor seen
    assert rows["host memory"].predicted == file.predicted.memory_bytes["host"]


def test_seconds_are_not_predicted_without_compute():
    file = plan_of(FAST).model_copy(update={"sequence_length": None})
    assert all(row.predicted is None for row in compare(file, [summary()], {}) if not row.is_bytes)
    assert "compute not counted" in prediction_text(file) and "tokens/s" not in prediction_text(file)


def test_prediction_of_an_edited_plan_says_so():
    file = plan_of(FAST)
    assert "edited since" not in prediction_text(file)
    assert "edited since" in prediction_text(file.model_copy(update={"prefetch_depth": 0}))


# -- drift -------------------------------------------------------------------------------------------------------------

def told(watch, factors):
    """(step, link, factor) of each drift."""
    return [(step, drift.link, round(drift.factor, 2)) for step, factor in enumerate(factors, 1)
            for drift in watch.add(at_rate(FAST, factor))]


def test_a_link_is_told_after_so_many_steps_in_a_row_and_once():
    assert told(RateWatch(FAST), [0.5] * 3 * NUM_STEPS) == [(NUM_STEPS, "ssd", 0.5)]
    assert told(RateWatch(FAST), [1.2] * NUM_STEPS) == [(NUM_STEPS, "ssd", 1.2)]


@pytest.mark.parametrize("factors", [
    [0.92] * 50, [1.08] * 50, ([0.5] * (NUM_STEPS - 1) + [1.0]) * 3, ([0.5] * (NUM_STEPS - 1) + [2.0]) * 3])
def test_small_short_and_alternating_errors_are_none(factors):
    assert told(RateWatch(FAST), factors) == []


def test_after_a_drift_the_measured_rate_is_expected():
    watch = RateWatch(FAST)
    assert told(watch, [0.5] * NUM_STEPS + [0.5] * NUM_STEPS + [1.0] * NUM_STEPS) == [
        (NUM_STEPS, "ssd", 0.5), (3 * NUM_STEPS, "ssd", 2.0)]
    assert watch.hardware.ssd_read_bytes_per_s == pytest.approx(FAST.ssd_read_bytes_per_s)
    assert watch.hardware.d2h_bytes_per_s == FAST.d2h_bytes_per_s


def test_links_that_were_hardly_used_say_nothing():
    assert rate_factors(at_rate(FAST, 0.5), FAST) == {"ssd": pytest.approx(0.5), "d2h": pytest.approx(1.0)}
    assert rate_factors(replace(at_rate(FAST, 0.5), total_s=3.0), FAST) == {}
    assert rate_factors(summary(cpu_update=int(12 * 0.5 * 2e9)), FAST) == {"cpu_update": pytest.approx(2.0)}


# -- planning anew -----------------------------------------------------------------------------------------------------

def places(file):
    return {name: (block.parameters, block.optimizer_state) for name, block in file.blocks.items()}


def test_at_other_rates_only_activations_change():
    tight = replace(FAST, host_bytes=130 * MB, device_flops_per_s=1e12)
    file = plan_of(tight)
    other = plan_at_rates(file, replace(tight, d2h_bytes_per_s=2e7), MODEL)
    assert {state for _, state in places(file).values()} == {"host", "ssd"}
    assert places(other) == places(file) and other.activations != file.activations
    assert (other.update, other.prefetch_depth) == (file.update, file.prefetch_depth)
    assert all(other.predicted.memory_bytes[tier] <= file.predicted.memory_bytes[tier] for tier in ("host", "ssd"))
    assert plan_at_rates(file, file.hardware, MODEL).predicted.step_s == pytest.approx(file.predicted.step_s, rel=0.01)


def check_of(file, said, **more):
    check = PlanCheck(file, said.append, lambda: {}, **more)
    for step in range(NUM_WARM_UP_STEPS):
        check.add(at_rate(file.hardware, 0.01, step + 1))   # counts for nothing
    return check


def test_the_comparison_is_said_after_the_first_steps_and_every_so_many():
    said, file = [], plan_of(FAST)
    check = check_of(file, said, every_steps=4)
    assert check.rows() == []
    for step in range(NUM_WARM_UP_STEPS + 1, 13):
        check.add(at_rate(file.hardware, 1.0, step))
    assert [text.split()[6:9] for text in said] == [
        ["3", "to", str(FIRST_AFTER_STEPS)], ["3", "to", "8"], ["3", "to", "12"]], said
    assert check.rows()[0].what == "step"


def drift(check, file, factor=0.5, steps=NUM_STEPS):
    for step in range(steps):
        check.add(at_rate(file.hardware, factor, step + 3))


def test_a_drift_is_said_with_both_plans_and_carried_out_when_it_can_be():
    said, file, answers, changed = [], plan_of(FAST), [False, False, True], []
    other = plan_of(SLOW)
    assert other.activations != file.activations

    def change(plan):
        changed.append(plan)
        return answers.pop(0)

    check = check_of(file, said, replan=lambda plan, hardware: other, change=change)
    drift(check, file)
    text = said[1]
    assert "for 20 steps the SSD has gone at 0.50 of the rate that was planned with" in text
    assert prediction_text(file) in text and prediction_text(other) in text
    assert "otherwise about activations" in text and check.file is file
    drift(check, file, 1.0, 2)
    assert changed == [other] * 3 and check.file is other and "from the next step on" in said[-1]


@pytest.mark.parametrize(("replan", "change", "expected"), [
    (None, None, "It stays as it is; to plan anew: lohan profile --refresh"),
    (lambda plan, hardware: None, None, "It stays as it is"),
    (lambda plan, hardware: plan_at_rates(plan, hardware, MODEL), None, "Its decisions are the same."),
    (lambda plan, hardware: plan_of(SLOW), lambda plan: None, "needs space that was not taken")])
def test_a_plan_that_cannot_change_goes_on(replan, change, expected):
    said, file = [], plan_of(FAST)
    check = check_of(file, said, replan=replan, change=change)
    drift(check, file)
    assert expected in "\n".join(said) and check.file.activations == file.activations


def test_nothing_is_changed_once_the_run_is_closed():
    said, file = [], plan_of(FAST)
    check = check_of(file, said, replan=lambda plan, hardware: plan_of(SLOW), change=lambda plan: False)
    drift(check, file)
    check.end()
    drift(check, file, steps=1)
    assert check.file is file and not any("next step on" in text for text in said)
