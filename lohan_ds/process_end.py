"""How a run ends: normally, by an exception, Ctrl-C, SIGTERM or a killed launcher, its files and threads go with it."""
from __future__ import annotations

import atexit
import os
import select
import signal
import sys
import threading
import weakref

import psutil

from lohan_ds.offload import close_all

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_LAUNCHERS = ("deepspeed", "accelerate", "torchrun", "deepspeed.launcher.launch", "deepspeed.launcher.runner",
              "accelerate.commands.launch", "torch.distributed.run", "torch.distributed.launch")


def close_at_end(engine, offload) -> None:
    """Closes `offload` when `engine` is collected or the interpreter exits, whichever is first; SIGTERM exits."""
    weakref.finalize(engine, close_all, offload.closers)   # offload itself would keep model and engine alive
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        for number in _SIGNALS:
            if signal.getsignal(number) is signal.SIG_DFL:   # under nohup SIGHUP is ignored, and stays so
                signal.signal(number, _exit_on_signal)
        atexit.register(_close_undisturbed)   # after weakref's, so it is called before
        _end_with_launcher()


def _exit_on_signal(number: int, frame) -> None:
    sys.exit(128 + number)


def _close_undisturbed() -> None:
    """After Ctrl-C the launcher also sends SIGTERM, and users press it twice: files must be removed all the same."""
    for number in (*_SIGNALS, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _end_with_launcher() -> None:
    """We get SIGTERM when a launcher above us ends, even by kill -9. Other parents, like a shell, may go away.

    DeepSpeed's has two processes, and neither ends the other when it is killed.
    """
    watched, num_watched = select.poll(), 0
    try:
        for parent in psutil.Process().parents():
            if _program(parent.cmdline()) in _LAUNCHERS:
                watched.register(os.pidfd_open(parent.pid), select.POLLIN)   # open for as long as we live
                num_watched += 1
    except (psutil.Error, AttributeError, OSError):
        return   # not Linux, or a parent is already gone
    if num_watched:
        threading.Thread(target=_wait_for_end, args=(watched,), name="launcher-watch", daemon=True).start()


def _program(command: list[str]) -> str:
    """Of a command line: the name of the program or, run by Python, of the script or module."""
    words = [os.path.basename(word) for word in command if not word.startswith("-")]
    if len(words) > 1 and words[0].startswith("python"):
        words = words[1:]
    return words[0] if words else ""


def _wait_for_end(watched: select.poll) -> None:
    watched.poll()
    os.kill(os.getpid(), signal.SIGTERM)
