"""`offload-eval plan`: the analytic bound from a config.json, for any mix of lengths, strategies and devices."""

import sys
from pathlib import Path
from typing import Final

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from offload_eval.bounds.plan import make_plan
from offload_eval.bounds.plan_cells import plan_cells
from offload_eval.bounds.plan_link import plan_hardware
from offload_eval.bounds.plan_request import PlanRequest
from offload_eval.cli.console import print_json, progress_console, result_console
from offload_eval.cli.option_types import Typed
from offload_eval.cli.plan_inputs import plan_request
from offload_eval.errors import ExitCode, InputError, UnableError
from offload_eval.reporting.plan_csv import write_plan_csv
from offload_eval.reporting.plan_text import render_plan
from offload_eval.store.model_config import load_model_config, preset_names

_MOST_CELLS_SHOWN: Final = 100_000
_MOST_CELLS_PRINTED: Final = 2_000


def plan_command(typed: Typed, *, hardware: str | None, csv_path: Path | None, json_output: bool) -> int:
    """Computes a plan, and prints it or writes its cells.

    Raises:
        InputError: The file, an option, the model's config or the hardware profile is wrong.
        UnknownModelStructureError: The arithmetic does not know the model's structure.
    """
    if csv_path is not None and not str(csv_path).strip("."):
        raise InputError("--csv: '' is not allowed; allowed: a file, or - for standard output")
    if csv_path is not None and typed.experiment is not None and csv_path.resolve() == typed.experiment.resolve():
        raise InputError(f"--csv {csv_path}: is the experiment itself; choose another file")
    if csv_path is not None and json_output:
        raise InputError("--csv and --json are two forms of one answer; give one of them")
    request = plan_request(typed, hardware)
    num_cells = len(request.workloads) * len(request.strategies)
    most_shown = _MOST_CELLS_SHOWN if json_output else _MOST_CELLS_PRINTED
    if csv_path is not None:
        _write_csv(csv_path, request)
    elif num_cells > most_shown:
        raise InputError(f"{num_cells:,} cells are too many to show; allowed: {most_shown:,}, or --csv FILE")
    elif json_output:
        print_json(msgspec.json.encode(make_plan(request)).decode())
    else:
        console = result_console()
        for part in render_plan(make_plan(request)):
            console.print(part, highlight=False)
    return ExitCode.DONE


def show_presets(*, json_output: bool) -> int:
    """Lists the presets with their full names, parameters and sources."""
    presets = [load_model_config(name) for name in preset_names()]
    if json_output:
        rows = [
            {
                "preset": preset.origin.stem,
                "name": preset.name,
                "weights": preset.weights_source,
                "source": preset.source,
            }
            for preset in presets
        ]
        print_json(msgspec.json.encode(rows).decode())
        return ExitCode.DONE
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("preset", "model", "weights"):
        table.add_column(title, overflow="fold")
    for preset in presets:
        table.add_row(preset.origin.stem, preset.name, preset.weights_source or "not known")
    result_console().print(table)
    return ExitCode.DONE


def _write_csv(path: Path, request: PlanRequest) -> None:
    """Computes before it opens anything, so that a refusal costs no file."""
    cells, hardware = plan_cells(request), plan_hardware(request.hardware)
    if str(path) == "-":
        write_plan_csv(sys.stdout, cells, hardware)
        return
    try:
        file = path.open("w", newline="", encoding="utf-8")
    except OSError as error:
        raise InputError(f"--csv {path}: cannot be written: {error.strerror}") from error
    try:
        with file:
            num_cells = write_plan_csv(file, cells, hardware)
    except OSError as error:
        raise UnableError(f"--csv {path}: cannot be written: {error.strerror}") from error
    progress_console().out(f"{num_cells:,} cells: {path}", highlight=False)
