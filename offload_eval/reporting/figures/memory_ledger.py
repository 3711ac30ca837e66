"""Device memory of each strategy, part by part: by arithmetic, traced and of the run; prefill and decode apart."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from offload_eval.analysis.memory import explain_memory
from offload_eval.core.judgement import PhaseMemory
from offload_eval.core.records import PHASES, RunRecord
from offload_eval.reporting.display import ByteScale, byte_scale
from offload_eval.reporting.figures.drawing import Drawing
from offload_eval.reporting.figures.style import (
    COLOURS,
    INK,
    MOST_STRATEGIES,
    RULE,
    add_legend,
    new_figure,
    shown_name,
)
from offload_eval.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = COLOURS
PARTS: Final = {
    "weights": BLUE,
    "KV": ORANGE,
    "cache transients": VERMILION,
    "logits": PURPLE,
    "activations": GREEN,
    "above the weights, not taken apart": SKY,
    "runtime and reserve of the budget, or allocator and context of the run": RULE,
}
"""Colour of each part of a bar, in the order they are stacked."""
_OPAQUE, _REST = list(PARTS)[-2:]
_BAR_IN: Final = 0.19
_MOST_BUDGET: Final = 2
"""Of the longest bar: a line farther out would leave no room for the bars."""


class Bar(NamedTuple):
    """One rung of one strategy in one phase."""

    strategy: str
    rung: str
    parts: dict[str, int]
    """Bytes of each of `PARTS` that there is."""


def draw_memory_ledger(records: Sequence[RunRecord]) -> Drawing | None:
    """Draws one workload's cells.

    Args:
        records: Of one workload, of runs and of traces.

    Returns:
        None where nothing was traced and no peak was seen: the arithmetic alone is no finding.
    """
    memories = [memory for memory in explain_memory(records) if _peak_bytes(memory) is not None]
    strategies = list(dict.fromkeys(memory.strategy for memory in memories))[:MOST_STRATEGIES]
    if not strategies:
        return None
    shown = [memory for memory in memories if memory.strategy in strategies]
    title = f"Device memory of {shown[0].workload} by strategy, phase and rung"
    return Drawing("memory", title, _caption(shown), memory_figure(records, shown))


def memory_figure(records: Sequence[RunRecord], memories: Sequence[PhaseMemory]) -> "Figure":
    """Two panels of stacked bars, in the unit of the largest; a line is the device budget."""
    known = {record.run_id: record for record in records}
    bars = {
        phase: [
            bar
            for memory in memories
            if memory.phase == phase
            for bar in bars_of(memory, known[memory.run_id or memory.traced_run_id or ""])
        ]
        for phase in PHASES
    }
    scale = byte_scale(sum(bar.parts.values()) for phase in PHASES for bar in bars[phase])
    longest = max(len(phase_bars) for phase_bars in bars.values())
    figure, panels = new_figure(1, 2, 1.5 + _BAR_IN * longest)
    budget_bytes = records[0].spec.budget.device_bytes
    longest_bytes = max(sum(bar.parts.values()) for phase in PHASES for bar in bars[phase])
    has_budget = budget_bytes <= _MOST_BUDGET * longest_bytes
    furthest_bytes = max(longest_bytes, budget_bytes) if has_budget else longest_bytes
    for panel, phase in zip(panels, PHASES, strict=True):
        _draw_bars(panel, bars[phase], scale)
        panel.set(title=phase, xlabel=f"device memory ({scale.unit})")
        if has_budget:
            panel.axvline(budget_bytes / scale.bytes, color=INK, linestyle="--", linewidth=1)
            panel.set_title(f"{phase}; dashed: device budget")
        panel.set_xlim(0, 1.05 * furthest_bytes / scale.bytes)
    handles = {part: patch for panel in panels for part, patch in _patches(panel)}
    labels = [part for part in PARTS if part in handles]
    add_legend(figure, [handles[part] for part in labels], labels)
    return figure


def bars_of(memory: PhaseMemory, record: RunRecord) -> list[Bar]:
    """The rungs of a phase that are known; parts below zero, as a window's view may have, are none."""
    weights_bytes, budget = record.model.weights_bytes, record.spec.budget
    budgeted = {_REST: budget.runtime_bytes + budget.reserve_bytes}
    bars = []
    if memory.analytic_bytes is not None:
        kv_bytes = memory.analytic_bytes - weights_bytes
        bars.append(("analytic", {"weights": weights_bytes, "KV": kv_bytes} | budgeted))
    if memory.traced_peak_bytes is not None:
        bars.append(("traced", _traced_parts(memory, weights_bytes) | budgeted))
    if memory.peak_allocated_bytes is not None:
        above = {"weights": weights_bytes, _OPAQUE: memory.peak_allocated_bytes - weights_bytes}
        bars.append((memory.run_evidence or "run", above | {_REST: _beyond_allocated(memory)}))
    return [
        Bar(memory.strategy, rung, {part: size for part, size in parts.items() if size > 0}) for rung, parts in bars
    ]


def _traced_parts(memory: PhaseMemory, weights_bytes: int) -> dict[str, int]:
    return {
        "weights": weights_bytes + (memory.weights_beyond_bytes or 0),
        "KV": memory.traced_kv_bytes or 0,
        "cache transients": memory.cache_transient_bytes or 0,
        "logits": memory.logits_bytes or 0,
        "activations": memory.activations_bytes or 0,
    }


def _beyond_allocated(memory: PhaseMemory) -> int:
    return (memory.allocator_bytes or 0) + (memory.context_bytes or 0)


def _draw_bars(panel: "Axes", bars: Sequence[Bar], scale: ByteScale) -> None:
    places = range(len(bars))
    ends = [0.0] * len(bars)
    for part, colour in PARTS.items():
        widths = [bar.parts.get(part, 0) / scale.bytes for bar in bars]
        if any(widths):
            panel.barh(places, widths, left=ends, height=0.8, color=colour, edgecolor=INK, linewidth=0.4, label=part)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    panel.set_yticks(places, [f"{shown_name(bar.strategy)}, {bar.rung}" for bar in bars], fontsize=7.5)
    panel.invert_yaxis()
    panel.grid(visible=False, axis="y")


def _patches(panel: "Axes") -> "list[tuple[str, Artist]]":
    handles, labels = panel.get_legend_handles_labels()
    return list(zip(labels, handles, strict=True))


def _peak_bytes(memory: PhaseMemory) -> int | None:
    return memory.traced_peak_bytes if memory.peak_allocated_bytes is None else memory.peak_allocated_bytes


def _caption(memories: Sequence[PhaseMemory]) -> str:
    """The highest peak against its arithmetic, and the largest thing that the arithmetic leaves out."""
    highest = max(memories, key=lambda memory: _peak_bytes(memory) or 0)
    peak_bytes = _peak_bytes(highest) or 0
    rung = "traced" if highest.peak_allocated_bytes is None else highest.run_evidence
    where = f"in {highest.phase} ({rung})"
    said = f"{highest.workload}: {highest.strategy} peaks highest, at {format_bytes(peak_bytes)} {where}"
    if highest.analytic_bytes:
        said += f", {peak_bytes / highest.analytic_bytes:.2f} times weights and KV by arithmetic"
    left_out = {
        "cache transients": highest.cache_transient_bytes or 0,
        "logits": highest.logits_bytes or 0,
        "activations": highest.activations_bytes or 0,
    }
    part, size_bytes = max(left_out.items(), key=lambda item: item[1])
    return f"{said}; {part} are {format_bytes(size_bytes)} of it." if size_bytes > 0 else f"{said}."
