"""What the probes of a capacity search have shown, as the search itself and the report read it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from offload_eval.analysis.cells import merged_sample
from offload_eval.analysis.statistics import summarize_throughput, summarize_tpot, summarize_ttft
from offload_eval.core.experiment import StrategySpec, Workload
from offload_eval.core.limits import Ledger, Lengths, TimedBatch
from offload_eval.core.records import PHASES, RunRecord
from offload_eval.core.trace import Trace

SEARCHED: Final = ("fit", "verify")
"""Roles that say whether a batch runs to its end."""


def lengths_of(workload: Workload) -> Lengths:
    """A workload without its batch."""
    return Lengths(**{name: getattr(workload, name) for name in Lengths.__struct_fields__})


def strategy_key(strategy: StrategySpec) -> str:
    """What a strategy is searched and listed under."""
    return strategy.label


def peak_bytes(record: RunRecord) -> int | None:
    """The higher of both phases' peaks that count against a cap: what the allocator reserved, where there is one.

    Returns:
        None unless both phases were seen.
    """
    sample = merged_sample(record)
    phases = [getattr(sample, phase) for phase in PHASES]
    reserved = [phase.peak_reserved_bytes for phase in phases]
    peaks = reserved if None not in reserved else [phase.peak_allocated_bytes for phase in phases]
    return None if None in peaks else max(peaks)


def exhausted(record: RunRecord) -> Ledger | None:
    """What a batch that did not run to its end ran out of; None where it failed for another reason."""
    if record.status == "timeout":
        return "time"
    failure = record.failure
    if record.status == "oom":
        return (failure.ledger if failure is not None else None) or "device"
    # The kernel takes the whole process where the host's memory ends.
    killed = failure is not None and failure.type == "WorkerDied" and "signal 9" in failure.message
    return "host" if record.status == "failed" and killed else None


def outcomes(records: Iterable[RunRecord]) -> dict[int, int | None]:
    """The peak of every batch that ran to its end each time it was tried, by its size; None where it did not once."""
    seen: dict[int, int | None] = {}
    for record in records:
        if record.spec.role in SEARCHED and record.evidence != "traced":
            batch = record.spec.workload.batch_size
            peak = peak_bytes(record) if record.status == "ok" else None
            before = seen.get(batch, peak)
            seen[batch] = None if peak is None or before is None else max(peak, before)
    return seen


def largest_passing(seen: Mapping[int, int | None]) -> int:
    """The largest batch below every one that failed; 0 where there is none."""
    failed = smallest_failing(seen)
    return max(
        (batch for batch, peak in seen.items() if peak is not None and (not failed or batch < failed)), default=0
    )


def smallest_failing(seen: Mapping[int, int | None]) -> int | None:
    """The smallest batch that failed."""
    return min((batch for batch, peak in seen.items() if peak is None), default=None)


def traced_peak_bytes(trace: Trace) -> int:
    """The higher of both phases' peaks on the device."""
    return max(trace.prefill.peak_device_bytes, trace.decode_peak_device_bytes)


def strategies_of(records: Sequence[RunRecord]) -> dict[tuple[str, str], list[RunRecord]]:
    """Probes by the label of their lengths and of their strategy, in the order they first ran."""
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for record in records:
        key = (lengths_of(record.spec.workload).label, strategy_key(record.spec.strategy))
        groups.setdefault(key, []).append(record)
    return groups


def timed_batch(record: RunRecord) -> TimedBatch | None:
    """Medians of a timed probe; None where it has no times."""
    figures = (summarize_ttft(record), summarize_tpot(record), summarize_throughput(record))
    ttft, tpot, throughput = figures
    if ttft is None or tpot is None or throughput is None:
        return None
    return TimedBatch(
        sessions=record.spec.workload.batch_size,
        trials=tpot.samples,
        ttft_s=ttft.median,
        tpot_s=tpot.median,
        tokens_per_s=throughput.median,
        swapped=any((trial.swap_in_bytes or 0) + (trial.swap_out_bytes or 0) for trial in record.trials),
        run_id=record.run_id,
    )


def at_batch(workload: Workload, sessions: int) -> Workload:
    """A workload's lengths at another batch; its name is left behind, as it names one batch."""
    return msgspec.structs.replace(workload, batch_size=sessions, name=None)
