"""Markdown that no text can break: every cell and paragraph is escaped here and nowhere else."""

import re
from collections.abc import Sequence
from typing import Final

from offload_eval.reporting.display import one_line

_ENTITIES: Final = {mark: f"&#{ord(mark)};" for mark in "\\`|<>&$"}
"""Entities, not backslashes: no renderer takes an entity for structure, inside a table or out of it."""
_INLINE: Final = re.compile(r"[*~\[\]]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_BLOCK_START: Final = re.compile(r"^(\d*)([#+.)-])")
_TAME: Final = re.compile(r"[^`|\\]+")


class Verbatim(str):
    """Markdown that is already safe and is not escaped again."""

    __slots__ = ()


def escape(text: str) -> Verbatim:
    """Makes any text show as itself, on one line, inside a table cell, a heading or a paragraph."""
    if isinstance(text, Verbatim):
        return text
    marked = "".join(_ENTITIES.get(mark, mark) for mark in one_line(text))
    return Verbatim(_INLINE.sub(r"\\\g<0>", marked))


def paragraph(text: str) -> Verbatim:
    """Escapes text that begins a line, where a heading, a list or a rule would start as well."""
    return text if isinstance(text, Verbatim) else Verbatim(_BLOCK_START.sub(r"\1\\\2", escape(text)))


def code(text: str) -> Verbatim:
    """Shows text in a code span, whatever is in it."""
    line = one_line(text)
    if _TAME.fullmatch(line):
        return Verbatim(f"`{line}`")
    inner = "".join(_ENTITIES.get(mark, mark) for mark in line)
    return Verbatim(f"<code>{_INLINE.sub(lambda found: f'&#{ord(found[0])};', inner)}</code>")


def render_table(headers: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """Renders a padded table, readable as text.

    Args:
        headers: One text for each column.
        rows: Cells, escaped unless `Verbatim`.
        align: `l` or `r` for each column.

    Raises:
        ValueError: A row or `align` has another number of columns.
    """
    for cells in (align, *rows):
        if len(cells) != len(headers):
            raise ValueError(f"{len(cells)} columns where the header has {len(headers)}: {cells!r}")
    lines = [[escape(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(headers))]
    rule = [_rule(width, side) for width, side in zip(widths, align, strict=True)]
    body = [_padded(line, widths, align) for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in (body[0], rule, *body[1:]))


def _rule(width: int, side: str) -> str:
    return "-" * (width - 1) + ":" if side == "r" else "-" * width


def _padded(cells: Sequence[str], widths: Sequence[int], align: str) -> list[str]:
    return [
        cell.rjust(width) if side == "r" else cell.ljust(width)
        for cell, width, side in zip(cells, widths, align, strict=True)
    ]


def section(title: str, *blocks: str, level: int = 2) -> str:
    """A heading and its blocks, with blank lines between them; empty blocks are left out."""
    return "\n\n".join([f"{'#' * level} {escape(title)}", *(block for block in blocks if block)])


def bullets(items: Sequence[str]) -> str:
    """A list of one-line items, each escaped unless `Verbatim`."""
    return "\n".join(f"- {paragraph(item)}" for item in items)


def fence(text: str) -> str:
    """A block of code; the fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    marks = "`" * max(3, longest + 1)
    return f"{marks}\n{text}\n{marks}"
