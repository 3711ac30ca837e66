"""Rules that hold a cell against its analytic card and against the baseline's peaks."""

from collections.abc import Sequence

from offload_eval.analysis.capacity import (
    analytic_bound,
    analytic_sessions,
    measured_sessions,
    worst_peak_bytes,
)
from offload_eval.analysis.cells import merged_sample
from offload_eval.analysis.comparison import compare_with_baseline
from offload_eval.core.judgement import Bound, Comparison, Finding
from offload_eval.core.records import RunRecord
from offload_eval.units import format_bytes


def check_kv_payload(record: RunRecord) -> Finding | None:
    """The cache holds less than the arithmetic says it must.

    KV that a strategy keeps on the host may or may not have a copy on the device when generation ends, so
    such a strategy is held to its host bytes, wherever they lie.
    """
    bound, sample = analytic_bound(record), merged_sample(record)
    if bound is None or sample.kv_cache_device_bytes is None:
        return None
    seen_bytes = sample.kv_cache_device_bytes + (sample.kv_cache_host_bytes or 0)
    least_bytes = _least_kv_bytes(bound, record.spec.workload.batch_size)
    if seen_bytes >= least_bytes:
        return None
    return Finding(
        code="kv_payload_below_bound",
        severity="error",
        message=f"the cache was counted at {seen_bytes:,} bytes where the arithmetic needs {least_bytes:,}. "
        "Suspected cause: the payload count misses tensors, or the arithmetic does not describe this cache.",
        remedy="Trust neither figure until they agree; report the model and the strategy.",
        run_ids=(record.run_id,),
    )


def _least_kv_bytes(bound: Bound, batch_size: int) -> int:
    if bound.kv_host_bytes_per_session:
        return bound.kv_host_bytes_per_session * batch_size
    return bound.kv_device_bytes_per_session * batch_size + bound.kv_device_bytes_fixed


def check_measured_sessions(record: RunRecord) -> Finding | None:
    """A measurement beats an upper bound."""
    measured, analytic = measured_sessions(record), analytic_sessions(record)
    if measured is None or analytic is None or measured <= analytic:
        return None
    return Finding(
        code="sessions_above_bound",
        severity="error",
        message=f"the peaks extrapolate to {measured:,} sessions where the arithmetic allows {analytic:,}. "
        "Suspected cause: the peak counter misses memory, or the arithmetic charges what the strategy does "
        "not hold.",
        remedy="Do not use the measured sessions; compare kv_device_bytes with the analytic card first.",
        run_ids=(record.run_id,),
    )


def check_peak_holds_weights(record: RunRecord) -> Finding | None:
    """A peak that weights alone would pass."""
    peak_bytes = worst_peak_bytes(record)
    if peak_bytes is None or peak_bytes > record.model.weights_bytes:
        return None
    return Finding(
        code="peak_below_weights",
        severity="error",
        message=f"the highest peak is {peak_bytes:,} bytes and the weights alone are "
        f"{record.model.weights_bytes:,}. Suspected cause: the weights are not on the device, or the peak "
        "counter does not see them.",
        remedy="Do not use this cell's peaks or measured sessions.",
        run_ids=(record.run_id,),
    )


def check_bound_exists(record: RunRecord) -> Finding | None:
    """The arithmetic refuses the model."""
    if record.model.shape is not None:
        return None
    return Finding(
        code="no_analytic_bound",
        severity="note",
        message=f"there is no analytic card: {record.model.shape_refusal or 'no reason was recorded'}. "
        "Nothing checks the measured bytes.",
        run_ids=(record.run_id,),
    )


def check_peaks_against_baseline(records: Sequence[RunRecord]) -> list[Finding]:
    """A strategy that is to save memory has a higher peak than the baseline in some phase."""
    return [
        _higher_peak(comparison, phase, -saved_bytes)
        for comparison in compare_with_baseline(records)
        for phase, saved_bytes in (
            ("prefill", comparison.prefill_peak_saved_bytes),
            ("decode", comparison.decode_peak_saved_bytes),
        )
        if saved_bytes is not None and saved_bytes < 0
    ]


def _higher_peak(comparison: Comparison, phase: str, excess_bytes: int) -> Finding:
    return Finding(
        code="peak_above_baseline",
        severity="warning",
        message=f"the {phase} peak is {format_bytes(excess_bytes)} ({excess_bytes:,} bytes) above the "
        "baseline's. Suspected cause: scratch or transients of the strategy outweigh what it saves.",
        remedy="Judge the strategy by its peaks, not by its KV bytes.",
        run_ids=(comparison.run_id, comparison.baseline_run_id),
    )
