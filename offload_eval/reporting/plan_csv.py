"""A plan's cells as CSV."""

import csv
from collections.abc import Iterable
from typing import IO, Final

from offload_eval.core.plan import PlanCell

_CELL_COLUMNS: Final = (
    "workload",
    "strategy",
    "kind",
    "prompt_tokens",
    "output_tokens",
    "batch_size",
    "cached_tokens",
    "kv_device_peak_bytes_per_session",
    "kv_device_bytes_fixed",
    "kv_host_bytes_per_session",
    "batch_device_bytes",
    "batch_pinned_bytes",
    "h2d_bytes_per_step",
    "d2h_bytes_per_step",
    "batch_fits",
    "refusal",
)
_ADMISSION_COLUMNS: Final = ("device_sessions", "host_sessions", "limit", "limited_by")


def write_plan_csv(file: IO[str], cells: Iterable[PlanCell]) -> int:
    """Writes one row a cell and returns their count; what is not known is empty."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow((*_CELL_COLUMNS, *_ADMISSION_COLUMNS))
    num_cells = 0
    for cell in cells:
        num_cells += 1
        row = [getattr(cell, name) for name in _CELL_COLUMNS]
        admission = cell.admission
        writer.writerow(row + [None if admission is None else getattr(admission, name) for name in _ADMISSION_COLUMNS])
    return num_cells
