"""A comparison on the terminal: the verdict first, and one table that fits 100 columns."""

from collections.abc import Sequence
from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offload_eval.core.comparison import RAISED, Change, RunComparison
from offload_eval.core.gate import GateResult
from offload_eval.reporting.compare_text import gate_headline, mismatch_mark
from offload_eval.reporting.compare_values import (
    VERDICT_WORDS,
    by_weight,
    headline,
    show_change,
    show_ratio,
    undecided_words,
)
from offload_eval.reporting.display import one_line

_NAME_WIDTH: Final = 22
_MOST_CHANGES: Final = 40
_MOST_CONDITIONS: Final = 8
_CHARACTERS: Final = 200


def render_terminal_comparison(comparison: RunComparison, gate: GateResult | None = None) -> RenderableType:
    """Renders verdict, gate, raised verdicts and what else is otherwise; no text in a record can act as markup."""
    raised = by_weight(tuple(change for change in comparison.changes if change.verdict in RAISED))
    mark = mismatch_mark(comparison)
    parts: list[RenderableType] = [Text(one_line(headline(comparison)), style="bold")]
    parts += [Text(mark, style="bold")] if mark else []
    parts += _gate_parts(gate) if gate is not None else []
    if raised:
        parts += _raised_parts(raised)
        parts += [Text("The table is of runs that are not alike: see above.")] if mark else []
    parts += [Text(words)] if (words := undecided_words(comparison)) else []
    parts += _conditions(comparison)
    return Group(*parts)


def _raised_parts(raised: Sequence[Change]) -> list[RenderableType]:
    shown, rest = raised[:_MOST_CHANGES], len(raised) - _MOST_CHANGES
    more = [f"and {rest:,} more, in compare.md and in --json"] if rest > 0 else []
    notes = [f"  {one_line(_noted(change), _CHARACTERS)}" for change in shown if _says_too_little(change)]
    return [Text(""), _table(shown), *(Text(line) for line in (*more, *notes))]


def _gate_parts(gate: GateResult) -> list[RenderableType]:
    lines = [
        f"  broken: {line.workload} / {line.strategy}: {line.metric}: {line.limit}; {line.message}"
        for line in gate.broken
    ]
    return [Text(gate_headline(gate), style="bold"), *(Text(one_line(line, 2 * _CHARACTERS)) for line in lines)]


def _table(changes: Sequence[Change]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("workload", "strategy", "metric (unit)"):
        table.add_column(title, overflow="fold", max_width=_NAME_WIDTH)
    for title in ("baseline", "candidate", "ratio"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold", max_width=13)
    for change in changes:
        shown = show_change(change)
        cells = (
            change.workload,
            change.strategy,
            shown.label,
            shown.baseline,
            shown.candidate,
            show_ratio(change),
            VERDICT_WORDS[change.verdict],
        )
        table.add_row(*(Text(one_line(cell)) for cell in cells))
    return table


def _noted(change: Change) -> str:
    return f"{change.workload} / {change.strategy}, {change.title}: {change.note}"


def _says_too_little(change: Change) -> bool:
    """Why a cell is what it is, or where tokens differ; how a time was decided is in the report."""
    return bool(change.note) and change.test in ("status", "exact")


def _conditions(comparison: RunComparison) -> list[RenderableType]:
    shown = comparison.conditions[:_MOST_CONDITIONS]
    lines = [f"  {each.name}: {each.baseline} -> {each.candidate}" for each in shown]
    rest = len(comparison.conditions) - len(shown)
    more = [f"  and {rest} more, in compare.md and in --json"] if rest else []
    if not lines:
        return [Text("Nothing else is otherwise: same versions, model, prompts and budget.")]
    return [Text("What else is otherwise:"), *(Text(one_line(line, _CHARACTERS)) for line in (*lines, *more))]
