"""Sentences whose numbers say which records they come from."""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from offload_eval.core.records import RunRecord
from offload_eval.reporting.markdown import Verbatim, code, escape

SHORTEST_ID: Final = 8


class Source(NamedTuple):
    """The records that the words before it come from."""

    run_ids: tuple[str, ...]


Sourced = Sequence[str | Source]
"""A sentence in parts."""


def plain(line: Sourced) -> str:
    """The sentence alone."""
    return "".join(part for part in line if isinstance(part, str))


def markdown(line: Sourced, shown_characters: int) -> Verbatim:
    """The sentence as Markdown, each source in brackets as the first characters of its run_ids."""
    parts = [escape(part) if isinstance(part, str) else _shown(part, shown_characters) for part in line]
    # Escaping puts a text on one line without blanks around it.
    spaced = (
        f"{' ' if isinstance(raw, str) and raw.startswith(' ') else ''}{part}"
        f"{' ' if isinstance(raw, str) and raw.endswith(' ') else ''}"
        for raw, part in zip(line, parts, strict=True)
    )
    return Verbatim("".join(spaced))


def _shown(source: Source, shown_characters: int) -> str:
    ids = ", ".join(code(run_id[:shown_characters]) for run_id in dict.fromkeys(source.run_ids))
    return f" ({ids})" if ids else ""


def telling_characters(records: Iterable[RunRecord]) -> int:
    """How many first characters of a run_id tell it from every other one, at least `SHORTEST_ID`."""
    run_ids = {record.run_id for record in records}
    longest = max(map(len, run_ids), default=SHORTEST_ID)
    lengths = range(SHORTEST_ID, longest)
    return next((each for each in lengths if len({run_id[:each] for run_id in run_ids}) == len(run_ids)), longest)
