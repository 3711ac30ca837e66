"""Statistics of raw samples: derived from records each time, never stored in their place."""

from collections.abc import Callable, Iterable, Sequence
from math import ceil, comb
from statistics import median
from typing import Final

from offload_eval.core.judgement import Interval
from offload_eval.core.records import RunRecord, TrialSample

CONFIDENCE: Final = 0.95
"""Least coverage of an interval that claims one."""


def summarize(samples: Sequence[float]) -> Interval | None:
    """Gives the median and the narrowest pair of order statistics that covers the true one often enough.

    The interval assumes independent samples of one distribution, and nothing about its form. `confidence` is
    its exact coverage, at least `CONFIDENCE`. Fewer than six samples cannot reach that: the range is then
    minimum to maximum and `confidence` is None.

    Returns:
        None for no samples.

    Source: David and Nagaraja, Order Statistics, 3rd ed., section 7.1.
    """
    if not samples:
        return None
    ordered = sorted(samples)
    rank, coverage = _symmetric_rank(len(ordered))
    return Interval(
        median=median(ordered),
        low=ordered[rank - 1],
        high=ordered[-rank],
        samples=len(ordered),
        confidence=coverage if coverage >= CONFIDENCE else None,
    )


def _symmetric_rank(count: int) -> tuple[int, float]:
    """The highest rank k for which [x_(k), x_(count+1-k)] still covers enough, or 1, with its coverage."""
    rank, coverage = 1, _coverage(count, 1)
    while 2 * (rank + 1) <= count and _coverage(count, rank + 1) >= CONFIDENCE:
        rank += 1
        coverage = _coverage(count, rank)
    return rank, coverage


def _coverage(count: int, rank: int) -> float:
    """1 - 2 P(Binomial(count, 1/2) < rank)."""
    return float(1 - 2 * sum(comb(count, below) for below in range(rank)) / 2**count)


def percentile(samples: Sequence[float], percent: int) -> float | None:
    """The nearest-rank percentile: a value that was seen, never one between two.

    Args:
        samples: In any order.
        percent: 1 to 100.

    Returns:
        The smallest sample that at least `percent` % of the samples do not exceed; None for no samples.
    """
    if not 1 <= percent <= 100:
        raise ValueError(f"percent is {percent}; allowed: 1 to 100")
    ordered = sorted(samples)
    return ordered[ceil(percent * len(ordered) / 100) - 1] if ordered else None


def relative_spread(samples: Sequence[float]) -> float | None:
    """(maximum - minimum) / median; None for fewer than two samples or a median of 0."""
    if len(samples) < 2:
        return None
    middle = median(samples)
    return (max(samples) - min(samples)) / middle if middle else None


def tpot_s(trial: TrialSample) -> float | None:
    """Time per output token after the first: (e2e_latency_s - ttft_s) / (output_tokens - 1).

    Returns:
        Seconds; None where the trial was not timed or has fewer than two tokens.
    """
    if trial.e2e_latency_s is None or trial.ttft_s is None or trial.output_tokens is None or trial.output_tokens < 2:
        return None
    return (trial.e2e_latency_s - trial.ttft_s) / (trial.output_tokens - 1)


def tokens_per_s(trial: TrialSample, batch_size: int) -> float | None:
    """Output tokens of the whole batch over end-to-end time, prefill included."""
    if not trial.e2e_latency_s or trial.output_tokens is None:
        return None
    return batch_size * trial.output_tokens / trial.e2e_latency_s


def tpot_samples_s(record: RunRecord) -> list[float]:
    """TPOT of each timed trial."""
    return _present(tpot_s, record.trials)


def summarize_ttft(record: RunRecord) -> Interval | None:
    """TTFT over a record's trials, in seconds."""
    return summarize(_present(lambda trial: trial.ttft_s, record.trials))


def summarize_tpot(record: RunRecord) -> Interval | None:
    """TPOT over a record's trials, in seconds."""
    return summarize(tpot_samples_s(record))


def summarize_throughput(record: RunRecord) -> Interval | None:
    """Output tokens per second of the whole batch, over a record's trials."""
    batch_size = record.spec.workload.batch_size
    return summarize(_present(lambda trial: tokens_per_s(trial, batch_size), record.trials))


def median_of(interval: Interval | None) -> float | None:
    """The median, where there is one."""
    return None if interval is None else interval.median


def itl_percentile_s(record: RunRecord, percent: int) -> float | None:
    """A percentile of the inter-token latencies of all trials together, in seconds."""
    pooled = [latency_s for trial in record.trials for latency_s in trial.inter_token_latencies_s or ()]
    return percentile(pooled, percent)


def _present(figure: Callable[[TrialSample], float | None], trials: Iterable[TrialSample]) -> list[float]:
    return [value for trial in trials if (value := figure(trial)) is not None]
