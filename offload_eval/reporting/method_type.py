"""How one column of a report comes about."""

from typing import Final, Literal, NamedTuple

RUN: Final = "run"
"""Stands for the rungs of the records."""


class Method(NamedTuple):
    """How one column, or a few that belong together, comes about."""

    columns: str
    rung: str
    formula: str
    reading: str
    of_fidelity: bool = False
    """Whether the column exists only where fidelity is planned."""
    of_trace: bool = False
    """Whether the column exists only where something was traced."""
    where: Literal["cells", "limits", "both"] = "cells"
    """Whether the column exists only with cells, only with a capacity search, or with either."""
    when: Literal["always", "not run", "priced"] = "always"
    """Whether the column exists only where nothing was run, or only where a price was bounded."""
