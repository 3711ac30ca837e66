"""What a run says on the terminal when it ends: the verdict, and one table that fits 100 columns."""

from collections.abc import Sequence
from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offload_eval.analysis.cells import probe_records
from offload_eval.analysis.study import Study
from offload_eval.analysis.swap import is_swapped
from offload_eval.core.capacity import CapacitySpec
from offload_eval.core.limits import CapacityLimit
from offload_eval.core.records import RunRecord
from offload_eval.reporting.capacity_tables import (
    are_traced,
    by_lengths,
    length_words,
    rung_run,
    show_analytic,
    show_gain,
    show_measured,
    show_sessions,
    show_under_objectives,
)
from offload_eval.reporting.display import MISSING, one_line, show_count, show_ms, show_number
from offload_eval.reporting.plain_columns import plain_columns
from offload_eval.reporting.price_table import bounds_overview, comparison_line
from offload_eval.reporting.sentences import EVIDENCE_WORDS
from offload_eval.reporting.sourced import Part, plain
from offload_eval.reporting.strategy_tables import Column, format_columns
from offload_eval.reporting.tables import strategy_frame
from offload_eval.reporting.verdict_text import answer

NAME_WIDTH: Final = 34
_LENGTHS_WIDTH: Final = 26
_STOP_WIDTH: Final = 19
MOST_ROWS: Final = 100
SWAP_SIGN: Final = "*"
SWAPPED: Final = "* swap was in use around the cell: its times are the disk's."
COLUMNS: Final = (
    Column("analytic_sessions", "analytic sessions", show_count, mark="analytic_ledger"),
    Column("sessions_by_peak", "sessions by peak", show_count, mark="ledger_by_peak"),
    Column("decode_peak_bytes", "decode peak ({unit})"),
    Column("tpot_s", "TPOT (ms)", show_ms, mark="swapped", sign="*"),
    Column("bytes_moved_per_token", "moved/token ({unit})"),
    Column("mean_kl_nats", "mean KL (nats)", show_number),
)


def render_terminal(study: Study) -> RenderableType:
    """Renders the verdict and one table for a terminal; no text in a record can act as markup.

    Returns:
        A rich renderable. The table fits 100 columns: long names fold, and no number is cut off. It is of the limits
        where there was a search, else of the cells.
    """
    if not study.records:
        return Text("Nothing has been recorded yet.")
    parts: list[RenderableType] = [_bullets([plain(line) for line in _answer(study)]), Text("")]
    if study.limits:
        capacity = study.experiment.capacity or CapacitySpec()
        parts.append(_limits_table(study.limits, has_objectives=capacity.has_objectives))
        if study.num_missing_limits:
            parts.append(
                Text(f"The search is not done: {study.num_missing_limits} limits are missing. Go on with --resume.")
            )
    elif study.runs:
        shown = study.runs[:MOST_ROWS]
        parts += [_strategy_table(shown), *([Text(SWAPPED)] if any(map(is_swapped, shown)) else [])]
        if len(shown) < len(study.runs):
            parts.append(Text(f"{len(study.runs) - len(shown):,} more cells are in the report."))
    return Group(*parts, Text(_closing(study)))


def _answer(study: Study) -> list[list[Part]]:
    """The verdict's, and what bounds say of a card that is not here."""
    situations = study.verdict.situations
    at_one = comparison_line(study.prices, situations[0].lengths) if len(situations) == 1 else []
    bounds = at_one or bounds_overview(study.prices)
    return [*answer(study.verdict), *([bounds] if bounds else [])]


def _limits_table(limits: Sequence[CapacityLimit], *, has_objectives: bool) -> Table:
    """One row for each strategy, under a row that names the lengths; it fits 100 columns."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("limits, in sessions", overflow="fold", max_width=_LENGTHS_WIDTH)
    under = ("under\nSLO",) if has_objectives else ()
    rungs = ("analytic", "traced") if are_traced(limits) else ("analytic", "traced", rung_run(limits))
    times = () if are_traced(limits) else (*under, "TPOT\n(ms)", "tokens\n/s")
    for title in (*rungs, "over\nin-GPU", *times):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("stops at", overflow="fold", max_width=_STOP_WIDTH)
    for lengths, group in by_lengths(limits).items():
        table.add_row(Text(length_words(lengths), style="bold"))
        for limit in group:
            cells = _limit_cells(limit, has_objectives=has_objectives)
            cells = cells[:3] + cells[4:5] + cells[-1:] if are_traced(limits) else cells
            table.add_row(*(Text(one_line(cell)) for cell in cells))
    return table


def _limit_cells(limit: CapacityLimit, *, has_objectives: bool) -> list[str]:
    own = limit.at_limit
    mark = SWAP_SIGN if own is not None and own.swapped else ""
    return [
        limit.label,
        show_analytic(limit),
        show_sessions(limit) if limit.evidence == "traced" else show_count(limit.traced),
        show_measured(limit),
        show_gain(limit).replace("at least ", ">="),
        *([show_under_objectives(limit)] if has_objectives else []),
        MISSING if own is None else show_ms(own.tpot_s) + mark,
        MISSING if own is None else show_number(own.tokens_per_s) + mark,
        _stops_at(limit),
    ]


def _stops_at(limit: CapacityLimit) -> str:
    if limit.refusal is not None:
        return "unsupported" if limit.probes == 0 else "failed"
    ledger = None if limit.limiting_ledger == "device" and limit.limiting_phase else limit.limiting_ledger
    parts = (ledger, limit.limiting_phase, limit.limiting_part)
    return " ".join(part for part in parts if part) or MISSING


def _bullets(texts: Sequence[str]) -> Table:
    """One bullet a text; what does not fit a line goes on under its first word."""
    hanging = Table.grid()
    hanging.add_column(no_wrap=True)
    hanging.add_column(overflow="fold")
    for text in texts:
        hanging.add_row(Text("  - "), Text(one_line(text)))
    return hanging


def _strategy_table(records: Sequence[RunRecord]) -> Table:
    """One row a cell, under a row that names its workload."""
    titles, rows = format_columns(plain_columns(strategy_frame(records)), COLUMNS)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy", overflow="fold", max_width=NAME_WIDTH)
    for title in titles:
        table.add_column(Text(title.replace(" ", "\n", 1)), justify="right", no_wrap=True)
    workload = None
    for record, row in zip(records, rows, strict=True):
        if record.spec.workload.label != workload:
            workload = record.spec.workload.label
            table.add_row(Text(one_line(workload), style="bold"))
        name = record.spec.strategy.label + ("" if record.status == "ok" else f" ({record.status})")
        table.add_row(*(Text(one_line(cell)) for cell in (name, *row)))
    return table


def _closing(study: Study) -> str:
    """The rungs under the table, and how many findings the report holds, on traces too."""
    shown = study.runs or probe_records(study.records) or study.records
    rungs = "; ".join(EVIDENCE_WORDS[rung] for rung in dict.fromkeys(record.evidence for record in shown))
    severities = [finding.severity for finding in study.findings]
    counts = [
        f"{count} {level}{'' if count == 1 else 's'}"
        for level in ("error", "warning", "note")
        if (count := severities.count(level))
    ]
    what = "Times, peaks and transfers" if study.has_runs else "Peaks and transfers"
    return f"{what}: {rungs}. Findings in the report: {', '.join(counts) or 'none'}."
