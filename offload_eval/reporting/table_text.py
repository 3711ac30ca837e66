"""Data frames as text for other programs: CSV that no spreadsheet runs, and plain rows for JSON."""

from typing import Any, Final

import pandas as pd

from offload_eval.reporting.tables import TEXT

_FORMULA_STARTS: Final = ("=", "+", "-", "@", "\t", "\n")
"""What makes a spreadsheet take a cell for a formula, or skip to one behind it."""


def csv_text(frame: pd.DataFrame) -> str:
    """Renders a frame as CSV; NA is empty.

    A text that a spreadsheet would take for a formula gets an apostrophe in front, in the header too. Numbers are
    never touched: a column of numbers holds nothing else.
    """
    tame = frame.rename(columns=_tame)
    for name in tame.columns:
        if tame[name].dtype == TEXT:
            tame[name] = tame[name].map(_tame, na_action="ignore").astype(TEXT)
    return str(tame.to_csv(index=False, lineterminator="\n"))


def plain_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Gives a frame's rows as plain values for JSON: NA is None, and integers are not floats."""
    columns = {str(name): [None if pd.isna(value) else value for value in frame[name].tolist()] for name in frame}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _tame(text: str) -> str:
    # A bare carriage return is not quoted by the writer, and is the end of a row to many readers.
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{lines}" if lines.startswith(_FORMULA_STARTS) else lines
