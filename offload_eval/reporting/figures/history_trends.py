"""What became of TPOT, the device's peak and the sessions of each strategy from run to run."""

from collections.abc import Sequence
from math import log
from typing import TYPE_CHECKING, Final, NamedTuple

from offload_eval.core.history import HistoryRow
from offload_eval.reporting.display import byte_scale, one_line
from offload_eval.reporting.figures.drawing import Drawing
from offload_eval.reporting.figures.style import MOST_STRATEGIES, Look, add_legend, looks_of, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_TRENDS: Final = 6
"""Workloads with a figure; the tables have all of them."""
LEAST_STEP: Final = 0.05
"""Of a figure over that of the run before: less is told as no step."""
_SESSIONS: Final = {
    "sessions_limit": "sessions (count), limit that ran",
    "sessions_by_peak": "sessions (count), by peak",
    "sessions_by_trace": "sessions (count), by trace",
}
"""In the order of what they are worth; the first that has a trend is drawn."""
_WORDS: Final = {"tpot_s": "TPOT", "peak_bytes": "device peak"} | dict.fromkeys(_SESSIONS, "sessions")
_MOST_TICKS: Final = 10
_RUN_CHARACTERS: Final = 16
_LEVEL_CHARACTERS: Final = 24
"""Of all runs' names together, that stand beside one another under a panel."""


class Trend(NamedTuple):
    """One figure of one workload over the runs."""

    field: str
    """Of `Figures`."""
    label: str
    """With the unit."""
    unit: float
    """What a value is divided by to be shown."""


class Step(NamedTuple):
    """From one run to the next that compares with it."""

    field: str
    row: HistoryRow
    ratio: float


def draw_history_trends(rows: Sequence[HistoryRow]) -> list[Drawing]:
    """Draws the workloads that were run more than once, those with the largest step first.

    Args:
        rows: What `make_history` made.

    Returns:
        At most `MOST_TRENDS` drawings; none where no figure was seen twice.
    """
    latest = {row.series: row.workload for row in rows}  # renamed work is the same work
    loads: dict[tuple[str, str], list[HistoryRow]] = {}
    for row in rows:
        loads.setdefault((row.experiment, latest[row.series]), []).append(row)
    found = [(own, trends) for own in loads.values() if (trends := trends_of(own))]
    found.sort(key=lambda each: -_size(largest_step(*each)))
    left_out = f" {MOST_TRENDS} of {len(found):,} workloads are drawn, those with the largest steps."
    drawings = [_draw(f"trend{place}", *each) for place, each in enumerate(found[:MOST_TRENDS])]
    if len(found) > MOST_TRENDS:
        drawings[0] = drawings[0]._replace(caption=drawings[0].caption + left_out)
    return drawings


def trends_of(rows: Sequence[HistoryRow]) -> list[Trend]:
    """The figures that some strategy has of at least two runs; of the sessions one rung."""
    sessions = [field for field in _SESSIONS if _is_trend(rows, field)][:1]
    scale = byte_scale(row.figures.peak_bytes for row in rows)
    trends = [
        Trend("tpot_s", "TPOT (ms)", 1e-3),
        Trend("peak_bytes", f"device peak ({scale.unit})", scale.bytes),
        *(Trend(field, _SESSIONS[field], 1) for field in sessions),
    ]
    return [trend for trend in trends if _is_trend(rows, trend.field)]


def trend_value(row: HistoryRow, field: str) -> float | None:
    """A figure that belongs into a trend: of a time none that swap was in, since it is the disk's."""
    if field == "tpot_s" and row.swapped:
        return None
    value: float | None = getattr(row.figures, field)
    return value


def steps_of(rows: Sequence[HistoryRow], field: str) -> list[tuple[HistoryRow, HistoryRow, float]]:
    """Each run with the earlier one that its figure compares with, and their ratio; both belong into the trend."""
    known = {(row.series, row.run_dir): row for row in rows if trend_value(row, field) is not None}
    steps = []
    for now in known.values():
        before, ratio = known.get((now.series, now.before or "")), getattr(now.ratios, field, None)
        if before is not None and ratio:
            steps.append((before, now, ratio))
    return steps


def largest_step(rows: Sequence[HistoryRow], trends: Sequence[Trend]) -> Step | None:
    """The step between comparable runs that is farthest from 1; None where none compare."""
    steps = [Step(trend.field, now, ratio) for trend in trends for _, now, ratio in steps_of(rows, trend.field)]
    return max(steps, key=_size, default=None)


def trends_figure(rows: Sequence[HistoryRow], trends: Sequence[Trend]) -> "Figure":
    """A panel for each figure. A line joins runs that compare: the same kind of machine, the same rung."""
    from matplotlib.lines import Line2D

    figure, panels = new_figure(1, len(trends), 3.6)
    runs = run_places(rows)
    seen = [row.strategy for row in rows if any(trend_value(row, trend.field) is not None for trend in trends)]
    looks = looks_of(list(dict.fromkeys(seen))[:MOST_STRATEGIES])
    for panel, trend in zip(panels, trends, strict=True):
        for strategy, look in looks.items():
            _draw_line(panel, [row for row in rows if row.strategy == strategy], trend, runs, look)
        _name_runs(panel, list(runs))
        panel.set_ylim(bottom=0, top=1.1 * max(panel.get_ylim()[1], 1e-9))
        panel.set(ylabel=trend.label, xlabel="run, by its start")
    handles = [Line2D([], [], color=look.colour, marker=look.marker) for look in looks.values()]
    add_legend(figure, handles, [look.name for look in looks.values()])
    return figure


def run_places(rows: Sequence[HistoryRow]) -> dict[str, int]:
    """Place of each run on the axis, by its first cell's start."""
    starts: dict[str, str] = {}
    for row in rows:
        starts[row.run_dir] = min(row.started_at_utc, starts.get(row.run_dir, row.started_at_utc))
    ordered = sorted(starts, key=lambda run: (starts[run], run))
    return {run: place for place, run in enumerate(ordered)}


def run_names(runs: Sequence[str]) -> list[str]:
    """The folders' own names where they tell the runs apart, else the ends of their paths."""
    own = [run.rpartition("/")[2] for run in runs]
    names = [one_line(name) for name in (own if len(set(own)) == len(own) else runs)]
    return [name if len(name) <= _RUN_CHARACTERS else f"…{name[1 - _RUN_CHARACTERS :]}" for name in names]


def _draw(name: str, rows: Sequence[HistoryRow], trends: Sequence[Trend]) -> Drawing:
    words = one_line(f"{rows[-1].experiment}: {rows[-1].workload}")
    title = f"Figures of {words} over the runs, by strategy"
    return Drawing(name, title, f"{words}: {_caption(rows, trends)}", trends_figure(rows, trends))


def _is_trend(rows: Sequence[HistoryRow], field: str) -> bool:
    seen = [row.series for row in rows if trend_value(row, field) is not None]
    return len(seen) > len(set(seen))


def _draw_line(panel: "Axes", rows: Sequence[HistoryRow], trend: Trend, runs: dict[str, int], look: Look) -> None:
    points = [
        (runs[row.run_dir], value / trend.unit) for row in rows if (value := trend_value(row, trend.field)) is not None
    ]
    panel.plot(*_columns(points), color=look.colour, marker=look.marker, linestyle="")
    for pair in steps_of(rows, trend.field):
        ends = [(runs[row.run_dir], (trend_value(row, trend.field) or 0) / trend.unit) for row in pair[:2]]
        panel.plot(*_columns(ends), color=look.colour, linewidth=1.2)


def _columns(points: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [place for place, _ in points], [value for _, value in points]


def _name_runs(panel: "Axes", runs: Sequence[str]) -> None:
    every = -(-len(runs) // _MOST_TICKS)
    names = run_names(runs)[::every]
    panel.set_xticks(range(0, len(runs), every), names, fontsize=7.5)
    if sum(map(len, names)) > _LEVEL_CHARACTERS:
        for label in panel.get_xticklabels():
            label.set(rotation=35, ha="right", rotation_mode="anchor")
    panel.set_xlim(-0.5, len(runs) - 0.5)
    panel.grid(visible=False, axis="x")


def _size(step: Step | None) -> float:
    return 0.0 if step is None else abs(log(step.ratio))


def _caption(rows: Sequence[HistoryRow], trends: Sequence[Trend]) -> str:
    step = largest_step(rows, trends)
    rungs = ", ".join(dict.fromkeys(row.evidence for row in rows))
    if step is None:
        return f"no two runs compare, each was made on another kind of machine or rung ({rungs})."
    if _size(step) < log(1 + LEAST_STEP):
        return f"no figure shown is more than {100 * LEAST_STEP:g} % from that of the run before it ({rungs})."
    row = step.row
    said = (
        f"the largest step is the {_WORDS[step.field]} of {row.strategy} in {row.run_dir}, {step.ratio:.2f}x of that "
        f"in {row.before} ({rungs})"
    )
    return one_line(f"{said}.")
