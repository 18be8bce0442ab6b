"""`WorkerProcess`: the other end of worker.py."""
from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import tempfile
from pathlib import Path

from lohan_ds.bench.case import Case, Side
from lohan_ds.bench.turns import Turn
from lohan_ds.bench.worker import serve

_START_S = 1800.0      # an operator may have to be compiled
_STEP_S = 600.0
_END_S = 60.0


class SideFailed(Exception):
    """A side could not start or go on; its text is the reason, for the table."""


class WorkerProcess:
    """Starts at once; raises SideFailed if it does not get ready. One thread."""

    def __init__(self, side: Side, case: Case, parent_folder: str):
        self.side = side
        self.folder = tempfile.mkdtemp(prefix=f"{side.name.replace(':', '-')}_", dir=parent_folder)
        self._log_path = f"{self.folder}.log"
        Path(self._log_path).touch()
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, side, case, self.folder, self._log_path),
                                        name=f"lohan-bench-{side.name}", daemon=True)
        os.environ["OMP_NUM_THREADS"] = str(case.num_threads)   # read when the child imports torch
        self._process.start()
        theirs.close()
        self._receive(_START_S)

    def turn(self, num_uncounted: int, num_counted: int) -> Turn:
        """Blocks until the steps are trained. SideFailed if they cannot be; the process has ended then."""
        with contextlib.suppress(ConnectionError):   # it has ended while it waited: said by `_receive`
            self._connection.send((num_uncounted, num_counted))
        return self._receive(_STEP_S * (num_uncounted + num_counted))

    def close(self) -> None:
        """Ends the process and removes its files. Idempotent."""
        if self._process.is_alive():
            try:
                self._connection.send(None)
                self._process.join(_END_S)
            except OSError:   # it is ending by itself
                self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        Path(self._log_path).unlink(missing_ok=True)

    def _receive(self, timeout_s: float):
        try:
            if not self._connection.poll(timeout_s):
                self._process.kill()
                raise SideFailed(f"no answer within {timeout_s:.0f} s")
            answer = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join(_END_S)
            code = self._process.exitcode
            lack = ": probably for lack of memory" if code == -9 else ""
            answer = f"its process ended with {code}{lack}; last line: {self._last_line()}"
        except SideFailed:
            self.close()
            raise
        if isinstance(answer, str) and answer != "ready":
            self.close()
            raise SideFailed(answer.removeprefix("failed: "))
        return answer

    def _last_line(self) -> str:
        lines = Path(self._log_path).read_text(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "none"
