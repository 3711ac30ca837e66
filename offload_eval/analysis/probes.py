"""What the probes of a capacity search have shown, as the search itself and the report read it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from offload_eval.analysis.capacity import worst_peak_bytes
from offload_eval.analysis.cells import cell_records, probe_records
from offload_eval.analysis.fingerprint import make_fingerprint, traced_fingerprint
from offload_eval.analysis.statistics import summarize_throughput, summarize_tpot, summarize_ttft
from offload_eval.analysis.swap import is_swapped
from offload_eval.core.experiment import Experiment, Workload, as_searched
from offload_eval.core.factors import expand_workloads
from offload_eval.core.limits import Exhausted, Lengths, TimedBatch
from offload_eval.core.policy import Fingerprint
from offload_eval.core.records import RunRecord
from offload_eval.core.trace import Trace

_BEFORE_THE_BATCH: Final = ("support", "load")
SEARCHED: Final = ("fit", "verify")
"""Roles that say whether a batch runs to its end."""


def lengths_of(workload: Workload) -> Lengths:
    """A workload without its batch."""
    return Lengths(**{name: getattr(workload, name) for name in Lengths.__struct_fields__})


def current_probes(experiment: Experiment, records: Sequence[RunRecord]) -> list[RunRecord]:
    """Probes and their traces that belong together: of the search that the experiment asks for, and of one machine.

    A directory may hold others, where a run went on with another budget, model, version or machine. Those that were
    made as the last one was are kept. A trace may be of another machine: it depends on code and model alone.
    """
    strategies = [as_searched(strategy) for strategy in experiment.strategies]
    timeout_s = experiment.measurement.cell_timeout_s
    return _made_together(
        [
            record
            for record in _asked(experiment, probe_records(records))
            if record.spec.measurement.cell_timeout_s == timeout_s and record.spec.strategy in strategies
        ]
    )


def current_cells(experiment: Experiment, records: Sequence[RunRecord]) -> list[RunRecord]:
    """Cells and their traces that belong together in the same sense; each strategy under its label."""
    labels = {strategy.label for strategy in experiment.strategies}
    cells = _asked(experiment, cell_records(records))
    return _made_together([record for record in cells if record.spec.strategy.label in labels])


def _asked(experiment: Experiment, records: Sequence[RunRecord]) -> list[RunRecord]:
    searched = {lengths_of(workload) for workload in expand_workloads(experiment)}
    return [
        record
        for record in records
        if record.spec.model == experiment.model
        and record.spec.budget == experiment.budget
        and record.spec.cpu == experiment.cpu
        and lengths_of(record.spec.workload) in searched
    ]


def _made_together(records: Sequence[RunRecord]) -> list[RunRecord]:
    last = max(records, key=lambda each: (each.evidence != "traced", _started(each)), default=None)
    return [] if last is None else [record for record in records if _made_as(last, record)]


def _started(record: RunRecord) -> str:
    return record.started_at_utc


def _made_as(last: RunRecord, record: RunRecord) -> bool:
    ours, theirs = _fingerprint(record), _fingerprint(last)
    if "traced" in (record.evidence, last.evidence):
        strategy = record.spec.strategy
        return traced_fingerprint(ours, strategy) == traced_fingerprint(theirs, strategy)
    return ours == theirs and record.evidence == last.evidence


def _fingerprint(record: RunRecord) -> Fingerprint:
    return make_fingerprint(record.machine, record.model, record.spec.model, record.spec.device)


def exhausted(record: RunRecord) -> Exhausted | None:
    """What a batch that did not run to its end ran out of; None where it failed for another reason."""
    failure = record.failure
    if record.status == "timeout":
        # A model that does not load in time says nothing of a batch.
        return None if failure is None or failure.stage in _BEFORE_THE_BATCH else "time"
    if record.status == "oom":
        return (failure.ledger if failure is not None else None) or "device"
    return "host" if was_killed(record) else None


def was_killed(record: RunRecord) -> bool:
    """Whether the worker was killed: as the kernel does where the host's memory ends, and as anybody may."""
    failure = record.failure
    return failure is not None and failure.type == "WorkerDied" and "signal 9" in failure.message


def outcomes(records: Iterable[RunRecord]) -> dict[int, int | None]:
    """The peak of every batch that ran to its end each time it was tried, by its size; None where it did not once."""
    seen: dict[int, int | None] = {}
    for record in records:
        if record.spec.role in SEARCHED and record.evidence != "traced":
            batch = record.spec.workload.batch_size
            peak = worst_peak_bytes(record)
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
        key = (lengths_of(record.spec.workload).label, record.spec.strategy.label)
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
        swapped=bool(is_swapped(record)),
        run_id=record.run_id,
    )


def at_batch(workload: Workload, sessions: int) -> Workload:
    """A workload's lengths at another batch; its name is left behind, as it names one batch."""
    return msgspec.structs.replace(workload, batch_size=sessions, name=None)
