"""How each strategy fails and how it comes back: a row for each kind of failure, and one for each in the CSV."""

from collections.abc import Sequence
from typing import Any, Final

import pandas as pd

from offload_eval.analysis.recovery import DRILL_WORDS, explain_recoveries, group_recoveries
from offload_eval.core.judgement import FailureGroup, FailureRecovery
from offload_eval.core.records import RunRecord
from offload_eval.reporting.display import MISSING, show_count, show_text
from offload_eval.reporting.markdown import bullets, render_table
from offload_eval.reporting.tables import COUNT, REAL, TEXT, typed_frame
from offload_eval.units import format_bytes, format_duration

_TRUTH: Final = "boolean"
RECOVERY_COLUMNS: Final[dict[str, str]] = {
    **dict.fromkeys(
        ("workload", "strategy", "evidence", "role", "status", "raised", "stage", "phase", "ledger"), TEXT
    ),
    "in_new_worker": _TRUTH,
    "recovery_s": REAL,
    "check_s": REAL,
    "tokens_equal": _TRUTH,
    "logits_equal": _TRUTH,
    "leaked_bytes": COUNT,
    **dict.fromkeys(("leaked", "unchecked", "message", "run_id"), TEXT),
}
READING: Final = (
    "A drill brings a failure about on purpose, by the means by which it comes about; the others came about by "
    "themselves. Back after: until memory was released or, of a new worker, until its model was loaded; the median, "
    "and the longest of several. Equal: the same short generation of one session before and after, bit by bit."
)
_TITLES: Final = (
    "strategy",
    "failure",
    "times",
    "what was raised",
    "worker",
    "back after",
    "left on the device",
    "tokens equal",
    "logits equal",
)


def recovery_frame(records: Sequence[RunRecord]) -> pd.DataFrame:
    """One row for each failure; bytes and SI seconds, NA where there is none."""
    return typed_frame(map(_frame_row, explain_recoveries(records)), RECOVERY_COLUMNS)


def render_recoveries(records: Sequence[RunRecord]) -> str:
    """Failures that were alike share a row; empty where nothing failed that is known to have been followed up."""
    groups = group_recoveries(explain_recoveries(records))
    if not groups:
        return ""
    return "\n\n".join(
        [bullets([READING]), render_table(list(_TITLES), [_row(group) for group in groups], "llrllrrrr")]
    )


def _frame_row(recovery: FailureRecovery) -> dict[str, Any]:
    same = {name: getattr(recovery, name) for name in RECOVERY_COLUMNS}
    return same | {"leaked": "; ".join(recovery.leaked) or None, "unchecked": recovery.unchecked or None}


def _row(group: FailureGroup) -> list[str]:
    first = group.first
    if first.status == "unsupported":
        return [first.strategy, _failure(first), show_count(group.times), show_text(first.message), *[MISSING] * 5]
    leaked = None if group.most_leaked_bytes is None else max(0, group.most_leaked_bytes)
    return [
        first.strategy,
        _failure(first),
        show_count(group.times),
        _raised(first),
        MISSING if first.in_new_worker is None else "new" if first.in_new_worker else "same",
        _back_after(group),
        format_bytes(leaked),
        _share(group.num_tokens_equal, group),
        _share(group.num_logits_equal, group),
    ]


def _failure(recovery: FailureRecovery) -> str:
    return "real" if recovery.drill is None else f"drill: {DRILL_WORDS[recovery.drill]}"


def _raised(recovery: FailureRecovery) -> str:
    """The type, then which memory and where, as far as they are known; a worker that is gone has raised nothing."""
    memory = None if recovery.ledger is None else f"{recovery.ledger} memory"
    place = None if recovery.phase is None else f"in {recovery.phase}"
    known = " ".join(part for part in (memory, place) if part is not None)
    return f"{recovery.raised or recovery.status}{f' ({known})' if known else ''}"


def _back_after(group: FailureGroup) -> str:
    shown, longest = format_duration(group.median_recovery_s), format_duration(group.longest_recovery_s)
    return shown if shown == longest else f"{shown}, at most {longest}"


def _share(count: int, group: FailureGroup) -> str:
    """Of one failure yes or no, of several how many."""
    if group.num_compared == 0:
        return MISSING
    if group.num_compared == 1:
        return "yes" if count else "no"
    return f"{count:,} of {group.num_compared:,}"
