"""gpu_check: "not run" where there is no GPU; and its checks' code works, here on a CPU and in tiny sizes."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from integration_tests import gpu_check
from integration_tests.doubles import fresh_environment
from integration_tests.gpu_check import CHECKS, DEEPSPEED, LOHAN, MODES, PLAIN, NotRun, Row
from lohan_ds.testing.harness import init_one_rank

SCRIPT = Path(__file__).parent / "gpu_check.sh"


@pytest.fixture(autouse=True)
def one_rank():
    init_one_rank()


def test_without_a_gpu_every_row_says_so():
    environment = fresh_environment(CUDA_VISIBLE_DEVICES="", PYTHON=sys.executable)
    done = subprocess.run(["bash", str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    machine, table, seconds = done.stdout.strip().split("\n\n")
    assert "torch" in machine and "pinned memory limit" in machine and seconds.endswith(" s")
    head, *rows = table.splitlines()
    assert head.split() == ["check", "result", "note"]
    assert len(rows) == len(gpu_check.not_run_rows("")) > len(MODES)
    assert all("  not run  there is no NVIDIA GPU" in row for row in rows), table


@pytest.mark.parametrize("name", CHECKS)
def test_checks(name):
    check, names, _ = CHECKS[name]
    try:
        rows = check("cpu")
    except NotRun as reason:
        assert name == "streams" and "GPU" in str(reason)
        return
    assert [row.check for row in rows] == names
    assert "FAILED" not in {row.result for row in rows}, rows
    assert {row.check for row in rows if row.result == "not run"} <= {"build grad_pack", "pinning"}


@pytest.fixture(scope="module")
def found():
    """One run of every mode but those of DeepSpeed that build its operators."""
    init_one_rank()
    return {mode: gpu_check.run_mode(mode, "cpu") for mode in (PLAIN, *LOHAN, "DeepSpeed ZeRO-3, all on the GPU")}


def test_modes_train_alike(found):
    assert [row.result for row in gpu_check.loss_rows(found)] == ["ok"]
    for mode, facts in found.items():
        assert len(facts["step_s"]) == gpu_check.NUM_STEPS
        assert facts["losses"] == pytest.approx(found[PLAIN]["losses"], rel=2e-2), mode   # bf16, other orders
    changed = {**found, "lohan, host, eager": {**found["lohan, host, eager"], "losses": [0.0]}}
    assert gpu_check.loss_rows(changed)[0].result == "FAILED"


def test_rows_of_modes(found):
    missing = {mode: ("not run", "why") for mode in DEEPSPEED}
    rows = {row.check: row for row in gpu_check.ab_rows(found, missing, "cpu")}
    assert list(rows) == [f"s/step: {mode}" for mode in MODES]
    assert all((row.result == "not run") == (name[8:] not in found) for name, row in rows.items())
    assert [row.result for row in gpu_check.memory_rows(found)] == ["not run"] * len(LOHAN)   # host memory
    shares = [row.result for row in gpu_check.overlap_rows(found)]
    assert all(share.endswith(" %") for share in shares) and shares[list(LOHAN).index("lohan, host, serial")] == "0 %"


def test_device_memory_is_weighed_against_the_plan(found):
    def verdicts(peak_bytes: int) -> set[str]:
        facts = {mode: {"peak_bytes": peak_bytes, "planned_device_bytes": 100} for mode in LOHAN}
        return {row.result for row in gpu_check.memory_rows({
            **facts, PLAIN: {"peak_bytes": 1000, "activation_bytes": 50}})}

    assert verdicts(165) == {"ok"} and verdicts(166) == {"FAILED"}


def test_a_check_that_fails_hangs_or_has_no_time_leaves_its_rows(monkeypatch):
    class Process:
        pid, returncode = 7, 1

        def __init__(self, command, **kwargs):
            self.name = command[-1]

        def communicate(self, timeout):
            if self.name == "links":
                raise subprocess.TimeoutExpired("links", timeout)
            return "", ("Traceback ...\nRuntimeError: CUDA error: illegal\nbye" if self.name == "parity" else
                        "Segmentation fault")

        def wait(self):
            pass

    killed = []
    monkeypatch.setattr(gpu_check.subprocess, "Popen", Process)
    monkeypatch.setattr(gpu_check.os, "killpg", lambda pid, how: killed.append(pid))
    rows = {row.check: row for row in gpu_check.all_rows("cpu", gpu_check.time.monotonic() + 1000)}
    assert list(rows) == [row.check for row in gpu_check.not_run_rows("")]
    assert rows["pinning"] == Row("pinning", "not run", "it took longer than 40 s") and killed == [7]
    assert rows["parity with the twin"][1:] == ("FAILED", "RuntimeError: CUDA error: illegal (exit code 1)")
    assert rows["packing, bits"][1:] == ("FAILED", "Segmentation fault (exit code 1)")
    assert rows["s/step: lohan, host, eager"].result == "FAILED"
    assert {rows[f"s/step: {mode}"].result for mode in DEEPSPEED} == {"not run"}
    late = gpu_check.all_rows("cpu", gpu_check.time.monotonic())
    assert {(row.result, row.note) for row in late if row.check.startswith("s/step")} == {
        ("not run", "no time was left")}


def test_in_a_process_of_its_own():
    pinning, link = gpu_check.in_own_process("links", "cpu", 120)
    assert pinning[1] == "not run" and link[1].endswith("GB/s")
    with pytest.raises(NotRun, match="GPU"):
        gpu_check.in_own_process("streams", "cpu", 120)
