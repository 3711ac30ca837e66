"""The history of cells on a terminal: tables that fit 100 columns."""

from collections.abc import Sequence
from typing import Final

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from offload_eval.core.history import HistoryRow, SkippedDirectory
from offload_eval.reporting.display import MISSING, one_line
from offload_eval.reporting.history_tables import (
    SWAPPED,
    by_series,
    change_lines,
    release_words,
    series_words,
    show_figure,
    show_ratio,
)

_SESSIONS: Final = ("analytic_sessions", "sessions_by_trace", "sessions_by_peak", "sessions_limit")
_FIGURES: Final = {
    "ttft_s": "TTFT ms",
    "tpot_s": "TPOT ms",
    "tokens_per_s": "tok/s",
    "peak_bytes": "peak",
    "bytes_moved_per_token": "moved",
    "mean_kl_nats": "KL nats",
}
READING: Final = (
    "Sessions: by arithmetic/ trace/ peak/ the limit that ran. A second line is the figure over that of the run "
    "before on the same kind of machine and rung (of sessions, those by peak); - where none compares."
)


def render_history_terminal(rows: Sequence[HistoryRow], skipped: Sequence[SkippedDirectory]) -> RenderableType:
    """Renders a table for each cell; long names fold, no number is cut off, no text can act as markup."""
    parts: list[RenderableType] = [Text(READING)]
    for group in by_series(rows):
        parts += [Text(""), Text(one_line(series_words(group)), style="bold"), _table(group)]
        parts += [Text(f"  {one_line(line)}") for line in change_lines(group)]
    if any(row.swapped for row in rows):
        parts += [Text(""), Text(SWAPPED)]
    if skipped:
        parts += [Text(""), Text("Left out:", style="bold")]
        parts += [Text(f"  {one_line(f'{each.path}: {each.reason}')}") for each in skipped]
    return Group(*parts)


def _table(group: Sequence[HistoryRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False)
    for title, width in (("run", 12), ("model", 13)):
        table.add_column(title, overflow="fold", max_width=width)
    table.add_column("sessions", justify="right", overflow="fold", max_width=15)
    for title in _FIGURES.values():
        # Where there is no room, names fold and numbers do not.
        table.add_column(title, justify="right", no_wrap=True)
    for row in group:
        table.add_row(*map(Text, _cells(row)))
    return table


def _cells(row: HistoryRow) -> list[str]:
    # A space after each stroke: lines break there, and not inside a number.
    sessions = "/ ".join(show_figure(row, name) for name in _SESSIONS)
    return [
        f"{one_line(row.run_dir)}\n{row.started_at_utc[:10]}",
        _lines(one_line(release_words(row)), "" if row.status == "ok" else f"({row.status})"),
        _lines(sessions, "" if row.figures.sessions_by_peak is None else show_ratio(row, "sessions_by_peak")),
        *(_figure(row, name) for name in _FIGURES),
    ]


def _figure(row: HistoryRow, name: str) -> str:
    text = show_figure(row, name)
    return _lines(text, "" if text == MISSING or name == "mean_kl_nats" else show_ratio(row, name))


def _lines(text: str, ratio: str) -> str:
    return f"{text}\n{ratio}" if ratio else text
