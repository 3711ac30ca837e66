"""How many sessions a budget admits: by arithmetic, by a traced peak, and by the peak that a run reached."""

from typing import Final, NamedTuple

from offload_eval.analysis.cells import merged_sample
from offload_eval.bounds.admission import admission_limit
from offload_eval.bounds.host_ledger import limiting_ledger
from offload_eval.bounds.strategy_bound import cell_bound
from offload_eval.core.judgement import Bound, Ledger
from offload_eval.core.records import RunRecord

SESSIONS_BY_PEAK_ASSUMPTION: Final = (
    "Extrapolated linearly from the batch that ran: everything above what was live before any session, in the "
    "worse phase, is charged to the sessions in equal parts, and all sessions are taken to prefill at once."
)


class Admitted(NamedTuple):
    """How many sessions both ledgers admit."""

    sessions: int
    device_sessions: int
    """Those that the device ledger alone admits."""
    ledger: Ledger | None
    """The one that admits fewer; None: the budget states no host memory."""


def analytic_bound(record: RunRecord) -> Bound | None:
    """The analytic card of a record's cell; None where the arithmetic refuses the model."""
    return cell_bound(record.spec, record.model)


def analytic_sessions(record: RunRecord) -> int | None:
    """Sessions the budget admits by arithmetic: an upper bound."""
    bound = analytic_bound(record)
    return None if bound is None else bound.sessions


def resident_bytes(record: RunRecord) -> int:
    """Device bytes live before any session: the weights and what libraries keep in the allocator.

    Returns:
        `baseline_bytes` where it was counted, else the weights alone.
    """
    counted_bytes = record.conditions.baseline_bytes
    return record.model.weights_bytes if counted_bytes is None else counted_bytes


def sessions_by_trace(traced: RunRecord) -> int | None:
    """As `admitted_by_trace`, without the ledger that decides."""
    admitted = admitted_by_trace(traced)
    return None if admitted is None else admitted.sessions


def admitted_by_trace(traced: RunRecord) -> Admitted | None:
    """Sessions the budget admits if each needs what those of the traced batch did.

    As `admitted_by_peak`, with the traced weights as what the peak starts from.

    Returns:
        The admission limit; None where there is no trace, or nothing in it lies above the weights.
    """
    trace = traced.trace
    if trace is None:
        return None
    above_bytes = max(trace.prefill.peak_device_bytes, trace.decode_peak_device_bytes) - trace.weights_bytes
    if above_bytes <= 0:
        return None
    per_session_bytes = -(-above_bytes // trace.workload.batch_size)
    return _admitted(traced, trace.weights_bytes, per_session_bytes, trace.kv_host_peak_bytes)


def worst_peak_bytes(record: RunRecord) -> int | None:
    """The higher of the two phases' peak_allocated_bytes, weights included.

    Returns:
        None unless the cell is ok and both phases were seen: the unseen one could be the worse.
    """
    sample = merged_sample(record)
    prefill_bytes, decode_bytes = sample.prefill.peak_allocated_bytes, sample.decode.peak_allocated_bytes
    if record.status != "ok" or prefill_bytes is None or decode_bytes is None:
        return None
    return max(prefill_bytes, decode_bytes)


def bytes_per_session_by_peak(record: RunRecord) -> int | None:
    """Device bytes that each session of the batch that ran added to the resident ones, in the worse phase.

    Counts KV cache, activations, logits and the strategy's transients; what does not grow with the batch is
    charged to the sessions as well, except for what was live before any of them.

    Returns:
        ceil((worst peak - resident_bytes) / batch_size); None where nothing lies above the resident bytes.
    """
    peak_bytes = worst_peak_bytes(record)
    if peak_bytes is None or peak_bytes <= resident_bytes(record):
        return None
    return -(-(peak_bytes - resident_bytes(record)) // record.spec.workload.batch_size)


def sessions_by_peak(record: RunRecord) -> int | None:
    """As `admitted_by_peak`, without the ledger that decides."""
    admitted = admitted_by_peak(record)
    return None if admitted is None else admitted.sessions


def admitted_by_peak(record: RunRecord) -> Admitted | None:
    """Sessions the budget admits if each needs what those of the batch that ran did.

    See `SESSIONS_BY_PEAK_ASSUMPTION`. What the peak starts from also comes off the budget; where the budget
    states its weights, those come off instead: a deployment's weights may differ from the run's. Where it states
    host memory, each session is charged its part of the cache's host payload, and no more are admitted than the
    arithmetic of the host ledger does, which knows how buffers are rounded.

    Returns:
        The admission limit; None where the peaks are not known.
    """
    per_session_bytes = bytes_per_session_by_peak(record)
    if per_session_bytes is None:
        return None
    return _admitted(record, resident_bytes(record), per_session_bytes, merged_sample(record).kv_cache_host_bytes)


def _admitted(record: RunRecord, start_bytes: int, per_session_bytes: int, host_bytes: int | None) -> Admitted:
    """Both ledgers, from what the batch started from, each session takes on the device, and the batch on the host."""
    budget = record.spec.budget
    by_device = admission_limit(
        budget.device_bytes,
        budget.weights_bytes or start_bytes,
        budget.runtime_bytes,
        budget.reserve_bytes,
        per_session_bytes,
    )
    by_host = _host_sessions(record, host_bytes)
    return Admitted(
        sessions=by_device if by_host is None else min(by_device, by_host),
        device_sessions=by_device,
        ledger=limiting_ledger(by_device, by_host, budget),
    )


def _host_sessions(record: RunRecord, host_bytes: int | None) -> int | None:
    """None where the budget states no host memory, or nothing of the batch is there."""
    budget = record.spec.budget
    if budget.host_bytes is None or not host_bytes:
        return None
    sessions = budget.host_bytes // -(-host_bytes // record.spec.workload.batch_size)
    bound = analytic_bound(record)
    return sessions if bound is None or bound.host_sessions is None else min(sessions, bound.host_sessions)
