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
from offload_eval.core.trace import PhaseTrace, Trace, TracedCell
from offload_eval.units import format_bytes, format_duration

CONTRIBUTORS_SHOWN: Final = 5
_BARS: Final = "▁▂▃▄▅▆▇█"
_CHART_COLUMNS: Final = 60


def render_traces(name: str, model: ModelSpec, cells: Sequence[TracedCell]) -> Iterator[RenderableType]:
    """The parts from top to bottom; each fits 100 columns."""
    yield Text(
        f"{name} ({model.dtype}, {model.attn_implementation} attention), traced: the real code, no data", style="bold"
    )
    for workload, group in groupby(cells, key=lambda cell: cell.workload):
        listed = list(group)
        traced = [(cell, cell.trace) for cell in listed if cell.trace is not None]
        yield Text()
        yield Text(_workload_line(workload, traced[0][1] if traced else None), style="bold")
        yield _phases(traced)
        for cell in listed:
            if cell.refusal is not None:
                yield Text(f"{cell.strategy}: {cell.refusal}")
        yield from _admissions(listed)
        yield from _latencies(listed)
        for cell, trace in traced:
            yield from _peaks(cell, trace)
    yield Text()
    yield Text("Assumptions", style="bold")
    for assumption in _assumptions(cells):
        yield Text(f"- {assumption}")


def _workload_line(workload: str, trace: Trace | None) -> str:
    if trace is None:
        return workload
    asked = trace.workload
    lengths = f"{asked.prompt_tokens:,} prompt and {asked.output_tokens:,} generated tokens"
    return f"{workload}: {asked.batch_size:,} sessions of {lengths}; weights {format_bytes(trace.weights_bytes)}"


def _table(first: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(first, no_wrap=True)
    return table


def _phases(traced: Sequence[tuple[TracedCell, Trace]]) -> Table:
    """Two rows a strategy. The decode row is the last step's, its peak the highest of all that were traced."""
    table = _table("strategy")
    table.add_column("phase", no_wrap=True)
    for name in ("peak\ndevice", "live\ndevice", "live\nhost", "H2D", "D2H", "copies\nH2D, D2H"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell, trace in traced:
        table.add_row(cell.strategy, "prefill", *_phase_numbers(trace.prefill, trace.prefill.peak_device_bytes))
        table.add_row("", "a decode step", *_phase_numbers(trace.decode, trace.decode_peak_device_bytes))
    return table


def _phase_numbers(phase: PhaseTrace, peak_bytes: int) -> list[str]:
    sizes = (phase.live_host_bytes or None, phase.h2d_bytes or None, phase.d2h_bytes or None)
    copies = (
        f"{phase.num_h2d_copies:,}, {phase.num_d2h_copies:,}" if phase.num_h2d_copies or phase.num_d2h_copies else "-"
    )
    return [format_bytes(peak_bytes), format_bytes(phase.live_device_bytes), *map(format_bytes, sizes), copies]


def _peaks(cell: TracedCell, trace: Trace) -> Iterator[RenderableType]:
    """The largest contributors to both peaks, and live bytes over the run."""
    steps = max(trace.steps, key=lambda step: step.peak_device_bytes)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column(f"{cell.strategy}: largest at the prefill's peak", overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column(f"at decode's, step {steps.step:,}", overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    for number in range(CONTRIBUTORS_SHOWN):
        table.add_row(*_contributor(trace.prefill, number), *_contributor(steps, number))
    yield table
    yield Text(f"live bytes over prefill and {len(trace.steps)} traced steps, from 0 to {_highest(trace)}:")
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
    found = [(cell, cell.admission) for cell in cells if cell.admission is not None]
    if not found:
        return
    yield Text(f"Sessions whose traced peak fits {format_bytes(found[0][1].available_bytes)}, weights included:")
    table = _table("strategy")
    for name in ("in prefill", "in decode", "both", "batches traced"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell, each in found:
        mark = " or more" if each.is_capped else ""
        numbers = (
            f"{each.prefill_sessions:,}",
            f"{each.decode_sessions:,}",
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
    yield Text(f"Least times on {hardware.hardware} ({calibrated}): bounds, not predictions.")
    table = _table("strategy")
    table.add_column("", no_wrap=True)
    for name in ("ideal", "scheduled", "serial"):
        table.add_column(name, justify="right", no_wrap=True)
    for cell, latency in found:
        table.add_row(cell.strategy, "TTFT", *_bounds(latency.ttft))
        table.add_row("", "TPOT", *_bounds(latency.tpot))
    yield table


def _bounds(phase: PhaseLatency) -> list[str]:
    found = (phase.ideal, phase.scheduled, phase.serial)
    return [f"{format_duration(each.seconds)} ({_LIMITS[each.limited_by]})" for each in found]


_LIMITS: Final = {"compute": "compute", "memory": "memory", "h2d": "H2D", "d2h": "D2H"}


def _assumptions(cells: Sequence[TracedCell]) -> Iterator[str]:
    strategies: dict[str, dict[str, None]] = {}
    for cell in cells:
        own = cell.trace.assumptions if cell.trace is not None else ()
        for assumption in (*own, *(cell.latency.assumptions if cell.latency is not None else ())):
            strategies.setdefault(assumption, {})[cell.strategy] = None
    num_traced = len({cell.strategy for cell in cells if cell.trace is not None})
    for assumption, names in strategies.items():
        yield assumption if len(names) == num_traced else f"{', '.join(names)}: {assumption}"
