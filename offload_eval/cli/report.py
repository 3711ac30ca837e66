"""`offload-eval report`: the report of a run, made again from its records."""

from pathlib import Path
from typing import Any, Final

import msgspec

from offload_eval.analysis.cells import latest_records, latest_traces
from offload_eval.analysis.study import Study
from offload_eval.cli.console import print_json, result_console
from offload_eval.core.experiment import Experiment
from offload_eval.core.hardware import HardwareProfile
from offload_eval.core.limits import CapacityLimit
from offload_eval.core.records import RunRecord
from offload_eval.errors import ExitCode, InputError, UnableError
from offload_eval.reporting.report import write_report
from offload_eval.reporting.terminal import render_terminal
from offload_eval.store.policy_file import write_policy
from offload_eval.store.run_directory import POLICY_NAME, RunDirectory

NUM_NAMED: Final = 3
"""Of the files of a report, those that the terminal names: the page, the Markdown and the JSON."""


def report_command(*, run_dir: Path, json_output: bool) -> int:
    """Writes the report files of a run directory and prints the table, or JSON that says what was written.

    Raises:
        InputError: Not a run directory, a corrupt record, or no finished cell.
    """
    directory = RunDirectory.read(run_dir)
    records = directory.records()
    if not records:
        raise InputError(
            f"{run_dir}: no cell has finished; continue with `offload-eval run EXPERIMENT --resume --out {run_dir}`"
        )
    show_report(run_dir, directory.experiment, records, directory.hardware, json_output=json_output)
    return ExitCode.DONE


def show_report(
    run_dir: Path,
    experiment: Experiment,
    records: list[RunRecord],
    hardware: HardwareProfile | None,
    *,
    json_output: bool,
) -> None:
    """Writes the report files into `run_dir` and prints the table, or JSON that says what was written.

    Raises:
        UnableError: The report cannot be written.
    """
    study = Study(experiment, records, hardware)
    try:
        files = write_report(run_dir, study)
    except OSError as error:
        raise UnableError(f"{run_dir}: the report cannot be written: {error.strerror}") from error
    policy = None if study.num_missing_limits else study.policy
    if policy is not None:
        write_policy(run_dir / POLICY_NAME, policy)
        files.append(run_dir / POLICY_NAME)
    if json_output:
        print_json(_summary(run_dir, study, files))
        return
    console = result_console()
    console.print(render_terminal(study))
    for file in files[:NUM_NAMED]:
        console.out(f"report: {file}", highlight=False)
    if policy is not None:
        console.out(f"policy: {run_dir / POLICY_NAME}", highlight=False)


def _summary(run_dir: Path, study: Study, files: list[Path]) -> str:
    summary = {
        "run_dir": str(run_dir),
        "files": [str(file) for file in files],
        "verdict": study.verdict,
        "cells": [_entry(record) for record in latest_records(study.of_cells)],
        "traces": [_entry(record) for record in latest_traces(study.of_cells)],
        "limits": [_limit_entry(limit) for limit in study.limits],
    }
    return msgspec.json.encode(summary).decode()


def _limit_entry(limit: CapacityLimit) -> dict[str, Any]:
    """The limit with its lengths and its figures at the limit beside the rest, under one name each."""
    at_limit = limit.at_limit
    return {
        **msgspec.to_builtins(limit.lengths),
        **{name: getattr(limit, name) for name in limit.__struct_fields__ if name != "lengths"},
        "is_exact": limit.is_exact,
        "gain_over_in_gpu": limit.gain_over_in_gpu,
        "tokens_per_s_at_limit": None if at_limit is None else at_limit.tokens_per_s,
        "tpot_s_at_limit": None if at_limit is None else at_limit.tpot_s,
    }


def _entry(record: RunRecord) -> dict[str, Any]:
    return {
        "run_id": record.run_id,
        "workload": record.spec.workload.label,
        "strategy": record.spec.strategy.label,
        "status": record.status,
        "evidence": record.evidence,
        "failure": record.failure,
    }
