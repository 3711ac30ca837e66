"""Memory of every cell, phase by phase: by arithmetic, traced and of the run, and what lies between them by name."""

from collections.abc import Sequence
from typing import Final

from offload_eval.analysis.cells import latest_records, latest_traces, merged_sample
from offload_eval.bounds.strategy_bound import kv_device_bytes_after
from offload_eval.core.judgement import PhaseMemory
from offload_eval.core.records import PHASES, Phase, PhaseSample, RunRecord
from offload_eval.core.run_spec import RunSpec
from offload_eval.core.trace import KV_CACHE, PhaseTrace, StepTrace, Trace

_WEIGHTS: Final = "weights"


def explain_memory(records: Sequence[RunRecord]) -> tuple[PhaseMemory, ...]:
    """Lays the three rungs of each cell side by side and names what lies between them.

    Args:
        records: Of runs and of traces, in any order; a cell may have either or both.

    Returns:
        Prefill and decode of each cell, in the order the cells first appear.
    """
    runs = {record.spec: record for record in latest_records(records)}
    traces = {record.spec: record for record in latest_traces(records)}
    cells = dict.fromkeys(record.spec for record in records)
    return tuple(_explained(phase, runs.get(cell), traces.get(cell)) for cell in cells for phase in PHASES)


def _explained(phase: Phase, run: RunRecord | None, traced: RunRecord | None) -> PhaseMemory:
    record = run or traced
    assert record is not None
    trace = None if traced is None else traced.trace
    seen = PhaseSample() if run is None else getattr(merged_sample(run), phase)
    followed = None if trace is None else _highest(trace, phase)
    step = _step(record.spec, phase, followed)
    kv_bytes = kv_device_bytes_after(record.spec, record.model, step)
    weights_bytes = record.model.weights_bytes
    workspaces_bytes = _workspaces_bytes(run, trace)
    given_bytes = None if run is None else _given_bytes(run)
    traced_bytes = None if followed is None else followed.peak_device_bytes
    return PhaseMemory(
        workload=record.spec.workload.label,
        strategy=record.spec.strategy.label,
        phase=phase,
        step=step or None,
        run_id=None if run is None else run.run_id,
        run_evidence=None if run is None else run.evidence,
        run_status=None if run is None else run.status,
        traced_run_id=None if traced is None else traced.run_id,
        analytic_bytes=_sum(weights_bytes, kv_bytes),
        **_traced_parts(trace, followed, weights_bytes, kv_bytes),
        traced_peak_bytes=traced_bytes,
        workspaces_bytes=workspaces_bytes,
        forced_tokens_bytes=given_bytes,
        unexplained_bytes=_less(seen.peak_allocated_bytes, _sum(traced_bytes, workspaces_bytes, given_bytes)),
        peak_allocated_bytes=seen.peak_allocated_bytes,
        allocator_bytes=_less(seen.peak_reserved_bytes, seen.peak_allocated_bytes),
        context_bytes=_less(seen.peak_device_used_bytes, seen.peak_reserved_bytes),
    )


def _highest(trace: Trace, phase: Phase) -> PhaseTrace:
    """The prefill, or the first of the traced decode steps whose peak is highest."""
    if phase == "prefill":
        return trace.prefill
    return max(trace.steps, key=lambda step: step.peak_device_bytes)


def _step(spec: RunSpec, phase: Phase, followed: PhaseTrace | None) -> int:
    if phase == "prefill":
        return 0
    return followed.step if isinstance(followed, StepTrace) else spec.workload.output_tokens - 1


def _traced_parts(
    trace: Trace | None, followed: PhaseTrace | None, weights_bytes: int, kv_bytes: int | None
) -> dict[str, int | None]:
    """The parts of a traced peak, weights and KV as what they are beyond the arithmetic.

    Of what the cache allocated, as much as it holds when the phase ends is KV; the rest is transient: a quantizer's
    work, a copy in a concatenation, a layer in flight, or the storage behind a window's view.
    """
    if trace is None or followed is None:
        return {}
    parts = {_WEIGHTS: 0, KV_CACHE: 0, "logits": 0, "activations": 0}
    for contributor in followed.contributors:
        parts[_part(contributor.module, trace)] += contributor.bytes
    held_bytes = parts[KV_CACHE] if followed.kv_device_bytes is None else followed.kv_device_bytes
    traced_kv_bytes = min(parts[KV_CACHE], held_bytes)
    return {
        "weights_beyond_bytes": parts[_WEIGHTS] - weights_bytes,
        "kv_beyond_bytes": _less(traced_kv_bytes, kv_bytes),
        "traced_kv_bytes": traced_kv_bytes,
        "cache_transient_bytes": parts[KV_CACHE] - traced_kv_bytes,
        "logits_bytes": parts["logits"],
        "activations_bytes": parts["activations"],
    }


def _part(module: str, trace: Trace) -> str:
    if module == _WEIGHTS:
        return _WEIGHTS
    if module.rpartition(".")[2] == KV_CACHE:
        return KV_CACHE
    return "logits" if module in trace.logits_modules else "activations"


def _workspaces_bytes(run: RunRecord | None, trace: Trace | None) -> int | None:
    """What was live before the cell beyond the traced weights: libraries' workspaces, weights of another form."""
    return None if run is None or trace is None else _less(run.conditions.baseline_bytes, trace.weights_bytes)


def _given_bytes(run: RunRecord) -> int | None:
    """The baseline's tokens, which a run has on the device and a trace has not."""
    if run.conditions.forced_tokens is None:
        return None
    return run.spec.workload.forced_tokens_bytes if run.conditions.forced_tokens else 0


def _sum(*sizes: int | None) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _less(size: int | None, subtracted: int | None) -> int | None:
    return None if size is None or subtracted is None else size - subtracted
