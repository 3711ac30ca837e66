"""One view of each cell: its last record, its passes laid over one another, and figures per token."""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from offload_eval.core.base import Strict
from offload_eval.core.records import PhaseSample, RunRecord, TrialSample

_PHASES = ("prefill", "decode")


def latest_records(records: Sequence[RunRecord]) -> tuple[RunRecord, ...]:
    """Keeps the last record of each run_id, in the order the cells first appear: cells may be retried."""
    return tuple({record.run_id: record for record in records}.values())


def merged_sample(record: RunRecord) -> TrialSample:
    """Lays a record's trials over one another: each field from the first trial that has it.

    Memory and transfers are looked at in some rounds only, and never while time is taken. Times differ
    between rounds: take them from `statistics`, not from here.
    """
    phases = {
        phase: PhaseSample(**_first_values([getattr(trial, phase) for trial in record.trials])) for phase in _PHASES
    }
    return TrialSample(**_first_values(record.trials) | phases)


def bytes_moved_per_token(record: RunRecord) -> float | None:
    """Bytes across the link during decode, both directions, for each token of each session.

    Returns:
        (decode h2d + decode d2h) / ((output_tokens - 1) * batch_size); None unless both were counted.
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
    exposed_s = merged_sample(record).decode.exposed_transfer_s
    return None if exposed_s is None else exposed_s / (record.spec.workload.output_tokens - 1)


def mean_kl_nats(record: RunRecord) -> float | None:
    """Mean over output positions of KL(baseline || strategy); for the baseline itself, its noise floor."""
    if record.fidelity is None or not record.fidelity.kl_nats:
        return None
    return fmean(record.fidelity.kl_nats)


def _first_values(samples: Iterable[Strict]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for sample in samples:
        for name in sample.__struct_fields__:
            value = getattr(sample, name)
            if value is not None:
                values.setdefault(name, value)
    return values
