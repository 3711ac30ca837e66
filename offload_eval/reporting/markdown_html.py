"""HTML of the report's own Markdown: the dialect that markdown.py writes, and nothing else.

A general parser takes minutes for ten thousand cells, and knows links, images and HTML, of which a report has none.
Here whatever is not one of the few marks below comes out as text, so that no name and no error text becomes a tag.
"""

import html
import re
from typing import Final, NamedTuple

_BLOCK: Final = re.compile(r"^(?P<fence>`{3,})\n(?P<code>(?s:.*?))\n(?P=fence)$|^.+(?:\n.+)*", re.MULTILINE)
_HEADING: Final = re.compile(r"(#{1,6}) (.*)")
_INLINE: Final = re.compile(r"`([^`]+)`|<code>([^<]*)</code>|\\([!-/:-@\[-`{-~])|\*\*(.+?)(?<!\\)\*\*")
_TAG: Final = re.compile(r"<[^>]*>")
_NOT_IN_ANCHOR: Final = re.compile(r"[^a-z0-9]+")
_SECTION_LEVEL: Final = 2
_ANCHOR_CHARACTERS: Final = 60
_LONG_CHARACTERS: Final = 28
_LONG: Final = ' class="w"'


class Section(NamedTuple):
    """A heading of the first or second level and all that stands under it."""

    anchor: str
    title: str
    """Plain text."""
    body: str
    """HTML, without the heading."""


def sections_of(markdown: str) -> list[Section]:
    """Renders Markdown that markdown.py made, section by section; the first has the document's title."""
    anchors: dict[str, int] = {}
    sections: list[tuple[str, str, list[str]]] = []
    under = ""
    for block in _BLOCK.finditer(markdown):
        heading = _HEADING.fullmatch(block[0])
        if heading is None:
            sections[-1][2].append(_block(block, under))
            continue
        shown = _inline(heading[2])
        under = html.unescape(_TAG.sub("", shown))
        level, anchor = len(heading[1]), _anchor(under, anchors)
        if level <= _SECTION_LEVEL:
            sections.append((anchor, under, []))
        else:
            sections[-1][2].append(f'<h{level} id="{anchor}">{shown}</h{level}>')
    return [Section(anchor, title, "\n".join(blocks)) for anchor, title, blocks in sections]


def _anchor(title: str, used: dict[str, int]) -> str:
    """An id that no other heading of the document has."""
    plain = _NOT_IN_ANCHOR.sub("-", title.lower())[:_ANCHOR_CHARACTERS].strip("-") or "section"
    anchor, number = plain, used.get(plain, 0)
    while anchor in used:
        number += 1
        anchor = f"{plain}-{number}"
    used[plain] = number
    used[anchor] = used.get(anchor, 0)
    return anchor


def _block(block: re.Match[str], under: str) -> str:
    text = block[0]
    if block["fence"] is not None:
        return f'<pre tabindex="0"><code>{_text(block["code"])}</code></pre>'
    if text.startswith("|"):
        return _table(text.split("\n"), under)
    if text.startswith("- "):
        items = "\n".join(f"<li>{_inline(line.removeprefix('- '))}</li>" for line in text.split("\n"))
        return f"<ul>\n{items}\n</ul>"
    return f"<p>{_inline(text)}</p>"


def _table(lines: list[str], under: str) -> str:
    """A table in a container of its own, which alone scrolls sideways, with a pointer or with keys.

    Args:
        lines: Header, rule and rows; no cell has a bar in it.
        under: The heading it stands under, which names it for those who do not see it.
    """
    header, rule, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    classes = [' class="n"' if cell.endswith(":") else "" for cell in rule]
    titles = "".join(f'<th scope="col"{kind}>{_inline(cell)}</th>' for cell, kind in zip(header, classes, strict=True))
    body = "\n".join(
        f"<tr>{''.join(_data_cell(cell, kind) for cell, kind in zip(row, classes, strict=True))}</tr>" for row in rows
    )
    return (
        f'<div class="table" role="region" tabindex="0" aria-label="{html.escape(under)}">'
        f"<table>\n<thead><tr>{titles}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _data_cell(cell: str, kind: str) -> str:
    """Text that is long enough to be folded says so: its column must not become one word wide."""
    is_long = len(cell) > _LONG_CHARACTERS and not kind
    return f"<td{_LONG if is_long else kind}>{_inline(cell)}</td>"


def _inline(text: str) -> str:
    """One line: code, bold, and text in which entities and backslashes stand for themselves."""
    parts, end = [], 0
    for mark in _INLINE.finditer(text):
        parts += [_text(html.unescape(text[end : mark.start()])), _marked(mark)]
        end = mark.end()
    return "".join([*parts, _text(html.unescape(text[end:]))])


def _marked(mark: re.Match[str]) -> str:
    plain_code, any_code, character, bold = mark.groups()
    if bold is not None:
        return f"<strong>{_inline(bold)}</strong>"
    if character is not None:
        return _text(character)
    code = plain_code if any_code is None else html.unescape(any_code)
    return f"<code>{_text(code)}</code>"


def _text(text: str) -> str:
    return html.escape(text, quote=False)
