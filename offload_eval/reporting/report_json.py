"""report.json: the verdict, the findings and the tables of a report for other programs, in SI units."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
import pandas as pd

from offload_eval.analysis.study import Study
from offload_eval.reporting.table_text import plain_rows

SCHEMA_VERSION: Final = 1
RAW: Final = ("trials",)
"""Tables that are in tables/ alone: what they hold is raw, and records.jsonl has it."""


def report_json(study: Study, frames: Mapping[str, pd.DataFrame]) -> str:
    """Renders one JSON document; what does not exist is null, and a table without a row is not there."""
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "experiment": study.experiment.name,
        "question": study.experiment.question,
        "machines": _distinct(record.machine for record in study.records),
        "models": _distinct(record.model for record in study.records),
        "budget": study.experiment.budget,
        "verdict": study.verdict,
        "findings": study.findings,
        "tables": {name: plain_rows(frame) for name, frame in frames.items() if name not in RAW},
    }
    return msgspec.json.encode(document).decode() + "\n"


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Each value once, in the order they come; there are few."""
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found
