"""Tables of a run for other programs, one tidy frame each."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pandas as pd

from offload_eval.analysis.cells import cell_records, latest_records, latest_traces
from offload_eval.analysis.grid import in_order
from offload_eval.analysis.limits import find_limits
from offload_eval.core.experiment import Experiment
from offload_eval.core.hardware import HardwareProfile
from offload_eval.core.records import RunRecord
from offload_eval.core.trace import PhaseTrace, StepTrace
from offload_eval.reporting.capacity_tables import limits_frame
from offload_eval.reporting.export_cells import cells_frame
from offload_eval.reporting.flat import flat_columns
from offload_eval.reporting.memory_tables import memory_frame
from offload_eval.reporting.tables import COUNT, TEXT, cell_labels, trials_frame, typed_frame
from offload_eval.reporting.transfer_tables import transfer_frame

TRACE_COLUMNS: Final[dict[str, str]] = {
    **dict.fromkeys(("run_id", "workload", "strategy", "status", "evidence", "phase"), TEXT),
    **flat_columns(StepTrace),
    "weights_bytes": COUNT,
    "attn_implementation": TEXT,
    "failure_message": TEXT,
}
"""A trace that was refused has one row, with its reason and no phase; of prefill `step` is NA."""


def export_frame(
    what: str, experiment: Experiment, records: Sequence[RunRecord], hardware: HardwareProfile | None = None
) -> pd.DataFrame:
    """Builds one table of a run.

    Args:
        what: A key of `TABLES`.
        experiment: What was asked; its cells come in its order.
        records: Of cells, traces and probes. Probes and drills are in `limits` alone.
        hardware: What transfers are held against.
    """
    return TABLES[what](experiment, records, hardware)


def traces_frame(records: Sequence[RunRecord]) -> pd.DataFrame:
    """One row for each traced phase: the prefill, and every decode step that was traced."""
    rows = (row for record in latest_traces(records) for row in _trace_rows(record))
    return typed_frame(rows, TRACE_COLUMNS)


def _trace_rows(record: RunRecord) -> list[dict[str, Any]]:
    labels = {"run_id": record.run_id} | cell_labels(record)
    trace = record.trace
    if trace is None:
        return [labels | {"failure_message": None if record.failure is None else record.failure.message}]
    same = {"weights_bytes": trace.weights_bytes, "attn_implementation": trace.attn_implementation}
    return [
        labels | same | {"phase": "prefill"} | _scalars(trace.prefill),
        *(labels | same | {"phase": "decode"} | _scalars(step) for step in trace.steps),
    ]


def _scalars(phase: PhaseTrace) -> dict[str, Any]:
    return {name: getattr(phase, name) for name in phase.__struct_fields__ if name in TRACE_COLUMNS}


def _cells(experiment: Experiment, records: Sequence[RunRecord]) -> list[RunRecord]:
    return in_order(experiment, cell_records(records))


Table = Callable[[Experiment, Sequence[RunRecord], HardwareProfile | None], pd.DataFrame]
TABLES: Final[Mapping[str, Table]] = {
    "cells": lambda experiment, records, _: cells_frame(_cells(experiment, records)),
    "trials": lambda experiment, records, _: trials_frame(latest_records(_cells(experiment, records))),
    "limits": lambda experiment, records, _: limits_frame(find_limits(experiment, records)),
    "memory": lambda experiment, records, _: memory_frame(_cells(experiment, records)),
    "transfers": lambda experiment, records, hardware: transfer_frame(_cells(experiment, records), hardware),
    "traces": lambda experiment, records, _: traces_frame(_cells(experiment, records)),
}
