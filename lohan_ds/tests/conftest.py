"""What commands do to the package's logger, run inside this process, ends with the test."""
from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def logger_as_before():
    logger = logging.getLogger("lohan_ds")
    level = logger.level
    yield
    logger.setLevel(level)
