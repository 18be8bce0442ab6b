"""What commands that plan are given, a model and a machine, found or read; and how they print and fail."""
from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from lohan_ds.cli_profile import DTYPES, TrainingDtype, progress_of

if TYPE_CHECKING:   # scipy and pydantic take a second to import, too long for --help
    from lohan_ds.planner.machines import Machine
    from lohan_ds.profile import HardwareProfile
    from lohan_ds.profiler.model_file import ModelFile

DEFAULT_SEQUENCE_LENGTH = 1024

# Options that mean the same in every command that plans.
ModelOption = Annotated[Path | None, typer.Option(
    metavar="DIR_OR_CONFIG", exists=True,
    help="Model folder of Hugging Face, or its config.json. No weights are read.")]
ModelProfileOption = Annotated[Path | None, typer.Option(
    metavar="FILE", help="Instead of --model: what `lohan plan --save-model-profile` wrote. Needs no torch.")]
MicroBatchOption = Annotated[int | None, typer.Option(
    min=1, help="Sequences per micro-batch. Default: 1, or that of --model-profile.")]
SeqOption = Annotated[int | None, typer.Option(
    min=1, help=f"Tokens per sequence. Default: {DEFAULT_SEQUENCE_LENGTH}, or that of --model-profile.")]
AccumulationOption = Annotated[int, typer.Option(min=1, help="Micro-batches per step.")]
DtypeOption = Annotated[TrainingDtype | None, typer.Option(
    help="Data type that the model trains in. Default: bf16.")]
NoClippingOption = Annotated[bool, typer.Option(
    "--no-clipping", help="gradient_clipping is off: updates may begin in backward.")]
HostMemoryOption = Annotated[str | None, typer.Option(
    metavar="SIZE", help="Host memory to use, such as 100GB or 100GiB.")]
DeviceMemoryOption = Annotated[str | None, typer.Option(metavar="SIZE", help="Device memory to use.")]


def machine_of(hardware: str | None, ssd_paths: list[str], dtype: TrainingDtype) -> tuple[Machine, list[str]]:
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


def with_limits(machine: Machine, host_memory: str | None, device_memory: str | None, tbw: float | None) -> Machine:
    from lohan_ds.config import parse_bytes
    profile = machine.profile
    if host_memory is not None:
        profile = replace(profile, host_bytes=parse_bytes(host_memory, "--host-memory"))
    if device_memory is not None:
        profile = replace(profile, device_bytes=parse_bytes(device_memory, "--device-memory"))
    rated_bytes = machine.ssd_rated_write_bytes if tbw is None else round(tbw * 1e12) * max(machine.num_ssds, 1)
    return replace(machine, profile=profile, ssd_rated_write_bytes=rated_bytes)


def model_of(read: ModelFile | None, path: Path | None, micro_batch: int | None, sequence_length: int | None,
             dtype: TrainingDtype | None, hardware: HardwareProfile,
             loss_tile_tokens: int | None = None) -> tuple[ModelFile, list[str]]:
    """What was read of --model-profile, or else the model at `path`; and what to say about it."""
    device_type = "cpu" if hardware.unified else "cuda"
    if read is None:
        return _profiled(path, micro_batch or 1, sequence_length or DEFAULT_SEQUENCE_LENGTH,
                         dtype or TrainingDtype.bf16, device_type, loss_tile_tokens, hardware)
    return read, [] if read.device_type == device_type else [f"The model was profiled for {read.device_type}."]


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


def read_profile(path: Path, sequence_length: int | None, dtype: TrainingDtype | None) -> ModelFile:
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
def only_the_page_on_stdout() -> Iterator[None]:
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
def collector_paused() -> Iterator[None]:
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


def fail(message: str) -> NoReturn:
    Console(stderr=True).print(f"[red]error:[/] {escape(message)}", soft_wrap=True, highlight=False)
    raise typer.Exit(2)
