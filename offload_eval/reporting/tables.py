"""Data frames over records: SI units, raw numbers, one nullable type a column. Missing is NA, never 0."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import pandas as pd

from offload_eval.analysis.capacity import Admitted, admitted_by_peak, admitted_by_trace, analytic_bound
from offload_eval.analysis.cells import (
    bytes_moved_per_token,
    exposed_s_per_token,
    latest_records,
    latest_traces,
    mean_kl_nats,
    merged_sample,
    noise_floor_nats,
)
from offload_eval.analysis.comparison import compare_with_baseline
from offload_eval.analysis.statistics import (
    median_of,
    summarize_throughput,
    summarize_tpot,
    summarize_ttft,
    tokens_per_s,
    tpot_s,
)
from offload_eval.analysis.swap import is_swapped
from offload_eval.core.experiment import compile_mode
from offload_eval.core.records import PHASES, PhaseSample, RunRecord, TrialSample
from offload_eval.reporting.warmup_table import first_use_s

TEXT: Final = "string"
COUNT: Final = "Int64"
REAL: Final = "Float64"
"""Nullable types of columns."""

ANALYTIC_COLUMNS: Final[dict[str, str]] = {
    "workload": TEXT,
    "strategy": TEXT,
    "kv_device_bytes_per_session": COUNT,
    "kv_device_peak_bytes_per_session": COUNT,
    "kv_device_bytes_fixed": COUNT,
    "kv_host_bytes_per_session": COUNT,
    "h2d_bytes_per_step": COUNT,
    "d2h_bytes_per_step": COUNT,
    "analytic_sessions": COUNT,
    "device_sessions": COUNT,
    "host_sessions": COUNT,
    "limiting_ledger": TEXT,
    "assumptions": TEXT,
    "source": TEXT,
    "run_id": TEXT,
}
STRATEGY_COLUMNS: Final[dict[str, str]] = {
    "workload": TEXT,
    "strategy": TEXT,
    "status": TEXT,
    "evidence": TEXT,
    "analytic_sessions": COUNT,
    "sessions_by_trace": COUNT,
    "sessions_by_peak": COUNT,
    "analytic_ledger": TEXT,
    "ledger_by_trace": TEXT,
    "ledger_by_peak": TEXT,
    "ttft_s": REAL,
    "tpot_s": REAL,
    "tokens_per_s": REAL,
    "swapped": "boolean",
    "prefill_peak_bytes": COUNT,
    "decode_peak_bytes": COUNT,
    "kv_device_bytes": COUNT,
    "kv_host_bytes": COUNT,
    "bytes_moved_per_token": REAL,
    "exposed_s_per_token": REAL,
    "mean_kl_nats": REAL,
    "noise_floor_nats": REAL,
    "batch_size": COUNT,
    "prefill_chunk_tokens": COUNT,
    "attn_implementation": TEXT,
    "compile": TEXT,
    "first_use_s": REAL,
    "run_id": TEXT,
}
"""Ledgers: the one that admits fewer sessions, where the budget states host memory. `swapped`: swap was in use around
the cell, whose times are the disk's. `first_use_s` is the warm-up in which a compiled cell compiles; no trial has it
in it."""
_TRIAL_FIELDS: Final[dict[str, str]] = {
    "ttft_s": REAL,
    "e2e_latency_s": REAL,
    "output_tokens": COUNT,
    "kv_cache_device_bytes": COUNT,
    "kv_cache_host_bytes": COUNT,
    "peak_host_rss_bytes": COUNT,
    "pinned_requested_bytes": COUNT,
    "pinned_allocated_bytes": COUNT,
    "swap_in_bytes": COUNT,
    "swap_out_bytes": COUNT,
    "num_major_faults": COUNT,
    "num_minor_faults": COUNT,
    "peak_cgroup_bytes": COUNT,
    "cgroup_limit_bytes": COUNT,
    "cgroup_swap_bytes": COUNT,
    "num_alloc_retries": COUNT,
    "num_compilations": COUNT,
}
_PHASE_FIELDS: Final = {name: REAL if name.endswith("_s") else COUNT for name in PhaseSample.__struct_fields__}
TRIAL_COLUMNS: Final[dict[str, str]] = {
    **dict.fromkeys(("workload", "strategy", "evidence", "run_id"), TEXT),
    "trial": COUNT,
    **_TRIAL_FIELDS,
    **{f"{phase}_{name}": kind for phase in PHASES for name, kind in _PHASE_FIELDS.items()},
    "tpot_s": REAL,
    "tokens_per_s": REAL,
    "swapped": "boolean",
    "inter_token_latencies_s": TEXT,
}
"""`inter_token_latencies_s` holds every latency, separated by spaces."""


def analytic_frame(records: Sequence[RunRecord], *, of_traces: bool = False) -> pd.DataFrame:
    """The analytic card: one row a cell, whether or not it ran; NA throughout where the arithmetic refuses.

    Args:
        records: Of cells and of their traces.
        of_traces: Whether the rows are those of the traces, where no cell was run.
    """
    cells = latest_traces(records) if of_traces else latest_records(records)
    return typed_frame((_analytic_row(record) for record in cells), ANALYTIC_COLUMNS)


def strategy_frame(records: Sequence[RunRecord]) -> pd.DataFrame:
    """The strategy table: one row a cell, medians over trials, raw SI units; sessions by the cell's trace, if any."""
    floors = noise_floors(records)
    traced = {record.spec: admitted_by_trace(record) for record in latest_traces(records)}
    rows = (
        _strategy_row(record, floors.get(record.run_id)) | _admitted("trace", traced.get(record.spec))
        for record in latest_records(records)
    )
    return typed_frame(rows, STRATEGY_COLUMNS)


def trials_frame(records: Sequence[RunRecord]) -> pd.DataFrame:
    """Every raw trial of every cell, one row each; `trial` counts from 1."""
    rows = (
        _trial_row(record, number, trial)
        for record in latest_records(records)
        for number, trial in enumerate(record.trials, start=1)
    )
    return typed_frame(rows, TRIAL_COLUMNS)


def noise_floors(records: Sequence[RunRecord]) -> dict[str, float | None]:
    """The noise floor that each cell is read beside, by run_id: the baseline's own, and its own for the baseline."""
    compared = {comparison.run_id: comparison.noise_floor_nats for comparison in compare_with_baseline(records)}
    return compared | {
        record.run_id: noise_floor_nats(record) for record in latest_records(records) if record.spec.is_baseline
    }


def typed_frame(rows: Iterable[Mapping[str, Any]], columns: dict[str, str]) -> pd.DataFrame:
    """Builds a frame of rows that may lack columns."""
    return pd.DataFrame(list(rows), columns=list(columns), dtype=object).astype(columns)


def _labels(record: RunRecord) -> dict[str, str]:
    return {
        "workload": record.spec.workload.label,
        "strategy": record.spec.strategy.label,
        "run_id": record.run_id,
    }


def _analytic_row(record: RunRecord) -> dict[str, Any]:
    bound = analytic_bound(record)
    if bound is None:
        return _labels(record)
    card = {name: getattr(bound, name) for name in bound.__struct_fields__}
    card |= {"analytic_sessions": bound.sessions, "assumptions": " ".join(bound.assumptions)}
    return _labels(record) | {name: card[name] for name in ANALYTIC_COLUMNS if name in card}


def cell_labels(record: RunRecord) -> dict[str, str]:
    """The columns that name a cell's row."""
    return _labels(record) | {"status": record.status, "evidence": record.evidence}


def _admitted(how: str, admitted: Admitted | None) -> dict[str, Any]:
    if admitted is None:
        return {}
    return {f"sessions_by_{how}": admitted.sessions, f"ledger_by_{how}": admitted.ledger}


def _strategy_row(record: RunRecord, floor_nats: float | None) -> dict[str, Any]:
    sample, bound = merged_sample(record), analytic_bound(record)
    return (
        cell_labels(record)
        | _admitted("peak", admitted_by_peak(record))
        | {
            "analytic_sessions": None if bound is None else bound.sessions,
            "analytic_ledger": None if bound is None else bound.limiting_ledger,
            "ttft_s": median_of(summarize_ttft(record)),
            "tpot_s": median_of(summarize_tpot(record)),
            "tokens_per_s": median_of(summarize_throughput(record)),
            "swapped": is_swapped(record),
            "prefill_peak_bytes": sample.prefill.peak_allocated_bytes,
            "decode_peak_bytes": sample.decode.peak_allocated_bytes,
            "kv_device_bytes": sample.kv_cache_device_bytes,
            "kv_host_bytes": sample.kv_cache_host_bytes,
            "bytes_moved_per_token": bytes_moved_per_token(record),
            "exposed_s_per_token": exposed_s_per_token(record),
            "mean_kl_nats": mean_kl_nats(record),
            "noise_floor_nats": floor_nats,
            "batch_size": record.spec.workload.batch_size,
            "prefill_chunk_tokens": record.spec.workload.prefill_chunk_tokens,
            "attn_implementation": record.spec.attn_implementation,
            "compile": compile_mode(record.spec.strategy),
            "first_use_s": first_use_s(record),
        }
    )


def _trial_row(record: RunRecord, number: int, trial: TrialSample) -> dict[str, Any]:
    latencies_s = trial.inter_token_latencies_s
    phases = {"prefill": trial.prefill, "decode": trial.decode}
    return (
        _labels(record)
        | {"evidence": record.evidence, "trial": number}
        | {name: getattr(trial, name) for name in _TRIAL_FIELDS}
        | {f"{phase}_{name}": getattr(seen, name) for phase, seen in phases.items() for name in _PHASE_FIELDS}
        | {
            "tpot_s": tpot_s(trial),
            "tokens_per_s": tokens_per_s(trial, record.spec.workload.batch_size),
            "swapped": is_swapped(record),
            "inter_token_latencies_s": None if latencies_s is None else " ".join(map(repr, latencies_s)),
        }
    )
