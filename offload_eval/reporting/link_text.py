"""A calibration of the link, for a terminal."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Final

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from offload_eval.analysis.link import link_notes
from offload_eval.analysis.statistics import relative_spread
from offload_eval.core.link import CopySeries, HostMemory, LinkCalibration, LinkFit
from offload_eval.core.records import Direction
from offload_eval.reporting.display import one_line
from offload_eval.reporting.sentences import EVIDENCE_WORDS
from offload_eval.units import format_bytes

_ARROWS: Final[dict[Direction, str]] = {"h2d": "H2D", "d2h": "D2H"}
_OTHER: Final[dict[Direction, str]] = {"h2d": "D2H", "d2h": "H2D"}


def render_link(calibration: LinkCalibration, fits: Sequence[LinkFit]) -> Iterator[RenderableType]:
    """Renders the medians by size, the fits, and what a reader has to know; nothing in it can act as markup."""
    yield Text(one_line(f"link of {calibration.device}: {calibration.link}"), style="bold")
    yield Text(EVIDENCE_WORDS[calibration.evidence])
    if calibration.device_numa_node is not None:
        yield Text(f"device on NUMA node {calibration.device_numa_node}")
    if calibration.host_numa_nodes:
        yield Text(f"process on NUMA node {', '.join(map(str, calibration.host_numa_nodes))}")
    for memory in dict.fromkeys(each.memory for each in calibration.series):
        yield Text("")
        yield _medians(calibration, memory)
    yield Text("")
    yield _fits(calibration, fits)
    for note in link_notes(calibration, fits):
        yield Text(f"- {one_line(note)}")


def _medians(calibration: LinkCalibration, memory: HostMemory) -> Table:
    series = [each for each in calibration.series if each.memory == memory]
    ways = list(dict.fromkeys(_way(each) for each in series))
    table = _table(f"GB/s, {calibration.evidence}, {memory}: median of {len(series[0].samples_s)} ± half the range")
    table.add_column("copy", justify="right", no_wrap=True)
    for way in ways:
        table.add_column(way, justify="right")
    for size_bytes in dict.fromkeys(each.size_bytes for each in series):
        by_way = {_way(each): each for each in series if each.size_bytes == size_bytes}
        table.add_row(format_bytes(size_bytes), *(_median(by_way.get(way)) for way in ways))
    return table


def _median(series: CopySeries | None) -> str:
    if series is None:
        return "-"
    times_s = series.copy_times_s
    spread = relative_spread(times_s)
    half = "" if spread is None else f" ±{spread / 2:4.0%}"
    return f"{series.size_bytes / median(times_s) / 1e9:.2f}{half}"


def _fits(calibration: LinkCalibration, fits: Sequence[LinkFit]) -> Table:
    table = _table(f"fit of latency + bytes/bandwidth, {calibration.evidence}")
    table.add_column("copies", no_wrap=True)
    for name in ("latency", "bandwidth", "worst error"):
        table.add_column(name, justify="right", no_wrap=True)
    for fit in fits:
        bandwidth = "-" if fit.bandwidth_bytes_per_s is None else f"{fit.bandwidth_bytes_per_s / 1e9:.2f} GB/s"
        latency, error = f"{fit.latency_s * 1e6:.1f} µs", f"{fit.worst_error_ratio:.0%}"
        table.add_row(f"{fit.memory}, {_way(fit)}", latency, bandwidth, error)
    return table


def _way(each: CopySeries | LinkFit) -> str:
    strided = " strided" if each.layout == "strided" else ""
    opposed = f" with {_OTHER[each.direction]}" if each.opposed else ""
    return f"{_ARROWS[each.direction]}{strided}{opposed}"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="", box=box.SIMPLE_HEAD, pad_edge=False)
