"""Transfers of every cell: what crossed the link and how fast, what was waited for, and what the bounds allow."""

from collections.abc import Sequence
from typing import Any, Final

import pandas as pd

from offload_eval.analysis.swap import is_swapped
from offload_eval.analysis.transfers import explain_transfers
from offload_eval.core.hardware import HardwareProfile
from offload_eval.core.judgement import LinkUse, PhaseTransfer
from offload_eval.core.records import Phase, RunRecord
from offload_eval.reporting.display import show_count, show_ms, show_number, show_text
from offload_eval.reporting.markdown import bullets, section
from offload_eval.reporting.plain_columns import Rows, plain_groups
from offload_eval.reporting.strategy_tables import Column, filled_columns, row_names, rows_table, swap_legend
from offload_eval.reporting.tables import COUNT, REAL, TEXT, typed_frame

_USE_COLUMNS: Final[dict[str, str]] = {
    "bytes_per_step": REAL,
    "copies_per_step": REAL,
    "busy_s_per_step": REAL,
    "bytes_per_s": REAL,
    "calibrated_bytes_per_s": REAL,
    "of_link_ratio": REAL,
}
TRANSFER_COLUMNS: Final[dict[str, str]] = {
    **dict.fromkeys(("workload", "strategy", "status", "evidence", "phase"), TEXT),
    "steps": COUNT,
    **{f"{way}_{name}": kind for name, kind in _USE_COLUMNS.items() for way in ("h2d", "d2h")},
    "num_pageable_copies": COUNT,
    "link": TEXT,
    "exposed_by_waits_s": REAL,
    "exposed_by_difference_s": REAL,
    "reference": TEXT,
    "hidden_ratio": REAL,
    "end_latency_s": REAL,
    "swapped": "boolean",
    "ideal_s": REAL,
    "scheduled_s": REAL,
    "serial_s": REAL,
    "run_id": TEXT,
}


_SPANS: Final[dict[Phase, str]] = {"prefill": "the prefill", "decode": "a decode step"}


def _show_gb_per_s(bytes_per_s: float | None) -> str:
    return show_number(None if bytes_per_s is None else bytes_per_s / 1e9)


def _show_ratio(ratio: float | None) -> str:
    return show_number(None if ratio is None else 100 * ratio, digits=3)


TRAFFIC: Final = (
    Column("h2d_bytes_per_step", "H2D ({unit})"),
    Column("d2h_bytes_per_step", "D2H ({unit})"),
    Column("h2d_copies_per_step", "H2D copies", show_number),
    Column("d2h_copies_per_step", "D2H copies", show_number),
    Column("num_pageable_copies", "pageable, whole phase (copies)", show_count),
    Column("h2d_busy_s_per_step", "H2D busy (ms)", show_ms),
    Column("d2h_busy_s_per_step", "D2H busy (ms)", show_ms),
    Column("h2d_bytes_per_s", "H2D speed (GB/s)", _show_gb_per_s),
    Column("d2h_bytes_per_s", "D2H speed (GB/s)", _show_gb_per_s),
    Column("h2d_of_link_ratio", "H2D of the link (%)", _show_ratio),
    Column("d2h_of_link_ratio", "D2H of the link (%)", _show_ratio),
)
TIMES: Final = (
    Column("exposed_by_waits_s", "exposed by waits (ms)", show_ms),
    Column("exposed_by_difference_s", "exposed by difference (ms)", show_ms, mark="swapped"),
    Column("reference", "reference", show_text),
    Column("hidden_ratio", "hidden (%)", _show_ratio),
    Column("end_latency_s", "end latency (ms)", show_ms, mark="swapped"),
    Column("ideal_s", "ideal, traced (ms)", show_ms),
    Column("scheduled_s", "scheduled, traced (ms)", show_ms),
    Column("serial_s", "serial, traced (ms)", show_ms),
)


def transfer_frame(records: Sequence[RunRecord], hardware: HardwareProfile | None = None) -> pd.DataFrame:
    """Two rows for each cell that uses the link, prefill and decode; bytes and SI seconds, NA where there is none."""
    cells = {record.run_id: record for record in records}
    rows = (_row(transfer, cells[transfer.run_id]) for transfer in explain_transfers(records, hardware))
    return typed_frame(rows, TRANSFER_COLUMNS)


def render_transfers(records: Sequence[RunRecord], hardware: HardwareProfile | None = None) -> str:
    """For each workload and phase what moved and how fast, and what it cost; empty where no cell uses the link."""
    frame = transfer_frame(records, hardware)
    if frame.empty:
        return ""
    tables = [
        section(
            f"{title} of {_SPANS[phase]}, {_rungs(rows)}: {workload}",
            rows_table(rows, shown, row_names(rows)),
            swap_legend(rows, shown),
            level=3,
        )
        for (workload, phase), rows in plain_groups(frame, "workload", "phase").items()
        for title, columns in (("Traffic", TRAFFIC), ("Time", TIMES))
        if (shown := filled_columns(rows, columns))
    ]
    return "\n\n".join([bullets([_held_against(frame, hardware)]), *tables])


def _held_against(frame: pd.DataFrame, hardware: HardwareProfile | None) -> str:
    links = list(frame["link"].dropna().unique())
    if not links:
        return (
            "No calibrated link is known for this run: give hardware in the experiment, a profile that "
            "offload-eval link --out writes. Speeds stand alone, and there are no bounds."
        )
    bounds = (
        "Bounds need a profile with memory bandwidth and peaks, and a trace."
        if frame["ideal_s"].isna().all()
        else f"Bounds: of {hardware.name}, from each cell's trace."
        if hardware
        else ""
    )
    return f"The link is held against {', '.join(links)}. {bounds}".strip()


def _rungs(rows: Rows) -> str:
    return ", ".join(dict.fromkeys(rows["evidence"]))


def _row(transfer: PhaseTransfer, record: RunRecord) -> dict[str, Any]:
    same = {name: getattr(transfer, name) for name in TRANSFER_COLUMNS if name in transfer.__struct_fields__}
    return (
        same
        | {"status": record.status, "swapped": is_swapped(record)}
        | _use_columns("h2d", transfer.h2d, transfer.steps)
        | _use_columns("d2h", transfer.d2h, transfer.steps)
    )


def _use_columns(way: str, use: LinkUse, steps: int) -> dict[str, Any]:
    per_step = {"bytes": use.bytes, "copies": use.num_copies, "busy_s": use.busy_s}
    rates = {name: getattr(use, name) for name in ("bytes_per_s", "calibrated_bytes_per_s", "of_link_ratio")}
    steady = {f"{name}_per_step": None if value is None else value / steps for name, value in per_step.items()}
    return {f"{way}_{name}": value for name, value in (steady | rates).items()}
