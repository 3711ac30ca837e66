"""A plan's cells as CSV."""

import csv
from collections.abc import Iterable
from typing import IO, Final

from offload_eval.core.plan import PlanCell, PlanHardware
from offload_eval.reporting.plan_link_text import hardware_words

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
    "link_h2d_s",
    "link_d2h_s",
    "link_bound_tpot_s",
    "link_h2d_at_limit_s",
    "link_d2h_at_limit_s",
    "link_bound_tpot_at_limit_s",
    "batch_fits",
    "refusal",
)
_ADMISSION_COLUMNS: Final = ("device_sessions", "host_sessions", "limit", "limited_by")


def write_plan_csv(file: IO[str], cells: Iterable[PlanCell], hardware: PlanHardware | None = None) -> int:
    """Writes one row a cell and returns their count; what is not known is empty."""
    profile = None if hardware is None else hardware_words(hardware)
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow((*_CELL_COLUMNS, *_ADMISSION_COLUMNS, "hardware"))
    num_cells = 0
    for cell in cells:
        num_cells += 1
        row = [getattr(cell, name) for name in _CELL_COLUMNS]
        admission = cell.admission
        row += [None if admission is None else getattr(admission, name) for name in _ADMISSION_COLUMNS]
        writer.writerow([*row, profile])
    return num_cells
