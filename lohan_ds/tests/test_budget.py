"""Budgets count exactly; available memory honours every cgroup on the way up (user case D14)."""
import threading
from pathlib import Path

import pytest

from lohan_ds.errors import CapacityError
from lohan_ds.memory.budget import MemoryBudget, available_host_bytes

MB = 1 << 20


@pytest.fixture
def roots(tmp_path: Path):
    """Empty fake cgroup and proc trees; 1000 MB are available before any cgroup limits it."""
    cgroup, proc = tmp_path / "cgroup", tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    cgroup.mkdir()
    (proc / "meminfo").write_text(f"MemTotal:  9999999 kB\nMemAvailable:  {1000 * 1024} kB\nHugePages_Total: 0\n")
    return cgroup, proc


def _write(directory: Path, **files) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("__", ".")).write_text(f"{content}\n")


def _available_mb(roots) -> float:
    return available_host_bytes(str(roots[0]), str(roots[1])) / MB


def test_without_cgroups_it_is_what_the_kernel_says(roots):
    assert _available_mb(roots) == 1000


def test_v2_limit_less_usage_with_page_cache_reclaimable(roots):
    cgroup, proc = roots
    (proc / "self/cgroup").write_text("0::/user/job\n")
    _write(cgroup / "user/job", memory__max=400 * MB, memory__current=150 * MB,
           memory__stat=f"anon {50 * MB}\ninactive_file {100 * MB}")
    assert _available_mb(roots) == 350


def test_v2_parent_limit_binds_and_max_is_none(roots):
    cgroup, proc = roots
    (proc / "self/cgroup").write_text("0::/slice/user/job\n")
    _write(cgroup / "slice/user/job", memory__max="max", memory__high="max", memory__current=10 * MB)
    _write(cgroup / "slice", memory__max=300 * MB, memory__high=200 * MB, memory__current=60 * MB)
    assert _available_mb(roots) == 140


def test_v1_with_container_directory_mounted_at_the_root(roots):
    cgroup, proc = roots
    (proc / "self/cgroup").write_text("3:cpu,cpuacct:/docker/abc\n2:memory:/docker/abc\n0::/\n")
    _write(cgroup / "memory", memory__limit_in_bytes=500 * MB, memory__usage_in_bytes=200 * MB,
           memory__stat=f"inactive_file 1\ntotal_inactive_file {20 * MB}")
    assert _available_mb(roots) == 320


def test_over_its_limit_is_zero_not_negative(roots):
    cgroup, proc = roots
    (proc / "self/cgroup").write_text("0::/\n")
    _write(cgroup, memory__max=MB, memory__current=2 * MB)
    assert available_host_bytes(str(cgroup), str(proc)) == 0


def test_this_machine_has_some():
    assert available_host_bytes() > 0


def test_charge_release_and_peak():
    budget = MemoryBudget("host", 100)
    budget.charge(60, "a")
    budget.charge(40, "b")
    budget.release(60)
    assert (budget.used_bytes, budget.peak_bytes) == (40, 100)


def test_over_budget_names_the_numbers_and_charges_nothing():
    budget = MemoryBudget("host RAM", 100)
    budget.charge(60, "a")
    with pytest.raises(CapacityError, match=r"host RAM: grads needs 41 bytes .* of 100 has 40 left"):
        budget.charge(41, "grads")
    assert budget.used_bytes == 60
    with pytest.raises(AssertionError):
        budget.release(61)


def test_threads_lose_no_bytes():
    budget = MemoryBudget("host", 10 ** 9)

    def charge_and_release():
        for _ in range(2000):
            budget.charge(3, "x")
            budget.release(2)

    threads = [threading.Thread(target=charge_and_release) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.used_bytes == 8000
