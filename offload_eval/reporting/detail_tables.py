"""Data frames of what stands behind the strategy table: fidelity, host memory, the allocator and the link."""

from collections.abc import Sequence
from typing import Any, Final

import pandas as pd

from offload_eval.analysis.cells import busy_s_per_step, latest_records, mean_kl_nats, merged_sample
from offload_eval.analysis.swap import swap_use
from offload_eval.core.records import Direction, RunRecord
from offload_eval.reporting.tables import COUNT, REAL, TEXT, cell_labels, noise_floors, typed_frame

FIDELITY_COLUMNS: Final[dict[str, str]] = {
    "workload": TEXT,
    "strategy": TEXT,
    "status": TEXT,
    "evidence": TEXT,
    "against": TEXT,
    "mean_kl_nats": REAL,
    "max_kl_nats": REAL,
    "noise_floor_nats": REAL,
    "noise_floor_max_nats": REAL,
    "top1_agreement_ratio": REAL,
    "nll_change_nats": REAL,
    "first_divergence_token": COUNT,
    "num_diverging_sessions": COUNT,
    "baseline_top1_margin_nats": REAL,
    "bit_equal": "boolean",
    "run_id": TEXT,
}
"""A strategy's figures are against the baseline. The baseline has none of its own but its noise floor and margin."""
HOST_COLUMNS: Final[dict[str, str]] = {
    "workload": TEXT,
    "strategy": TEXT,
    "status": TEXT,
    "evidence": TEXT,
    "peak_host_rss_bytes": COUNT,
    "pinned_requested_bytes": COUNT,
    "pinned_allocated_bytes": COUNT,
    "peak_cgroup_bytes": COUNT,
    "cgroup_limit_bytes": COUNT,
    "cgroup_swap_bytes": COUNT,
    "swap_in_bytes": COUNT,
    "swap_out_bytes": COUNT,
    "num_major_faults": COUNT,
    "num_minor_faults": COUNT,
    "prefill_peak_reserved_bytes": COUNT,
    "decode_peak_reserved_bytes": COUNT,
    "prefill_peak_device_used_bytes": COUNT,
    "decode_peak_device_used_bytes": COUNT,
    "h2d_busy_s_per_step": REAL,
    "d2h_busy_s_per_step": REAL,
    "num_alloc_retries": COUNT,
    "run_id": TEXT,
}
_SEEN: Final = (
    "peak_host_rss_bytes",
    "pinned_requested_bytes",
    "pinned_allocated_bytes",
    "peak_cgroup_bytes",
    "cgroup_limit_bytes",
    "num_major_faults",
    "num_minor_faults",
    "num_alloc_retries",
)
_DIRECTIONS: Final[tuple[Direction, ...]] = ("h2d", "d2h")


def fidelity_frame(records: Sequence[RunRecord]) -> pd.DataFrame:
    """The fidelity table: one row a cell; NA where logits were not compared."""
    floors = noise_floors(records)
    rows = (_fidelity_row(record, floors.get(record.run_id)) for record in latest_records(records))
    return typed_frame(rows, FIDELITY_COLUMNS)


def host_frame(records: Sequence[RunRecord]) -> pd.DataFrame:
    """The host, allocator and link table: one row a cell."""
    return typed_frame((_host_row(record) for record in latest_records(records)), HOST_COLUMNS)


def _fidelity_row(record: RunRecord, floor_nats: float | None) -> dict[str, Any]:
    row = cell_labels(record) | {"mean_kl_nats": mean_kl_nats(record), "noise_floor_nats": floor_nats}
    fidelity = record.fidelity
    if fidelity is None:
        return row
    row |= {"against": fidelity.against, "baseline_top1_margin_nats": fidelity.baseline_top1_margin_nats}
    if fidelity.against == "chunked_prefill":
        return row | {"noise_floor_max_nats": fidelity.max_kl_nats}
    diverged = [position for position in fidelity.first_divergence_tokens if position is not None]
    return row | {
        "max_kl_nats": fidelity.max_kl_nats,
        "top1_agreement_ratio": fidelity.top1_agreement_ratio,
        "nll_change_nats": fidelity.nll_change_nats,
        "first_divergence_token": min(diverged, default=None),
        "num_diverging_sessions": len(diverged),
        "bit_equal": fidelity.bit_equal,
    }


def _swap(record: RunRecord) -> dict[str, int]:
    """Bytes swapped in all timing passes together, and the most of the group in swap; what no trial has stays out."""
    use = swap_use(record)
    seen = {"swap_in_bytes": use.in_bytes, "swap_out_bytes": use.out_bytes, "cgroup_swap_bytes": use.cgroup_bytes}
    looked = {name for trial in record.trials for name in seen if getattr(trial, name) is not None}
    return {name: size for name, size in seen.items() if name in looked}


def _host_row(record: RunRecord) -> dict[str, Any]:
    sample = merged_sample(record)
    phases = {"prefill": sample.prefill, "decode": sample.decode}
    peaks = ("peak_reserved_bytes", "peak_device_used_bytes")
    return (
        cell_labels(record)
        | {name: getattr(sample, name) for name in _SEEN}
        | _swap(record)
        | {f"{phase}_{name}": getattr(seen, name) for phase, seen in phases.items() for name in peaks}
        | {f"{direction}_busy_s_per_step": busy_s_per_step(record, direction) for direction in _DIRECTIONS}
    )
