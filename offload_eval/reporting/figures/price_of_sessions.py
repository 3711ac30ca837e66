"""TPOT against the sessions of a batch, with the stated limit of TPOT and the batches that no other one beats."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from offload_eval.analysis.probes import current_probes
from offload_eval.analysis.timed import Timed, timed_batches
from offload_eval.core.experiment import Experiment
from offload_eval.core.limits import Lengths, TimedBatch
from offload_eval.core.records import RunRecord
from offload_eval.reporting.capacity_tables import length_words
from offload_eval.reporting.display import show_ms
from offload_eval.reporting.figures.drawing import Drawing
from offload_eval.reporting.figures.style import INK, add_legend, looks_of, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from offload_eval.reporting.figures.style import Look

MOST_PANELS: Final = 4
"""Combinations of lengths in one figure; the tables have all of them."""


def draw_price_of_sessions(experiment: Experiment, records: Sequence[RunRecord]) -> Drawing | None:
    """Draws the timed batches of a capacity search; None where nothing was timed."""
    probes = current_probes(experiment, records)
    timed = timed_batches([record for record in probes if record.spec.role == "time"])
    shown = dict(list(timed.items())[:MOST_PANELS])
    if not shown:
        return None
    tpot_limit_s = None if experiment.capacity is None else experiment.capacity.tpot_limit_s
    rungs = {record.evidence for record in probes} - {"traced"}
    sentences = [_sentence(lengths, batches) for lengths, batches in shown.items()]
    caption = " ".join([*sentences, f"Times: {', '.join(sorted(rungs))}."])
    return Drawing("price", "TPOT against sessions by strategy", caption, price_figure(shown, tpot_limit_s))


def price_figure(timed: Timed, tpot_limit_s: float | None) -> "Figure":
    """A panel for each combination of lengths."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    columns = min(2, len(timed))
    rows = -(-len(timed) // columns)
    figure, panels = new_figure(rows, columns, 1.0 + 2.6 * rows)
    looks = looks_of([label for batches in timed.values() for label in batches])
    for panel, (lengths, batches) in zip(panels, timed.items(), strict=False):
        _draw_panel(panel, batches, looks)
        if tpot_limit_s is not None:
            panel.axhline(tpot_limit_s * 1000, color=INK, linestyle="--", linewidth=1)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.set_xlim(*_sessions_range(batches))
        panel.set(title=length_words(lengths), xlabel="sessions (count)", ylabel="TPOT (ms)")
    for panel in panels[len(timed) :]:
        panel.set_visible(False)
    handles = [Line2D([], [], color=look.colour, marker=look.marker) for look in looks.values()]
    handles.append(Line2D([], [], color=INK, linestyle="", marker="o", markersize=11, fillstyle="none"))
    labels = [*(look.name for look in looks.values()), "not beaten in both"]
    if tpot_limit_s is not None:
        handles.append(Line2D([], [], color=INK, linestyle="--"))
        labels.append("TPOT limit")
    add_legend(figure, handles, labels)
    return figure


def pareto_front(batches: Sequence[TimedBatch]) -> list[TimedBatch]:
    """Those that no other batch beats: none has as many sessions at as low a TPOT, and is better in one of them."""
    front: list[TimedBatch] = []
    for batch in sorted(batches, key=lambda batch: (-batch.sessions, batch.tpot_s)):
        if not front or batch.tpot_s < front[-1].tpot_s:
            front.append(batch)
    return front


def _draw_panel(panel: "Axes", batches: Mapping[str, Sequence[TimedBatch]], looks: "Mapping[str, Look]") -> None:
    for label, own in batches.items():
        look = looks[label]
        places = [batch.sessions for batch in own], [batch.tpot_s * 1000 for batch in own]
        panel.plot(*places, color=look.colour, marker=look.marker, linewidth=1)
    front = pareto_front([batch for own in batches.values() for batch in own])
    ring = [batch.sessions for batch in front], [batch.tpot_s * 1000 for batch in front]
    panel.plot(*ring, color=INK, linestyle="", marker="o", markersize=11, fillstyle="none")
    panel.set_ylim(0, 1120 * max(batch.tpot_s for own in batches.values() for batch in own))


def _sessions_range(batches: Mapping[str, Sequence[TimedBatch]]) -> tuple[float, float]:
    """Room for whole sessions on both sides, also of a single batch."""
    counts = [batch.sessions for own in batches.values() for batch in own]
    room = max(1.0, 0.1 * (max(counts) - min(counts)))
    return min(counts) - room, max(counts) + room


def _sentence(lengths: Lengths, batches: Mapping[str, Sequence[TimedBatch]]) -> str:
    every = [(label, batch) for label, own in batches.items() for batch in own]
    most_label, most = max(every, key=lambda each: (each[1].sessions, -each[1].tpot_s))
    least_label, least = min(every, key=lambda each: (each[1].tpot_s, -each[1].sessions))
    said = f"{length_words(lengths)}: most sessions under {most_label}, {_priced(most)}"
    return f"{said}." if most == least else f"{said}; lowest TPOT under {least_label}, {_priced(least)}."


def _priced(batch: TimedBatch) -> str:
    return f"{batch.sessions:,} at a TPOT of {show_ms(batch.tpot_s, 3)} ms"
