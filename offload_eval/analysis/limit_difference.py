"""Why the limit that ran and the traced one are not the same: the parts of one peak that the other lacks."""

from collections.abc import Sequence

from offload_eval.analysis.memory import explain_memory
from offload_eval.analysis.probes import traced_peak_bytes
from offload_eval.core.judgement import PhaseMemory
from offload_eval.core.limits import CapacityLimit
from offload_eval.core.records import RunRecord
from offload_eval.units import format_bytes


def explain_difference(limit: CapacityLimit, runs: Sequence[RunRecord], traces: Sequence[RunRecord]) -> str:
    """Lays the run's peak at its limit beside the trace's, and says whether what is between them suffices.

    Args:
        limit: With both limits.
        runs: Of the same strategy and lengths.
        traces: Of the same.

    Returns:
        Words; empty where the limits agree, or one is missing.
    """
    traced, measured = limit.traced, limit.measured
    if traced is None or measured is None or traced == measured:
        return ""
    if limit.limiting_ledger != "device" and traced > measured:
        return f"the trace admits {traced:,}, and knows nothing of what stopped the run: {limit.limited_by}"
    if measured == 0:
        return f"the trace admits {traced:,}, and not even one session ran: {limit.limited_by or 'none was tried'}"
    memory = _highest_at(measured, runs, traces)
    if memory is None:
        return f"the trace admits {traced:,}, and there is no trace of {measured:,} sessions to lay beside the run"
    room_bytes = _traced_room_bytes(limit, traces)
    said = f"the trace admits {traced:,}; at {measured:,} sessions {_beyond(memory)}"
    if traced < measured or room_bytes is None:
        return said
    explained = _beyond_bytes(memory) > room_bytes
    return f"{said}, and to the trace the next batch leaves {format_bytes(room_bytes)}: that " + (
        "is why it fails" if explained else "does not explain why it fails"
    )


def _highest_at(batch: int, runs: Sequence[RunRecord], traces: Sequence[RunRecord]) -> PhaseMemory | None:
    """The phase with the higher peak, of what the allocator held where that was counted."""
    pair = [each for each in (*runs, *traces) if each.spec.workload.batch_size == batch and each.spec.role == "fit"]
    known = [
        memory
        for memory in explain_memory(pair)
        if None not in (memory.peak_allocated_bytes, memory.traced_peak_bytes)
    ]
    return max(known, key=_held_bytes, default=None)


def _held_bytes(memory: PhaseMemory) -> int:
    return (memory.peak_allocated_bytes or 0) + (memory.allocator_bytes or 0)


def _beyond_bytes(memory: PhaseMemory) -> int:
    return _held_bytes(memory) - (memory.traced_peak_bytes or 0)


def _beyond(memory: PhaseMemory) -> str:
    parts = {
        "workspaces": memory.workspaces_bytes,
        "forced tokens": memory.forced_tokens_bytes,
        "the allocator": memory.allocator_bytes,
        "unexplained": memory.unexplained_bytes,
    }
    named = ", ".join(f"{name} {_signed(size)}" for name, size in parts.items() if size)
    more_bytes = _beyond_bytes(memory)
    where = "above" if more_bytes >= 0 else "below"
    peak = f"the run's peak in {memory.phase} lies {format_bytes(abs(more_bytes))} {where} the trace's"
    return f"{peak} ({named})" if named else peak


def _signed(size_bytes: int) -> str:
    return format_bytes(size_bytes) if size_bytes >= 0 else f"-{format_bytes(-size_bytes)}"


def _traced_room_bytes(limit: CapacityLimit, traces: Sequence[RunRecord]) -> int | None:
    """What the cap leaves over the traced peak of the batch that failed."""
    failed = [each.trace for each in traces if each.spec.workload.batch_size == limit.failed_at and each.trace]
    return limit.cap_bytes - traced_peak_bytes(failed[0]) if failed and limit.cap_bytes is not None else None
