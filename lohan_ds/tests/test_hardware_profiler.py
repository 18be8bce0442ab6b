"""The hardware profiler: what it measures, that it leaves nothing behind and fills no disk, and what it keeps."""
import errno
import json
import logging
import math
import os
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from lohan_ds import cli_profile
from lohan_ds.errors import CapacityError, ConfigError, StoreError
from lohan_ds.profile import HardwareProfile
from lohan_ds.profiler import hardware, ssd
from lohan_ds.profiler.compute import LayerProducts, measure_compute
from lohan_ds.profiler.cpu_update import measure_cpu_update
from lohan_ds.planner.machines import load
from lohan_ds.profiler.free_space import FreeBytes, free_bytes_of_tiers
from lohan_ds.profiler.hardware import Limits, cached_stripe, profile_hardware
from lohan_ds.profiler.hardware_cache import MAX_AGE_S, cache_file, why_stale
from lohan_ds.profiler.hardware_file import dump_profile, save_profile
from lohan_ds.profiler.hardware_report import HardwareReport, hardware_table
from lohan_ds.profiler.links import LinkReport, measure_link
from lohan_ds.profiler.machine import conditions, machine_key
from lohan_ds.profiler.rates import Rate, sample_rate
from lohan_ds.profiler.ssd import SsdLimits, SsdRates, SsdReport, measure_ssds
from lohan_ds.profiler.ssd_traffic import sustained
from lohan_ds.store.ssd_io import ThreadSsdIo
from lohan_ds.testing.delayed_streams import DelayedStreams

KIB, MIB = 1 << 10, 1 << 20
CPU = torch.device("cpu")
SMALL = SsdLimits(seconds=0.3, write_bytes=8 * MIB, file_bytes=2 * MIB, free_share=0.5, chunk_bytes=64 * KIB)
FREE = FreeBytes(host=10**9, device=10**9, ssd=10**10)


def rate(value):
    return Rate.of([value] * 3)


def ssd_report(path, read, write, sustained_write=None):
    return SsdReport(path=path, file_system="ext4", direct=True, file_bytes=1, written_bytes=1,
                     rates=SsdRates(read=rate(read), write=rate(write), mixed=rate(1.0)),
                     sustained_write_per_s=sustained_write)


def report_of(ssds=(), together=None, link=None):
    return HardwareReport(made_at_s=time.time(), seconds=1.0, conditions=conditions(CPU, ()), ssds=ssds, link=link,
                          compute={"bfloat16": rate(1e12)}, ssds_together=together, cpu_update=rate(1e9))


# -- SSD -------------------------------------------------------------------------------------------------------------

def test_ssd_rates_of_one_directory(tmp_path):
    told = []
    (report,), together = measure_ssds([str(tmp_path)], SMALL, told.append)
    assert together is None
    assert told == [f"SSD {kind}, {tmp_path}" for kind in ("write", "read", "mixed")]
    for measured in (report.rates.read, report.rates.write, report.rates.mixed):
        assert 0 < measured.lowest_per_s <= measured.per_s <= measured.highest_per_s
    assert report.file_bytes == 2 * MIB
    assert 2 * MIB <= report.written_bytes <= SMALL.write_bytes
    assert report.sustained_write_per_s is None or report.sustained_write_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_ssd_rates_of_several_directories_together(tmp_path):
    paths = [str(tmp_path / name) for name in "ab"]
    for path in paths:
        os.mkdir(path)
    reports, together = measure_ssds(paths, SMALL)
    assert [report.path for report in reports] == paths
    assert min(together.read.per_s, together.write.per_s, together.mixed.per_s) > 0
    assert [os.listdir(path) for path in paths] == [[], []]


def test_what_is_read_was_written(tmp_path, monkeypatch):
    """Space that was only reserved is not read from the drive, which would look very fast."""
    written, read_before_written = set(), []

    class Watching(ThreadSsdIo):
        def write(self, file, offset, buffer):
            written.add(offset)
            return super().write(file, offset, buffer)

        def read(self, file, offset, buffer):
            read_before_written.extend({offset} - written)
            return super().read(file, offset, buffer)

    monkeypatch.setattr(ssd, "make_ssd_io", Watching)
    limits = SsdLimits(seconds=0.01, write_bytes=4 * MIB, file_bytes=4 * MIB, free_share=0.5, chunk_bytes=64 * KIB)
    (report,), _ = measure_ssds([str(tmp_path)], limits)
    assert report.file_bytes == 64 * KIB * len(written) and not read_before_written


def test_a_full_drive_is_refused_with_needed_and_free(tmp_path, monkeypatch):
    monkeypatch.setattr(ssd, "free_bytes", lambda path: MIB)
    with pytest.raises(CapacityError, match=r"needs 2.62 MB free, of which it uses 10%; free 1.05 MB"):
        measure_ssds([str(tmp_path)], SsdLimits(chunk_bytes=64 * KIB))
    assert list(tmp_path.iterdir()) == []


def test_directories_on_one_drive_share_its_free_space(tmp_path, monkeypatch):
    monkeypatch.setattr(ssd, "free_bytes", lambda path: 8 * MIB)
    sizes = []
    really_open = ssd._open_unlinked
    monkeypatch.setattr(ssd, "_open_unlinked",
                        lambda io, path, nbytes: sizes.append(nbytes) or really_open(io, path, nbytes))
    measure_ssds([str(tmp_path)] * 4, SMALL)
    assert sizes == [MIB] * 4                     # half of the free space, by four


@pytest.mark.parametrize("call", ["_pwrite", "_pread"])
def test_a_failing_drive_is_told_and_nothing_left(tmp_path, monkeypatch, call):
    def fail(self, fd, view, offset):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(ThreadSsdIo, call, fail)
    monkeypatch.setattr(ssd, "make_ssd_io", ThreadSsdIo)
    with pytest.raises(StoreError, match="Input/output error"):
        measure_ssds([str(tmp_path)], SMALL)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_it_is_interrupted(tmp_path, number):
    code = ("import sys, torch\n"
            "from lohan_ds.profiler.ssd import *\n"
            "limits = SsdLimits(seconds=60, write_bytes=1 << 40, file_bytes=8 << 20, chunk_bytes=1 << 20)\n"
            "measure_ssds([sys.argv[1]], limits, lambda what: print(what, flush=True))\n")
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE,
                             stderr=subprocess.DEVNULL, text=True)
    assert any(line.startswith("SSD write") for line in child.stdout)   # DeepSpeed may say something first
    time.sleep(0.1)
    child.send_signal(number)
    assert child.wait(timeout=30) != 0
    assert list(tmp_path.iterdir()) == []


def test_sustained_write_is_known_only_when_the_drive_slowed_down():
    steady, known = sustained([5.0] * 8 + [2.0] * 8)
    assert (steady.per_s, known) == (2.0, 2.0)
    steady, known = sustained([5.0, 4.8, 5.1, 4.9, 5.0, 5.2])
    assert steady.per_s == 5.0 and known is None


# -- compute, links, update, memory ----------------------------------------------------------------------------------

def test_flops_of_a_layer():
    products = LayerProducts(64, torch.float32, CPU)
    assert products.run() == 3 * 2 * 64 * 12 * 64 ** 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compute_rate(dtype):
    assert measure_compute(CPU, dtype, 0.1).per_s > 1e6


def test_cpu_update_rate():
    measured = measure_cpu_update(0.1, 1 * MIB)
    assert measured.per_s > 1e4 and measured.num_samples >= 3


def test_link_rates_each_way_and_together():
    streams = DelayedStreams(seed=0, max_delay_s=0.002)
    try:
        link = measure_link(streams, CPU, 0.1, copy_bytes=MIB)
    finally:
        streams.close()
    for measured in (link.h2d, link.d2h, link.h2d_with_d2h, link.d2h_with_h2d):
        assert 1e6 < measured.per_s < 4 * MIB / 1e-4
    assert link.h2d_sustained_per_s == min(link.h2d.per_s, link.h2d_with_d2h.per_s)


def test_sampling_counts_amounts_and_leaves_the_first_call_out():
    calls = []
    measured = sample_rate(lambda: calls.append(time.sleep(0.02 if calls else 0.2)) or 1.0, 0.0)
    assert len(calls) == 4 and measured.num_samples == 3
    assert measured.lowest_per_s > 1 / 0.2
    assert Rate.of([1.0, 2.0, 9.0]).per_s == 2.0 and not Rate.of([1.0, 2.0, 9.0]).is_steady
    assert Rate.of([1.0, 2.0, 3.0, 4.0, 5.0], quantile=0.75).per_s == 4.0


def test_free_bytes_of_every_tier(tmp_path):
    free = free_bytes_of_tiers(CPU, [str(tmp_path)])
    assert free.host == pytest.approx(free.device) and 0 < free.host
    assert free.ssd > 0 and free_bytes_of_tiers(CPU, []).ssd == 0
    with pytest.raises(StoreError, match="not a usable SSD directory"):
        free_bytes_of_tiers(CPU, [str(tmp_path / "none")])


# -- what follows from it --------------------------------------------------------------------------------------------

def test_profile_of_a_host_that_is_the_device():
    found = report_of().profile("bfloat16", FREE)
    assert found.unified and found.h2d_bytes_per_s == found.d2h_bytes_per_s == math.inf
    assert (found.ssd_read_bytes_per_s, found.ssd_write_bytes_per_s) == (0, 0)
    assert (found.device_flops_per_s, found.cpu_update_params_per_s) == (1e12, 1e9)
    assert (found.host_bytes, found.device_bytes, found.ssd_bytes) == FREE


def test_profile_takes_what_can_be_sustained():
    together = SsdRates(read=rate(7.0), write=rate(6.0), mixed=rate(6.0))
    ssds = (ssd_report("/a", 5.0, 4.0, sustained_write=1.0), ssd_report("/b", 5.0, 4.0))
    link = LinkReport(h2d=rate(20.0), d2h=rate(21.0), h2d_with_d2h=rate(15.0), d2h_with_h2d=rate(22.0), pinned=True)
    found = report_of(ssds, together, link).profile("bfloat16", FREE)
    assert (found.ssd_read_bytes_per_s, found.ssd_write_bytes_per_s) == (7.0, 2.0)   # one of two alike sustains 1
    assert (found.h2d_bytes_per_s, found.d2h_bytes_per_s, found.unified) == (15.0, 21.0, False)
    one = report_of(ssds[:1]).profile("bfloat16", FREE)
    assert (one.ssd_read_bytes_per_s, one.ssd_write_bytes_per_s) == (5.0, 1.0)


def test_rates_of_drives_of_different_speed_are_of_data_dealt_by_their_speed():
    ssds = (ssd_report("/a", 6.0, 6.0), ssd_report("/b", 3.0, 3.0))
    evenly = SsdRates(read=rate(6.0), write=rate(5.7), mixed=rate(6.0))   # the slower one binds
    found = report_of(ssds, evenly).profile("bfloat16", FREE)
    assert found.ssd_stripe == (0, 0, 1)
    assert (found.ssd_read_bytes_per_s, found.ssd_write_bytes_per_s) == (9.0, pytest.approx(0.95 * 9))
    shared = SsdRates(read=rate(5.0), write=rate(5.0), mixed=rate(5.0))   # not even that: there is one link to both
    found = report_of(ssds, shared).profile("bfloat16", FREE)
    assert found.ssd_stripe == () and found.ssd_read_bytes_per_s == found.ssd_write_bytes_per_s == 5.0
    ssds = (ssd_report("/a", 6.0, 6.0, sustained_write=2.0), ssd_report("/b", 6.0, 6.0))
    together = SsdRates(read=rate(12.0), write=rate(12.0), mixed=rate(12.0))
    found = report_of(ssds, together).profile("bfloat16", FREE)           # 3 and 6, reads and writes half each
    assert found.ssd_stripe == (1, 0, 1)
    assert (found.ssd_read_bytes_per_s, found.ssd_write_bytes_per_s) == (9.0, 6.0)


def test_table_shows_every_measurement():
    link = LinkReport(h2d=rate(2e10), d2h=rate(2e10), h2d_with_d2h=rate(1e10), d2h_with_h2d=rate(1e10), pinned=False)
    ssds = (ssd_report("/a", 5e9, 4e9, sustained_write=1e9), ssd_report("/b", 5e9, 4e9))
    together = SsdRates(read=rate(7e9), write=rate(6e9), mixed=Rate.of([1e9, 6e9]))
    console = Console(width=150)
    with console.capture() as capture:
        console.print(hardware_table(report_of(ssds, together, link), FREE))
    shown = capture.get()
    for text in ("1.00 TFLOP/s", "20.00 GB/s", "not pinned", "/a", "1.00 GB/s", "past the drive's fast cache",
                 "unknown", "2 SSD directories together", "50 %, 50 %", "unsteady", "1.00 Gparams/s", "10.00 GB"):
        assert text in shown, text


# -- the file --------------------------------------------------------------------------------------------------------

def test_profile_file_goes_round(tmp_path):
    found = report_of().profile("bfloat16", FREE)
    found = replace(found, num_ssds=2, ssd_stripe=(0, 0, 1))
    save_profile(found, tmp_path / "here.json")
    assert load(str(tmp_path / "here.json")).profile == found
    assert json.loads(dump_profile(found))["h2d_bytes_per_s"] == "Infinity"
    without = {key: value for key, value in json.loads(dump_profile(found)).items() if key != "unified"}
    (tmp_path / "here.json").write_text(json.dumps(without))
    assert load(str(tmp_path / "here.json")).profile.unified is False       # the field's own default


# -- the cache -------------------------------------------------------------------------------------------------------

@pytest.fixture
def machine(tmp_path, monkeypatch):
    """profile_hardware with a cache of its own and measurements that take no time; `calls` names them."""
    calls = []
    monkeypatch.setattr(hardware, "measure_compute", lambda device, dtype, s: calls.append(str(dtype)) or rate(1e12))
    monkeypatch.setattr(hardware, "measure_cpu_update", lambda s, chunk_bytes: calls.append("update") or rate(1e9))
    monkeypatch.setattr(hardware, "measure_ssds", lambda paths, limits, progress: calls.append("ssd") or (
        tuple(ssd_report(path, 5.0, 4.0) for path in paths), None))
    (tmp_path / "ssd").mkdir()

    def run(*paths, **options):
        calls.clear()
        return profile_hardware(paths or [str(tmp_path / "ssd")], device=CPU, cache=tmp_path / "cache", **options)

    run.calls = calls
    run.file = cache_file(tmp_path / "cache", machine_key(CPU, [str(tmp_path / "ssd")]))
    run.folder = tmp_path
    return run


def test_second_time_nothing_is_measured(machine):
    profile, report, _ = machine()
    assert machine.calls == ["ssd", "torch.bfloat16", "update"]
    again, kept, _ = machine()
    assert machine.calls == [] and kept == report
    assert again.device_flops_per_s == profile.device_flops_per_s
    assert stat.S_IMODE(machine.file.stat().st_mode) == 0o600
    assert [path.name for path in machine.file.parent.iterdir()] == [machine.file.name]
    machine(refresh=True)
    assert machine.calls == ["ssd", "torch.bfloat16", "update"]


def test_another_dtype_measures_only_that(machine):
    machine()
    profile, report, _ = machine(dtype="float32")
    assert machine.calls == ["torch.float32"] and set(report.compute) == {"bfloat16", "float32"}
    machine()
    assert machine.calls == []


def test_directories_in_another_order_have_their_stripe_in_that_order(machine, monkeypatch):
    speed = {"a": 6.0, "b": 3.0, "link": 6.0}
    paths = [str(machine.folder / name) for name in "ab"]
    for path in paths:
        os.mkdir(path)
    monkeypatch.setattr(hardware, "measure_ssds", lambda paths, limits, progress: (
        tuple(ssd_report(path, *2 * (speed[os.path.basename(path)],)) for path in paths), None))
    cache = machine.folder / "cache"
    assert cached_stripe(paths, CPU, cache) == ()
    assert machine(*paths)[0].ssd_stripe == (0, 0, 1) == cached_stripe(paths, CPU, cache)
    assert machine(*paths[::-1])[0].ssd_stripe == (1, 0, 1) == cached_stripe(paths[::-1], CPU, cache)
    monkeypatch.chdir(machine.folder)
    machine("a", "b", refresh=True)
    assert cached_stripe(paths, CPU, cache) == (0, 0, 1)
    monkeypatch.chdir("/")                               # where "a" is nothing
    assert cached_stripe(paths, CPU, cache) == (0, 0, 1)
    link = machine.folder / "link"
    link.symlink_to(paths[0])
    machine(str(link), paths[1], refresh=True)
    link.unlink()                                        # nobody knows any more what it was
    assert cached_stripe(paths, CPU, cache) == ()


def test_other_directories_have_their_own_measurements(machine):
    machine()
    (machine.folder / "other").mkdir()
    machine(str(machine.folder / "other"))
    assert "ssd" in machine.calls
    machine()
    assert machine.calls == []


@pytest.mark.parametrize("change", [
    {"made_at_s": time.time() - MAX_AGE_S - 60},
    {"made_at_s": time.time() + 1e6},
    {"conditions": {"torch": "1.0"}},
    {"conditions": {"device": "another GPU"}},
    {"format": 0},
    None,
])
def test_stale_measurements_are_made_again(machine, change):
    machine()
    content = json.loads(machine.file.read_text())
    for key, value in (change or {}).items():
        content[key] = {**content[key], **value} if isinstance(value, dict) else value
    machine.file.write_text(json.dumps(content) if change else "{ damaged")
    machine()
    assert machine.calls == ["ssd", "torch.bfloat16", "update"]
    machine()
    assert machine.calls == []


def test_why_stale_names_what_changed():
    report = report_of()
    assert why_stale(report, report.conditions) is None
    assert why_stale(report, {**report.conditions, "torch": "9"}) == f"torch was {torch.__version__}, is 9"
    old = report.model_copy(update={"made_at_s": time.time() - 40 * 86400})
    assert why_stale(old, report.conditions) == "measured 40 days ago"


def test_a_cache_that_cannot_be_written_is_a_warning(machine, caplog):
    (machine.folder / "cache").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        profile, _, _ = machine()
    assert profile.device_flops_per_s == 1e12
    assert "cannot be kept" in caplog.text


def test_settings_that_cannot_be(tmp_path):
    with pytest.raises(ConfigError, match="dtype: got 'int8', supported are bfloat16"):
        profile_hardware([], "int8")
    with pytest.raises(ConfigError, match="none: is not a directory"):
        profile_hardware([str(tmp_path / "none")])


def test_really_measured_from_end_to_end(tmp_path):
    limits = Limits(compute_s=0.1, link_s=0.1, cpu_update_s=0.1, ssd=SMALL)
    told = []
    profile, report, free = profile_hardware([str(tmp_path)], "float32", device=CPU, limits=limits,
                                             progress=told.append, cache=tmp_path / "cache")
    assert told[0].startswith("SSD write") and told[-2:] == ["compute, float32", told[-1]]
    assert min(profile.device_flops_per_s, profile.ssd_read_bytes_per_s, profile.ssd_write_bytes_per_s,
               profile.cpu_update_params_per_s, profile.host_bytes, profile.ssd_bytes) > 0
    assert HardwareReport.model_validate_json(report.model_dump_json()) == report
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


# -- the command -----------------------------------------------------------------------------------------------------

@pytest.fixture
def lohan_profile(monkeypatch):
    """Runs `lohan profile` with a fixed measurement; `asked` has the arguments of the last one."""
    app = typer.Typer()
    app.command()(cli_profile.profile_command)
    asked = []

    def fake(*arguments, progress):
        asked[:] = arguments
        progress("something")
        print("a library's remark")
        report = report_of()
        return report.profile("bfloat16", FREE), report, FREE

    monkeypatch.setattr(hardware, "profile_hardware", fake)

    def run(*words):
        return CliRunner().invoke(app, list(words))

    run.asked = asked
    return run


def test_command_prints_a_table(lohan_profile, tmp_path):
    result = lohan_profile("--ssd-path", str(tmp_path), "--dtype", "fp16", "--refresh")
    assert result.exit_code == 0, result.output
    assert lohan_profile.asked == [[str(tmp_path)], "float16", True]
    assert "1.00 TFLOP/s" in result.stdout and "unsteady" not in result.stdout
    assert "measuring: something" in result.stderr


def test_command_prints_json_that_can_be_loaded(lohan_profile, tmp_path):
    result = lohan_profile("--json")
    assert result.exit_code == 0 and lohan_profile.asked == [[], "bfloat16", False]
    (tmp_path / "here.json").write_text(result.stdout)
    assert isinstance(load(str(tmp_path / "here.json")).profile, HardwareProfile)


def test_command_says_what_is_wrong(monkeypatch, tmp_path):
    app = typer.Typer()
    app.command()(cli_profile.profile_command)
    result = CliRunner().invoke(app, ["--ssd-path", str(tmp_path / "none")])
    assert result.exit_code == 2 and "is not a directory" in result.stderr
