"""`lohan bench` as a user runs it, with a process per side, on the tiny size: its JSON, and sides that cannot run."""
import json

import pytest
from typer.testing import CliRunner

from lohan_ds import cli
from lohan_ds.bench import probes
from lohan_ds.profiler.ssd import SsdLimits

pytestmark = pytest.mark.timeout(900)    # a process per side, each of which imports everything
FEW = ["--size", "tiny", "--rounds", "2", "--steps", "2", "--warmup", "1", "--no-sweep", "--threads", "1", "--json"]


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Runs `lohan bench` with a small probe of the drive; gives exit status and JSON. Nothing may be left on it."""
    monkeypatch.setattr(probes, "_SSD_LIMITS", SsdLimits(seconds=0.2, write_bytes=32 << 20, file_bytes=16 << 20,
                                                         chunk_bytes=1 << 20))
    monkeypatch.setattr(probes, "_ADAM_S", 0.05)

    def run(*words):
        result = CliRunner().invoke(cli.app, ["bench", *FEW, f"--ssd-path={tmp_path}", *words])
        assert list(tmp_path.iterdir()) == []
        assert result.exit_code in (0, 1), (result.output, result.exception)
        return result.exit_code, json.loads(result.stdout)

    return run


def test_every_side_that_needs_no_compiler_has_all_figures(bench):
    status, found = bench("--sides", "torch,fsdp2,lohan-ssd", "--dtype", "fp32")
    assert status == 0, found
    names = {"torch", "fsdp2", "lohan-ssd"}
    assert set(found["sides"]) == set(found["ratio"]) == names
    for name, side in found["sides"].items():
        assert side["failure"] is None and side["starts"] in (1, 2) and side["numerics"] == "same", (name, side)
        assert side["step_s"]["lowest"] <= side["step_s"]["median"] <= side["step_s"]["highest"]
        assert sorted(side["phase_s"]) == ["backward", "forward", "step"]
        assert len(side["samples_s"]) == 2 and all(len(turn) == 2 for turn in side["samples_s"])
        assert side["peak_rss_bytes"] >= side["peak_rss_steps_bytes"] > 100 << 20
        bound = side["bound"]
        assert bound["lower_s"] == max(bound["compute_s"], bound["disk_s"], bound["memory_s"]) > 0
        assert set(found["ratio"][name]) == names - {name}
        assert all(ratio > 0 for ratio in found["ratio"][name].values())
        assert (side["written_bytes_per_param"] > 8) == (name == "lohan-ssd")
    assert found["refused"] == {} and len(found["probes"]) == 2
    assert found["case"]["clip"] == "every" and found["case"]["params"] > 0


def test_a_side_without_what_it_needs_is_reported_and_the_others_compared(bench, monkeypatch, tmp_path_factory):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.mktemp("extensions")))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("LOHAN_DS_NATIVE_OPS", "0")
    status, found = bench("--sides", "torch,zero3-cpu,lohan-ssd")
    assert status == 0
    assert found["sides"]["zero3-cpu"]["failure"] and found["ratio"]["lohan-ssd"]["zero3-cpu"] is None
    assert found["ratio"]["lohan-ssd"]["torch"] > 0
    assert any(note.startswith("zero3-cpu did not run: ") for note in found["notes"])
