"""Rules that hold a cell against its analytic card and against the baseline's peaks."""

from collections.abc import Sequence

from offload_eval.analysis.capacity import (
    admitted_by_peak,
    analytic_bound,
    resident_bytes,
    worst_peak_bytes,
)
from offload_eval.analysis.comparison import compare_with_baseline
from offload_eval.core.experiment import OffloadedSpec, QuantizedSpec
from offload_eval.core.judgement import Comparison, Finding
from offload_eval.core.records import RunRecord
from offload_eval.units import format_bytes


def check_kv_payload(record: RunRecord) -> Finding | None:
    """The cache holds other bytes than the arithmetic says it must.

    Both ledgers are held to the analytic card exactly. Upstream's offloaded cache alone is not: how many layers
    have a copy on the device when generation ends is the prefetcher's affair, so its ledgers together must hold
    at least the host's KV.
    """
    for trial in record.trials:
        difference = payload_difference(record, trial.kv_cache_device_bytes, trial.kv_cache_host_bytes)
        if difference is not None:
            return Finding(
                code="kv_payload_differs",
                severity="error",
                message=f"{difference}. Suspected cause: the payload count misses tensors or counts some twice, or "
                "the arithmetic does not describe this cache.",
                remedy="Trust neither figure until they agree; report the model and the strategy.",
                run_ids=(record.run_id,),
            )
    return None


def payload_difference(record: RunRecord, device_bytes: int | None, host_bytes: int | None) -> str | None:
    """How a cache's payload when generation ends differs from its analytic card, in words; None where it does not."""
    bound = analytic_bound(record)
    if bound is None:
        return None
    strategy, batch_size = record.spec.strategy, record.spec.workload.batch_size
    host_kv_bytes = bound.kv_host_bytes_per_session * batch_size
    if isinstance(strategy, OffloadedSpec):
        if device_bytes is None or host_bytes is None or device_bytes + host_bytes >= host_kv_bytes:
            return None
        return _counted("on both ledgers together", device_bytes + host_bytes, "at least ", host_kv_bytes)
    device_kv_bytes = bound.kv_device_bytes_per_session * batch_size + bound.kv_device_bytes_fixed
    # The card rounds each session of a quantized cache up to a whole byte.
    rounding_bytes = batch_size - 1 if isinstance(strategy, QuantizedSpec) else 0
    if device_bytes is not None and abs(device_bytes - device_kv_bytes) > rounding_bytes:
        return _counted("on the device", device_bytes, "", device_kv_bytes)
    if host_bytes is not None and host_bytes != host_kv_bytes:
        return _counted("on the host", host_bytes, "", host_kv_bytes)
    return None


def _counted(where: str, seen_bytes: int, at_least: str, card_bytes: int) -> str:
    more = "more" if seen_bytes > card_bytes else "fewer"
    return (
        f"the cache was counted at {seen_bytes:,} bytes {where} where the arithmetic gives {at_least}{card_bytes:,}: "
        f"{abs(seen_bytes - card_bytes):,} bytes {more}"
    )


def check_sessions_by_peak(record: RunRecord) -> Finding | None:
    """An extrapolation from what was seen beats an upper bound, both of the device ledger."""
    admitted, bound = admitted_by_peak(record), analytic_bound(record)
    by_peak = None if admitted is None else admitted.device_sessions
    analytic = None if bound is None else bound.device_sessions
    if by_peak is None or analytic is None or by_peak <= analytic:
        return None
    return Finding(
        code="sessions_above_bound",
        severity="error",
        message=f"the peaks extrapolate to {by_peak:,} sessions where the arithmetic allows {analytic:,}. "
        "Suspected cause: the peak counter misses memory, or the arithmetic charges what the strategy does "
        "not hold.",
        remedy="Do not use the sessions by peak; compare kv_device_bytes with the analytic card first.",
        run_ids=(record.run_id,),
    )


def check_peak_holds_weights(record: RunRecord) -> Finding | None:
    """A peak that what was live before any session would pass alone."""
    peak_bytes = worst_peak_bytes(record)
    if peak_bytes is None or peak_bytes > resident_bytes(record):
        return None
    return Finding(
        code="peak_below_weights",
        severity="error",
        message=f"the highest peak is {peak_bytes:,} bytes, and {resident_bytes(record):,} were live before any "
        "session. Suspected cause: the weights are not on the device, or the peak counter does not see them.",
        remedy="Do not use this cell's peaks or sessions by peak.",
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
        "Nothing checks the bytes that were counted.",
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
