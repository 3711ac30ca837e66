"""A candidate's figures over the baseline's, cell by cell, with what the trials leave open and the least effect."""

from collections.abc import Sequence
from math import log
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from offload_eval.analysis.compare_metrics import BYTES_RATIO, SAMPLED_BYTES_RATIO
from offload_eval.analysis.compare_times import LEAST_EFFECT
from offload_eval.core.comparison import BETTER, RAISED, WORSE, Change, RunComparison, Verdict
from offload_eval.reporting.compare_values import VERDICT_WORDS, by_weight, show_ratio
from offload_eval.reporting.display import one_line
from offload_eval.reporting.figures.drawing import Drawing
from offload_eval.reporting.figures.style import COLOURS, INK, RULE, add_legend, new_figure

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

MOST_METRICS: Final = 4
MOST_CELLS: Final = 16
"""In one figure; the tables have all of them."""
MAIN_METRICS: Final = ("tpot_s", "ttft_s", "decode_peak_bytes", "prefill_peak_bytes", "limit_sessions", "tokens_per_s")
"""Drawn first where something came of them, and else where there is room."""
_OWN_EFFECT: Final = ("ttft_s", "tpot_s", "tokens_per_s")
"""Of other times the least effect is a share of these, and no ratio."""
_EDGES: Final = (1.02, 1.05, 1.1, 1.2, 1.5, 2, 3, 5, 10, 30, 100, 1000, 10_000, 1e6, 1e9)
"""Ends of an axis: candidates that round ratios reach."""
_WORKLOAD_CHARACTERS: Final = 18
_STRATEGY_CHARACTERS: Final = 22
Cell = tuple[str, str]


class Mark(NamedTuple):
    """How a verdict looks."""

    colour: str
    marker: str
    is_filled: bool


_NO_VERDICT: Final = Mark(INK, "o", is_filled=False)
_MARKS: Final[dict[Verdict, Mark]] = {
    "worse": Mark(COLOURS[1], "s", is_filled=True),
    "likely_worse": Mark(COLOURS[1], "s", is_filled=False),
    "better": Mark(COLOURS[0], "^", is_filled=True),
    "likely_better": Mark(COLOURS[0], "^", is_filled=False),
    "changed": Mark(INK, "D", is_filled=False),
    "undecided": Mark(INK, "x", is_filled=True),
    "same": _NO_VERDICT,
}


def draw_compare_ratios(comparison: RunComparison) -> Drawing | None:
    """Draws the metrics in which something changed, and the main ones; None where no figure has a ratio."""
    figures = [change for change in comparison.changes if change.ratio is not None and change.ratio > 0]
    metrics = shown_metrics(figures)
    drawn = [change for change in figures if change.metric in metrics]
    cells = list(dict.fromkeys((change.workload, change.strategy) for change in by_weight(tuple(drawn))))
    if not cells:
        return None
    in_order = dict.fromkeys((change.workload, change.strategy) for change in comparison.changes)
    rows = [cell for cell in in_order if cell in cells[:MOST_CELLS]]
    shown = [change for change in drawn if (change.workload, change.strategy) in rows]
    caption = _caption(comparison, shown)
    if len(cells) > len(rows):
        caption += f" {len(rows)} of {len(cells):,} cells and limits are shown, those with the weightiest verdicts."
    title = f"Figures of {comparison.candidate} over those of {comparison.baseline}, by metric and cell"
    return Drawing("ratios", one_line(title), caption, ratios_figure(metrics, rows, shown))


def shown_metrics(figures: Sequence[Change]) -> list[str]:
    """Main metrics with a verdict, then others with one, then main ones without."""
    raised = [change.metric for change in figures if change.verdict in RAISED]
    found = {change.metric for change in figures}
    wanted = [
        *(metric for metric in MAIN_METRICS if metric in raised),
        *sorted(set(raised), key=lambda metric: (-raised.count(metric), metric)),
        *(metric for metric in MAIN_METRICS if metric in found),
    ]
    return list(dict.fromkeys(wanted))[:MOST_METRICS]


def ratio_ends(change: Change) -> tuple[float, float] | None:
    """The least and the largest ratio that both medians' intervals allow; None where either has none."""
    before, after = change.baseline_interval, change.candidate_interval
    if before is None or after is None or not min(before.low, after.low) > 0:
        return None
    return after.low / before.high, after.high / before.low


def no_change_band(change: Change) -> tuple[float, float] | None:
    """Ratios that are no verdict whatever the trials say; None where any difference is one, or none is a ratio."""
    if change.test == "ranks":
        return (1 / (1 + LEAST_EFFECT), 1 + LEAST_EFFECT) if change.metric in _OWN_EFFECT else None
    if change.unit != "bytes":
        return None
    least = SAMPLED_BYTES_RATIO if change.test == "sampled" else BYTES_RATIO
    return 1 - least, 1 + least


def ratios_figure(metrics: Sequence[str], rows: Sequence[Cell], changes: Sequence[Change]) -> "Figure":
    """A panel for each metric and a line for each cell, on a logarithmic axis with 1 in its middle."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure, panels = new_figure(1, len(metrics), 1.7 + 0.24 * len(rows))
    for panel, metric in zip(panels, metrics, strict=True):
        _draw_metric(panel, rows, [change for change in changes if change.metric == metric])
        panel.set_yticks(range(len(rows)), [])
    panels[0].set_yticks(range(len(rows)), [_row_name(cell) for cell in rows], fontsize=7.5)
    seen = {change.verdict for change in changes}
    handles: list[Artist] = [_mark_line(mark) for verdict, mark in _MARKS.items() if verdict in seen]
    labels = [VERDICT_WORDS[verdict] for verdict in _MARKS if verdict in seen]
    if any(ratio_ends(change) for change in changes):
        handles.append(Line2D([], [], color=INK, linewidth=1))
        labels.append("ends of both intervals")
    if any(no_change_band(change) for change in changes):
        handles.append(Patch(facecolor=RULE, alpha=0.5))
        labels.append("below the least effect")
    add_legend(figure, handles, labels)
    return figure


def _draw_metric(panel: "Axes", rows: Sequence[Cell], changes: Sequence[Change]) -> None:
    first = changes[0]
    band = no_change_band(first)
    if band is not None:
        panel.axvspan(*band, color=RULE, alpha=0.5, linewidth=0)
    panel.axvline(1, color=INK, linewidth=0.8)
    reach = 1.0
    for change in changes:
        ratio, ends = change.ratio or 1.0, ratio_ends(change)
        place, mark = rows.index((change.workload, change.strategy)), _MARKS.get(change.verdict, _NO_VERDICT)
        if ends is not None:
            panel.plot(ends, (place, place), color=mark.colour, linewidth=1)
        panel.add_line(_mark_line(mark, [ratio], [place]))
        reach = max(reach, *(max(each, 1 / each) for each in (ratio, *(ends or ()))))
    _set_axis(panel, reach)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.grid(visible=False, axis="y")
    side = {True: "\nlower is better", False: "\nhigher is better", None: "\n"}[first.lower_is_better]
    panel.set_title(f"{first.title}{side}", fontsize=8)
    panel.set_xlabel("ratio to baseline", fontsize=8)


def _set_axis(panel: "Axes", reach: float) -> None:
    """1 in the middle, and as far to both sides as the farthest ratio is."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    edge = next((edge for edge in _EDGES if edge >= reach), reach)
    panel.set_xscale("log")
    panel.set_xlim(edge**-1.4, edge**1.4)
    panel.set_xticks([1 / edge, 1, edge])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:.3g}x"))
    panel.tick_params(axis="x", labelsize=8)


def _mark_line(mark: Mark, ratios: Sequence[float] = (), places: Sequence[float] = ()) -> "Line2D":
    from matplotlib.lines import Line2D

    fill: Literal["full", "none"] = "full" if mark.is_filled else "none"
    return Line2D(ratios, places, linestyle="", color=mark.colour, marker=mark.marker, fillstyle=fill)


def _row_name(cell: Cell) -> str:
    workload, strategy = cell
    return f"{one_line(workload, _WORKLOAD_CHARACTERS)} / {one_line(strategy, _STRATEGY_CHARACTERS)}"


def _caption(comparison: RunComparison, shown: Sequence[Change]) -> str:
    """The farthest of what counts against the candidate, and the farthest that speaks for it."""
    said: list[str] = []
    for side, word in ((WORSE, "worse"), (BETTER, "better")):
        own = [change for change in shown if change.verdict in side]
        if own:
            farthest = max(own, key=lambda change: abs(log(change.ratio or 1.0)))
            said.append(
                f"{len(own):,} of {len(shown):,} figures shown {'is' if len(own) == 1 else 'are'} {word}, farthest "
                f"{farthest.title} of {farthest.workload} / {farthest.strategy}: {show_ratio(farthest)} of "
                f"{comparison.baseline}'s ({VERDICT_WORDS[farthest.verdict]})"
            )
    if not said:
        said.append(f"None of {len(shown):,} figures shown of {comparison.candidate} is worse or better")
    undecided = sum(change.verdict == "undecided" for change in shown)
    if undecided:
        said.append(f"{undecided:,} {'is' if undecided == 1 else 'are'} undecided")
    unlike = "Runs that are not alike: " if comparison.mismatches else ""
    return one_line(f"{unlike}{'; '.join(said)}.")
