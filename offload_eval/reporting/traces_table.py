"""The traces that a run directory holds of its cells, where nothing was run."""

from collections.abc import Sequence
from typing import Final

from offload_eval.analysis.rules_outcomes import failure_reason
from offload_eval.core.records import RunRecord
from offload_eval.reporting.display import MISSING, one_line
from offload_eval.reporting.markdown import Verbatim, code, render_table
from offload_eval.units import format_duration

TRACES: Final = "Traces of cells that were not run"
_REASON_CHARACTERS: Final = 300


def render_kept_traces(traces: Sequence[RunRecord]) -> str:
    """One row a trace; of one that was refused or failed with the reason."""
    titles = ["workload", "strategy", "status", "run_id", "started (UTC)", "duration", "reason"]
    return render_table(titles, [_row(record) for record in traces], "lllllrl")


def _row(record: RunRecord) -> list[str]:
    return [
        record.spec.workload.label,
        record.spec.strategy.label,
        record.status,
        Verbatim(code(record.run_id)),
        record.started_at_utc,
        format_duration(record.duration_s),
        MISSING if record.status == "ok" else one_line(failure_reason(record), _REASON_CHARACTERS),
    ]
