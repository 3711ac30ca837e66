"""Why a device peak is another one: the parts of both sides' peaks, laid side by side."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from offload_eval.analysis.cells import cell_records
from offload_eval.analysis.compare_metrics import BYTES_RATIO, ValueMetric
from offload_eval.analysis.compare_pairs import RunSide
from offload_eval.analysis.compare_values import make_change
from offload_eval.analysis.memory import explain_memory
from offload_eval.core.comparison import Change, MemoryChange, MemoryPart
from offload_eval.core.judgement import PhaseMemory
from offload_eval.core.records import PHASES, Phase, RunRecord

BEYOND: Final = ("allocator", "context")
"""Parts beyond the peak allocated."""
TRACED_PEAKS: Final[Mapping[Phase, ValueMetric]] = {
    phase: ValueMetric(
        f"traced_{phase}_peak_bytes", f"{phase} peak, traced", "bytes", lambda _: None, least_ratio=BYTES_RATIO
    )
    for phase in PHASES
}
Memories = Mapping[tuple[str, Phase], PhaseMemory]
Pair = tuple[RunRecord, RunRecord]


def memories_of(side: RunSide) -> Memories:
    """The memory of every cell that ran, by its run_id and phase."""
    explained = explain_memory(cell_records(side.records))
    return {(memory.run_id, memory.phase): memory for memory in explained if memory.run_id is not None}


def explain_changes(before: Memories, after: Memories, pairs: Sequence[Pair]) -> tuple[MemoryChange, ...]:
    """Takes every peak apart that is not the same on both sides.

    Where both sides have the cell's trace, the parts are weights, KV, cache transients, logits, activations,
    workspaces, forced tokens and what is unexplained; else weights and KV by arithmetic, and all the rest as one. They
    sum to the peak. `allocator` is the peak reserved beyond it, `context` the peak in use on the device beyond that.
    """
    changes = [
        _explained(old, new, phase, before[old.run_id, phase], after[new.run_id, phase])
        for old, new in _known(before, after, pairs)
        for phase in PHASES
    ]
    return tuple(change for change in changes if change is not None)


def _known(before: Memories, after: Memories, pairs: Sequence[Pair]) -> list[Pair]:
    """Pairs whose memory is known: of two records of one spec only the later one's is."""
    return [(old, new) for old, new in pairs if (old.run_id, "prefill") in before and (new.run_id, "prefill") in after]


def compare_traced_peaks(before: Memories, after: Memories, pairs: Sequence[Pair]) -> list[Change]:
    """Holds the traced peaks of every pair side by side."""
    changes: list[Change] = []
    for old, new in _known(before, after, pairs):
        for phase, metric in TRACED_PEAKS.items():
            mine, theirs = before[old.run_id, phase], after[new.run_id, phase]
            if mine.traced_peak_bytes is None and theirs.traced_peak_bytes is None:
                continue
            sizes = mine.traced_peak_bytes, theirs.traced_peak_bytes
            change = make_change(metric, *sizes, old.spec.workload.label, old.spec.strategy.label)
            ids = {"baseline_run_id": mine.traced_run_id, "candidate_run_id": theirs.traced_run_id}
            changes.append(msgspec.structs.replace(change, **ids))
    return changes


def _explained(
    old: RunRecord, new: RunRecord, phase: Phase, before: PhaseMemory, after: PhaseMemory
) -> MemoryChange | None:
    peaks: tuple[Literal["allocated", "traced"], int | None, int | None]
    peaks = "allocated", before.peak_allocated_bytes, after.peak_allocated_bytes
    if peaks[1] is None or peaks[2] is None:
        peaks = "traced", before.traced_peak_bytes, after.traced_peak_bytes
    peak, old_bytes, new_bytes = peaks
    if old_bytes is None or new_bytes is None:
        return None
    if old_bytes == new_bytes and before.allocator_bytes == after.allocator_bytes:
        return None
    # Traced parts of one side and arithmetic of the other do not correspond.
    traced = before.traced_peak_bytes is not None and after.traced_peak_bytes is not None
    mine = _parts(before, old.model.weights_bytes, old_bytes, traced=traced)
    theirs = _parts(after, new.model.weights_bytes, new_bytes, traced=traced)
    return MemoryChange(
        workload=old.spec.workload.label,
        strategy=old.spec.strategy.label,
        phase=phase,
        peak=peak,
        baseline_bytes=old_bytes,
        candidate_bytes=new_bytes,
        parts=_differing(mine, theirs),
    )


def _differing(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[MemoryPart, ...]:
    """Parts that differ, the largest difference first; one that only one side knows is left out."""
    parts = [
        MemoryPart(part=name, baseline_bytes=size, candidate_bytes=after[name])
        for name, size in before.items()
        if name in after and after[name] != size
    ]
    return tuple(sorted(parts, key=lambda part: -abs(part.candidate_bytes - part.baseline_bytes)))


def _parts(memory: PhaseMemory, weights_bytes: int, peak_bytes: int, *, traced: bool) -> dict[str, int]:
    """Parts that sum to the peak, and after them what lies beyond it."""
    parts = _traced_parts(memory, weights_bytes) if traced else _arithmetic_parts(memory, weights_bytes)
    parts["unexplained" if traced else "all else"] = peak_bytes - sum(parts.values())
    beyond = {"allocator": memory.allocator_bytes, "context": memory.context_bytes}
    return parts | {name: size for name, size in beyond.items() if size is not None}


def _traced_parts(memory: PhaseMemory, weights_bytes: int) -> dict[str, int]:
    return {
        "weights": weights_bytes + (memory.weights_beyond_bytes or 0),
        "KV cache": memory.traced_kv_bytes or 0,
        "cache transients": memory.cache_transient_bytes or 0,
        "logits": memory.logits_bytes or 0,
        "activations": memory.activations_bytes or 0,
        "workspaces": memory.workspaces_bytes or 0,
        "forced tokens": memory.forced_tokens_bytes or 0,
    }


def _arithmetic_parts(memory: PhaseMemory, weights_bytes: int) -> dict[str, int]:
    """Weights, and KV at rest where the arithmetic knows the model."""
    kv_bytes = None if memory.analytic_bytes is None else memory.analytic_bytes - weights_bytes
    return {"weights": weights_bytes} | ({} if kv_bytes is None else {"KV cache": kv_bytes})
