"""The history of cells as a tidy frame and as Markdown."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

import pandas as pd

from offload_eval.core.history import Figures, HistoryRow, Ratios, SkippedDirectory
from offload_eval.reporting.display import MISSING, byte_scale, show_bytes, show_count, show_ms, show_number
from offload_eval.reporting.flat import fitting, flat_columns
from offload_eval.reporting.markdown import Verbatim, bullets, code, paragraph, render_table, section
from offload_eval.reporting.tables import TEXT, typed_frame

HISTORY_COLUMNS: Final[dict[str, str]] = {
    **{name: kind for name, kind in flat_columns(HistoryRow).items() if not name.startswith(("figures_", "ratios_"))},
    "versions": TEXT,
    "changes": TEXT,
    **flat_columns(Figures),
    **{f"{name}_ratio": kind for name, kind in flat_columns(Ratios).items()},
}
"""`versions` and `changes` hold several texts, separated by `; `. A ratio is to the run in `before`."""
SWAPPED: Final = "* swap was in use around the cell: its times are the disk's."
READING: Final = (
    "Each row is one run of a cell; the number in brackets is the figure over that of the latest earlier run on the "
    "same kind of machine and the same rung. Sessions compare under the same budget alone."
)


class Figure(NamedTuple):
    """A column of figures."""

    name: str
    title: str
    has_ratio: bool = True


FIGURES: Final = (
    Figure("analytic_sessions", "sessions, analytic", has_ratio=False),
    Figure("sessions_by_trace", "by trace"),
    Figure("sessions_by_peak", "by peak"),
    Figure("sessions_limit", "limit that ran"),
    Figure("ttft_s", "TTFT (ms)"),
    Figure("tpot_s", "TPOT (ms)"),
    Figure("tokens_per_s", "tokens/s"),
    Figure("peak_bytes", "device peak"),
    Figure("bytes_moved_per_token", "moved a token"),
    Figure("mean_kl_nats", "mean KL (nats)", has_ratio=False),
)


def history_frame(rows: Sequence[HistoryRow]) -> pd.DataFrame:
    """One row for each run of a cell, by its start; SI units, NA where there is none."""
    return typed_frame((fitting(_frame_row(row), HISTORY_COLUMNS) for row in rows), HISTORY_COLUMNS)


def render_history(rows: Sequence[HistoryRow], skipped: Sequence[SkippedDirectory]) -> str:
    """Renders a table for each cell, with what changed from run to run, and what was left out."""
    parts = [
        section(series_words(group), render_table(*_table(group)), bullets(change_lines(group)))
        for group in by_series(rows)
    ]
    if any(row.swapped for row in rows):
        parts.append(paragraph(SWAPPED))
    left_out = [Verbatim(f"{code(each.path)}: {paragraph(each.reason)}") for each in skipped]
    if left_out:
        parts.append(section("Left out", bullets(left_out)))
    return "\n\n".join([section("History", paragraph(READING), level=1), *parts]) + "\n"


def by_series(rows: Sequence[HistoryRow]) -> list[list[HistoryRow]]:
    """The runs of each cell, cells in the order of their first runs."""
    order = list(dict.fromkeys(row.series for row in rows))
    ordered = sorted(rows, key=lambda row: order.index(row.series))
    return [list(group) for _, group in groupby(ordered, key=lambda row: row.series)]


def series_words(group: Sequence[HistoryRow]) -> str:
    """Names a cell: as its latest run does."""
    last = group[-1]
    return f"{last.experiment}: {last.workload}, {last.strategy}"


def change_lines(group: Sequence[HistoryRow]) -> list[str]:
    """What changed before each run but the first, and why it is not held against anything."""
    return [f"{row.run_dir}: {_change_words(row)}" for row in group if row.before is not None]


def show_figure(row: HistoryRow, name: str) -> str:
    """A figure as people read it."""
    value = getattr(row.figures, name)
    if name in ("ttft_s", "tpot_s"):
        return show_ms(value) + ("*" if row.swapped and value is not None else "")
    if name.endswith(("_bytes", "_per_token")):
        scale = byte_scale([value])
        return MISSING if value is None else f"{show_bytes(value, scale)} {scale.unit}"
    return show_count(value) if "sessions" in name else show_number(value)


def show_ratio(row: HistoryRow, name: str) -> str:
    """The figure over the earlier one; empty for a first run, `-` where the two do not compare."""
    if row.before is None:
        return ""
    ratio = None if row.ratios is None else getattr(row.ratios, name)
    return MISSING if ratio is None else f"{ratio:.2f}x"


def _change_words(row: HistoryRow) -> str:
    said = "; ".join(row.changes) or "nothing changed"
    if row.ratios is None:
        return f"not comparable, no earlier run on this kind of machine and this rung; against {row.before}: {said}."
    return f"against {row.before}: {said}."


def _table(group: Sequence[HistoryRow]) -> tuple[list[str], list[list[str]], str]:
    shown = [each for each in FIGURES if any(getattr(row.figures, each.name) is not None for row in group)]
    titles = ["started (UTC)", "run", "model", "machine", "rung", "status", *(each.title for each in shown)]
    rows = [
        [
            row.started_at_utc,
            row.run_dir,
            release_words(row),
            row.machine,
            row.evidence,
            row.status,
            *(_figure_cell(row, each) for each in shown),
        ]
        for row in group
    ]
    return titles, rows, "llllll" + "r" * len(shown)


def release_words(row: HistoryRow) -> str:
    """The model, with its revision where one was asked for."""
    return row.model if row.model_revision is None else f"{row.model}@{row.model_revision}"


def _figure_cell(row: HistoryRow, figure: Figure) -> str:
    text = show_figure(row, figure.name)
    ratio = show_ratio(row, figure.name) if figure.has_ratio and text != MISSING else ""
    return f"{text} ({ratio})" if ratio else text


def _frame_row(row: HistoryRow) -> dict[str, Any]:
    ratios = row.ratios or Ratios()
    return {
        **{name: getattr(row, name) for name in HISTORY_COLUMNS if hasattr(row, name)},
        "versions": "; ".join(f"{name} {version}" for name, version in row.versions.items()),
        "changes": "; ".join(row.changes) or None,
        **{name: getattr(row.figures, name) for name in Figures.__struct_fields__},
        **{f"{name}_ratio": getattr(ratios, name) for name in Ratios.__struct_fields__},
    }
