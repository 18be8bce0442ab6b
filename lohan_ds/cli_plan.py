"""`lohan plan`: whether a model can be trained on a machine, how fast, and what binds. Nothing is run or loaded."""
from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from lohan_ds.cli_profile import DTYPES, TrainingDtype, progress_of

if TYPE_CHECKING:   # scipy and pydantic take a second to import, too long for --help
    from lohan_ds.planner.machines import Machine
    from lohan_ds.planner.page import Page
    from lohan_ds.profile import HardwareProfile
    from lohan_ds.profiler.model_file import ModelFile

DEFAULT_SEQUENCE_LENGTH = 1024


def plan_command(
    model: Annotated[Path | None, typer.Option(metavar="DIR_OR_CONFIG", exists=True, help="Model folder of Hugging "
                                               "Face, or its config.json. No weights are read.")] = None,
    model_profile: Annotated[Path | None, typer.Option(metavar="FILE", help="Instead of --model: what "
                                                       "--save-model-profile wrote. Needs no torch.")] = None,
    save_model_profile: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep what was found out about the "
                                                            "model.")] = None,
    hardware: Annotated[str | None, typer.Option(metavar="NAME_OR_FILE", help="Machine that comes with lohan, such as "
                                                 "rtx4090-256gb-2ssd, or what `lohan profile --json` wrote. Default: "
                                                 "this machine, measured if it was not.")] = None,
    micro_batch: Annotated[int | None, typer.Option(min=1, help="Sequences per micro-batch. Default: 1, or that of "
                                                    "--model-profile.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help=f"Tokens per sequence. Default: {DEFAULT_SEQUENCE_LENGTH}, or "
                                            "that of --model-profile.")] = None,
    accumulation: Annotated[int, typer.Option(min=1, help="Micro-batches per step.")] = 1,
    dtype: Annotated[TrainingDtype | None, typer.Option(help="Data type that the model trains in. Default: "
                                                        "bf16.")] = None,
    loss_tile_tokens: Annotated[int | None, typer.Option(min=0, help="As the key of the \"lohan\" section: tokens at a "
                                                         "time for head and loss, 0 for never. Default: as the run "
                                                         "decides.")] = None,
    no_clipping: Annotated[bool, typer.Option("--no-clipping", help="gradient_clipping is off: updates may begin in "
                                              "backward.")] = False,
    device_parameters: Annotated[bool, typer.Option("--device-parameters", help="Plan with parameters that stay on the "
                                                    "device, too. The runtime does not carry that out yet.")] = False,
    ssd_path: Annotated[list[Path] | None, typer.Option(help="Directory on an SSD of this machine to use; may be given "
                                                        "several times.")] = None,
    host_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Host memory to use, such as 100GB or "
                                                    "100GiB.")] = None,
    device_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Device memory to use.")] = None,
    tbw: Annotated[float | None, typer.Option(metavar="TB", min=0.001, help="Terabytes that one drive may be written "
                                              "in its life, by its data sheet.")] = None,
    save_plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan, to read, edit and run: "
                                                   '"lohan": {"plan": FILE}.')] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a page.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="PNG", help="Draw what every resource does when, and the memory "
                                              "of every tier. Needs matplotlib.")] = None,
) -> None:
    """Say whether a model fits and how fast it trains, before anything is loaded or bought.

    Exit status: 0 if it fits, 1 if not, 2 if it cannot be told.
    """
    if (model is None) == (model_profile is None):
        raise typer.BadParameter("name a model with either --model or --model-profile", param_hint="--model")
    if model_profile is not None and loss_tile_tokens is not None:
        raise typer.BadParameter("is decided when a model is profiled: use --model", param_hint="--loss-tile-tokens")
    if hardware is not None and ssd_path:
        raise typer.BadParameter("is of this machine; a machine of --hardware has its own", param_hint="--ssd-path")
    if save_plan is not None and device_parameters:
        raise typer.BadParameter("the runtime does not carry out plans with --device-parameters yet",
                                 param_hint="--save-plan")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from lohan_ds.errors import LohanError
    try:
        with _collector_paused(), _only_the_page_on_stdout():
            from lohan_ds.planner.outlook import Request, look_ahead
            from lohan_ds.planner.page import make_page
            from lohan_ds.planner.placement import with_micro_batch
            from lohan_ds.planner.solution import Batch
            if plot is not None:
                from lohan_ds.planner_plot import check_matplotlib
                check_matplotlib()
            file = None if model_profile is None else _read(model_profile, seq, dtype)   # before what takes its time
            machine, notes = _machine(hardware, [str(path) for path in ssd_path or ()], dtype or TrainingDtype.bf16)
            machine = _with_limits(machine, host_memory, device_memory, tbw)
            device_type = "cpu" if machine.profile.unified else "cuda"
            if file is None:
                file, remarks = _profiled(model, micro_batch or 1, seq or DEFAULT_SEQUENCE_LENGTH,
                                          dtype or TrainingDtype.bf16, device_type, loss_tile_tokens,
                                          machine.profile)
            else:
                remarks = [] if file.device_type == device_type else [f"The model was profiled for {file.device_type}."]
            if save_model_profile is not None:
                from lohan_ds.profiler.model_file import save_model
                save_model(file, save_model_profile)
            profile = with_micro_batch(file.profile, micro_batch or file.profile.micro_batch)
            request = Request(Batch(profile.micro_batch, accumulation), not no_clipping, device_parameters)
            outlook = look_ahead(profile, machine.profile, machine.num_ssds, request)
            assumed = [f"Attention: {file.attention}."] + ([f"Head and loss: {file.loss}."] if file.loss else [])
            page = make_page(file.name, profile, machine, outlook, [*notes, *assumed, *remarks])
            if save_plan is not None and outlook.solution is not None:
                from lohan_ds.planner.plan_file import save_plan as write_plan
                from lohan_ds.planner.plan_layout import lay_out
                write_plan(lay_out(outlook.solution, profile, machine.profile, file.name), save_plan)
            if plot is not None:
                from lohan_ds.planner_plot import draw
                draw(page, plot)
    except (LohanError, OSError) as error:
        _fail(str(error))
    _show(page, as_json)
    if save_plan is not None and not page.fits:
        Console(stderr=True).print(f"{escape(str(save_plan))} is not written: nothing fits", highlight=False)
    raise typer.Exit(0 if page.fits else 1)


def _show(page: Page, as_json: bool) -> None:
    from lohan_ds.planner.page_text import page_text
    print(json.dumps(asdict(page), indent=2) if as_json else page_text(page))


def _machine(hardware: str | None, ssd_paths: list[str], dtype: TrainingDtype) -> tuple[Machine, list[str]]:
    """A machine of a file, or this one; and what to say about it."""
    from lohan_ds.planner.machines import DEVICE_SHARE, HOST_SHARE, SSD_SHARE, Machine, load
    if hardware is not None:
        return load(hardware), []
    errors = Console(stderr=True)
    with progress_of(errors) as progress:
        from lohan_ds.profiler.hardware import profile_hardware
        profile, report, _ = profile_hardware(ssd_paths, DTYPES[dtype], progress=progress)
    profile = replace(profile, host_bytes=int(HOST_SHARE * profile.host_bytes),
                      device_bytes=int(DEVICE_SHARE * profile.device_bytes),
                      ssd_bytes=int(SSD_SHARE * profile.ssd_bytes))
    made_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(report.made_at_s))
    note = (f"Rates of this machine were measured at {made_at}. Budgets without a flag: {HOST_SHARE:.0%} of the host "
            f"memory, {DEVICE_SHARE:.0%} of the device memory and {SSD_SHARE:.0%} of the SSD space that are free now.")
    return Machine(profile, "this machine", len(ssd_paths), 0, {}), [note]


def _with_limits(machine: Machine, host_memory: str | None, device_memory: str | None, tbw: float | None) -> Machine:
    from lohan_ds.config import parse_bytes
    profile = machine.profile
    if host_memory is not None:
        profile = replace(profile, host_bytes=parse_bytes(host_memory, "--host-memory"))
    if device_memory is not None:
        profile = replace(profile, device_bytes=parse_bytes(device_memory, "--device-memory"))
    rated_bytes = machine.ssd_rated_write_bytes if tbw is None else round(tbw * 1e12) * max(machine.num_ssds, 1)
    return replace(machine, profile=profile, ssd_rated_write_bytes=rated_bytes)


def _profiled(path: Path, micro_batch: int, sequence_length: int, dtype: TrainingDtype,
              device_type: str, loss_tile_tokens: int | None,
              hardware: HardwareProfile) -> tuple[ModelFile, list[str]]:
    """The model of a config, and what to say about it."""
    import torch

    from lohan_ds.integrations.model_sources import model_from
    from lohan_ds.profiler.model import profile_model
    from lohan_ds.profiler.model_file import ModelFile
    source = model_from(path, micro_batch, sequence_length, getattr(torch, DTYPES[dtype]))
    profile, report = profile_model(source.model, source.inputs, micro_batch, sequence_length, device_type,
                                    source.loss_of, loss_tile_tokens=loss_tile_tokens,
                                    device_bytes=hardware.host_bytes if hardware.unified else hardware.device_bytes)
    remarks = []
    longest = getattr(getattr(source.model, "config", None), "max_position_embeddings", None)
    if "input_ids" not in source.inputs:
        remarks = ["The model takes no tokens: a sequence is one sample of the size in its config."]
    elif isinstance(longest, int) and sequence_length > longest:
        remarks = [f"The model is made for at most {longest} tokens per sequence."]
    return (ModelFile(name=source.description, device_type=device_type, attention=report.attention, loss=report.loss,
                      profile=profile), remarks)


def _read(path: Path, sequence_length: int | None, dtype: TrainingDtype | None) -> ModelFile:
    """ConfigError if the file is of another sequence length or dtype than asked for."""
    from lohan_ds.errors import ConfigError
    from lohan_ds.profiler.model_file import load_model
    file = load_model(path)
    if sequence_length not in (None, file.profile.sequence_length):
        raise ConfigError(f"--seq {sequence_length}: {path} is of {file.profile.sequence_length} tokens per sequence; "
                          "profile the model again with --model")
    dtypes = {block.dtype for block in file.profile.size.blocks}
    if dtype is not None and DTYPES[dtype] not in dtypes:
        raise ConfigError(f"--dtype {dtype.value}: {path} is of {', '.join(sorted(dtypes))}; profile the model again "
                          "with --model")
    return file


@contextlib.contextmanager
def _only_the_page_on_stdout() -> Iterator[None]:
    """What libraries print from Python goes to standard error, what they print from C (HiGHS does) nowhere."""
    sys.stdout.flush()
    stdout_fd, nowhere_fd = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere_fd, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(stdout_fd, 1)
        os.close(stdout_fd)
        os.close(nowhere_fd)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Importing torch and transformers makes millions of objects that stay: looking through them for garbage takes most
    of a second, and as long again when the process ends."""
    atexit.register(gc.freeze)
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(f"[red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)
    raise typer.Exit(2)
