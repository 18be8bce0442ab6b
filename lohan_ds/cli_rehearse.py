"""`lohan rehearse`: how a step would go on a machine that is not there, by the product's own schedule."""
from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from lohan_ds.cli_facts import (AccumulationOption, DeviceMemoryOption, DtypeOption, HostMemoryOption,
                                MicroBatchOption, ModelOption, ModelProfileOption, NoClippingOption, SeqOption,
                                collector_paused, fail, machine_of, model_of,
                                only_the_page_on_stdout, read_profile, with_limits)
from lohan_ds.cli_profile import TrainingDtype

if TYPE_CHECKING:
    from lohan_ds.planner.machines import Machine
    from lohan_ds.planner.outlook import Request
    from lohan_ds.planner.time_model import UpdateOrder
    from lohan_ds.profile import ModelProfile
    from lohan_ds.rehearsal.report import RehearsalReport

MODES = ("eager", "deferred", "serial", "barrier")


def rehearse_command(
    hardware: Annotated[str, typer.Option(metavar="NAME_OR_FILE", help="Machine that comes with lohan, such as "
                                          "rtx4090-256gb-2ssd, or what `lohan profile --json` wrote.")],
    model: ModelOption = None,
    model_profile: ModelProfileOption = None,
    micro_batch: MicroBatchOption = None,
    seq: SeqOption = None,
    accumulation: AccumulationOption = 1,
    dtype: DtypeOption = None,
    no_clipping: NoClippingOption = False,
    modes: Annotated[str | None, typer.Option(metavar="LIST", help=f"Update orders: some of {','.join(MODES)}. The "
                                              "last one is LoHan's own. Each gets its own plan. Default: the one that "
                                              "the plan takes.")] = None,
    host_memory: HostMemoryOption = None,
    device_memory: DeviceMemoryOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that count; one more comes before them.")] = 3,
    bytes_scale: Annotated[float | None, typer.Option(min=1e-9, max=1.0, help="Rehearsed bytes per byte. Default: "
                                                      "parameters and optimizer state take 160 MB.")] = None,
    seconds_scale: Annotated[float | None, typer.Option(min=1e-6, help="Rehearsed seconds per second. Default: the "
                                                        "forward of a layer takes 50 ms. More makes what Python takes "
                                                        "weigh less.")] = None,
    scratch: Annotated[Path | None, typer.Option(exists=True, file_okay=False, help="Directory for files while it "
                                                 "lasts. Default: the system's for temporary files.")] = None,
    trace: Annotated[Path | None, typer.Option(exists=True, file_okay=False, metavar="DIR", help="Write "
                                               "rehearsal_MODE.json there, for chrome://tracing or "
                                               "ui.perfetto.dev.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Rehearse the plan of a model on a machine that you do not have, and compare with what the plan predicts.

    The product's own engine streams, swaps and updates a small stand-in of the model; links, drives and the CPU's Adam
    run at the machine's rates, compute is time that passes. Bytes and seconds are scaled by one factor each. Exit
    status: 0, 1 if no plan of a mode fits, 2 if it cannot be told.
    """
    if (model is None) == (model_profile is None):
        raise typer.BadParameter("name a model with either --model or --model-profile", param_hint="--model")
    chosen = _modes(modes)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from lohan_ds.errors import LohanError
    try:
        with only_the_page_on_stdout():
            with collector_paused():
                from lohan_ds.planner.outlook import Request
                from lohan_ds.planner.placement import with_micro_batch
                from lohan_ds.planner.solution import Batch
                read = None if model_profile is None else read_profile(model_profile, seq, dtype)
                machine, _ = machine_of(hardware, [], dtype or TrainingDtype.bf16)
                machine = with_limits(machine, host_memory, device_memory, None)
                file, _ = model_of(read, model, micro_batch, seq, dtype, machine.profile)
                profile = with_micro_batch(file.profile, micro_batch or file.profile.micro_batch)
                request = Request(Batch(profile.micro_batch, accumulation), not no_clipping)
            report = _rehearsed(file.name, profile, machine, request, chosen, steps, (bytes_scale, seconds_scale),
                                scratch, trace)
    except (LohanError, OSError) as error:
        fail(str(error))
    from lohan_ds.rehearsal.report import report_text
    print(json.dumps(asdict(report), indent=2) if as_json else report_text(report))
    raise typer.Exit(1 if report.not_fitting else 0)


def _modes(text: str | None) -> tuple[UpdateOrder, ...] | None:
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in MODES]
    if unknown or len(set(names)) < len(names):
        raise typer.BadParameter(f"must be some of {', '.join(MODES)}, each once, got {text!r}", param_hint="--modes")
    return names


def _rehearsed(name: str, model: ModelProfile, machine: Machine, request: Request,
               modes: Sequence[UpdateOrder] | None, num_steps: int, scales: tuple[float | None, float | None],
               scratch: Path | None, trace: Path | None) -> RehearsalReport:
    import torch

    from lohan_ds.errors import CapacityError
    from lohan_ds.planner.program import solve
    from lohan_ds.planner.shortage import shortage
    from lohan_ds.rehearsal.rehearsal import rehearse
    from lohan_ds.rehearsal.report import RehearsalReport, mode_report
    from lohan_ds.rehearsal.scale import find_scale
    torch.set_num_threads(1)   # what little is computed is too small for more
    scale, reports, not_fitting = find_scale(model, machine.profile, *scales), [], {}
    with Console(stderr=True).status("") as status:
        for choices in request.choices_of(modes):
            label = " or ".join(choices.updates)
            try:
                solution = solve(model, machine.profile, choices)
            except CapacityError:
                not_fitting[label] = shortage(model, machine.profile, choices).lacks
                continue
            update = solution.schedule.update

            def say(step: int, update: str = update) -> None:
                status.update(f"update {update}: step {step + 1} of {num_steps + 1}")
            path = None if trace is None else str(trace / f"rehearsal_{update}.json")
            rehearsed = rehearse(model, machine.profile, machine.num_ssds, solution, scale, num_steps,
                                 None if scratch is None else str(scratch), path, say)
            reports.append(mode_report(solution, machine.profile, rehearsed))
    return RehearsalReport(name, machine.profile.name, machine.description, machine.num_ssds, model.micro_batch,
                           request.batch.accumulation, model.sequence_length, scale.bytes, scale.seconds,
                           tuple(reports), not_fitting)
