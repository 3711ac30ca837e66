"""Latency of each token, median of the trials, with the steps in which a quantized cache flushes."""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Final

from offload_eval.analysis.cells import latest_records
from offload_eval.bounds.session_card import UPSTREAM_DEFAULTS
from offload_eval.core.experiment import QuantizedSpec
from offload_eval.core.records import RunRecord
from offload_eval.reporting.display import show_ms
from offload_eval.reporting.figures.drawing import Drawing, workload_and_rungs
from offload_eval.reporting.figures.style import INK, MOST_STRATEGIES, add_legend, looks_of, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_POINTS: Final = 400
"""Of one line: of more tokens the slowest of each few is drawn, so that no flush is lost."""

_MARKERS: Final = 8
"""On each line."""


def draw_token_latencies(records: Sequence[RunRecord]) -> Drawing | None:
    """Draws one workload's cells; None where no token was timed."""
    timed = [record for record in latest_records(records) if step_latencies_s(record)][:MOST_STRATEGIES]
    if not timed:
        return None
    pooled = max(1, -(-max(len(step_latencies_s(record)) for record in timed) // MOST_POINTS))
    caption = f"{workload_and_rungs(timed)}: {_caption(timed)}"
    if pooled > 1:
        caption += f" Each point is the slowest of {pooled} tokens."
    title = f"Inter-token latency of {timed[0].spec.workload.label} over the tokens, by strategy"
    return Drawing("latencies", title, caption, latencies_figure(timed, pooled))


def step_latencies_s(record: RunRecord) -> list[float]:
    """Median over the trials of the latency of each decode step, from step 1 on; empty where none was timed."""
    trials = [trial.inter_token_latencies_s for trial in record.trials if trial.inter_token_latencies_s]
    return [median(step) for step in zip(*trials, strict=False)]


def flush_steps(record: RunRecord) -> list[int]:
    """Decode steps in which a quantized cache quantizes what it kept unquantized; fp8 keeps nothing."""
    strategy = record.spec.strategy
    if not isinstance(strategy, QuantizedSpec) or strategy.backend == "fp8":
        return []
    length = (UPSTREAM_DEFAULTS | strategy.options)["residual_length"]
    return list(range(length, record.spec.workload.output_tokens, length))


def latencies_figure(records: Sequence[RunRecord], pooled: int) -> "Figure":
    """One line for each strategy; a dotted line stands where one flushes."""
    from matplotlib.lines import Line2D

    figure, (panel,) = new_figure(1, 1, 4.0)
    looks = looks_of([record.spec.strategy.label for record in records])
    for place, record in enumerate(records):
        latencies_s = step_latencies_s(record)
        slowest_ms = [max(latencies_s[at : at + pooled]) * 1000 for at in range(0, len(latencies_s), pooled)]
        steps = range(1, len(latencies_s) + 1, pooled)
        look, apart = looks[record.spec.strategy.label], max(1, len(slowest_ms) // _MARKERS)
        every = (place * apart // len(records), apart)  # markers of one strategy are not under another's
        panel.plot(steps, slowest_ms, color=look.colour, marker=look.marker, markevery=every, linewidth=1.1)
    flushes = _all_flushes(records)
    for step in flushes:
        panel.axvline(step, color=INK, linestyle=":", linewidth=0.7)
    panel.set_ylim(bottom=0)
    panel.set(xlabel="decode step (tokens after the first)", ylabel="inter-token latency, median of trials (ms)")
    handles = [Line2D([], [], color=look.colour, marker=look.marker) for look in looks.values()]
    labels = [look.name for look in looks.values()]
    if flushes:
        handles.append(Line2D([], [], color=INK, linestyle=":"))
        labels.append("quantizer flush")
    add_legend(figure, handles, labels)
    return figure


def _all_flushes(records: Iterable[RunRecord]) -> list[int]:
    """Up to as many as can be told apart."""
    steps = sorted({step for record in records for step in flush_steps(record)})
    return steps if len(steps) <= MOST_POINTS // 4 else []


def _caption(records: Sequence[RunRecord]) -> str:
    """The fastest and the slowest by their median, and what a flush costs where one was seen."""
    medians = {record.spec.strategy.label: median(step_latencies_s(record)) for record in records}
    fastest, slowest = min(medians, key=medians.__getitem__), max(medians, key=medians.__getitem__)
    said = f"{fastest} has the lowest median latency, {show_ms(medians[fastest], 3)} ms a token"
    if slowest != fastest:
        said += f", {slowest} the highest, {show_ms(medians[slowest], 3)} ms"
    ratios = {record.spec.strategy.label: ratio for record in records if (ratio := flush_ratio(record)) is not None}
    if ratios:
        label = max(ratios, key=ratios.__getitem__)
        said += f"; a step in which {label} flushes takes {ratios[label]:.2f} times its median"
    return f"{said}."


def flush_ratio(record: RunRecord) -> float | None:
    """Median latency of the steps that flush over the median of all; None where none flushes."""
    latencies_s = step_latencies_s(record)
    flushed_s = [latencies_s[step - 1] for step in flush_steps(record) if step <= len(latencies_s)]
    middle_s = median(latencies_s) if latencies_s else 0.0
    return median(flushed_s) / middle_s if flushed_s and middle_s else None
