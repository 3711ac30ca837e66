"""A figure in colours of its own, for where no page decides them: a notebook, an image file, a slide."""

from typing import TYPE_CHECKING, Any, Final

from offload_eval.reporting.figures.style import INK, RULE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPER: Final = "#ffffff"
DARK: Final = "#1c2127"
LIGHT: Final = "#d0d7de"
"""Of the page's light ground: text, and lines of grids."""
_PROPERTIES: Final = ("color", "facecolor", "edgecolor", "markeredgecolor", "markerfacecolor", "hatchcolor")


def on_paper(figure: "Figure") -> "Figure":
    """Puts real colours in the place of those that a page decides, on white ground.

    Args:
        figure: Made in the house style, which is still in force: its ticks are made here, while it holds.

    Returns:
        The same figure.
    """
    figure.draw_without_rendering()
    figure.set_facecolor(PAPER)
    for artist in figure.findobj():
        for name in _PROPERTIES:
            _replace(artist, name)
    for panel in figure.axes:
        panel.tick_params(which="both", color=DARK, labelcolor=DARK, grid_color=LIGHT)  # ticks yet to come
    return figure


def _replace(artist: Any, name: str) -> None:
    from matplotlib.colors import to_hex, to_rgba

    get, put = getattr(artist, f"get_{name}", None), getattr(artist, f"set_{name}", None)
    if get is None or put is None:
        return
    colour = get()
    if not isinstance(colour, str | tuple):  # a collection has many, and none of ours
        return
    if isinstance(colour, str) and colour in ("none", "auto"):
        return
    wanted = {INK: DARK, RULE: LIGHT}.get(to_hex(colour))
    if wanted is not None:
        alpha = to_rgba(colour)[3]
        put(to_rgba(wanted, alpha) if alpha < 1 else wanted)
