"""For every test: it begins with one compute thread, and what it changes in the process ends with it."""
from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

_LINEAR = torch.nn.functional.linear


@pytest.fixture(autouse=True)
def process_as_at_the_start() -> Iterator[None]:
    """One thread: tiny operations on two wait for each other, ten times longer when the cores are shared."""
    torch.set_num_threads(1)
    logger = logging.getLogger("lohan_ds")   # commands make it quiet
    level = logger.level
    yield
    logger.setLevel(level)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    torch.nn.functional.linear = _LINEAR   # DeepSpeed's ZeRO-3 puts another there, with other bits
