"""`offload-eval run` and `offload-eval capacity`: cells of an experiment or its limits, then the report."""

import shlex
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from offload_eval.analysis.limits import has_failed_search
from offload_eval.analysis.probes import current_probes
from offload_eval.bounds.strategy_bound import cell_bound
from offload_eval.cli.console import print_json, progress_console, result_console
from offload_eval.cli.progress import open_progress
from offload_eval.cli.report import show_report
from offload_eval.core.capacity import CapacitySpec
from offload_eval.core.experiment import BudgetSpec, Experiment, StreamedSpec
from offload_eval.core.factors import lengths_alone
from offload_eval.core.hardware import HardwareProfile
from offload_eval.core.judgement import Bound
from offload_eval.core.records import RunRecord, record_id
from offload_eval.core.run_spec import RunSpec, content_hash
from offload_eval.errors import ExitCode, InputError
from offload_eval.execution.capacity_session import CapacitySession, searched_workloads
from offload_eval.execution.launcher import preflight
from offload_eval.execution.messages import Preflight
from offload_eval.execution.session import Session, expand_cells
from offload_eval.store.experiment_file import load_experiment
from offload_eval.store.hardware_file import load_hardware
from offload_eval.store.origin import Override
from offload_eval.store.run_directory import RunDirectory
from offload_eval.units import format_bytes

_PREFLIGHT_TIMEOUT_S = 600.0
_FELL_SHORT = ("failed", "timeout")


def run_command(
    *,
    experiment: Path,
    out: Path | None,
    resume: bool,
    dry_run: bool,
    overrides: list[str],
    device: str | None,
    json_output: bool,
    allow_mismatch: bool,
    trace_only: bool = False,
    limits_alone: bool = False,
) -> int:
    """Runs an experiment file and writes its report. With `limits_alone`, as `capacity` does, no cells are run.

    With `trace_only` nothing is run at all: the traces that a run begins with are kept, and a run resumes after them.

    Returns:
        0 when every cell has its answer (`ok`, `oom` or `unsupported`) and every limit was searched; 1 when one, or
        with `trace_only` a trace, failed or timed out.

    Raises:
        InputError: The file, an option or the run directory is wrong; nothing was run.
        UnableError: This environment cannot run it.
    """
    if resume and out is None:
        raise InputError("--resume needs --out, the directory of the run to continue")
    options = [Override(path=("device",), value=device, origin=f"--device {device}")] if device else []
    asked = load_experiment(experiment, overrides, options)
    if limits_alone and asked.capacity is None:
        asked = msgspec.structs.replace(asked, capacity=CapacitySpec())
    asked = lengths_alone(asked) if limits_alone else asked
    if trace_only and not asked.trace:
        raise InputError(f"{experiment}: trace: false leaves --trace-only nothing to do; allowed: trace: true")
    hardware = _hardware(asked, experiment)
    try:
        checked = preflight(asked, _PREFLIGHT_TIMEOUT_S, trace_only=trace_only)
    except InputError as error:
        raise InputError(f"{experiment}: {error}") from error
    cells = expand_cells(asked, checked)
    if dry_run:
        _show_cells(cells, checked, what="limits" if limits_alone else "cells", json_output=json_output)
        return ExitCode.DONE
    cells = [] if limits_alone else cells
    path = out or _default_directory(asked.name + ("-capacity" if limits_alone else ""))
    opened = (
        RunDirectory.resume(path, asked, checked.machine, allow_mismatch=allow_mismatch)
        if resume
        else RunDirectory.create(path, asked, checked.machine)
    )
    with opened as directory:
        if hardware is not None:
            directory.keep_hardware(hardware)
        try:
            (_trace if trace_only else _run)(asked, checked, directory, cells)
        except KeyboardInterrupt:
            words = ["capacity" if limits_alone else "run", str(experiment), *(["--trace-only"] if trace_only else [])]
            command = _resume_command(words, overrides, device, path)
            progress_console().out(f"interrupted; finished cells are kept: continue with {command}", highlight=False)
            raise
        records, kept_hardware = directory.records(), directory.hardware
    show_report(path, asked, records, kept_hardware, json_output=json_output)
    if trace_only:
        return ExitCode.FELL_SHORT if _has_failed_trace(asked, cells, records) else ExitCode.DONE
    wanted = {content_hash(spec) for spec in cells}
    fell_short = any(record.status in _FELL_SHORT for record in records if record.run_id in wanted)
    return ExitCode.FELL_SHORT if fell_short or has_failed_search(asked, records) else ExitCode.DONE


def _hardware(asked: Experiment, file: Path) -> HardwareProfile | None:
    """Reads the profile now, so that a wrong one is refused before anything is measured."""
    if asked.hardware is None:
        return None
    try:
        return load_hardware(asked.hardware)
    except InputError as error:
        raise InputError(f"{file}: hardware: {error}") from error


def _run(experiment: Experiment, checked: Preflight, directory: RunDirectory, cells: list[RunSpec]) -> None:
    finished = directory.finished_run_ids()
    num_cells = sum(content_hash(spec) not in finished for spec in cells)
    with open_progress(progress_console(), num_cells) as progress:
        if cells:
            Session(experiment, checked, directory, progress).run(cells)
        if experiment.capacity is not None:
            progress.expect(len(searched_workloads(experiment)) * len(experiment.strategies))
            CapacitySession(experiment, checked, directory, progress).run()


def _trace(experiment: Experiment, checked: Preflight, directory: RunDirectory, cells: list[RunSpec]) -> None:
    """As `_run`, up to where something would be measured."""
    finished = directory.finished_run_ids()
    num_cells = sum(record_id(spec, "traced") not in finished for spec in cells)
    with open_progress(progress_console(), num_cells) as progress:
        if cells:
            Session(experiment, checked, directory, progress).trace(cells)
        if experiment.capacity is not None:
            progress.expect(len(searched_workloads(experiment)) * len(experiment.strategies))
            CapacitySession(experiment, checked, directory, progress).trace()


def _has_failed_trace(experiment: Experiment, cells: list[RunSpec], records: list[RunRecord]) -> bool:
    """Whether a trace failed or timed out; one that cannot be made has its answer."""
    wanted = {record_id(spec, "traced") for spec in cells}
    wanted |= {record.run_id for record in current_probes(experiment, records) if record.evidence == "traced"}
    return any(record.status in _FELL_SHORT for record in records if record.run_id in wanted)


def _resume_command(command: list[str], overrides: list[str], device: str | None, path: Path) -> str:
    """What continues this very run: an override left out would make it another experiment."""
    words = ["offload-eval", *command, "--resume", "--out", str(path)]
    words += [word for override in overrides for word in ("--set", override)]
    return shlex.join([*words, *(["--device", device] if device else [])])


def _default_directory(name: str) -> Path:
    return Path("runs") / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


def _show_cells(cells: list[RunSpec], checked: Preflight, *, what: str, json_output: bool) -> None:
    bounds = [cell_bound(spec, checked.model) for spec in cells]
    if json_output:
        rows = [
            {"run_id": content_hash(spec), "spec": spec, "bound": bound, "refusal": _refusal(spec, checked)}
            for spec, bound in zip(cells, bounds, strict=True)
        ]
        document = {"device": checked.device, "model": checked.model, "cells": rows}
        print_json(msgspec.json.encode(document).decode())
        return
    console = result_console()
    console.print(_cells_table(cells, bounds, checked, what))
    for note in _notes(checked, cells[0].budget):
        console.out(note, highlight=False)


def _cells_table(cells: list[RunSpec], bounds: list[Bound | None], checked: Preflight, what: str) -> Table:
    """One row a cell, under a row that names its workload; it fits 80 columns."""
    title = f"{len(cells)} {what} on {checked.device}; every number is analytic, an upper bound"
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title)
    table.add_column("strategy", overflow="fold", min_width=16)
    for name in ("device KV\na session", "host KV\na session", "H2D\na step", "D2H\na step", "sessions\nat most"):
        table.add_column(name, justify="right", no_wrap=True)
    workload = None
    for spec, bound in sorted(zip(cells, bounds, strict=True), key=lambda cell: cell[0].workload.label):
        if spec.workload.label != workload:
            workload = spec.workload.label
            table.add_row(Text(workload, style="bold"))
        name = spec.strategy.label + (" (unsupported)" if _refusal(spec, checked) else "")
        table.add_row(name, *(["-"] * 5 if bound is None else _numbers(bound)))
    return table


def _notes(checked: Preflight, budget: BudgetSpec) -> list[str]:
    refused = [(cell, refusal) for cell, refusal in checked.refusals.items() if refusal]
    notes = [f"{workload} / {strategy}: unsupported: {refusal}" for (workload, strategy), refusal in refused]
    notes += [
        f"{workload} / {strategy}: by trace, the budget leaves room for {resolved.resident_share:.0%} of the "
        "full-attention layers"
        for (workload, strategy), resolved in checked.resolved.items()
        if isinstance(resolved, StreamedSpec) and isinstance(resolved.resident_share, float)
    ]
    weights_bytes = budget.weights_bytes or checked.model.weights_bytes
    if weights_bytes >= budget.device_bytes:
        sizes = f"{format_bytes(weights_bytes)} of {format_bytes(budget.device_bytes)}"
        notes.append(f"no session fits: the weights alone take {sizes}")
    if checked.model.shape_refusal:
        notes.append(f"no analytic bound: {checked.model.shape_refusal}")
    return notes


def _numbers(bound: Bound) -> list[str]:
    sizes = (
        bound.kv_device_peak_bytes_per_session,
        bound.kv_host_bytes_per_session,
        bound.h2d_bytes_per_step,
        bound.d2h_bytes_per_step,
    )
    ledger = " (host)" if bound.limiting_ledger == "host" else ""
    return [*map(format_bytes, sizes), f"{bound.sessions:,}{ledger}"]


def _refusal(spec: RunSpec, checked: Preflight) -> str | None:
    return checked.refusals[spec.workload.label, spec.strategy.label]
