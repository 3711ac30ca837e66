"""What a first use costs: warm-ups of compiled cells, beside the trials that they are kept apart from."""

from collections.abc import Sequence
from statistics import median

from offload_eval.core.experiment import compile_mode
from offload_eval.core.records import RunRecord
from offload_eval.reporting.display import MISSING, show_count
from offload_eval.reporting.markdown import render_table
from offload_eval.units import format_duration

_TITLES = ("cell", "first run", "later warm-ups", "then, median", "graphs compiled", "while timed")


def render_warmups(records: Sequence[RunRecord]) -> str:
    """One row for each compiled cell that ran; nothing where there is none."""
    compiled = [record for record in records if compile_mode(record.spec.strategy) and record.conditions.warmups_s]
    if not compiled:
        return ""
    return render_table(list(_TITLES), [_row(record) for record in compiled], "lrrrrr")


def first_use_s(record: RunRecord) -> float | None:
    """The first warm-up of a compiled cell, in which it compiles; None for others, whose warm-ups are no first use."""
    compiled = compile_mode(record.spec.strategy) is not None
    return next(iter(record.conditions.warmups_s), None) if compiled else None


def _row(record: RunRecord) -> list[str]:
    first, *later = record.conditions.warmups_s
    timed = [trial.e2e_latency_s for trial in record.trials if trial.e2e_latency_s is not None]
    counted = [trial.num_compilations for trial in record.trials if trial.num_compilations is not None]
    return [
        record.spec.label,
        format_duration(first),
        ", ".join(map(format_duration, later)) or MISSING,
        format_duration(median(timed) if timed else None),
        show_count(record.conditions.num_compilations),
        show_count(sum(counted) if counted else None),
    ]
