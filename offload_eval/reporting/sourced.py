"""Sentences whose numbers say which records they come from."""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from offload_eval.core.records import RunRecord
from offload_eval.reporting.markdown import Verbatim, code, escape

SHORTEST_ID: Final = 8


class Source(NamedTuple):
    """The records that the words before it come from."""

    run_ids: tuple[str, ...]


class Lead(NamedTuple):
    """What a sentence is about: its first words, which stand out."""

    text: str


Part = str | Lead | Source
Sourced = Sequence[Part]
"""A sentence in parts."""


def plain(line: Sourced) -> str:
    """The sentence alone."""
    return "".join(part.text if isinstance(part, Lead) else part for part in line if not isinstance(part, Source))


def markdown(line: Sourced, shown_characters: int) -> Verbatim:
    """The sentence as Markdown, each source in brackets as the first characters of its run_ids."""
    return Verbatim("".join(_marked(part, shown_characters) for part in line))


def _marked(part: Part, shown_characters: int) -> str:
    if isinstance(part, Lead):
        return f"**{escape(part.text)}**"
    if isinstance(part, Source):
        ids = ", ".join(code(run_id[:shown_characters]) for run_id in dict.fromkeys(part.run_ids))
        return f" ({ids})" if ids else ""
    # Escaping puts a text on one line without blanks around it.
    before, after = (" " if blank else "" for blank in (part.startswith(" "), part.endswith(" ")))
    return f"{before}{escape(part)}{after}" if part.strip() else before


def telling_characters(records: Iterable[RunRecord]) -> int:
    """How many first characters of a run_id tell it from every other one, at least `SHORTEST_ID`."""
    run_ids = {record.run_id for record in records}
    longest = max(map(len, run_ids), default=SHORTEST_ID)
    lengths = range(SHORTEST_ID, longest)
    return next((each for each in lengths if len({run_id[:each] for run_id in run_ids}) == len(run_ids)), longest)
