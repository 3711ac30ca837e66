"""The table of cells for other programs: what was asked, where it ran, how it ended and what was seen, flat."""

from collections.abc import Sequence
from statistics import median
from typing import Any, Final

import pandas as pd

from offload_eval.analysis.cells import latest_records
from offload_eval.analysis.statistics import itl_percentile_s, summarize_tpot, summarize_ttft
from offload_eval.core.judgement import Interval
from offload_eval.core.machine import Machine
from offload_eval.core.records import Conditions, Failure, RunRecord
from offload_eval.core.run_spec import RunSpec
from offload_eval.reporting.detail_tables import FIDELITY_COLUMNS, HOST_COLUMNS, fidelity_frame, host_frame
from offload_eval.reporting.flat import fitting, flat_columns, flat_values
from offload_eval.reporting.tables import COUNT, REAL, STRATEGY_COLUMNS, TEXT, strategy_frame, typed_frame

_PERCENTS: Final = (50, 90, 99)
_NAME_COLUMNS: Final = {
    **dict.fromkeys(("run_id", "workload", "strategy", "status", "evidence", "started_at_utc"), TEXT),
    "duration_s": REAL,
    "num_trials": COUNT,
}
_SPREAD_COLUMNS: Final = {
    **dict.fromkeys(("ttft_low_s", "ttft_high_s", "tpot_low_s", "tpot_high_s"), REAL),
    **{f"itl_p{percent}_s": REAL for percent in _PERCENTS},
    "e2e_latency_s": REAL,
}
_MODEL_COLUMNS: Final = {
    "model_type": TEXT,
    **dict.fromkeys(("model_parameters", "model_weights_bytes", "model_context_tokens"), COUNT),
    "model_shape_refusal": TEXT,
}
_SAID_ONCE: Final = frozenset({*_NAME_COLUMNS, "batch_size", "prefill_chunk_tokens", "compile"})
"""Columns of other tables that the cell's name or its spec has as well."""
_TABLES: Final = (
    (strategy_frame, STRATEGY_COLUMNS),
    (fidelity_frame, FIDELITY_COLUMNS),
    (host_frame, HOST_COLUMNS),
)
_FIGURE_COLUMNS: Final = {
    name: kind for _, columns in _TABLES for name, kind in columns.items() if name not in _SAID_ONCE
}
CELL_COLUMNS: Final[dict[str, str]] = {
    **_NAME_COLUMNS,
    **_FIGURE_COLUMNS,
    **_SPREAD_COLUMNS,
    **flat_columns(Failure, "failure"),
    **flat_columns(RunSpec),
    **_MODEL_COLUMNS,
    **flat_columns(Conditions, "conditions"),
    **flat_columns(Machine, "machine"),
}
"""Followed by a column `version_<package>` for each package that any of the records names. Times are medians over
trials, with the range that holds the true one; ITL percentiles are of all trials' latencies together."""


def cells_frame(records: Sequence[RunRecord]) -> pd.DataFrame:
    """One row for each cell that ran, in the order of its first record; SI units, NA where there is none."""
    latest = latest_records(records)
    versions = sorted({name for record in latest for name in record.machine.versions})
    columns = CELL_COLUMNS | {_version_column(name): TEXT for name in versions}
    figures = _figures(records)
    rows = (fitting(figures[record.run_id] | _row(record), columns) for record in latest)
    return typed_frame(rows, columns)


def _figures(records: Sequence[RunRecord]) -> dict[str, dict[str, Any]]:
    """By run_id what the report's own tables say of a cell."""
    found: dict[str, dict[str, Any]] = {}
    for build, columns in _TABLES:
        kept = [name for name in columns if name in _FIGURE_COLUMNS]
        frame = build(records)
        for run_id, *values in frame[["run_id", *kept]].itertuples(index=False, name=None):
            found.setdefault(run_id, {}).update(zip(kept, values, strict=True))
    return found


def _row(record: RunRecord) -> dict[str, Any]:
    facts = record.model
    return {
        **flat_values(record.spec),
        **flat_values(record.conditions, "conditions"),
        **flat_values(record.machine, "machine"),
        **({} if record.failure is None else flat_values(record.failure, "failure")),
        **{_version_column(name): version for name, version in record.machine.versions.items()},
        **_spread(record),
        "run_id": record.run_id,
        "workload": record.spec.workload.label,
        "strategy": record.spec.strategy.label,
        "status": record.status,
        "evidence": record.evidence,
        "started_at_utc": record.started_at_utc,
        "duration_s": record.duration_s,
        "num_trials": len(record.trials),
        "model_type": None if facts.shape is None else facts.shape.model_type,
        "model_parameters": facts.parameters,
        "model_weights_bytes": facts.weights_bytes,
        "model_context_tokens": facts.context_tokens,
        "model_shape_refusal": facts.shape_refusal,
    }


def _spread(record: RunRecord) -> dict[str, float | None]:
    latencies_s = [trial.e2e_latency_s for trial in record.trials if trial.e2e_latency_s is not None]
    return {
        **_range("ttft", summarize_ttft(record)),
        **_range("tpot", summarize_tpot(record)),
        **{f"itl_p{percent}_s": itl_percentile_s(record, percent) for percent in _PERCENTS},
        "e2e_latency_s": median(latencies_s) if latencies_s else None,
    }


def _range(name: str, interval: Interval | None) -> dict[str, float | None]:
    return {} if interval is None else {f"{name}_low_s": interval.low, f"{name}_high_s": interval.high}


def _version_column(package: str) -> str:
    return f"version_{package.replace('-', '_')}"
