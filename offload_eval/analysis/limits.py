"""What a capacity search concludes, from its records alone."""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from offload_eval.analysis.capacity import analytic_bound
from offload_eval.analysis.limit_difference import explain_difference
from offload_eval.analysis.memory import explain_memory
from offload_eval.analysis.probes import (
    SEARCHED,
    current_probes,
    exhausted,
    largest_passing,
    lengths_of,
    outcomes,
    smallest_failing,
    strategies_of,
    timed_batch,
    traced_peak_bytes,
)
from offload_eval.analysis.rules_outcomes import failure_reason
from offload_eval.bounds.host_ledger import is_held_to_host
from offload_eval.core.capacity import CapacitySpec
from offload_eval.core.experiment import Experiment, StrategySpec
from offload_eval.core.factors import expand_workloads
from offload_eval.core.judgement import Bound, PhaseMemory
from offload_eval.core.limits import CapacityLimit, TimedBatch
from offload_eval.core.records import Phase, RunRecord
from offload_eval.units import format_bytes

PARTS: Final = {
    "traced_kv_bytes": "KV",
    "cache_transient_bytes": "cache transients",
    "logits_bytes": "logits",
    "activations_bytes": "activations",
}
"""What of a traced peak grows with the batch."""


def find_limits(experiment: Experiment, records: Sequence[RunRecord]) -> tuple[CapacityLimit, ...]:
    """Concludes the limit of every strategy at every combination of lengths that was searched.

    Args:
        experiment: What the search was asked.
        records: Of its probes and their traces, and of anything else; see `current_probes`.

    Returns:
        By lengths, in the order they were searched, the in-GPU cache first. Where nothing was run, the limit is the
        traced one.
    """
    probes = current_probes(experiment, records)
    asked = experiment.capacity or CapacitySpec()
    in_gpu_strategy = experiment.in_gpu_strategy
    found = [
        _limit(group, asked, in_gpu_strategy) if any(map(_is_run, group)) else _by_trace(group, asked, in_gpu_strategy)
        for group in strategies_of(probes).values()
    ]
    limits = [limit for limit in found if limit is not None]
    order = list(dict.fromkeys(limit.lengths for limit in limits))
    ordered = sorted(limits, key=lambda limit: order.index(limit.lengths))
    in_gpu = {limit.lengths: limit for limit in limits if limit.is_in_gpu}
    return tuple(_beside_in_gpu(limit, in_gpu.get(limit.lengths), probes) for limit in ordered)


def has_failed_search(experiment: Experiment, records: Sequence[RunRecord]) -> bool:
    """Whether a probe failed for a reason that says nothing of its batch's size; what cannot run at all is none."""
    return any(
        record.status in ("failed", "timeout") and exhausted(record) is None
        for record in current_probes(experiment, records)
        if _is_run(record)
    )


def missing_limits(experiment: Experiment, limits: Sequence[CapacityLimit]) -> int:
    """How many limits a search has not come to yet; where any was run, those that were only traced are among them."""
    ran = [limit for limit in limits if limit.evidence != "traced"]
    found = {(limit.lengths, limit.label) for limit in ran or limits}
    lengths = {lengths_of(workload) for workload in expand_workloads(experiment)}
    return sum((each, strategy.label) not in found for each in lengths for strategy in experiment.strategies)


def _is_run(record: RunRecord) -> bool:
    return record.evidence != "traced"


def _limit(group: Sequence[RunRecord], capacity: CapacitySpec, in_gpu_strategy: StrategySpec | None) -> CapacityLimit:
    runs = [record for record in group if _is_run(record)]
    traces = [record for record in group if not _is_run(record)]
    searched = [record for record in runs if record.spec.role in SEARCHED]
    first = (searched or runs)[0]
    bound = analytic_bound(first)
    cap_bytes = next((cap for record in runs if (cap := record.conditions.cap_bytes) is not None), None)
    limit = msgspec.structs.replace(
        _searched_limit(first, in_gpu_strategy),
        cap_bytes=cap_bytes,
        probes=len({_batch(record) for record in searched if record.status != "unsupported"}),
        run_ids=tuple(record.run_id for record in runs),
        **_traced(traces, cap_bytes, capacity.most_sessions),
    )
    if (refusal := _refusal(searched)) is not None:
        return msgspec.structs.replace(limit, refusal=refusal)
    measured = _with_measured(limit, runs, traces, capacity)
    return measured if bound is None else _within_host(measured, bound)


def _searched_limit(record: RunRecord, in_gpu_strategy: StrategySpec | None) -> CapacityLimit:
    """What a limit is of, and its sessions by arithmetic."""
    bound, strategy = analytic_bound(record), record.spec.strategy
    return CapacityLimit(
        lengths=lengths_of(record.spec.workload),
        strategy=strategy,
        kind=strategy.kind,
        label=strategy.label,
        is_in_gpu=strategy == in_gpu_strategy,
        evidence=record.evidence,
        analytic=None if bound is None else bound.sessions,
        analytic_ledger=None if bound is None else bound.limiting_ledger,
    )


def _by_trace(
    traces: Sequence[RunRecord], capacity: CapacitySpec, in_gpu_strategy: StrategySpec | None
) -> CapacityLimit | None:
    """The limit of a strategy that nothing was run of; None where its traces do not say it yet."""
    first = traces[0]
    cap_bytes = first.spec.budget.cap_bytes(first.model.weights_bytes)
    found = _traced(traces, cap_bytes, capacity.most_sessions)
    limit = msgspec.structs.replace(
        _searched_limit(first, in_gpu_strategy),
        cap_bytes=cap_bytes,
        limit_run_ids=found.get("traced_run_ids", ()),
        **found,
    )
    if limit.traced is None:
        refused = next((record for record in traces if record.trace is None), None)
        if refused is None:
            return None
        ids = (refused.run_id,)
        return msgspec.structs.replace(limit, refusal=failure_reason(refused), traced_run_ids=ids, limit_run_ids=ids)
    bound = analytic_bound(first)
    host_sessions = None if bound is None or first.spec.device == "cpu" else bound.host_sessions
    if host_sessions is not None and limit.traced > host_sessions:
        return _within_pinned(limit, traces, host_sessions)
    following = next((record for record in traces if _batch(record) == limit.traced + 1), None)
    if following is None or limit.traced == capacity.most_sessions:
        return limit
    return msgspec.structs.replace(limit, failed_at=_batch(following), **_limiting_trace(following, cap_bytes))


def _within_pinned(limit: CapacityLimit, traces: Sequence[RunRecord], host_sessions: int) -> CapacityLimit:
    """A trace counts host bytes as they are asked for, and an enforced budget as the pinned allocator takes them."""
    run_ids = {_batch(record): record.run_id for record in traces}
    following = host_sessions + 1
    ids = tuple(run_ids[batch] for batch in (host_sessions, following) if batch in run_ids)
    return msgspec.structs.replace(
        limit,
        traced=host_sessions,
        traced_run_ids=ids,
        limit_run_ids=ids,
        failed_at=following,
        limiting_ledger="host",
        limited_by="host memory, by arithmetic: a pinned allocator rounds each buffer up to a power of two",
    )


def _limiting_trace(record: RunRecord, cap_bytes: int) -> dict[str, Any]:
    """What a traced batch passes first, the device's cap or the host's budget, and its largest part."""
    trace = record.trace
    assert trace is not None, "a limit has the trace of the next batch"
    if traced_peak_bytes(trace) <= cap_bytes:
        return {"limiting_ledger": "host", "limited_by": "host memory"}
    phase: Phase = "prefill" if trace.prefill.peak_device_bytes >= trace.decode_peak_device_bytes else "decode"
    return _limiting_device(record, trace.weights_bytes, cap_bytes, phase)


def _refusal(searched: Sequence[RunRecord]) -> str | None:
    """Why a search came to nothing: a probe that failed for no reason of size."""
    ended = [record for record in searched if record.status != "ok" and exhausted(record) is None]
    return failure_reason(ended[0]) if ended else None


def _traced(traces: Sequence[RunRecord], cap_bytes: int | None, most_sessions: int) -> dict[str, Any]:
    """The largest traced batch that fits both ledgers, up to the largest that was asked for, and its traces.

    Returns:
        Nothing unless the next larger batch was traced as well, or may not be tried.
    """
    batches = {
        _batch(record): traced_peak_bytes(record.trace) <= cap_bytes and _fits_host(record)
        for record in traces
        if record.trace is not None and cap_bytes is not None and _batch(record) <= most_sessions
    }
    fitting = max((batch for batch, fits in batches.items() if fits), default=0)
    # A trace that was lost leaves a gap, in which the limit may lie anywhere.
    if fitting != most_sessions and fitting + 1 not in batches:
        return {}
    run_ids = {_batch(record): record.run_id for record in traces}
    ids = tuple(run_ids[batch] for batch in (fitting, fitting + 1) if batch in batches)
    return {"traced": fitting, "traced_run_ids": ids}


def _fits_host(record: RunRecord) -> bool:
    host_bytes, trace = record.spec.budget.host_bytes, record.trace
    return host_bytes is None or trace is None or trace.kv_host_peak_bytes <= host_bytes


def _within_host(limit: CapacityLimit, bound: Bound) -> CapacityLimit:
    """Upstream's offloading allocates by itself: what ran past the host budget is no limit of that budget."""
    host = bound.host_sessions
    if host is None or limit.measured is None or limit.measured <= host or is_held_to_host(limit.strategy):
        return limit
    return msgspec.structs.replace(
        limit,
        measured=host,
        failed_at=host + 1,
        at_limit=None,
        limiting_ledger="host",
        limiting_phase=None,
        limiting_part=None,
        limited_by="host memory by arithmetic; transformers' offloading is counted, and not held to the budget",
        difference=f"{limit.measured:,} sessions ran, past the host's budget",
    )


def _with_measured(
    limit: CapacityLimit, runs: Sequence[RunRecord], traces: Sequence[RunRecord], capacity: CapacitySpec
) -> CapacityLimit:
    seen = outcomes(runs)
    measured, failed_at = largest_passing(seen), smallest_failing(seen)
    at_limit = [record for record in runs if _batch(record) == measured and record.spec.role in SEARCHED]
    failing = next((record for record in runs if _batch(record) == failed_at and record.status != "ok"), None)
    timed = _timed(runs)
    found = msgspec.structs.replace(
        limit,
        measured=measured,
        failed_at=failed_at,
        passes=sum(_passes(record) for record in at_limit),
        repeats=capacity.repeats,
        at_limit=timed.get(measured),
        limit_run_ids=tuple(
            record.run_id
            for record in runs
            if record.spec.role in SEARCHED and _batch(record) in (measured, failed_at)
        ),
        **({} if failing is None else _limiting(failing, traces)),
        **_under_objectives(runs, capacity, failed_at),
    )
    return msgspec.structs.replace(found, difference=explain_difference(found, runs, traces))


def _batch(record: RunRecord) -> int:
    return record.spec.workload.batch_size


def _passes(record: RunRecord) -> int:
    return sum(trial.decode.peak_allocated_bytes is not None for trial in record.trials)


def _timed(runs: Sequence[RunRecord]) -> dict[int, TimedBatch]:
    timed = ((_batch(record), timed_batch(record)) for record in runs if record.spec.role == "time")
    return {batch: figures for batch, figures in timed if figures is not None}


def _under_objectives(
    runs: Sequence[RunRecord], capacity: CapacitySpec, failed_at: int | None
) -> dict[str, TimedBatch | int | None]:
    """The largest timed batch below every one over its limits, and the smallest of those; unfinished ones are over."""
    tried = {_batch(record): timed_batch(record) for record in runs if record.spec.role == "time"}
    if not capacity.has_objectives or not tried:
        return {}
    over = [
        batch
        for batch, each in tried.items()
        if each is None or capacity.objectives_ratio(each.ttft_s, each.tpot_s) > 1
    ]
    first_over = min(over, default=failed_at)
    kept = [batch for batch in tried if batch not in over and (first_over is None or batch < first_over)]
    return {"under_slo": tried[max(kept)] if kept else None, "slo_failed_at": first_over}


def _limiting(failing: RunRecord, traces: Sequence[RunRecord]) -> dict[str, Any]:
    """What the smallest batch that failed ran out of, and in its trace the largest part that grows with the batch."""
    ledger, cap_bytes = exhausted(failing), failing.conditions.cap_bytes
    phase = None if failing.failure is None else failing.failure.phase
    if ledger == "device":
        weights_bytes = failing.conditions.baseline_bytes or failing.model.weights_bytes
        traced = min(traces, key=lambda record: abs(_batch(record) - _batch(failing)), default=None)
        return _limiting_device(traced, weights_bytes, cap_bytes, phase)
    said = ledger if ledger == "time" else f"{ledger} memory"
    where = f"{said} in {phase}" if phase else str(said)
    return {"limiting_ledger": ledger, "limiting_phase": phase, "limited_by": where}


def _limiting_device(
    traced: RunRecord | None, weights_bytes: int, cap_bytes: int | None, phase: Phase | None
) -> dict[str, Any]:
    """The device's cap, and in a trace the largest part that grows with the batch."""
    if cap_bytes is not None and weights_bytes >= cap_bytes:
        words = f"the weights alone: {format_bytes(weights_bytes)} of {format_bytes(cap_bytes)}"
        return {"limiting_ledger": "device", "limiting_part": "weights", "limited_by": words}
    part, share = _largest_part(None if traced is None else _phase_memory([traced], phase))
    where = f"device memory in {phase}" if phase else "device memory"
    words = where if part is None else f"{where}: {part}, {share:.0%} of what grows with the batch"
    return {"limiting_ledger": "device", "limiting_phase": phase, "limiting_part": part, "limited_by": words}


def _phase_memory(records: Sequence[RunRecord], phase: Phase | None) -> PhaseMemory | None:
    """The phase's, or that of the higher traced peak where the phase is not known."""
    memories = [memory for memory in explain_memory(records) if phase in (None, memory.phase)]
    return max(memories, key=lambda memory: memory.traced_peak_bytes or 0, default=None)


def _largest_part(memory: PhaseMemory | None) -> tuple[str | None, float]:
    if memory is None:
        return None, 0.0
    sizes = {name: getattr(memory, field) or 0 for field, name in PARTS.items()}
    largest = max(sizes, key=lambda name: sizes[name])
    total = sum(sizes.values())
    return (largest, sizes[largest] / total) if total else (None, 0.0)


def _beside_in_gpu(limit: CapacityLimit, in_gpu: CapacityLimit | None, probes: Sequence[RunRecord]) -> CapacityLimit:
    if in_gpu is None or in_gpu.sessions is None or not in_gpu.is_exact or not _same_rung(limit, in_gpu):
        return limit
    own = _timed([record for record in probes if record.run_id in limit.run_ids])
    return msgspec.structs.replace(
        limit,
        in_gpu=in_gpu.sessions,
        in_gpu_at_limit=in_gpu.at_limit,
        at_in_gpu_limit=own.get(in_gpu.sessions),
    )


def _same_rung(limit: CapacityLimit, in_gpu: CapacityLimit) -> bool:
    """Whether both were run, or both only traced: a ratio is of one rung."""
    return (limit.evidence == "traced") == (in_gpu.evidence == "traced")
