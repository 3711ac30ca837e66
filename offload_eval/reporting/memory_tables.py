"""Device memory on three rungs: each row adds up from the arithmetic over the trace to the run."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import pandas as pd

from offload_eval.analysis.memory import explain_memory
from offload_eval.core.judgement import PhaseMemory
from offload_eval.core.records import PHASES, Evidence, Phase, RunRecord
from offload_eval.reporting.display import byte_scale, show_bytes, show_count
from offload_eval.reporting.markdown import paragraph, render_table, section
from offload_eval.reporting.tables import COUNT, TEXT, typed_frame

RUN: Final = "run"
"""Stands for the run's rung in a title."""
MEMORY_COLUMNS: Final[dict[str, str]] = {
    name: COUNT if name.endswith("_bytes") or name == "step" else TEXT for name in PhaseMemory.__struct_fields__
}
READING: Final = (
    "Each row adds up from left to right: the arithmetic and what a trace finds beyond it are the traced peak; that, "
    "what the run alone holds and what nobody has named are the peak of the run."
)


class Part(NamedTuple):
    """A column of bytes."""

    name: str
    title: str
    only_if_any: bool = False
    """Left out where no row has anything of it: none known, or all zero."""


PARTS: Final = (
    Part("analytic_bytes", "weights + KV, analytic"),
    Part("weights_beyond_bytes", "+ weights, traced", only_if_any=True),
    Part("kv_beyond_bytes", "+ KV, traced"),
    Part("cache_transient_bytes", "+ cache transients, traced"),
    Part("logits_bytes", "+ logits, traced"),
    Part("activations_bytes", "+ activations, traced"),
    Part("traced_peak_bytes", "= peak, traced"),
    Part("workspaces_bytes", f"+ workspaces, {RUN}", only_if_any=True),
    Part("forced_tokens_bytes", f"+ forced tokens, {RUN}"),
    Part("unexplained_bytes", f"+ unexplained, {RUN}"),
    Part("peak_allocated_bytes", f"= peak, {RUN}"),
    Part("allocator_bytes", f"+ allocator, {RUN}", only_if_any=True),
    Part("context_bytes", f"+ context, {RUN}", only_if_any=True),
)


def memory_frame(records: Sequence[RunRecord]) -> pd.DataFrame:
    """Two rows a cell, prefill and decode, of runs and of traces; bytes, NA where there is none."""
    rows = ({name: getattr(memory, name) for name in MEMORY_COLUMNS} for memory in explain_memory(records))
    return typed_frame(rows, MEMORY_COLUMNS)


def render_memory(records: Sequence[RunRecord]) -> str:
    """One table for each workload and phase, in one unit each; empty without records."""
    memories = explain_memory(records)
    groups: dict[str, dict[Phase, list[PhaseMemory]]] = {}
    for memory in memories:
        groups.setdefault(memory.workload, {phase: [] for phase in PHASES})[memory.phase].append(memory)
    tables = [_phase_table(workload, own) for workload, phases in groups.items() for own in phases.values()]
    return "\n\n".join([paragraph(READING), *tables]) if tables else ""


def _phase_table(workload: str, memories: Sequence[PhaseMemory]) -> str:
    sizes = {part: [getattr(memory, part.name) for memory in memories] for part in PARTS}
    shown = {part: column for part, column in sizes.items() if _is_shown(part, column)}
    scale = byte_scale(size for column in shown.values() for size in column)
    rung = _rung(memories)
    titles = [part.title.replace(RUN, rung) for part in shown]
    columns: list[list[str]] = [[show_bytes(size, scale) for size in column] for column in shown.values()]
    phase = memories[0].phase
    if phase == "decode":
        titles.insert(0, "step")
        columns.insert(0, [show_count(memory.step) for memory in memories])
    rows = [[_name(memory), *row] for memory, row in zip(memories, zip(*columns, strict=True), strict=True)]
    table = render_table(["strategy", *titles], rows, "l" + "r" * len(titles))
    return section(f"Memory of {phase}, in {scale.unit}: {workload}", table, level=3)


def _is_shown(part: Part, column: Sequence[Any]) -> bool:
    return any(column) if part.only_if_any else any(size is not None for size in column)


def _rung(memories: Sequence[PhaseMemory]) -> str:
    """The rung of the runs; `run` where there are several, or none."""
    rungs: set[Evidence] = {memory.run_evidence for memory in memories if memory.run_evidence is not None}
    return rungs.pop() if len(rungs) == 1 else RUN


def _name(memory: PhaseMemory) -> str:
    """The strategy, with the status of its run where that is not ok."""
    status = memory.run_status or "not run"
    return memory.strategy if status == "ok" else f"{memory.strategy} ({status})"
