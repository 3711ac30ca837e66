"""Exposed transfer time by difference: a strategy's steps against a reference's, each at the same length."""

from collections.abc import Sequence
from math import sqrt
from statistics import fmean, median, stdev

from offload_eval.analysis.statistics import tpot_samples_s
from offload_eval.core.records import Phase, RunRecord

_END_SHARE = 10
"""The last tenth of the steps is the end."""
_STANDARD_ERRORS = 2


def step_difference_s(record: RunRecord, reference: RunRecord) -> float | None:
    """Mean over the decode steps of what a step takes longer than the reference's step at the same length.

    As of the waits, it is the mean of all steps and the median of the trials: a step that waits long once counts in
    both alike.
    """
    mine_s, theirs_s = _timed(record), _timed(reference)
    if not mine_s or not theirs_s:
        return None
    num_steps = min(map(len, (*mine_s, *theirs_s)))
    mine, theirs = (median(fmean(trial[:num_steps]) for trial in trials) for trials in (mine_s, theirs_s))
    return mine - theirs


def difference_noise_s(phase: Phase, record: RunRecord, reference: RunRecord) -> float | None:
    """How far exposed time by waits and by difference may lie apart by chance, in seconds of one step.

    Two standard errors of the mean of the steps' differences, and the ranges over trials of both TPOTs (of TTFT in
    prefill) and of the waits, added up: each of the two figures is taken in passes of its own.

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
    return _STANDARD_ERRORS * _standard_error(differences_s) + ranges_s


def end_latency_s(record: RunRecord) -> float | None:
    """Median latency of the last tenth of the decode steps, at least one, over all trials."""
    latencies_s = [median(step) for step in _steps(record)]
    return median(latencies_s[-max(1, len(latencies_s) // _END_SHARE) :]) if latencies_s else None


def _differences_s(record: RunRecord, reference: RunRecord) -> list[float]:
    """Of each step, over the mean of all trials: a median would hide what one of them waited."""
    pairs = zip(_steps(record), _steps(reference), strict=False)
    return [fmean(mine_s) - fmean(theirs_s) for mine_s, theirs_s in pairs]


def _steps(record: RunRecord) -> list[tuple[float, ...]]:
    """Latencies of each step in every timed trial; of steps that all of them have."""
    return list(zip(*_timed(record), strict=False))


def _timed(record: RunRecord) -> list[tuple[float, ...]]:
    """The latencies of each timed trial."""
    return [trial.inter_token_latencies_s for trial in record.trials if trial.inter_token_latencies_s]


def _ttft(record: RunRecord) -> list[float]:
    return [trial.ttft_s for trial in record.trials if trial.ttft_s is not None]


def _range(samples: Sequence[float]) -> float:
    return max(samples) - min(samples) if samples else 0.0


def _standard_error(samples: Sequence[float]) -> float:
    """Of their mean."""
    return stdev(samples) / sqrt(len(samples)) if len(samples) > 1 else 0.0
