"""`lohan profile`: measures this machine, or shows what was measured before."""
from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape


class TrainingDtype(str, Enum):
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


DTYPES = {TrainingDtype.bf16: "bfloat16", TrainingDtype.fp16: "float16", TrainingDtype.fp32: "float32"}


def profile_command(
    ssd_path: Annotated[list[Path] | None, typer.Option(help="Directory on an SSD to measure; may be given several "
                                                        "times. Without one, no SSD is measured.")] = None,
    dtype: Annotated[TrainingDtype, typer.Option(help="Data type that the model trains in.")] = TrainingDtype.bf16,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again even if there are measurements that "
                                          "hold.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON, for `lohan plan "
                                          "--hardware`.")] = False,
) -> None:
    """Measure how fast this machine computes, copies, reads, writes and updates, in less than a minute.

    Measurements are kept for 30 days per machine and set of SSD directories, as long as the libraries and the device
    stay the same. On each directory at most 16 GiB are written and a tenth of the free space is used; no file is left.
    Exit status: 0, or 2 if something could not be measured.
    """
    console, errors = Console(), Console(stderr=True)
    logging.getLogger("lohan_ds").setLevel(logging.ERROR)   # the table says it better
    from lohan_ds.errors import LohanError
    try:
        with contextlib.redirect_stdout(sys.stderr), progress_of(errors) as progress:   # libraries print remarks
            from lohan_ds.profiler.hardware import profile_hardware
            profile, report, free = profile_hardware([str(path) for path in ssd_path or ()], DTYPES[dtype], refresh,
                                                     progress=progress)
    except (LohanError, OSError) as error:
        errors.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from error
    from lohan_ds.profiler.hardware_file import dump_profile
    from lohan_ds.profiler.hardware_report import hardware_table
    if as_json:
        typer.echo(dump_profile(profile))
        return
    console.print(hardware_table(report, free))
    if not report.is_steady:
        console.print("Compute or update was unsteady: something else was using this machine. Measure again with "
                      "--refresh when it is quiet.", soft_wrap=True, highlight=False)


@contextlib.contextmanager
def progress_of(errors: Console) -> Iterator[Callable[[str], None]]:
    """On standard error: a line with a spinner on a terminal, else a line for each thing measured."""
    if not errors.is_terminal:
        yield lambda what: errors.print(f"measuring: {what}", soft_wrap=True, highlight=False, markup=False)
        return
    with errors.status("") as status:
        yield lambda what: status.update(f"measuring: {escape(what)}")
