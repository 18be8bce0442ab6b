"""Host memory against the plan: what stays allocated, and what the process really uses."""
from __future__ import annotations

import subprocess
import sys

import torch
from torch import nn

from integration_tests.doubles import fresh_environment
from lohan_ds.testing.harness import ds_config, engine_for
from lohan_ds.testing.twin import Twin


class Widths(nn.Module):
    """Every layer of another size, so no fetch buffer fits two of them."""

    def __init__(self, num_layers: int = 12, hidden: int = 64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden + 8 * i, hidden + 8 * (i + 1)) for i in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_idle_buffers_stay_within_what_is_planned(tmp_path):
    config = ds_config({"ssd_paths": [str(tmp_path)], "param_tier": "ssd", "prefetch_depth": 1},
                       optimizer={"type": "AdamW", "params": {"lr": 1e-3}})
    with engine_for(Widths(), config) as engine:
        buffers, blocks = engine.offload.streamer.buffers, engine.offload.blocks
        planned = sum(sorted(block.param_bytes for block in blocks)[-3:])   # depth 1: it, one ahead, one behind
        for _ in range(3):
            engine.backward(engine(torch.randn(4, 64)))
            engine.step()
            assert 0 < buffers.nbytes <= planned


REAL_USE = """
import os, sys, threading, time
import psutil, torch
from torch import nn
from lohan_ds.testing.harness import ds_config, engine_for, init_one_rank
init_one_rank()
rss = psutil.Process().memory_info
class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(60))   # 252 MB in pieces of 4
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()
config = ds_config({"ssd_paths": [sys.argv[1]], "param_tier": "ssd", "optimizer_tier": "ssd", "chunk_bytes": "1MiB",
                    "host_memory": "300MB"}, optimizer={"type": "AdamW", "params": {"lr": 1e-3}})
with engine_for(nn.Sequential(nn.Linear(8, 8)), config) as engine:   # so that every module is imported
    engine.backward(engine(torch.randn(2, 8)).square().mean())
    engine.step()
base = rss().rss
with engine_for(Layers(), config) as engine:
    peaks, stop = [], threading.Event()
    def watch():
        while not stop.wait(0.005):
            peaks.append(rss().rss)
    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(4):
        engine.backward(engine(torch.randn(2, 1024)))
        engine.step()
    stop.set()
    watcher.join()
    print("USED", max(peaks) - base, engine.lohan_stats()["host_peak_bytes"])
"""


def test_resident_memory_is_what_is_planned(tmp_path):
    """Gradients (252 MB) are the bulk of the plan; the model's own 252 MB and its state's 504 MB must be gone."""
    done = subprocess.run([sys.executable, "-c", REAL_USE, str(tmp_path)], capture_output=True, text=True, timeout=200,
                          env=fresh_environment(OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr[-3000:]
    used, pool = map(int, done.stdout.split("USED")[1].split())
    resident = 4 * 4 * 1024 * 1024
    assert used <= pool + resident + 60_000_000, (used, pool)   # gradients and activations on their way, the heap


def test_paths_on_drives_of_different_size_offer_what_even_striping_can_use(monkeypatch, tmp_path):
    from lohan_ds.store import free_space
    drives = {"a": (1, 100), "b": (1, 100), "c": (2, 70)}   # two paths share the first drive
    monkeypatch.setattr(free_space.os, "stat", lambda path: type("S", (), {"st_dev": drives[path][0]}))
    monkeypatch.setattr(free_space.shutil, "disk_usage", lambda path: type("U", (), {"free": drives[path][1]}))
    assert free_space.striped_free_bytes(["a", "b", "c"]) == 3 * 50
    assert free_space.striped_free_bytes(["a", "c"]) == 2 * 70
    assert free_space.striped_free_bytes(["a", "c"], (0, 0, 1)) == 3 * 50   # the first is full with 100
    assert free_space.striped_free_bytes(["a", "b", "c"], (0, 0, 1, 2)) == 4 * 100 // 3
    assert free_space.striped_free_bytes(["a", "c"], (1,)) == 70 and free_space.striped_free_bytes([]) == 0


class ZeroElements(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.empty = nn.Parameter(torch.zeros(0, 8))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(torch.cat([self.first(x), x @ self.empty.t()], 1)).square().mean()


def test_a_block_of_zero_elements_updates_nothing_and_waits_for_nothing(tmp_path):
    for mode in ("serial", "deferred", "eager"):
        torch.manual_seed(0)
        twin = Twin(ZeroElements(), lr=1e-2)
        torch.manual_seed(0)
        config = ds_config({"ssd_paths": [str(tmp_path)], "param_tier": "ssd", "update": mode},
                           optimizer={"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}})
        with engine_for(ZeroElements(), config) as engine:
            for step in range(3):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
                loss = engine(x)
                engine.backward(loss)
                engine.step()
                assert loss.item() == twin.micro_step(x, lambda model, batch: model(batch))
                twin.step()
