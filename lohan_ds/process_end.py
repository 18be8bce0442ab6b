"""How a run ends: normally, by an exception, Ctrl-C, SIGTERM or a killed launcher, its files and threads go with it."""
from __future__ import annotations

import ctypes
import signal
import sys
import threading
import weakref

import psutil

_PR_SET_PDEATHSIG = 1


def close_at_end(engine, offload) -> None:
    """Closes `offload` when `engine` is collected or the interpreter exits, whichever is first; SIGTERM exits."""
    weakref.finalize(engine, offload.close)
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _exit_on_signal)
        _end_with_launcher()


def _exit_on_signal(number: int, frame) -> None:
    sys.exit(128 + number)


def _end_with_launcher() -> None:
    """The kernel sends us SIGTERM when DeepSpeed's launcher dies, even by kill -9. Other parents may go away."""
    try:
        parent = " ".join(psutil.Process().parent().cmdline())
        if "deepspeed.launcher.launch" in parent:
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    except (psutil.Error, AttributeError, OSError):
        pass   # not Linux, or the parent is already gone
