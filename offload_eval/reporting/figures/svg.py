"""A figure as SVG inside a page: text stays text, colours follow the page, and no id meets one of another figure."""

import html
import io
import re
import warnings
from typing import TYPE_CHECKING, Final

from offload_eval.reporting.figures.style import INK, RULE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TAG: Final = re.compile(r"<[^>]+>")
_ID: Final = re.compile(r'(?<= id=")|(?<=href="#)|(?<=url\(#)')
_OUTSIDE: Final = re.compile(r"^.*?(?=<svg\b)", re.DOTALL)
_OPENING: Final = re.compile(r"<svg\b[^>]*>")
_VIEW: Final = re.compile(r'viewBox="[^"]*"')
_GLOBAL_STYLE: Final = re.compile(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", re.DOTALL)
_NO_METADATA: Final = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def inline_svg(figure: "Figure", name: str, title: str) -> str:
    """Saves a figure, the same bytes each time.

    Args:
        figure: Made in the house style, which is still in force.
        name: Of letters, and of this figure alone in its page.
        title: What is said in place of the figure to those who do not see it.
    """
    file = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a glyph that this font lacks is there in the browser's
        figure.savefig(file, format="svg", metadata=_NO_METADATA)
    text = _GLOBAL_STYLE.sub("", _OUTSIDE.sub("", file.getvalue()))
    text = _TAG.sub(lambda tag: _in_page(tag[0], name), text)
    view = _VIEW.search(text)
    assert view is not None
    opening = f'<svg role="img" aria-labelledby="{name}.title" {view[0]}>\n<title id="{name}.title">'
    return _OPENING.sub(lambda _: f"{opening}{html.escape(title)}</title>", text, count=1).strip()


def _in_page(tag: str, name: str) -> str:
    return _ID.sub(f"{name}.", tag).replace(INK, "currentColor").replace(RULE, "var(--line)")
