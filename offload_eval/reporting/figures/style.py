"""How every figure looks: on light and on dark ground, on a screen and in print, to all kinds of eyes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from offload_eval.reporting.display import one_line

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK: Final = "#010203"
"""Stands for the colour of text, which the page decides."""
RULE: Final = "#040506"
"""Stands for the colour of lines in tables and of grids."""
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Of Okabe and Ito, without black and yellow, which one of the grounds swallows. Source: jfly.uni-koeln.de/color."""
MARKERS: Final = ("o", "s", "^", "D", "v", "P")
MOST_STRATEGIES: Final = 12
"""In one figure; the tables have all of them."""
_NAME_CHARACTERS: Final = 40
_WIDTH_IN: Final = 8.0
_SETTINGS: Final[dict[Any, Any]] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "legend.frameon": False,
    "figure.constrained_layout.h_pad": 0.08,
    "hatch.color": INK,
    "text.parse_math": False,  # a name with two dollar signs is no formula
    "svg.fonttype": "none",
    "svg.hashsalt": "offload-eval",
    **dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}


class Look(NamedTuple):
    """Of one strategy, the same in every figure of a report."""

    name: str
    colour: str
    marker: str


@contextmanager
def house_style() -> Iterator[None]:
    """Figures are made and saved inside of it; other users of matplotlib keep their own settings."""
    import matplotlib as mpl

    with mpl.rc_context(_SETTINGS):
        yield


def looks_of(strategies: Sequence[str]) -> dict[str, Look]:
    """A colour and a marker for each strategy; past the sixth a colour returns with another marker."""
    count = len(COLOURS)
    return {
        name: Look(shown_name(name), COLOURS[place % count], MARKERS[(place + place // count) % count])
        for place, name in enumerate(dict.fromkeys(strategies))
    }


def shown_name(name: str) -> str:
    """A strategy's name as a label: matplotlib leaves out those that begin with an underscore."""
    line = one_line(name, _NAME_CHARACTERS)
    return f" {line}" if line.startswith("_") else line


def new_figure(rows: int, columns: int, height_in: float) -> "tuple[Figure, list[Axes]]":
    """An empty figure and its panels, row by row; no global state knows of it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    return figure, list(panels.flat)


def add_legend(figure: "Figure", handles: "Sequence[Artist]", labels: Sequence[str]) -> None:
    """A legend under the panels, where it covers nothing, read row by row."""
    columns = min(4, len(labels))
    rows = -(-len(labels) // columns)
    # matplotlib fills columns, of which the last ones are shorter where it does not come out even.
    full = len(labels) - columns * (rows - 1)
    longs = [rows if column < full else rows - 1 for column in range(columns)]
    places = [row * columns + column for column, long in enumerate(longs) for row in range(long)]
    figure.legend(
        [handles[place] for place in places],
        [labels[place] for place in places],
        loc="outside lower center",
        ncols=columns,
    )
