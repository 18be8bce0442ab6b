"""CPU threads are shared out on purpose."""
from __future__ import annotations

import os

import psutil
import pytest
import torch

from lohan_ds.cpu_threads import num_update_threads


@pytest.mark.parametrize("allowed,physical,expected", [(16, 8, 7), (4, 8, 3), (1, 8, 1), (2, None, 1), (16, 1, 1)])
def test_beside_an_accelerator_one_core_is_left(monkeypatch, allowed, physical, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(allowed)))
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: physical)
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)   # as launchers do
    try:
        assert num_update_threads(torch.device("cuda"), None) == expected
    finally:
        torch.set_num_threads(torch_threads)


def test_where_the_cpu_computes_the_number_is_torchs():
    assert num_update_threads(torch.device("cpu"), None) is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_users_number_wins(device):
    assert num_update_threads(torch.device(device), 3) == 3
