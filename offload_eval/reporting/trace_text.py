"""Traces for the terminal: peaks and bytes moved, what each peak is made of, and the course of live bytes."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from offload_eval.core.experiment import ModelSpec
from offload_eval.core.latency import PhaseLatency
from offload_eval.core.records import PHASES
from offload_eval.core.trace import PhaseTrace, Trace, TracedCell
from offload_eval.units import format_bytes, format_duration

CONTRIBUTORS_SHOWN: Final = 5
_BARS: Final = "▁▂▃▄▅▆▇█"
_CHART_COLUMNS: Final = 60


def render_traces(
    name: str, model: ModelSpec, cells: Sequence[TracedCell], notes: Sequence[str] = ()
) -> Iterator[RenderableType]:
    """The parts from top to bottom; each fits 80 columns."""
    yield Text(
        f"{name} ({model.dtype}, {model.attn_implementation} attention), traced: the real code, no data", style="bold"
    )
    for workload, group in groupby(cells, key=lambda cell: cell.workload):
        listed = list(group)
        traced = [(cell, cell.trace) for cell in listed if cell.trace is not None]
        yield Text()
        yield Text(_workload_line(workload, traced[0][1] if traced else None), style="bold")
        if traced:
            yield _phases(traced)
        for cell in listed:
            if cell.refusal is not None:
                yield Text(f"{cell.strategy}: {cell.refusal}")
        yield from _moved(listed)
        yield from _admissions(listed)
        yield from _latencies(listed)
        for cell, trace in traced:
            yield from _peaks(cell, trace)
    yield Text()
    yield Text("Assumptions", style="bold")
    for assumption in (*notes, *_assumptions(cells)):
        yield Text(f"- {assumption}")


def moved_ratio(cell: TracedCell, cells: Sequence[TracedCell]) -> float | None:
    """Bytes that one decode step moves both ways over those of transformers' offloading; None without either."""
    offloaded = next((each for each in cells if each.kind == "offloaded" and each.workload == cell.workload), None)
    if cell.trace is None or offloaded is None or offloaded.trace is None:
        return None
    ours, theirs = cell.trace.busiest_step, offloaded.trace.busiest_step
    moved_bytes, whole_bytes = (each.h2d_bytes + each.d2h_bytes for each in (ours, theirs))
    return moved_bytes / whole_bytes if moved_bytes and whole_bytes else None


def _moved(cells: Sequence[TracedCell]) -> Iterator[Text]:
    for cell in cells:
        ratio = moved_ratio(cell, cells)
        if ratio is not None and cell.kind != "offloaded":
            words = "what offloaded moves in a decode step, both ways together"
            yield Text(f"{cell.strategy} moves {ratio:.2f} times {words}")


def _workload_line(workload: str, trace: Trace | None) -> str:
    if trace is None:
        return workload
    asked = trace.workload
    lengths = f"{asked.prompt_tokens:,} prompt and {asked.output_tokens:,} generated tokens"
    sessions = "1 session" if asked.batch_size == 1 else f"{asked.batch_size:,} sessions"
    return f"{workload}: {sessions} of {lengths}; weights {format_bytes(trace.weights_bytes)}"


def _table(first: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(first, overflow="fold")
    return table


def _phases(traced: Sequence[tuple[TracedCell, Trace]]) -> Table:
    """Two rows a strategy. Of decode the highest peak, what lives after the last step, and the most a step moves."""
    table = _table("strategy")
    for name in ("peak\ndevice", "live\ndevice", "live\nhost", "H2D", "D2H"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell, trace in traced:
        table.add_row(Text(cell.strategy, style="bold"))
        table.add_row("  prefill", *_phase_numbers(trace.prefill, trace.prefill.peak_device_bytes, trace.prefill))
        moving = trace.busiest_step
        table.add_row("  a decode step", *_phase_numbers(trace.decode, trace.decode_peak_device_bytes, moving))
    return table


def _phase_numbers(phase: PhaseTrace, peak_bytes: int, moving: PhaseTrace) -> list[str]:
    sizes = (phase.live_host_bytes or None, moving.h2d_bytes or None, moving.d2h_bytes or None)
    return [format_bytes(peak_bytes), format_bytes(phase.live_device_bytes), *map(format_bytes, sizes)]


def _peaks(cell: TracedCell, trace: Trace) -> Iterator[RenderableType]:
    """The largest contributors to both peaks, and live bytes over the run."""
    highest = trace.highest_step
    yield Text(f"{cell.strategy}: the largest at the peak of prefill, and of decode (step {highest.step:,})")
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for phase in PHASES:
        table.add_column(phase, overflow="fold")
        table.add_column("bytes", justify="right", no_wrap=True)
    for number in range(CONTRIBUTORS_SHOWN):
        table.add_row(*_contributor(trace.prefill, number), *_contributor(highest, number))
    yield table
    steps = "1 traced step" if len(trace.steps) == 1 else f"{len(trace.steps)} traced steps"
    yield Text(f"Live bytes over prefill | {steps}, from 0 to {_highest(trace)}:")
    yield Text(_chart(trace))


def _contributor(phase: PhaseTrace, number: int) -> tuple[str, str]:
    if number >= len(phase.contributors):
        return "", ""
    found = phase.contributors[number]
    operator = f" ({found.operator})" if found.operator else ""
    return f"{found.module}{operator}", format_bytes(found.bytes)


def _highest(trace: Trace) -> str:
    return format_bytes(max(trace.prefill.peak_device_bytes, trace.decode_peak_device_bytes))


def _chart(trace: Trace) -> str:
    """Bars of live bytes; a stroke divides prefill from decode."""
    decode = [bytes_ for step in trace.steps for bytes_ in step.timeline_bytes]
    top = max(trace.prefill.peak_device_bytes, trace.decode_peak_device_bytes, 1)
    half = _CHART_COLUMNS // 2
    return f"{_bars(trace.prefill.timeline_bytes, half, top)}|{_bars(decode, half, top)}"


def _bars(values: Sequence[int], columns: int, top: int) -> str:
    if not values:
        return ""
    count = min(columns, len(values))
    slices = [
        values[len(values) * n // count : max(len(values) * (n + 1) // count, len(values) * n // count + 1)]
        for n in range(count)
    ]
    return "".join(_BARS[min(len(_BARS) - 1, max(each) * len(_BARS) // top)] for each in slices)


def _admissions(cells: Sequence[TracedCell]) -> Iterator[RenderableType]:
    for cell in cells:
        if cell.admission_refusal is not None:
            yield Text(f"{cell.strategy}: no largest batch: {cell.admission_refusal}")
    found = [(cell, cell.admission) for cell in cells if cell.admission is not None]
    if not found:
        return
    available, host_bytes = format_bytes(found[0][1].available_bytes), found[0][1].host_available_bytes
    host = "host memory is not checked" if host_bytes is None else f"{format_bytes(host_bytes)} on the host"
    yield Text(f"Sessions whose traced peak fits {available}, weights included; {host}:")
    if all(cell.trace is None or cell.trace.weights_bytes > each.available_bytes for cell, each in found):
        yield Text("The weights alone do not fit.", style="bold")
    table = _table("strategy")
    for name in ("in prefill", "in decode", "on the host", "all", "batches traced"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell, each in found:
        mark = " or more" if each.is_capped else " (host)" if each.limiting_ledger == "host" else ""
        numbers = (
            f"{each.prefill_sessions:,}",
            f"{each.decode_sessions:,}",
            "-" if each.host_sessions is None else f"{each.host_sessions:,}",
            f"{each.limit:,}{mark}",
            f"{each.num_traces}",
        )
        table.add_row(cell.strategy, *numbers)
    yield table


def _latencies(cells: Sequence[TracedCell]) -> Iterator[RenderableType]:
    found = [(cell, cell.latency) for cell in cells if cell.latency is not None]
    if not found:
        return
    hardware = found[0][1]
    calibrated = "calibrated" if hardware.calibrated else "from documents"
    yield Text(f"Least times of this batch on {hardware.hardware} ({calibrated}): bounds, not predictions.")
    table = _table("strategy")
    for name in ("ideal", "scheduled", "serial"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell, latency in found:
        table.add_row(Text(cell.strategy, style="bold"))
        table.add_row("  TTFT", *_bounds(latency.ttft))
        table.add_row("  TPOT", *_bounds(latency.tpot))
    yield table


def _bounds(phase: PhaseLatency) -> list[str]:
    found = (phase.ideal, phase.scheduled, phase.serial)
    return [f"{format_duration(each.seconds)}, {_LIMITS[each.limited_by]}" for each in found]


_LIMITS: Final = {"compute": "FLOP", "memory": "mem", "h2d": "H2D", "d2h": "D2H"}
"""The busiest resource, in few letters: FLOP/s, memory bandwidth, a direction of the link."""


def _assumptions(cells: Sequence[TracedCell]) -> Iterator[str]:
    strategies: dict[str, dict[str, None]] = {}
    for cell in cells:
        own = cell.trace.assumptions if cell.trace is not None else ()
        for assumption in (*own, *(cell.latency.assumptions if cell.latency is not None else ())):
            strategies.setdefault(assumption, {})[cell.strategy] = None
    num_traced = len({cell.strategy for cell in cells if cell.trace is not None})
    for assumption, names in strategies.items():
        yield assumption if len(names) == num_traced else f"{', '.join(names)}: {assumption}"
