"""Exposed transfer time by difference: a strategy's steps against a reference's, each at the same length."""

from collections.abc import Sequence
from statistics import median, quantiles

from offload_eval.analysis.statistics import tpot_samples_s
from offload_eval.core.records import Phase, RunRecord

_END_SHARE = 10
"""The last tenth of the steps is the end."""


def step_difference_s(record: RunRecord, reference: RunRecord) -> float | None:
    """Median over the decode steps of what a step takes longer than the reference's step at the same length."""
    differences_s = _differences_s(record, reference)
    return median(differences_s) if differences_s else None


def difference_noise_s(phase: Phase, record: RunRecord, reference: RunRecord) -> float | None:
    """How far exposed time by waits and by difference may lie apart by chance, in seconds of one step.

    The middle half of the steps' differences, and the ranges over trials of both TPOTs (of TTFT in prefill) and of
    the waits, added up: each of the two figures is taken in passes of its own.

    Returns:
        None where there is no difference.
    """
    steps = 1 if phase == "prefill" else record.spec.workload.output_tokens - 1
    samples = (getattr(trial, phase).exposed_transfer_s for trial in record.trials)
    waits_s = [sample / steps for sample in samples if sample is not None]
    if phase == "prefill":
        return _range(_ttft(record)) + _range(_ttft(reference)) + _range(waits_s)
    differences_s = _differences_s(record, reference)
    if not differences_s:
        return None
    ranges_s = _range(tpot_samples_s(record)) + _range(tpot_samples_s(reference)) + _range(waits_s)
    return _middle_half(differences_s) + ranges_s


def end_latency_s(record: RunRecord) -> float | None:
    """Median latency of the last tenth of the decode steps, at least one, over all trials."""
    latencies_s = _step_latencies_s(record)
    return median(latencies_s[-max(1, len(latencies_s) // _END_SHARE) :]) if latencies_s else None


def _differences_s(record: RunRecord, reference: RunRecord) -> list[float]:
    mine_s, theirs_s = _step_latencies_s(record), _step_latencies_s(reference)
    return [mine - theirs for mine, theirs in zip(mine_s, theirs_s, strict=False)]


def _step_latencies_s(record: RunRecord) -> list[float]:
    """The median over trials of each step; of steps that every timed trial has."""
    timed = [trial.inter_token_latencies_s for trial in record.trials if trial.inter_token_latencies_s]
    return [median(step) for step in zip(*timed, strict=False)] if timed else []


def _ttft(record: RunRecord) -> list[float]:
    return [trial.ttft_s for trial in record.trials if trial.ttft_s is not None]


def _range(samples: Sequence[float]) -> float:
    return max(samples) - min(samples) if samples else 0.0


def _middle_half(samples: Sequence[float]) -> float:
    if len(samples) < 2:
        return 0.0
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return high - low
