"""A frame as plain lists, whole or group by group: to slice it anew for each of thousands of small tables is slow."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

Rows = Mapping[str, Sequence[Any]]
"""Columns by name, each with one value a row; a missing one is None."""


def plain_columns(frame: pd.DataFrame) -> dict[str, list[Any]]:
    """The columns of a frame."""
    return {str(name): _plain(frame[name]) for name in frame}


def plain_groups(frame: pd.DataFrame, *by: str) -> dict[tuple[Any, ...], Rows]:
    """The rows that agree in some columns, by their values there, in the order they first appear."""
    columns = plain_columns(frame)
    places: dict[tuple[Any, ...], list[int]] = {}
    for place, key in enumerate(zip(*(columns[name] for name in by), strict=True)):
        places.setdefault(key, []).append(place)
    return {
        key: {name: [values[place] for place in own] for name, values in columns.items()}
        for key, own in places.items()
    }


def _plain(column: "pd.Series[Any]") -> list[Any]:
    return [
        None if missing else value
        for value, missing in zip(column.astype(object).tolist(), column.isna().tolist(), strict=True)
    ]
