"""From the peaks of runs to a calibration, and from a calibration to the peak of another batch."""

import math
from collections.abc import Iterator, Sequence

from offload_eval.analysis.capacity import resident_bytes
from offload_eval.analysis.cells import merged_sample
from offload_eval.analysis.peak_fit import PeakPoint, fit_phase
from offload_eval.core.admission import Batch, PeakTerm, PredictedPeak, Prediction
from offload_eval.core.policy import Calibration, PhaseFit
from offload_eval.core.records import PHASES, RunRecord
from offload_eval.core.run_spec import PROBES
from offload_eval.units import MIB


def peak_points(records: Sequence[RunRecord], label: str) -> list[PeakPoint]:
    """The peaks that runs of one strategy reached, with the model's own attention, in the order they ran.

    Probes and cells that ended well count; drills and traces do not.

    Args:
        records: Of one capacity search.
        label: The strategy's.
    """
    runs = [each for each in records if each.evidence != "traced" and each.spec.strategy.label == label]
    ordered = sorted(runs, key=lambda record: record.started_at_utc)
    return [_point(record, order) for order, record in enumerate(ordered) if _counts(record)]


def calibrate(points: Sequence[PeakPoint]) -> Calibration | None:
    """Fits both phases, and keeps the range that was measured.

    Returns:
        None where too few different batches were measured in both phases to predict one from the others: a plane
        through as many points as it has coefficients says nothing of any other, and an unseen phase could be worse.
    """
    points = [point for point in points if None not in (point.prefill_peak_bytes, point.decode_peak_bytes)]
    fits = tuple(fit for phase in PHASES if (fit := fit_phase(points, phase)) is not None)
    if not fits or any(fit.leave_one_out_ratio is None for fit in fits):
        return None
    worst_above_bytes = max(fit.worst_above_bytes for fit in fits)
    return Calibration(
        fits=fits,
        least_prompt_tokens=min(point.prompt_tokens for point in points),
        most_prompt_tokens=max(point.prompt_tokens for point in points),
        least_output_tokens=min(point.output_tokens for point in points),
        most_output_tokens=max(point.output_tokens for point in points),
        least_prefill_tokens=min(point.prefill_tokens // point.sessions for point in points),
        most_cached_tokens=max(point.cached_tokens for point in points),
        most_sessions=max(point.sessions for point in points),
        most_session_tokens=max(point.sessions * point.cached_tokens for point in points),
        reserve_bytes=math.ceil(worst_above_bytes / MIB) * MIB,
        run_ids=tuple(point.run_id for point in points),
    )


def predict(calibration: Calibration, batch: Batch) -> Prediction:
    """Computes the calibrated peak of each phase, and says in words where the batch lies outside of what was measured.

    Args:
        calibration: Of one strategy.
        batch: Rows, lengths and how it is prefilled.
    """
    peaks = tuple(_peak(fit, batch) for fit in calibration.fits)
    return Prediction(batch=batch, peaks=peaks, extrapolates=tuple(outside_of_measured(calibration, batch)))


def outside_of_measured(calibration: Calibration, batch: Batch) -> Iterator[str]:
    """Says in words where a batch lies outside of what a calibration was measured over; nothing where within."""
    ranges = (
        ("prompt tokens", batch.prompt_tokens, calibration.least_prompt_tokens, calibration.most_prompt_tokens),
        ("output tokens", batch.output_tokens, calibration.least_output_tokens, calibration.most_output_tokens),
        ("prompt tokens at once", batch.prefill_at_once_tokens, calibration.least_prefill_tokens, None),
        ("cached tokens a session", batch.cached_tokens, None, calibration.most_cached_tokens),
        ("sessions", batch.rows, None, calibration.most_sessions),
        ("tokens of all sessions", batch.rows * batch.cached_tokens, None, calibration.most_session_tokens),
    )
    for name, asked, least, most in ranges:
        if least is not None and asked < least:
            yield f"{asked:,} {name}, and no fewer than {least:,} were measured"
        if most is not None and asked > most:
            yield f"{asked:,} {name}, and no more than {most:,} were measured"


def _peak(fit: PhaseFit, batch: Batch) -> PredictedPeak:
    """Every term is rounded up to whole bytes, so that the sum shown is the sum."""
    rows, tokens = batch.rows, batch.tokens(fit.phase)
    per_token, per_session, per_prefill = (
        fit.bytes_per_session_token,
        fit.bytes_per_session,
        fit.bytes_per_prefill_token,
    )
    factors = (
        ("session tokens", per_token, rows * tokens, f"{rows:,} sessions * {tokens:,} tokens * {per_token:,.2f} B"),
        ("sessions", per_session, rows, f"{rows:,} sessions * {per_session:,.2f} B"),
        (
            "prefill tokens",
            per_prefill,
            batch.prefill_tokens,
            f"{batch.prefill_tokens:,} tokens at once * {per_prefill:,.2f} B",
        ),
    )
    terms = (
        PeakTerm(name="weights", arithmetic="", bytes=fit.weights_bytes),
        PeakTerm(name="runtime", arithmetic="", bytes=math.ceil(fit.runtime_bytes)),
        *(
            PeakTerm(name=name, arithmetic=words, bytes=math.ceil(coefficient * count))
            for name, coefficient, count, words in factors
        ),
    )
    return PredictedPeak(phase=fit.phase, terms=terms, bytes=sum(term.bytes for term in terms))


def _counts(record: RunRecord) -> bool:
    own_attention = record.spec.workload.attn_implementation in (None, record.spec.model.attn_implementation)
    return own_attention and record.status == "ok" and record.spec.role in (*PROBES, "cell")


def _point(record: RunRecord, order: int) -> PeakPoint:
    workload, sample = record.spec.workload, merged_sample(record)
    batch = Batch(
        rows=workload.batch_size,
        prompt_tokens=workload.prompt_tokens,
        output_tokens=workload.output_tokens,
        prefill_chunk_tokens=workload.prefill_chunk_tokens,
    )
    return PeakPoint(
        sessions=workload.batch_size,
        prompt_tokens=workload.prompt_tokens,
        output_tokens=workload.output_tokens,
        prefill_tokens=batch.prefill_tokens,
        prefill_peak_bytes=sample.prefill.peak_allocated_bytes,
        decode_peak_bytes=sample.decode.peak_allocated_bytes,
        weights_bytes=resident_bytes(record),
        order=order,
        run_id=record.run_id,
    )
