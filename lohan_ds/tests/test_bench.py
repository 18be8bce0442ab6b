"""The parts of `lohan bench` that need no other process: sides, order, arithmetic, refusals, JSON."""
import functools
import math
import mmap

import pytest
import torch

from lohan_ds.bench import run as run_module
from lohan_ds.bench import worker_process
from lohan_ds.bench.case import CLIP_LIMITS, SIZES, Case, Side, parse_sides
from lohan_ds.bench.deepspeed_settings import START, best_of, sweep
from lohan_ds.bench.figures import Bound, clipped_as_said, clipped_bound_s, max_loss_difference, ratio
from lohan_ds.bench.model import count_params, make_batch, make_model
from lohan_ds.bench.probes import Probe
from lohan_ds.bench.process_facts import cached_share, drive_bytes, forget_peak_rss, peak_rss_bytes
from lohan_ds.bench.report import Report
from lohan_ds.bench.rounds import SideTurns, Workers, run_rounds
from lohan_ds.bench.run import Results, Schedule
from lohan_ds.bench.turns import StepRecord, Turn
from lohan_ds.bench.worker import COMPUTE, Session
from lohan_ds.errors import ConfigError

CASE = Case("tiny", 16, 1, "fp32", "every", 1, False)
SCHEDULE = Schedule(num_rounds=2, num_warmup=1, num_counted=2)


def make_turn(seconds, losses=None, first=0, norm=5.0, read=0, written=0, cached=None, uncounted=1):
    """A turn of `uncounted` steps that do not count, then one per entry of `seconds`."""
    all_s = [9.0] * uncounted + list(seconds)
    losses = losses or [5.0 - 0.5 * (first + i) for i in range(len(all_s))]
    steps = tuple(StepRecord(first + i, i >= uncounted, s, {"forward": s * 0.25, "backward": s * 0.5, "step": s * 0.25},
                             2 * s, loss, norm, read, written) for i, (s, loss) in enumerate(zip(all_s, losses)))
    return Turn(steps, 0.1, 2_000, 1_000, cached)


def make_side(name, *turns, **more):
    kind, _, variant = name.partition(":")
    return SideTurns(Side(name, kind, variant), [list(turns)], dict(enumerate(turns)), **more)


def make_results(*sides, case=CASE):
    compute = make_side(COMPUTE, make_turn([2.0, 2.0], norm=None), make_turn([4.0, 4.0], norm=None))
    probes = [Probe(1000.0, 1000.0, 1000.0, 50.0), Probe(500.0, 1.0, 1.0, 25.0), Probe(800.0, 1.0, 1.0, 40.0)]
    return Results(case, SCHEDULE, 100, {side.side.name: side for side in sides}, compute, probes, {})


# -- what is compared ---------------------------------------------------------------------------------------------


def test_plain_torch_runs_named_or_not_and_comes_first():
    assert [side.name for side in parse_sides("lohan-ssd:eager, zero3-cpu,torch")] == ["torch", "lohan-ssd:eager",
                                                                                       "zero3-cpu"]
    assert [side.name for side in parse_sides("lohan-host")] == ["torch", "lohan-host"]
    eager = parse_sides("lohan-ssd:eager,zero3-cpu", "3GB")
    assert eager[1] == Side("lohan-ssd:eager", "lohan-ssd", "eager", host_memory="3GB") and eager[2].host_memory == ""


@pytest.mark.parametrize(("text", "named"), [("lohan", "lohan"), ("torch,zero3-cpu:eager", "no variants of zero3-cpu"),
                                             ("lohan-ssd:late", "lohan-ssd:deferred"), ("fsdp2,fsdp2", "twice")])
def test_sides_that_there_are_not_are_refused_by_name(text, named):
    with pytest.raises(ConfigError, match=named):
        parse_sides(text)


def test_parameters_are_counted_as_the_model_has_them():
    assert count_params(CASE) == sum(p.numel() for p in make_model(CASE).parameters())


@pytest.mark.parametrize(("size", "millions"), [("134m", 134), ("374m", 374), ("1.14b", 1143)])
def test_sizes_are_as_large_as_they_are_called(size, millions):
    assert round(count_params(Case(size, SIZES[size].seq, 1, "fp32", "none", 1, False)) / 1e6) == millions


def test_every_process_gets_the_same_weights_and_tokens():
    first, second = make_model(CASE), make_model(CASE)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))
    assert torch.equal(make_batch(CASE)["input_ids"], make_batch(CASE)["input_ids"])


def test_16_bit_weights_with_fp32_products_give_the_loss_of_fp32_weights_of_the_same_value():
    case = Case("tiny", 16, 1, "bf16", "none", 1, True)
    exact, stored = make_model(case), make_model(case).to(torch.bfloat16)
    assert {p.dtype for p in stored.parameters()} == {torch.bfloat16}
    losses = [model(**make_batch(case)).loss for model in (exact, stored)]
    assert losses[1].dtype == torch.float32 and losses[0].item() == losses[1].item()
    losses[1].backward()
    assert all(p.grad.dtype == torch.bfloat16 for p in stored.parameters())


# -- one side's process, without the process ----------------------------------------------------------------------


@pytest.mark.parametrize("clip", list(CLIP_LIMITS))
def test_lohan_on_ssd_has_the_losses_of_plain_torch(tmp_path, clip):
    case = Case("tiny", 16, 1, "fp32", clip, 1, False)
    starts = {}
    for name in ("torch", "torch:lohan-adam", "lohan-ssd"):
        (tmp_path / name).mkdir()
        kind, _, variant = name.partition(":")
        session = Session(Side(name, kind, variant), case, str(tmp_path / name))
        starts[name] = [session.turn(1, 2), session.turn(1, 2)]
        session.trainer.close()
    turns = {name: SideTurns(Side(name, name), [start]) for name, start in starts.items()}
    assert [step.index for turn in starts["torch"] for step in turn.steps] == list(range(6))
    assert [step.counts for step in starts["torch"][0].steps] == [False, True, True]
    for name, side in turns.items():
        assert max_loss_difference(side, turns["torch"]) < 1e-5, name
        assert clipped_as_said(side, case), name
    first, last = starts["torch"][0].steps[0].loss, starts["torch"][1].steps[-1].loss
    assert last < first
    written_bytes = sum(step.written_bytes for step in starts["lohan-ssd"][1].steps)
    assert written_bytes > 2 * 8 * count_params(case)   # the third step's update may still trail
    assert starts["torch"][1].steps[-1].read_bytes == 0


def test_compute_alone_does_not_train(tmp_path):
    session = Session(Side(COMPUTE, COMPUTE), CASE, str(tmp_path))
    assert len({step.loss for step in session.turn(1, 2).steps}) == 1


def test_facts_of_this_process(tmp_path):
    assert cached_share(str(tmp_path)) is None
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    assert cached_share(str(tmp_path)) == 1.0
    forget_peak_rss()
    before = peak_rss_bytes()
    with mmap.mmap(-1, 64 << 20) as memory:   # which goes back to the system
        memory.write(b"x" * (32 << 20))
        memory.write(b"x" * (32 << 20))
    assert peak_rss_bytes() >= before + (48 << 20)
    forget_peak_rss()
    assert peak_rss_bytes() < before + (48 << 20)
    assert len(drive_bytes()) == 2


def test_a_side_that_cannot_start_says_why(tmp_path):
    class DeadProcess:
        exitcode = -9

        def __init__(self, **more):
            self.connection = more["args"][0]

        def start(self):
            self.connection.close()

        def join(self, timeout=None): ...

        def is_alive(self):
            return False

    context = worker_process.multiprocessing.get_context("spawn")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(context), "Process", staticmethod(lambda **more: DeadProcess(**more)))
        with pytest.raises(worker_process.SideFailed, match="ended with -9: probably for lack of memory"):
            worker_process.WorkerProcess(Side("torch", "torch"), CASE, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


# -- order --------------------------------------------------------------------------------------------------------


class FakeWorker:
    """Notes what it is asked, and how many are alive."""
    log: list = []
    alive: set = set()
    failing: set = set()

    def __init__(self, side, case, folder):
        self.name = side.name
        self.alive.add(self.name)
        self.log.append(f"start {self.name}")

    def turn(self, num_uncounted, num_counted):
        if self.name in self.failing:
            self.alive.discard(self.name)
            raise worker_process.SideFailed("no compiler")
        self.log.append((self.name, num_uncounted))
        return make_turn([1.0] * num_counted, uncounted=num_uncounted)

    def close(self):
        self.alive.discard(self.name)
        self.log.append(f"end {self.name}")


@pytest.fixture
def fakes():
    FakeWorker.log, FakeWorker.alive, FakeWorker.failing = [], set(), set()
    return FakeWorker


def rounds_of(fakes, names, available_bytes, num_rounds=2):
    workers = Workers(CASE, 10, "", start=fakes, available_bytes=available_bytes)
    probes = []
    found = {name: SideTurns(Side(name, name)) for name in names}
    run_rounds(workers, list(found.values()), num_rounds, 3, 2, lambda: probes.append(1), lambda what: None)
    workers.close()
    assert not fakes.alive and len(probes) == num_rounds
    return found


def test_sides_take_turns_in_an_order_that_moves_and_keep_their_processes(fakes):
    found = rounds_of(fakes, ["a", "b", "c"], lambda: 1 << 60)
    assert fakes.log[:9] == ["start a", ("a", 3), "start b", ("b", 3), "start c", ("c", 3),
                             ("b", 1), ("c", 1), ("a", 1)]
    assert all(len(side.starts) == 1 and sorted(side.rounds) == [0, 1] for side in found.values())


def test_without_room_the_side_that_waited_longest_ends_and_warms_up_again(fakes):
    found = rounds_of(fakes, ["a", "b", "c"], lambda: 0 if len(fakes.alive) > 1 else 1 << 60)
    assert fakes.log[:10] == ["start a", ("a", 3), "start b", ("b", 3), "end a", "start c", ("c", 3),
                              ("b", 1), ("c", 1), "end b"]
    assert [len(side.starts) for side in found.values()] == [2, 1, 1]


def test_a_side_that_fails_is_not_tried_again_and_the_others_go_on(fakes):
    fakes.failing.add("b")
    found = rounds_of(fakes, ["a", "b"], lambda: 1 << 60)
    assert found["b"].failure == "no compiler" and not found["b"].rounds and len(found["a"].rounds) == 2
    assert fakes.log.count("start b") == 1


def test_an_interrupted_run_gives_what_was_measured(fakes, monkeypatch):
    def turn(self, num_uncounted, num_counted):
        if self.name == "zero3-cpu":
            raise KeyboardInterrupt
        return make_turn([1.0] * num_counted, uncounted=num_uncounted)

    monkeypatch.setattr(fakes, "turn", turn)
    monkeypatch.setattr(run_module, "Workers", functools.partial(Workers, start=fakes))
    monkeypatch.setattr(run_module, "probe", lambda folder, dtype: Probe(1.0, 1.0, 1.0, 1.0))
    results = run_module.run(CASE, parse_sides("lohan-ssd,zero3-cpu"), Schedule(sweep=False), "")
    found = Report(results).as_json()
    assert results.interrupted and "interrupted in round 1 of 3" in found["notes"] and not fakes.alive
    assert found["sides"]["torch"]["step_s"]["median"] == found["ratio"]["lohan-ssd"]["torch"] == 1.0
    assert "interrupted" in found["sides"]["zero3-cpu"]["failure"]


def test_the_sweep_keeps_the_best_value_of_each_setting():
    side = Side("zero-infinity", "zero-infinity")

    def seconds_of(settings):
        if settings["buffer_count"] == 8:
            return None                       # does not run
        return 5.0 - settings["aio_threads"] / 8 + settings["pipeline"]

    tried = list(sweep(side, seconds_of))
    assert best_of(tried) == {**START["zero-infinity"], "aio_threads": 4, "pipeline": False}
    assert len({str(sorted(settings.items())) for settings, _ in tried}) == len(tried) == 7
    assert list(sweep(Side("torch", "torch"), seconds_of)) == []


# -- arithmetic ---------------------------------------------------------------------------------------------------


def test_a_ratio_is_the_median_over_rounds_of_what_one_round_says():
    """The machine was four times slower in the second round: the ratio does not see it."""
    side = make_side("lohan-ssd", make_turn([2.0, 2.0]), make_turn([8.0, 8.0]), make_turn([3.0, 3.0]))
    other = make_side("zero-infinity", make_turn([4.0, 4.0]), make_turn([16.0, 16.0]), make_turn([2.0, 2.0]))
    found = ratio(side, other)
    assert (found.median, found.lowest, found.highest) == (0.5, 0.5, 1.5)
    assert ratio(side, make_side("fsdp2")) is None


def test_the_lower_bound_is_the_largest_of_what_each_resource_needs_alone():
    results = make_results(make_side("torch", make_turn([3.0])), make_side("lohan-ssd", make_turn(
        [4.0], read=1600, written=1200)))
    bound = Report(results).bounds["lohan-ssd"]
    # steps of compute: 2, 2, 4, 4 s; 2800 bytes at the median of 1000, 500, 800; 100 parameters at that of 50, 25, 40
    assert bound == Bound(compute_s=3.0, disk_s=3.5, memory_s=2.5) and bound.lower_s == 3.5
    assert clipped_bound_s(bound, forward_s=0.5, backward_s=1.5) == 5.0     # T_b + S
    assert clipped_bound_s(bound, forward_s=4.0, backward_s=1.5) == 5.5     # T_b + T_f
    found = Report(results).as_json()["sides"]["lohan-ssd"]["bound"]
    assert found["lower_s"] == 3.5 and found["ratio"] == 4.0 / 3.5
    assert found["clipped_s"] == 1.5 + 3.5 and found["forward_s"] == 0.75   # of compute alone


def test_only_counted_steps_count_for_bytes_and_seconds():
    report = Report(make_results(make_side("torch", make_turn([3.0])), make_side("lohan-ssd", make_turn(
        [4.0, 5.0, 9.0], read=1600, written=1200))))
    figures = report.sides["lohan-ssd"]
    assert (figures.step_s.median, figures.step_s.lowest, figures.step_s.highest) == (5.0, 4.0, 9.0)
    assert (figures.read_bytes_per_param, figures.written_bytes_per_param) == (16.0, 12.0)


def test_losses_of_a_process_that_started_again_are_compared_from_its_first_step():
    reference = make_side("torch", make_turn([1.0] * 2), make_turn([1.0] * 2, first=3))
    again = SideTurns(Side("lohan-ssd", "lohan-ssd"), [[make_turn([1.0] * 2)], [make_turn([1.0] * 2)]])
    assert max_loss_difference(again, reference) == 0.0
    again.starts[1] = [make_turn([1.0] * 2, losses=[5.0, 4.5, 4.25])]
    assert max_loss_difference(again, reference) == 0.25
    again.starts[1] = [make_turn([1.0] * 2, losses=[5.0, math.nan, 4.0])]
    assert max_loss_difference(again, reference) == math.inf


# -- hard to fool -------------------------------------------------------------------------------------------------


WRONG = [5.0, 4.9, 4.8]


def test_no_ratio_with_lohan_when_it_disagrees_with_plain_torch():
    report = Report(make_results(make_side("torch", make_turn([3.0, 3.0])),
                                 make_side("zero3-cpu", make_turn([4.0, 4.0])),
                                 make_side("lohan-ssd", make_turn([1.0, 1.0], losses=WRONG))))
    found = report.as_json()
    assert found["ratio"]["lohan-ssd"] == {"torch": None, "zero3-cpu": None}
    assert found["ratio"]["zero3-cpu"]["lohan-ssd"] is None
    assert found["ratio"]["zero3-cpu"]["torch"] == pytest.approx(4 / 3)
    assert "disagrees with plain torch: losses differ by 0.8" in found["refused"]["lohan-ssd"]["zero3-cpu"]
    assert found["sides"]["lohan-ssd"]["numerics"] == "differ"


def test_a_peer_that_trains_differently_is_compared_and_marked():
    report = Report(make_results(make_side("torch", make_turn([3.0, 3.0])),
                                 make_side("lohan-ssd", make_turn([1.0, 1.0])),
                                 make_side("zero-infinity", make_turn([4.0, 4.0], losses=WRONG))))
    found = report.as_json()
    assert found["ratio"]["lohan-ssd"]["zero-infinity"] == 0.25 and found["refused"] == {}
    assert found["sides"]["zero-infinity"]["numerics"] == "differ"
    assert found["sides"]["zero-infinity"]["max_loss_difference"] == pytest.approx(0.8)
    assert any("zero-infinity: numerics differ" in note and "0.8" in note for note in found["notes"])


@pytest.mark.parametrize(("clip", "norm", "said"), [("every", 0.001, True), ("every", 5.0, False),
                                                    ("never", 5.0, False), ("never", 1e7, True),
                                                    ("none", 1e7, False)])
def test_clipping_that_was_not_as_said_is_noted(clip, norm, said):
    case = Case("tiny", 16, 1, "fp32", clip, 1, False)
    notes = Report(make_results(make_side("torch", make_turn([3.0, 3.0], norm=norm)), case=case)).notes()
    assert any("was not met as --clip" in note for note in notes) == said


def test_a_loss_that_hardly_falls_a_cached_file_and_a_restart_are_noted():
    flat = make_side("torch", make_turn([3.0, 3.0], losses=[5.0, 5.0, 4.999]))
    peer = make_side("zero-infinity", make_turn([4.0, 4.0], losses=[5.0, 5.0, 4.999], cached=0.5))
    peer.starts.append([make_turn([4.0, 4.0], losses=[5.0, 5.0, 4.999])])
    notes = "\n".join(Report(make_results(flat, peer)).notes())
    assert "too little to see" in notes and "zero-infinity was started 2 times" in notes
    assert "zero-infinity uses the page cache: 50%" in notes


def test_a_side_that_did_not_run_is_in_every_table_with_the_reason():
    report = Report(make_results(make_side("torch", make_turn([3.0, 3.0])),
                                 SideTurns(Side("zero-infinity", "zero-infinity"), failure="no libaio")))
    found = report.as_json()
    assert found["sides"]["zero-infinity"]["failure"] == "no libaio"
    assert found["ratio"]["torch"]["zero-infinity"] is None
    assert found["refused"]["torch"]["zero-infinity"] == "zero-infinity: no libaio"
    assert any("zero-infinity did not run: no libaio" in note for note in found["notes"])
    assert len(report.tables()) > 3


def test_without_plain_torch_there_are_figures_and_nothing_is_compared():
    failed = SideTurns(Side("torch", "torch"), [[]], failure="no memory")
    report = Report(make_results(failed, make_side("lohan-ssd", make_turn([1.0]), make_turn([3.0])),
                                 make_side("zero3-cpu", make_turn([2.0]))))
    found = report.as_json()
    assert all(ratio is None for row in found["ratio"].values() for ratio in row.values())
    assert found["refused"]["torch"]["lohan-ssd"] == "torch: no memory"
    assert "plain torch did not run" in found["refused"]["lohan-ssd"]["zero3-cpu"]
    assert any(note.startswith("plain torch did not run") for note in found["notes"])
    side = found["sides"]["lohan-ssd"]
    assert side["step_s"]["median"] == 2.0 and side["bound"]["ratio"] > 0
    assert side["numerics"] is None and side["max_loss_difference"] is None
    assert len(report.tables()) > 3 and report.lohan_is_right()


@pytest.mark.parametrize(("losses", "failure", "right"), [(None, "", True), (WRONG, "", False),
                                                          (None, "no space", False)])
def test_lohan_is_right_only_if_every_side_of_it_ran_and_agrees(losses, failure, right):
    report = Report(make_results(make_side("torch", make_turn([3.0, 3.0])),
                                 make_side("zero3-cpu", make_turn([3.0, 3.0], losses=WRONG)),
                                 make_side("lohan-ssd", make_turn([1.0, 1.0], losses=losses), failure=failure)))
    assert report.lohan_is_right() == right
