"""What a smaller KV cache costs in fidelity: mean KL against the device bytes of a session's cache."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from offload_eval.analysis.cells import latest_records, mean_kl_nats, merged_sample, noise_floor_nats
from offload_eval.core.records import RunRecord
from offload_eval.reporting.display import byte_scale, show_number
from offload_eval.reporting.figures.drawing import Drawing, workload_and_rungs
from offload_eval.reporting.figures.style import INK, MOST_STRATEGIES, add_legend, looks_of, new_figure
from offload_eval.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class SizedFidelity(NamedTuple):
    """A strategy's cache and what came of it."""

    strategy: str
    kv_bytes: float
    """On the device when generation ends, for one session."""
    kl_nats: float
    """Mean over positions, against the baseline; 0 for the baseline itself."""
    is_baseline: bool


def draw_fidelity_by_size(records: Sequence[RunRecord]) -> Drawing | None:
    """Draws one workload's cells; None unless a strategy was held against a baseline."""
    runs = latest_records(records)
    points = [point for record in runs if (point := sized_fidelity(record)) is not None][:MOST_STRATEGIES]
    if all(point.is_baseline for point in points):
        return None
    floors = [floor for record in runs if (floor := noise_floor_nats(record)) is not None]
    floor_nats = max(floors, default=None)
    title = f"Mean KL of {runs[0].spec.workload.label} against KV bytes of a session, by strategy"
    caption = f"{workload_and_rungs(runs)}: {_caption(points, floor_nats)}"
    return Drawing("fidelity", title, caption, fidelity_figure(points, floor_nats))


def sized_fidelity(record: RunRecord) -> SizedFidelity | None:
    """None where the cache's bytes or, but for the baseline, its KL are not known."""
    kv_bytes, kl_nats = merged_sample(record).kv_cache_device_bytes, mean_kl_nats(record)
    spec = record.spec
    if spec.is_baseline:
        kl_nats = 0.0
    if kv_bytes is None or kl_nats is None or record.status != "ok":
        return None
    return SizedFidelity(spec.strategy.label, kv_bytes / spec.workload.batch_size, kl_nats, spec.is_baseline)


def fidelity_figure(points: Sequence[SizedFidelity], floor_nats: float | None) -> "Figure":
    """One mark for each strategy; a line is the noise floor. The axis is linear below its smallest value above 0."""
    from matplotlib.ticker import FuncFormatter

    figure, (panel,) = new_figure(1, 1, 3.8)
    scale = byte_scale(point.kv_bytes for point in points)
    looks = looks_of([point.strategy for point in points])
    marks = [
        panel.plot(
            [point.kv_bytes / scale.bytes],
            [point.kl_nats],
            linestyle="",
            color=looks[point.strategy].colour,
            marker=looks[point.strategy].marker,
            markersize=14 if point.is_baseline else 8,
            markeredgewidth=1.6 if point.is_baseline else 1.0,
            fillstyle="none" if point.is_baseline else "full",
            clip_on=False,
        )[0]
        for point in points
    ]
    labels = [looks[point.strategy].name + (", the baseline" if point.is_baseline else "") for point in points]
    above = [nats for nats in (floor_nats, *(point.kl_nats for point in points)) if nats]
    if above:
        panel.set_yscale("symlog", linthresh=min(above))
        panel.set_ylim(0, 2 * max(above))
    if floor_nats is not None:
        marks.append(panel.axhline(floor_nats, color=INK, linestyle="--", linewidth=1))
        labels.append("noise floor")
    panel.yaxis.set_major_formatter(FuncFormatter(lambda nats, _: show_number(nats, 3)))
    panel.set_xlim(0, 1.05 * max(point.kv_bytes for point in points) / scale.bytes)
    panel.set(xlabel=f"KV cache on the device for one session ({scale.unit})", ylabel="mean KL to the baseline (nats)")
    add_legend(figure, marks, labels)
    return figure


def _caption(points: Sequence[SizedFidelity], floor_nats: float | None) -> str:
    """The smallest cache and what it costs, in KL and against the baseline's bytes."""
    smallest = min((point for point in points if not point.is_baseline), key=lambda point: point.kv_bytes)
    said = f"{smallest.strategy} has the smallest cache, {format_bytes(smallest.kv_bytes)} a session"
    baseline = next((point for point in points if point.is_baseline), None)
    if baseline is not None and baseline.kv_bytes:
        said += f", {smallest.kv_bytes / baseline.kv_bytes:.2f} times {baseline.strategy}'s"
    said += f", at a mean KL of {show_number(smallest.kl_nats, 3)} nats"
    if floor_nats:
        said += f", {show_number(smallest.kl_nats / floor_nats, 3)} times the noise floor"
    return f"{said}."
