"""`lohan store`: what lies on the SSDs of runs that have a name, or had none: look, check, remove.

Torch is not imported, so it answers at once.
"""
from __future__ import annotations

import datetime
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lohan_ds.errors import StoreError
from lohan_ds.store.check import Report, check_run
from lohan_ds.store.found_runs import FoundRun, find_runs

app = typer.Typer(no_args_is_help=True, help="Look at, check and remove what runs keep on their SSDs.")

_WIDTH_IN_A_FILE = 240   # characters; of lines that nobody's window cuts

Dirs = Annotated[list[Path], typer.Argument(metavar="DIR", show_default=False,
                                            help="SSD paths, as in lohan.ssd_paths, or directories of runs in them.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@app.command("list")
def list_runs(dirs: Dirs, as_json: Json = False) -> None:
    """List the runs in these directories, one line each.

    "Written" are all bytes that a run has written to its files since it began, as of its last commit. Exit status: 0,
    or 2 if a directory cannot be listed.
    """
    runs = _find(dirs)
    if as_json:
        print(json.dumps([_values_of(run) for run in runs], indent=2))
        return
    table = _table("run", "state", "on disk", "last change", "written", "directories")
    for run in runs:
        table.add_row(_title(run), run.state(), _size(sum(run.disk_bytes)), _time(run.last_change_s),
                      _size(_bytes_written(run)), ", ".join(run.dirs))
    _console().print(table if runs else "no runs")


@app.command()
def check(
    dirs: Dirs,
    run: Annotated[list[str] | None, typer.Option(help="Name of a run to check; may be given several times. Default: "
                                                  "all that have a name.")] = None,
    as_json: Json = False,
) -> None:
    """Read everything that runs have committed, and compare checksums.

    Of a run that is striped over several SSDs all must be named. Exit status: 0 if everything reads as it was written,
    1 if something is damaged, 2 if something could not be checked: in use, dirty, not ours, a directory missing, of
    another version.
    """
    found = [each for each in _find(dirs) if each.name is not None and (not run or each.name in run)]
    for name in {*(run or [])} - {each.name for each in found}:
        _fail(f"there is no run {name!r} in {', '.join(map(str, dirs))}")
    if not found:
        _fail(f"there is no run with a name in {', '.join(map(str, dirs))}")
    entries, status = [], 0
    for each in found:
        try:
            report = _check(each)
        except (StoreError, OSError) as error:
            entries.append({**_values_of(each), "error": str(error)})
            status = status or 2
            if not as_json:
                _console().print(f"run {each.name}: [red]not checked:[/] {escape(str(error))}", highlight=False)
            continue
        status = 1 if report.damages else status or (2 if report.commit.dirty else 0)
        entries.append({**_values_of(each), **_values_of_report(report)})
        if not as_json:
            _print_report(each, report)
    if as_json:
        print(json.dumps(entries, indent=2))
    raise typer.Exit(status)


@app.command()
def clean(
    dirs: Dirs,
    run: Annotated[list[str] | None, typer.Option(help="Name of a run to remove with all that it has trained; may be "
                                                  "given several times.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove runs with a name without asking.")] = False,
) -> None:
    """Remove what dead processes left: scratch, and runs that were cut off before their first commit.

    Runs with a name are removed only by --run. Never what is in use, belongs to another user, or is a symbolic link.
    Exit status: 0, or 2 if something that was asked for was not removed.
    """
    found = _find(dirs)
    named = [each for each in found if each.name in (run or [])]
    for name in {*(run or [])} - {each.name for each in named}:
        _fail(f"there is no run {name!r} in {', '.join(map(str, dirs))}")
    status = 0
    for each in found:
        if each in named and not each.may_go:
            if each.is_ours and each.holder is None and not yes and not _confirmed(each):
                status = 2
                continue
        elif not each.may_go:
            continue
        try:
            each.remove()
        except OSError as error:
            _console(stderr=True).print(f"[red]error:[/] {escape(str(error))}", highlight=False)
            status = 2
        else:
            _console().print(f"removed {_title(each)}: {', '.join(each.dirs)}", highlight=False, markup=False)
    raise typer.Exit(status)


def _confirmed(run: FoundRun) -> bool:
    try:
        return typer.confirm(f"Remove {_title(run)} ({run.state()}, {_size(sum(run.disk_bytes))}, "
                             f"{', '.join(run.dirs)})?")
    except typer.Abort:   # nobody is there to answer
        return False


def _find(dirs: Sequence[Path]) -> list[FoundRun]:
    try:
        return find_runs([str(path) for path in dirs])
    except StoreError as error:
        _fail(str(error))


def _fail(message: str) -> None:
    _console(stderr=True).print(f"[red]error:[/] {escape(message)}", highlight=False)
    raise typer.Exit(2)


def _check(run: FoundRun) -> Report:
    if run.refusal is not None:
        raise run.refusal
    if run.is_partial:
        raise StoreError(f"only {len(run.dirs)} of its {run.num_dirs} directories found: {', '.join(run.dirs)}; name "
                         "all SSD paths of the run")
    with Console(stderr=True).status("") as status:
        return check_run(run.dirs, lambda block: status.update(f"run {run.name}: block {block.index} ({block.name})"))


def _print_report(run: FoundRun, report: Report) -> None:
    console = _console()
    if report.commit is not None:
        commit, manifest = report.commit, report.manifest
        console.print(f"run {run.name}: step {commit.step}, commit {commit.number}, durability {manifest.durability}, "
                      f"{len(manifest.blocks)} blocks, {_size(commit.bytes_written)} written so far", highlight=False)
        console.print(f"  slots of the blocks: {_short(commit.slots)}", highlight=False)
    for path, nbytes in zip(run.dirs, run.disk_bytes):
        console.print(f"  {_size(nbytes)} in {path}", highlight=False, markup=False)
    for path in report.unexpected:
        console.print(f"  not a file of this run: {path}", highlight=False, markup=False)
    if report.damages:
        table = _table("file", "offset", "bytes", "block", "chunk", "kind", "damage")
        for damage in report.damages:
            table.add_row(*("" if value is None else str(value) for value in (
                damage.path, damage.offset, damage.nbytes, damage.block, damage.chunk, damage.kind, damage.what)))
        console.print(table)
        console.print(f"[red]damaged:[/] {len(report.damages)} pieces do not read as they were committed",
                      highlight=False)
    elif report.commit.dirty:
        console.print(f"[red]dirty:[/] cut off while data was changed in place; last checkpoint: "
                      f"{escape(report.commit.last_checkpoint or 'none')}", highlight=False)
    else:
        console.print(f"[green]ok:[/] {_size(report.bytes_checked)} read as they were committed", highlight=False)


def _values_of(run: FoundRun) -> dict:
    return {"name": run.name, "state": run.state(), "directories": list(run.dirs), "num_directories": run.num_dirs,
            "disk_bytes": list(run.disk_bytes), "last_change_s": run.last_change_s,
            "bytes_written": _bytes_written(run)}


def _values_of_report(report: Report) -> dict:
    commit, manifest = report.commit, report.manifest
    known = {} if commit is None else {
        "step": commit.step, "commit": commit.number, "dirty": commit.dirty, "durability": manifest.durability,
        "slots": dict(zip((block.name for block in manifest.blocks), commit.slots)),
        "last_checkpoint": commit.last_checkpoint}
    return {**known, "bytes_checked": report.bytes_checked, "damages": [damage._asdict() for damage in report.damages],
            "unexpected": list(report.unexpected)}


def _bytes_written(run: FoundRun) -> int | None:
    try:
        return None if run.refusal is not None or run.commit is None else run.commit.bytes_written
    except StoreError:
        return None


def _title(run: FoundRun) -> str:
    return run.name or "scratch"


def _short(slots: Iterable[int]) -> str:
    """Neighbours that are alike together: "0-23: 1, 24: 0"."""
    parts, first = [], 0
    for slot, group in itertools.groupby(slots):
        last = first + len(list(group)) - 1
        parts.append(f"{first}: {slot}" if first == last else f"{first}-{last}: {slot}")
        first = last + 1
    return ", ".join(parts)


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return ""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _console(stderr: bool = False) -> Console:
    console = Console(stderr=stderr, soft_wrap=True)
    if not console.is_terminal:
        console.width = _WIDTH_IN_A_FILE
    return console
