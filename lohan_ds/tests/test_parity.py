"""Engine against twin: the pairwise part of the full matrix; and that the comparison can fail."""
from dataclasses import replace
from itertools import combinations

import pytest
import torch

from lohan_ds.step_protocol import StepProtocol
from lohan_ds.testing.models import OddModel, lm_batch
from lohan_ds.testing.parity import (Case, Run, first_difference, full_matrix, norm_before_last, pairwise, run_case,
                                     run_cases)
from lohan_ds.testing.twin import Twin

MATRIX = full_matrix(steps=10)
CASE = Case("odd", "host", "serial", "off", 1, "fp32", 2)
FIELDS = ("model", "tier", "update", "clip", "accumulation", "dtype")


@pytest.fixture
def ssd_paths(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    yield [str(path) for path in paths]
    assert [file for path in paths for file in path.iterdir()] == []


def test_full_matrix_has_every_combination_once():
    assert len(set(MATRIX)) == len(MATRIX) == 4 * 3 * 3 * 5 * 2 * 2


def test_pairwise_covers_every_pair_of_values():
    chosen = pairwise(MATRIX)
    for first, second in combinations(FIELDS, 2):
        wanted = {(getattr(c, first), getattr(c, second)) for c in MATRIX}
        assert {(getattr(c, first), getattr(c, second)) for c in chosen} == wanted
    assert len(chosen) < len(MATRIX) / 10
    assert pairwise(MATRIX) == chosen


@pytest.mark.parametrize("case", pairwise(MATRIX), ids=str)
def test_engine_has_the_bits_of_the_twin(case, ssd_paths):
    result = run_case(case, ssd_paths)
    assert result.same, result.first_difference
    assert result.num_clipped_steps == {"always": 10, "last": 10, "alternating": 5}.get(case.clip, 0)
    assert (result.num_kept > 0) == (case.update == "eager" and case.clip in ("off", "never", "alternating"))
    assert result.num_dropped > 0 or case.update != "eager" or case.clip != "last"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_same_bits_with_two_compute_threads(dtype, ssd_paths):
    torch.set_num_threads(2)
    result = run_case(Case("llama tied", "ssd", "deferred", "always", 1, dtype, 3), ssd_paths)
    assert result.same, result.first_difference


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_flipped_bit_is_found(dtype):
    result = run_case(replace(CASE, dtype=dtype), [], flip_bit=True)
    assert not result.same
    assert "step 1" in result.first_difference


def test_engine_that_does_not_clip_is_found(monkeypatch):
    monkeypatch.setattr("lohan_ds.optimizer.clip_coefficient", lambda *_: 1.0)
    result = run_case(replace(CASE, clip="always"), [])
    assert result.first_difference.startswith("state after step 1: ")


def test_flipped_bit_is_found_when_looking_only_at_the_end():
    result = run_case(CASE, [], flip_bit=True, look_early=False)
    assert not result.same


def test_cases_that_share_a_twin_are_each_compared():
    cases = [CASE, replace(CASE, update="eager"), replace(CASE, dtype="bf16")]
    assert [result.same for result in run_cases(cases, [])] == [True, True, True]
    assert [result.same for result in run_cases(cases, [], flip_bit=True)] == [False, False, False]


def test_limit_that_is_not_reached_as_promised_is_a_difference(monkeypatch):
    monkeypatch.setattr("lohan_ds.testing.parity.FIXED_LIMITS", {"always": 1e6, "never": 1e-3})
    always, never = run_cases([replace(CASE, clip="always"), replace(CASE, clip="never")], [])
    assert always.first_difference == "0 of 2 steps were clipped, 2 expected"
    assert never.first_difference == "2 of 2 steps were clipped, 0 expected"


def test_eager_case_that_does_not_speculate_is_found(monkeypatch):
    monkeypatch.setattr(StepProtocol, "take", take_only_due)
    for clip in ("off", "never", "alternating"):
        result = run_case(replace(CASE, update="eager", clip=clip), [])
        assert result.first_difference.endswith("some should have been kept")
    result = run_case(replace(CASE, update="eager", clip="last"), [])
    assert result.first_difference.endswith("some should have been dropped")


take = StepProtocol.take


def take_only_due(protocol, begun=None):
    protocol.stop_speculation()
    return take(protocol, begun)


def test_speculation_that_is_kept_when_it_must_not_is_found(monkeypatch):
    decide = StepProtocol.decide
    monkeypatch.setattr(StepProtocol, "decide", lambda protocol, stands, due: decide(protocol, True, due))
    result = run_case(replace(CASE, update="eager", clip="last", dtype="bf16"), [])
    assert result.first_difference.startswith("state after step 1: ")


def test_twin_knows_which_block_comes_last():
    twin = Twin(OddModel())
    twin.micro_step(lm_batch(131))
    others = [grad for name, grad in twin.main_grads.items() if name != "embed.weight"]
    assert norm_before_last(twin) == pytest.approx(torch.cat([grad.flatten() for grad in others]).norm().item())


def _run(losses=(1.0, 2.0, 3.0, 4.0), norms=(5.0, 6.0), weight=0.5, step=2) -> Run:
    return Run(list(losses), list(norms), {2: {"w": {"param": torch.tensor([weight]), "step": step}}})


@pytest.mark.parametrize("got, message", [
    (_run(), None),
    (_run(losses=(1.0, 2.0, 3.0, 4.000001), weight=0.6), "loss of step 2, micro-step 2: 4.000001, twin 4.0"),
    (_run(norms=(5.000001, 6.0)), "gradient norm of step 1: 5.000001, twin 5.0"),
    (_run(weight=-0.5), "state after step 2: w.param[0] of 1: -0.5 against 0.5 (1 elements differ)"),
    (_run(step=1), "state after step 2: w.step: 1 against 2"),
])
def test_first_difference_is_named(got, message):
    assert first_difference(got, _run(), accumulation=2) == message


def test_zero_and_minus_zero_differ_and_nan_equals_itself():
    assert first_difference(_run(norms=(0.0, 6.0)), _run(norms=(-0.0, 6.0)), 2) is not None
    assert first_difference(_run(norms=(float("nan"), 6.0)), _run(norms=(float("nan"), 6.0)), 2) is None
