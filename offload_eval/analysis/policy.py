"""From a capacity search to an admission policy."""

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from offload_eval.analysis.calibration import calibrate, peak_points, predict
from offload_eval.analysis.cells import merged_sample
from offload_eval.analysis.fingerprint import differences, make_fingerprint
from offload_eval.analysis.peak_fit import PeakPoint
from offload_eval.analysis.probes import current_probes
from offload_eval.core.admission import Batch
from offload_eval.core.experiment import Experiment, StrategySpec, as_searched
from offload_eval.core.limits import CapacityLimit
from offload_eval.core.policy import AdmissionPolicy, Calibration, Fingerprint, PolicyLimit, PolicyStrategy
from offload_eval.core.records import RunRecord, TrialSample
from offload_eval.units import MIB, format_bytes

Number = TypeVar("Number", int, float)


def build_policy(
    experiment: Experiment,
    limits: Sequence[CapacityLimit],
    records: Sequence[RunRecord],
    fingerprint: Fingerprint,
    created_at_utc: str,
) -> AdmissionPolicy:
    """Writes down what a capacity search found, and the conditions it holds under.

    Args:
        experiment: What was searched; the policy has its name and its strategies, in its order.
        limits: Of every strategy and combination of lengths.
        records: Of the search. Those made under another fingerprint, as in a run that went on elsewhere, are left out
            of the calibration.
        fingerprint: What the limits hold for.
        created_at_utc: ISO 8601.
    """
    limits = [limit for limit in limits if limit.evidence != "traced"]  # a policy admits what ran
    valid = [record for record in records if record.evidence != "traced" and _is_of(record, fingerprint)]
    cap_bytes = max(each.cap_bytes or 0 for each in limits)
    strategies = tuple(_strategy(as_searched(each), limits, valid, cap_bytes) for each in experiment.strategies)
    context_tokens = next((record.model.context_tokens for record in valid), None)
    num_left_out = sum(record.evidence != "traced" for record in records) - len(valid)
    return AdmissionPolicy(
        name=experiment.name,
        created_at_utc=created_at_utc,
        fingerprint=fingerprint,
        budget=experiment.budget,
        cap_bytes=cap_bytes,
        context_tokens=context_tokens,
        baseline=(experiment.in_gpu_strategy or experiment.baseline_strategy).label,
        strategies=strategies,
        assumptions=tuple(_assumptions(experiment, limits, strategies, num_left_out)),
    )


def policy_of(
    experiment: Experiment, limits: Sequence[CapacityLimit], records: Sequence[RunRecord]
) -> AdmissionPolicy | None:
    """The policy of a capacity search, as of its last probe; None where nothing could be searched.

    The same records give the same policy, whenever it is asked for.
    """
    current = current_probes(experiment, records)
    probes = [record for record in current if record.evidence != "traced"]
    if not probes or not any(limit.cap_bytes for limit in limits):
        return None
    last = max(probes, key=lambda record: record.started_at_utc)
    fingerprint = make_fingerprint(last.machine, last.model, last.spec.model, last.spec.device)
    return build_policy(experiment, limits, current, fingerprint, last.started_at_utc)


def _is_of(record: RunRecord, fingerprint: Fingerprint) -> bool:
    made = make_fingerprint(record.machine, record.model, record.spec.model, record.spec.device)
    return not differences(fingerprint, made)


def _strategy(
    strategy: StrategySpec, limits: Sequence[CapacityLimit], records: Sequence[RunRecord], cap_bytes: int
) -> PolicyStrategy:
    own = [limit for limit in limits if limit.label == strategy.label]
    samples = [_Sample(record) for record in records if record.spec.strategy.label == strategy.label]
    return PolicyStrategy(
        strategy=strategy,
        limits=tuple(policy_limit for limit in own if (policy_limit := _limit(limit)) is not None),
        calibration=_calibration(peak_points(records, strategy.label), own, cap_bytes),
        host_bytes_per_session_token=_most(each.host_bytes_per_session_token for each in samples),
        peak_host_rss_bytes=_most(each.sample.peak_host_rss_bytes for each in samples),
        pinned_allocated_bytes=_most(each.sample.pinned_allocated_bytes for each in samples),
        refusal=_refusal(own),
    )


def _calibration(points: Sequence[PeakPoint], limits: Sequence[CapacityLimit], cap_bytes: int) -> Calibration | None:
    """Its reserve also keeps out every batch that ran out of the device: an allocator strands some of its memory."""
    calibration = calibrate(points)
    if calibration is None:
        return None
    failed = [limit for limit in limits if limit.limiting_ledger == "device" and limit.failed_at]
    room_bytes = max((cap_bytes - _failed_peak_bytes(calibration, limit) + 1 for limit in failed), default=0)
    reserve_bytes = max(calibration.reserve_bytes, math.ceil(room_bytes / MIB) * MIB)
    return msgspec.structs.replace(calibration, reserve_bytes=reserve_bytes)


def _failed_peak_bytes(calibration: Calibration, limit: CapacityLimit) -> int:
    lengths = limit.lengths
    batch = Batch(
        rows=limit.failed_at or 0,
        prompt_tokens=lengths.prompt_tokens,
        output_tokens=lengths.output_tokens,
        prefill_chunk_tokens=lengths.prefill_chunk_tokens,
    )
    return predict(calibration, batch).worst.bytes


def _limit(limit: CapacityLimit) -> PolicyLimit | None:
    if limit.measured is None:
        return None
    return PolicyLimit(
        lengths=limit.lengths,
        sessions=limit.measured,
        evidence=limit.evidence,
        limited_by=limit.limited_by,
        run_ids=limit.run_ids,
    )


def _refusal(limits: Sequence[CapacityLimit]) -> str | None:
    """Why no limit was measured; None where one was."""
    if any(limit.measured is not None for limit in limits):
        return None
    reasons = dict.fromkeys(limit.refusal for limit in limits if limit.refusal)
    return "; ".join(reasons) or "no limit was measured"


class _Sample:
    """What a record says of the host."""

    def __init__(self, record: RunRecord) -> None:
        self.sample: TrialSample = merged_sample(record)
        self._workload = record.spec.workload
        self._is_ok = record.status == "ok"

    @property
    def host_bytes_per_session_token(self) -> float | None:
        if not self._is_ok or not self.sample.kv_cache_host_bytes:
            return None
        return self.sample.kv_cache_host_bytes / (self._workload.batch_size * self._workload.cached_tokens)


def _most(values: Iterator[Number | None]) -> Number | None:
    return max((value for value in values if value is not None), default=None)


def _assumptions(
    experiment: Experiment, limits: Sequence[CapacityLimit], strategies: Sequence[PolicyStrategy], num_left_out: int
) -> Iterator[str]:
    budget = experiment.budget
    yield (
        "All sessions are rows of one batch, and their prompts have one length: padding builds an attention mask of "
        "rows * prompt * cached tokens, which no limit here has in it. Each row takes as much as the longest "
        "generation among them; all start together, and prefill at once or in chunks of one length."
    )
    yield (
        f"The cap is {format_bytes(budget.device_bytes)} of device memory less {format_bytes(budget.runtime_bytes)} "
        f"outside the allocator and {format_bytes(budget.reserve_bytes)} kept free. It holds weights, cache and "
        "activations, and no other process."
    )
    yield "A limit is of memory: what a session then waits for is not part of it."
    yield (
        "Measured with greedy decoding, one beam, and generations as long as asked for. Beams count as rows; what "
        "reordering them takes was not measured."
    )
    if any(limit.evidence == "emulated" for limit in limits):
        yield "Emulated: the device is a capped tier of a CPU's memory. A GPU has other workspaces and fragmentation."
    inexact = [f"{each.label} at {each.lengths.label}" for each in limits if each.measured and not each.is_exact]
    if inexact:
        yield f"The next larger batch was not seen to fail, so the limit may be higher: {', '.join(inexact)}."
    if num_left_out:
        yield f"{num_left_out} records made under other conditions are left out of the calibrations."
    for strategy in strategies:
        yield from _calibration_assumptions(strategy)


def _calibration_assumptions(strategy: PolicyStrategy) -> Iterator[str]:
    if strategy.calibration is None:
        if strategy.limits:
            yield f"{strategy.label}: too few batches were measured for a calibration; the measured limits alone hold."
        return
    for fit in strategy.calibration.fits:
        for flag in fit.flags:
            yield f"{strategy.label}, {fit.phase}: {flag}"
        if fit.not_told_apart:
            yield (
                f"{strategy.label}, {fit.phase}: {', '.join(fit.not_told_apart)} cannot be told apart from the other "
                "coefficients over what was measured"
            )
