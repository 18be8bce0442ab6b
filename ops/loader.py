"""Native or fallback: decided once per process and operator, and said once if it is the fallback."""
from __future__ import annotations

import functools
import logging
import os
import threading
from types import ModuleType

logger = logging.getLogger(__name__)
_COMPILER = "a C++17 compiler (CXX), ninja and Python's headers"
_WITHOUT = {   # operator: what is slower then, what it needs
    "cpu_adam": ("The update runs in plain torch", _COMPILER),
    "grad_accumulate": ("Gradients are added and their norm is taken in plain torch, in more passes over memory",
                        _COMPILER),
    "grad_pack": ("Gradients leave the GPU one by one and the CPU takes their norm",
                  f"an nvcc of torch's CUDA version (CUDA_HOME), {_COMPILER}"),
}
_lock = threading.Lock()     # one build at a time; the second caller waits for the first one's result


def native(operator: str) -> ModuleType | None:
    """The operator's module, or None: use the twin. Called from any thread.

    The first call may compile, which takes seconds. `LOHAN_DS_NATIVE_OPS=0` in the environment is None without a
    word; what cannot be built is None with one warning that names the operator, the reason and what is slower now.
    """
    with _lock:
        return _load(operator)


@functools.cache
def _load(operator: str) -> ModuleType | None:
    if os.environ.get("LOHAN_DS_NATIVE_OPS", "1") == "0":
        return None
    try:
        from .builders import BUILDERS
        return BUILDERS[operator]().load()
    except Exception as error:  # noqa: BLE001 - whatever it was, there is a fallback
        slower, needed = _WITHOUT[operator]
        logger.warning("lohan_ds: the native operator %s could not be built (%s). %s: same results, slower. To have "
                       "it, install %s; to hide this, set LOHAN_DS_NATIVE_OPS=0", operator, _reason(error), slower,
                       needed)
        return None


def _reason(error: Exception) -> str:
    """One line. The first line of a compiler's output that says "error", else the first line there is."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    told = [line for line in lines[1:] if "error" in line.lower() or "not found" in line.lower()]
    return (told or lines)[0]
