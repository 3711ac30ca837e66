"""How many sessions a budget admits: by arithmetic, and by the peak that a run reached."""

from typing import Final

from offload_eval.analysis.cells import merged_sample
from offload_eval.bounds.admission import admission_limit
from offload_eval.bounds.strategy_bound import strategy_bound
from offload_eval.core.judgement import Bound
from offload_eval.core.records import RunRecord

MEASURED_SESSIONS_ASSUMPTION: Final = (
    "Extrapolated linearly from the measured batch: everything above the weights, in the worse phase, is "
    "charged to the sessions in equal parts, and all sessions are taken to prefill at once."
)


def analytic_bound(record: RunRecord) -> Bound | None:
    """The analytic card of a record's cell; None where the arithmetic refuses the model."""
    spec = record.spec
    if record.model.shape is None:
        return None
    return strategy_bound(
        record.model.shape,
        record.model.weights_bytes,
        spec.model.dtype,
        spec.workload,
        spec.strategy,
        spec.budget,
    )


def analytic_sessions(record: RunRecord) -> int | None:
    """Sessions the budget admits by arithmetic: an upper bound."""
    bound = analytic_bound(record)
    return None if bound is None else bound.sessions


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


def measured_bytes_per_session(record: RunRecord) -> int | None:
    """Device bytes that each session of the measured batch added to the weights, in the worse phase.

    Counts KV cache, activations, logits and the strategy's transients; what does not grow with the batch is
    charged to the sessions as well.

    Returns:
        ceil((worst peak - weights the run loaded) / batch_size); None where nothing lies above the weights.
    """
    peak_bytes = worst_peak_bytes(record)
    if peak_bytes is None or peak_bytes <= record.model.weights_bytes:
        return None
    return -(-(peak_bytes - record.model.weights_bytes) // record.spec.workload.batch_size)


def measured_sessions(record: RunRecord) -> int | None:
    """Sessions the budget admits if each needs what the measured ones did.

    See `MEASURED_SESSIONS_ASSUMPTION`. The weights taken off the budget are the budget's own where it states
    them, so that a deployment's weights may differ from the run's.

    Returns:
        The admission limit; None where the peaks are not known.
    """
    per_session_bytes = measured_bytes_per_session(record)
    if per_session_bytes is None:
        return None
    budget = record.spec.budget
    return admission_limit(
        budget.device_bytes,
        budget.weights_bytes or record.model.weights_bytes,
        budget.runtime_bytes,
        budget.reserve_bytes,
        per_session_bytes,
    )
