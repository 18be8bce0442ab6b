"""`lohan bench`: lohan beside plain torch, FSDP2 and DeepSpeed, on this machine, in one run."""
from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from lohan_ds.bench.case import CLIP_LIMITS, KINDS, SIZES, Case, has_native_bf16, parse_sides
from lohan_ds.cli_profile import progress_of
from lohan_ds.errors import ConfigError

_WIDTH = 160     # of a table that goes to a file
Size = Enum("Size", {name: name for name in SIZES}, type=str)
Clip = Enum("Clip", {name: name for name in CLIP_LIMITS}, type=str)


class BenchDtype(str, Enum):
    bf16 = "bf16"
    fp32 = "fp32"


def bench_command(
    size: Annotated[Size, typer.Option(help="Model: Llama-style, random weights.")] = Size["134m"],
    sides: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(KINDS)}; also torch:lohan-adam and "
                                       "lohan-host or lohan-ssd with :eager, :deferred or :serial. Plain torch always "
                                       "runs.")] = "torch,fsdp2,zero3-cpu,zero-infinity,lohan-host,lohan-ssd",
    seq: Annotated[int | None, typer.Option(min=2, help="Tokens per sequence. Default: 256; 128 for 1.14b.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 1,
    dtype: Annotated[BenchDtype, typer.Option(help="Of the parameters. On a CPU without bf16 instructions bf16 is only "
                                              "stored, and every side computes in fp32.")] = BenchDtype.bf16,
    clip: Annotated[Clip, typer.Option(help="Gradient clipping: a limit that every step exceeds, one that none does, "
                                       "or none.")] = Clip["every"],
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; in each every side has one turn.")] = 3,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a turn that count.")] = 3,
    warmup: Annotated[int, typer.Option(min=1, help="Steps of a new process that do not count.")] = 2,
    sweep: Annotated[bool, typer.Option(help="Find the best settings of each DeepSpeed side first.")] = True,
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads. Default: all cores.")] = None,
    host_memory: Annotated[str, typer.Option(help="lohan's host_memory. Default: its own.")] = "",
    ssd_path: Annotated[Path | None, typer.Option(help="Directory on the SSD to use. Default: a temporary one.")
                        ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: ratio[side][other] and all figures.")] = False,
) -> None:
    """Compare lohan with plain torch, FSDP2 and DeepSpeed: same model, tokens, precision and clipping, in one run.

    Every side trains in a process of its own; they take turns, on the CPU. A ratio with lohan is refused when its
    losses are not those of plain torch; another side that trains differently is compared, and marked. A side that does
    not run here is in the table, with the reason. DeepSpeed compiles its operators at first use, which takes minutes.
    Exit status: 0; 1 if a side of lohan failed or disagrees with plain torch; 2 if it could not be tried.
    """
    console, errors = Console(), Console(stderr=True)
    logging.getLogger("lohan_ds").setLevel(logging.ERROR)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from lohan_ds.bench.report import Report   # now: nothing may be missing when a long run has ended
    from lohan_ds.bench.run import Schedule, run
    from lohan_ds.errors import LohanError
    fp32_gemms = dtype is BenchDtype.bf16 and not has_native_bf16()
    case = Case(size.value, seq or SIZES[size.value].seq, batch, dtype.value, clip.value,
                threads or len(os.sched_getaffinity(0)), fp32_gemms)
    try:
        chosen = parse_sides(sides, host_memory)
        with _drive_folder(ssd_path) as folder, contextlib.redirect_stdout(sys.stderr), \
                progress_of(errors) as progress:
            results = run(case, chosen, Schedule(rounds, warmup, steps, sweep), folder, progress)
    except (LohanError, OSError) as error:
        errors.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from error
    report = Report(results)
    found = report.as_json()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        if not console.is_terminal:
            console.width = _WIDTH
        for part in report.tables():
            console.print(part, soft_wrap=isinstance(part, str), highlight=False, markup=False)
    raise typer.Exit(0 if report.lohan_is_right() else 1)


@contextlib.contextmanager
def _drive_folder(given: Path | None):
    """A folder of this run, removed at its end."""
    from lohan_ds.store.direct_io import RAM_FILE_SYSTEMS, file_system_type
    with tempfile.TemporaryDirectory(prefix="lohan_bench_", dir=given) as folder:
        if file_system_type(folder) in RAM_FILE_SYSTEMS:
            raise ConfigError(f"{folder} is in RAM, not on a drive; name a directory with --ssd-path")
        yield folder
