"""Data frames over records: SI units, raw numbers, one nullable type a column. Missing is NA, never 0."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import pandas as pd

from offload_eval.analysis.capacity import analytic_bound, analytic_sessions, measured_sessions
from offload_eval.analysis.cells import (
    bytes_moved_per_token,
    exposed_s_per_token,
    latest_records,
    mean_kl_nats,
    merged_sample,
)
from offload_eval.analysis.statistics import (
    median_of,
    summarize_throughput,
    summarize_tpot,
    summarize_ttft,
    tokens_per_s,
    tpot_s,
)
from offload_eval.core.records import PhaseSample, RunRecord, TrialSample

_TEXT, _COUNT, _REAL = "string", "Int64", "Float64"

ANALYTIC_COLUMNS: Final[dict[str, str]] = {
    "workload": _TEXT,
    "strategy": _TEXT,
    "kv_device_bytes_per_session": _COUNT,
    "kv_device_bytes_fixed": _COUNT,
    "kv_host_bytes_per_session": _COUNT,
    "h2d_bytes_per_step": _COUNT,
    "d2h_bytes_per_step": _COUNT,
    "analytic_sessions": _COUNT,
    "assumptions": _TEXT,
    "source": _TEXT,
    "run_id": _TEXT,
}
STRATEGY_COLUMNS: Final[dict[str, str]] = {
    "workload": _TEXT,
    "strategy": _TEXT,
    "status": _TEXT,
    "evidence": _TEXT,
    "analytic_sessions": _COUNT,
    "measured_sessions": _COUNT,
    "ttft_s": _REAL,
    "tpot_s": _REAL,
    "tokens_per_s": _REAL,
    "prefill_peak_bytes": _COUNT,
    "decode_peak_bytes": _COUNT,
    "kv_device_bytes": _COUNT,
    "kv_host_bytes": _COUNT,
    "bytes_moved_per_token": _REAL,
    "exposed_s_per_token": _REAL,
    "mean_kl_nats": _REAL,
    "top1_agreement_ratio": _REAL,
    "run_id": _TEXT,
}
_TRIAL_FIELDS: Final[dict[str, str]] = {
    "ttft_s": _REAL,
    "e2e_latency_s": _REAL,
    "output_tokens": _COUNT,
    "kv_cache_device_bytes": _COUNT,
    "kv_cache_host_bytes": _COUNT,
    "peak_host_rss_bytes": _COUNT,
    "pinned_requested_bytes": _COUNT,
    "pinned_allocated_bytes": _COUNT,
    "swap_in_bytes": _COUNT,
    "swap_out_bytes": _COUNT,
    "num_alloc_retries": _COUNT,
}
_PHASE_FIELDS: Final = {name: _REAL if name.endswith("_s") else _COUNT for name in PhaseSample.__struct_fields__}
TRIAL_COLUMNS: Final[dict[str, str]] = {
    **dict.fromkeys(("workload", "strategy", "evidence", "run_id"), _TEXT),
    "trial": _COUNT,
    **_TRIAL_FIELDS,
    **{f"{phase}_{name}": kind for phase in ("prefill", "decode") for name, kind in _PHASE_FIELDS.items()},
    "tpot_s": _REAL,
    "tokens_per_s": _REAL,
    "inter_token_latencies_s": _TEXT,
}
"""`inter_token_latencies_s` holds every latency, separated by spaces."""


def analytic_frame(records: Sequence[RunRecord]) -> pd.DataFrame:
    """The analytic card: one row a cell, whether or not it ran; NA throughout where the arithmetic refuses."""
    return _frame((_analytic_row(record) for record in latest_records(records)), ANALYTIC_COLUMNS)


def strategy_frame(records: Sequence[RunRecord]) -> pd.DataFrame:
    """The strategy table: one row a cell, medians over trials, raw SI units."""
    return _frame((_strategy_row(record) for record in latest_records(records)), STRATEGY_COLUMNS)


def trials_frame(records: Sequence[RunRecord]) -> pd.DataFrame:
    """Every raw trial of every cell, one row each; `trial` counts from 1."""
    rows = (
        _trial_row(record, number, trial)
        for record in latest_records(records)
        for number, trial in enumerate(record.trials, start=1)
    )
    return _frame(rows, TRIAL_COLUMNS)


def _frame(rows: Iterable[Mapping[str, Any]], columns: dict[str, str]) -> pd.DataFrame:
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


def _strategy_row(record: RunRecord) -> dict[str, Any]:
    sample, fidelity = merged_sample(record), record.fidelity
    return _labels(record) | {
        "status": record.status,
        "evidence": record.evidence,
        "analytic_sessions": analytic_sessions(record),
        "measured_sessions": measured_sessions(record),
        "ttft_s": median_of(summarize_ttft(record)),
        "tpot_s": median_of(summarize_tpot(record)),
        "tokens_per_s": median_of(summarize_throughput(record)),
        "prefill_peak_bytes": sample.prefill.peak_allocated_bytes,
        "decode_peak_bytes": sample.decode.peak_allocated_bytes,
        "kv_device_bytes": sample.kv_cache_device_bytes,
        "kv_host_bytes": sample.kv_cache_host_bytes,
        "bytes_moved_per_token": bytes_moved_per_token(record),
        "exposed_s_per_token": exposed_s_per_token(record),
        "mean_kl_nats": mean_kl_nats(record),
        "top1_agreement_ratio": None if fidelity is None else fidelity.top1_agreement_ratio,
    }


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
            "inter_token_latencies_s": None if latencies_s is None else " ".join(map(repr, latencies_s)),
        }
    )
