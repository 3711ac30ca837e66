"""The figures that two runs are compared by: where each comes from, its unit, and the least effect that counts."""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from offload_eval.analysis.cells import mean_kl_nats, merged_sample, noise_floor_nats
from offload_eval.analysis.statistics import median_of, summarize_tpot, summarize_ttft, tokens_per_s, tpot_s
from offload_eval.core.comparison import Value
from offload_eval.core.experiment import StreamedSpec
from offload_eval.core.records import Phase, PhaseSample, RunRecord, TrialSample

BYTES_RATIO: Final = 0.01
"""Bytes that are counted: any change is listed, beyond this share it is worse or better."""
SAMPLED_BYTES_RATIO: Final = 0.05
"""Bytes that are sampled, or that an allocator, a system or other processes add to: RSS, reserved, in use."""
KL_RATIO: Final = 0.05
KL_NATS: Final = 1e-4
"""Both must be passed: below, a mean KL says nothing about the output."""
NOWHERE: Final = "nowhere"
"""First divergence of a cell whose greedy tokens are the baseline's throughout."""


class ValueMetric(NamedTuple):
    """A figure that a cell has once."""

    name: str
    title: str
    unit: str
    value: Callable[[RunRecord], Value]
    lower_is_better: bool | None = True
    least_ratio: float = 0.0
    """A difference up to this share of the baseline is no verdict."""
    least: float = 0.0
    """Nor is one up to this, in the unit."""
    is_sampled: bool = False
    """Whether equal runs differ by that much: such a difference is not listed as a change."""


class TimedMetric(NamedTuple):
    """A figure that every trial has."""

    name: str
    title: str
    unit: str
    samples: Callable[[RunRecord], list[float]]
    lower_is_better: bool = True
    scale: Callable[[RunRecord], float | None] | None = None
    """What an effect is a share of; None: of the figure itself."""


def _of_trials(figure: Callable[[TrialSample], float | None]) -> Callable[[RunRecord], list[float]]:
    return lambda record: [value for trial in record.trials if (value := figure(trial)) is not None]


def _throughputs(record: RunRecord) -> list[float]:
    return _of_trials(lambda trial: tokens_per_s(trial, record.spec.workload.batch_size))(record)


def _exposed_per_token(record: RunRecord) -> list[float]:
    steps = record.spec.workload.output_tokens - 1
    return [seconds / steps for seconds in _of_trials(lambda trial: trial.decode.exposed_transfer_s)(record)]


TIMED_METRICS: Final = (
    TimedMetric("ttft_s", "TTFT", "s", _of_trials(lambda trial: trial.ttft_s)),
    TimedMetric("tpot_s", "TPOT", "s", _of_trials(tpot_s)),
    TimedMetric("tokens_per_s", "throughput", "tokens/s", _throughputs, lower_is_better=False),
    TimedMetric(
        "prefill_exposed_s",
        "exposed transfer in prefill",
        "s",
        _of_trials(lambda trial: trial.prefill.exposed_transfer_s),
        scale=lambda record: median_of(summarize_ttft(record)),
    ),
    TimedMetric(
        "exposed_s_per_token",
        "exposed transfer a decode step",
        "s",
        _exposed_per_token,
        scale=lambda record: median_of(summarize_tpot(record)),
    ),
)
"""An exposed time is a part of TTFT or TPOT: its effect is a share of that, since ten times nothing is nothing."""


def _sample(name: str) -> Callable[[RunRecord], Value]:
    def value(record: RunRecord) -> Value:
        found: Value = getattr(merged_sample(record), name)
        return found

    return value


def _phase(phase: Phase, name: str) -> Callable[[RunRecord], Value]:
    def value(record: RunRecord) -> Value:
        sample: PhaseSample = getattr(merged_sample(record), phase)
        found: Value = getattr(sample, name)
        return found

    return value


def _pageable_copies(record: RunRecord) -> Value:
    sample = merged_sample(record)
    counts = [sample.prefill.num_pageable_copies, sample.decode.num_pageable_copies]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _top1(record: RunRecord) -> Value:
    return None if record.fidelity is None else record.fidelity.top1_agreement_ratio


def _first_divergence(record: RunRecord) -> Value:
    """The earliest position of any session."""
    positions = divergences(record)
    if positions is None:
        return None
    earliest = min(positions, default=float("inf"))
    return NOWHERE if earliest == float("inf") else int(earliest)


def divergences(record: RunRecord) -> list[float] | None:
    """The first divergence of each session, infinity where there is none; None where fidelity was not looked at."""
    fidelity = record.fidelity
    if fidelity is None:
        return None
    return [float("inf") if position is None else position for position in fidelity.first_divergence_tokens]


def _bit_equal(record: RunRecord) -> Value:
    """Of a strategy against the baseline; the baseline against itself in chunks is not asked to be."""
    fidelity = record.fidelity
    return None if fidelity is None or fidelity.against != "baseline" else fidelity.bit_equal


def _resident_share(record: RunRecord) -> Value:
    strategy = record.spec.strategy
    share = strategy.resident_share if isinstance(strategy, StreamedSpec) else None
    return share if isinstance(share, float | int) else None


def _bytes(name: str, title: str, value: Callable[[RunRecord], Value], **changes: object) -> ValueMetric:
    metric = ValueMetric(name, title, "bytes", value, least_ratio=BYTES_RATIO)
    return metric._replace(**changes)  # type: ignore[arg-type]


def _sampled(name: str, title: str, value: Callable[[RunRecord], Value]) -> ValueMetric:
    return _bytes(name, title, value, least_ratio=SAMPLED_BYTES_RATIO, is_sampled=True)


def _by_phase(phase: Phase) -> tuple[ValueMetric, ...]:
    return (
        _bytes(f"{phase}_peak_bytes", f"{phase} peak allocated", _phase(phase, "peak_allocated_bytes")),
        _sampled(f"{phase}_reserved_bytes", f"{phase} peak reserved", _phase(phase, "peak_reserved_bytes")),
        _sampled(f"{phase}_device_used_bytes", f"{phase} peak in use", _phase(phase, "peak_device_used_bytes")),
        _bytes(f"{phase}_h2d_bytes", f"moved to the device in {phase}", _phase(phase, "h2d_bytes")),
        _bytes(f"{phase}_d2h_bytes", f"moved to the host in {phase}", _phase(phase, "d2h_bytes")),
    )


VALUE_METRICS: Final[tuple[ValueMetric, ...]] = (
    *_by_phase("prefill"),
    *_by_phase("decode"),
    _bytes("kv_device_bytes", "KV cache on the device", _sample("kv_cache_device_bytes")),
    _bytes("kv_host_bytes", "KV cache on the host", _sample("kv_cache_host_bytes")),
    _sampled("peak_host_rss_bytes", "peak host RSS", _sample("peak_host_rss_bytes")),
    _bytes("pinned_requested_bytes", "pinned, requested", _sample("pinned_requested_bytes")),
    _bytes("pinned_allocated_bytes", "pinned, allocated", _sample("pinned_allocated_bytes")),
    ValueMetric("num_pageable_copies", "pageable copies", "copies", _pageable_copies),
    ValueMetric("resident_share", "resident share", "ratio", _resident_share, lower_is_better=None),
    ValueMetric("mean_kl_nats", "mean KL", "nats", mean_kl_nats, least_ratio=KL_RATIO, least=KL_NATS),
    ValueMetric("noise_floor_nats", "noise floor", "nats", noise_floor_nats, lower_is_better=None),
    ValueMetric("top1_agreement_ratio", "top-1 agreement", "ratio", _top1, lower_is_better=False),
    ValueMetric(
        "first_divergence_tokens", "first divergence", "token position", _first_divergence, lower_is_better=False
    ),
    ValueMetric("bit_equal", "bit-equal to the baseline strategy", "yes or no", _bit_equal, lower_is_better=False),
)


def as_number(value: Value) -> float | None:
    """A figure to calculate with: true is 1, `nowhere` is infinite; None for other text."""
    if isinstance(value, str):
        return float("inf") if value == NOWHERE else None
    return None if value is None else float(value)


def metric_names() -> Sequence[str]:
    """Every figure of a cell, in the order it is shown."""
    return [*(metric.name for metric in TIMED_METRICS), *(metric.name for metric in VALUE_METRICS)]
