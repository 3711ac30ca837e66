"""Every table of a report, each computed once: what is written as CSV and as JSON, and what the text is made from."""

from collections.abc import Callable, Mapping
from typing import Final

import pandas as pd

from offload_eval.analysis.study import Study
from offload_eval.reporting.calibration_table import calibration_frame
from offload_eval.reporting.capacity_tables import limits_frame
from offload_eval.reporting.detail_tables import fidelity_frame, host_frame
from offload_eval.reporting.memory_tables import memory_frame
from offload_eval.reporting.price_table import price_frame
from offload_eval.reporting.recovery_table import recovery_frame
from offload_eval.reporting.tables import analytic_frame, strategy_frame, trials_frame
from offload_eval.reporting.transfer_tables import transfer_frame

TABLES: Final[Mapping[str, Callable[[Study], pd.DataFrame | None]]] = {
    "strategies": lambda study: strategy_frame(study.of_cells),
    "fidelity": lambda study: fidelity_frame(study.runs),
    "host": lambda study: host_frame(study.runs),
    "analytic": lambda study: analytic_frame(study.runs or study.traces_alone, of_traces=not study.runs),
    "memory": lambda study: memory_frame(study.of_cells),
    "transfers": lambda study: transfer_frame(study.of_cells, study.hardware),
    "trials": lambda study: trials_frame(study.runs),
    "limits": lambda study: limits_frame(study.limits),
    "prices": lambda study: price_frame(study.prices),
    "calibration": lambda study: None if study.policy is None else calibration_frame(study.policy),
    "recovery": lambda study: recovery_frame(study.ordered),
}
"""What there may be; a report has those that have a row."""


def report_frames(study: Study) -> dict[str, pd.DataFrame]:
    """The tables that have a row, by name."""
    frames = {name: table(study) for name, table in TABLES.items()}
    return {name: frame for name, frame in frames.items() if frame is not None and not frame.empty}
