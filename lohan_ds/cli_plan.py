"""`lohan plan`: whether a model can be trained on a machine, how fast, and what binds. Nothing is run or loaded."""
from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from lohan_ds.cli_facts import (AccumulationOption, DeviceMemoryOption, DtypeOption, HostMemoryOption,
                                MicroBatchOption, ModelOption, ModelProfileOption, NoClippingOption, SeqOption,
                                collector_paused, fail, machine_of, model_of,
                                only_the_page_on_stdout, read_profile, with_limits)
from lohan_ds.cli_profile import TrainingDtype

if TYPE_CHECKING:   # scipy and pydantic take a second to import, too long for --help
    from lohan_ds.planner.page import Page


def plan_command(
    model: ModelOption = None,
    model_profile: ModelProfileOption = None,
    save_model_profile: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep what was found out about the "
                                                            "model.")] = None,
    hardware: Annotated[str | None, typer.Option(metavar="NAME_OR_FILE", help="Machine that comes with lohan, such as "
                                                 "rtx4090-256gb-2ssd, or what `lohan profile --json` wrote. Default: "
                                                 "this machine, measured if it was not.")] = None,
    micro_batch: MicroBatchOption = None,
    seq: SeqOption = None,
    accumulation: AccumulationOption = 1,
    dtype: DtypeOption = None,
    loss_tile_tokens: Annotated[int | None, typer.Option(min=0, help="As the key of the \"lohan\" section: tokens at a "
                                                         "time for head and loss, 0 for never. Default: as the run "
                                                         "decides.")] = None,
    no_clipping: NoClippingOption = False,
    device_parameters: Annotated[bool, typer.Option("--device-parameters", help="Plan with parameters that stay on the "
                                                    "device, too. The runtime does not carry that out yet.")] = False,
    ssd_path: Annotated[list[Path] | None, typer.Option(help="Directory on an SSD of this machine to use; may be given "
                                                        "several times.")] = None,
    host_memory: HostMemoryOption = None,
    device_memory: DeviceMemoryOption = None,
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
        with collector_paused(), only_the_page_on_stdout():
            from lohan_ds.planner.outlook import Request, look_ahead
            from lohan_ds.planner.page import make_page
            from lohan_ds.planner.placement import with_micro_batch
            from lohan_ds.planner.solution import Batch
            if plot is not None:
                from lohan_ds.planner_plot import check_matplotlib
                check_matplotlib()
            read = None if model_profile is None else read_profile(model_profile, seq, dtype)   # before what takes time
            machine, notes = machine_of(hardware, [str(path) for path in ssd_path or ()], dtype or TrainingDtype.bf16)
            machine = with_limits(machine, host_memory, device_memory, tbw)
            file, remarks = model_of(read, model, micro_batch, seq, dtype, machine.profile, loss_tile_tokens)
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
        fail(str(error))
    _show(page, as_json)
    if save_plan is not None and not page.fits:
        Console(stderr=True).print(f"{escape(str(save_plan))} is not written: nothing fits", highlight=False)
    raise typer.Exit(0 if page.fits else 1)


def _show(page: Page, as_json: bool) -> None:
    from lohan_ds.planner.page_text import page_text
    print(json.dumps(asdict(page), indent=2) if as_json else page_text(page))
