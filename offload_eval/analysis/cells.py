"""One view of each cell: its last record, its passes laid over one another, and figures per token."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from statistics import fmean, median
from typing import Any, Final, Literal

from offload_eval.core.base import Strict
from offload_eval.core.records import PHASES, Direction, PhaseSample, RunRecord, TrialSample
from offload_eval.core.run_spec import PROBES

_KEPT: Final = 16_384
"""Merged samples that are kept: a report asks for each some eighty times, cell by cell over and over."""


def cell_records(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Those of the experiment's cells and of their traces: a capacity search's probes and drills are left out."""
    return [record for record in records if record.spec.role == "cell"]


def probe_records(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Those of a capacity search's probes and of their traces."""
    return [record for record in records if record.spec.role in PROBES]


def latest_records(records: Sequence[RunRecord]) -> tuple[RunRecord, ...]:
    """Keeps the last record of each cell that ran, in the order the cells first appear: cells may be retried.

    Traced records are not among them, so that nothing takes a trace for a run: see `latest_traces`.
    """
    return tuple({record.run_id: record for record in records if record.evidence != "traced"}.values())


def latest_traces(records: Sequence[RunRecord]) -> tuple[RunRecord, ...]:
    """Keeps the last traced record of each cell, in the order the cells first appear."""
    return tuple({record.run_id: record for record in records if record.evidence == "traced"}.values())


def merged_sample(record: RunRecord) -> TrialSample:
    """Lays a record's trials over one another; a round that did not look at a figure does not count for it.

    Peaks are the highest of all rounds, counts of events their sum, copies, other bytes and times the median. Series
    are left out: take the times of the timing pass from `statistics`, with their spread.
    """
    return _merged_trials(tuple(record.trials))


def bytes_moved_per_token(record: RunRecord) -> float | None:
    """Bytes across the link during decode, both directions, for each token of each session.

    Returns:
        (decode h2d + decode d2h) / ((output_tokens - 1) * batch_size); None unless both were counted, as for a
        strategy that does not use the link.
    """
    decode = merged_sample(record).decode
    if decode.h2d_bytes is None or decode.d2h_bytes is None:
        return None
    workload = record.spec.workload
    return (decode.h2d_bytes + decode.d2h_bytes) / ((workload.output_tokens - 1) * workload.batch_size)


def exposed_s_per_token(record: RunRecord) -> float | None:
    """Seconds of each decode step in which computation waited for copies: the part of TPOT that is transfer.

    Returns:
        decode exposed_transfer_s / (output_tokens - 1). A step serves the whole batch, as TPOT does.
    """
    return _per_step(record, merged_sample(record).decode.exposed_transfer_s)


def busy_s_per_step(record: RunRecord, direction: Direction) -> float | None:
    """Seconds of each decode step in which the link copied in one direction, hidden or not.

    Returns:
        decode h2d_busy_s or d2h_busy_s / (output_tokens - 1); None where no transfer pass looked.
    """
    decode = merged_sample(record).decode
    return _per_step(record, decode.h2d_busy_s if direction == "h2d" else decode.d2h_busy_s)


def mean_kl_nats(record: RunRecord) -> float | None:
    """Mean over output positions of KL(baseline || strategy); the baseline has none: see `noise_floor_nats`."""
    return _mean_kl_against("baseline", record)


def noise_floor_nats(record: RunRecord) -> float | None:
    """Mean over output positions of the baseline's KL against itself, prefilled in chunks; None for the others."""
    return _mean_kl_against("chunked_prefill", record)


def ran_on_own_tokens(record: RunRecord) -> bool:
    """Whether a strategy was given no tokens, so that its work is not the baseline's."""
    return record.status == "ok" and not record.spec.is_baseline and record.conditions.forced_tokens is False


def _mean_kl_against(against: Literal["baseline", "chunked_prefill"], record: RunRecord) -> float | None:
    fidelity = record.fidelity
    return fmean(fidelity.kl_nats) if fidelity and fidelity.against == against and fidelity.kl_nats else None


def _per_step(record: RunRecord, seconds: float | None) -> float | None:
    return None if seconds is None else seconds / (record.spec.workload.output_tokens - 1)


@lru_cache(maxsize=_KEPT)
def _merged_trials(trials: tuple[TrialSample, ...]) -> TrialSample:
    phases: dict[str, Any] = {
        phase: PhaseSample(**_merged([getattr(trial, phase) for trial in trials])) for phase in PHASES
    }
    return TrialSample(**_merged(trials) | phases)


def _merged(samples: Iterable[Strict]) -> dict[str, Any]:
    """Each field over the samples that have it; those that are not numbers are left out."""
    seen: dict[str, list[Any]] = {}
    for sample in samples:
        for name in sample.__struct_fields__:
            if isinstance(value := getattr(sample, name), int | float):
                seen.setdefault(name, []).append(value)
    return {name: _merge(name, values) for name, values in seen.items()}


def _merge(name: str, values: Sequence[float]) -> float:
    if name.startswith("peak_"):
        return max(values)
    if name.startswith("num_") and not name.endswith("_copies"):
        return sum(values)
    return median(values) if name.endswith("_s") else round(median(values))
