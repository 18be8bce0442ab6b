"""The `lohan` command."""
from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lohan_ds import cli_bench, cli_plan, cli_profile, cli_rehearse, cli_store

if TYPE_CHECKING:   # torch takes seconds to import, too long for --help
    from lohan_ds.testing.parity import Case, CaseResult

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(cli_store.app, name="store")
app.command("profile")(cli_profile.profile_command)
app.command("plan")(cli_plan.plan_command)
app.command("bench")(cli_bench.bench_command)
app.command("rehearse")(cli_rehearse.rehearse_command)


class Dtype(str, Enum):
    bf16 = "bf16"
    fp32 = "fp32"
    both = "both"


@app.callback()
def lohan() -> None:
    """Out-of-core training for DeepSpeed, with exact numbers."""


@app.command()
def verify(
    full: Annotated[bool, typer.Option("--full", help="Every combination, not only every pair of values.")] = False,
    model: Annotated[Path | None, typer.Option(help="Folder of a Hugging Face causal LM to train instead of the "
                                               "built-in tiny models.", exists=True, file_okay=False)] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of --model to keep; all if left out.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps per run.")] = 5,
    ssd_path: Annotated[list[Path] | None, typer.Option(help="Directory on an SSD to test with; may be given several "
                                                        "times. Default: two temporary ones.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Data type of the parameters.")] = Dtype.both,
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads. Default: 1 for the tiny models, for "
                                                "which it is fastest, all cores for --model.")] = None,
    flip_bit: Annotated[bool, typer.Option("--flip-bit", hidden=True)] = False,
) -> None:
    """Train out-of-core and in memory, on the CPU, and compare every bit.

    Each row is one run; compared are the losses, the gradient norms, and in the end parameters, master weights,
    moments and step counts. Column "eager": block updates made during backward that were kept / dropped. Exit status:
    0 if all bits are equal, 1 if not, 2 if it could not be tried.
    """
    if layers and model is None:
        raise typer.BadParameter("needs --model", param_hint="--layers")
    _be_quiet()
    import torch

    from lohan_ds.errors import LohanError
    from lohan_ds.testing import parity
    if threads or model is None:
        torch.set_num_threads(threads or 1)
    values = {"dtypes": ("fp32", "bf16") if dtype is Dtype.both else (dtype.value,)}
    options = {"flip_bit": flip_bit}
    if model is not None:
        values["models"] = (model.resolve().name,)
        if not full:   # a real model takes its time
            values.update(clips=("alternating",), accumulations=(1,))
        options.update(make_model=lambda: parity.load_model(str(model), layers), chunk_bytes=None, look_early=False)
    cases = (parity.full_matrix if full else parity.quick_matrix)(steps, **values)
    console = Console()
    try:
        with _ssd_paths(ssd_path, console) as paths:
            results = _run(parity.run_cases(cases, paths, **options), cases)
    except (LohanError, OSError) as error:
        console.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        raise typer.Exit(2) from error
    console.print(_table(results))
    different = [result for result in results if not result.same]
    if different:
        first = f"{different[0].case}: {different[0].first_difference}"
        console.print(f"[red]{len(different)} of {len(results)} runs differ from training in memory.[/] "
                      f"First: {escape(first)}", soft_wrap=True, highlight=False)
        raise typer.Exit(1)
    console.print(f"[green]All {len(results)} runs have the same bits as training in memory.[/]", highlight=False)


def main() -> None:
    app()


def _be_quiet() -> None:
    """Before torch, deepspeed and transformers are imported: none of their warnings, and no plan of ours."""
    logging.getLogger("lohan_ds").setLevel(logging.WARNING)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.simplefilter("ignore")


@contextlib.contextmanager
def _ssd_paths(given: list[Path] | None, console: Console) -> Iterator[list[str]]:
    """The directories for the SSD tier: those given, or two temporary ones, removed at the end."""
    from lohan_ds.store.direct_io import RAM_FILE_SYSTEMS, file_system_type
    if given:
        yield [str(path) for path in given]
        return
    with tempfile.TemporaryDirectory(prefix="lohan_verify_") as folder:
        if file_system_type(folder) in RAM_FILE_SYSTEMS:
            console.print(f"{tempfile.gettempdir()} is in RAM, so tier ssd is tried without a disk; "
                          "name a directory with --ssd-path", soft_wrap=True)
        paths = [os.path.join(folder, name) for name in ("a", "b")]
        for path in paths:
            os.mkdir(path)
        yield paths


def _run(results: Iterable[CaseResult], cases: list[Case]) -> list[CaseResult]:
    """All results; a terminal shows on standard error how far it is."""
    with Console(stderr=True).status("") as status:
        done = []
        results = iter(results)
        for index, case in enumerate(cases, start=1):
            status.update(f"{index} of {len(cases)}: {case}")
            done.append(next(results))
        return done


def _table(results: list[CaseResult]) -> Table:
    table = Table("model", "tier", "update", "clip", "accum.", "dtype", "eager", "bits equal", "seconds",
                  box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False)   # in 80 columns
    for result in results:
        case = result.case
        eager = f"{result.num_kept}/{result.num_dropped}" if case.update == "eager" else ""
        table.add_row(case.model, case.tier, case.update, case.clip, str(case.accumulation), case.dtype, eager,
                      "[green]yes[/]" if result.same else "[red]no[/]", f"{result.seconds:.1f}")
    return table
