"""What a comparison must keep, and whether it did."""

from typing import Annotated, Literal

from msgspec import Meta

from offload_eval.core.base import Strict, Text

NonNegative = Annotated[float, Meta(ge=0)]


class MetricLimit(Strict, frozen=True, kw_only=True):
    """Limits of one metric, in its SI unit. Every stated one must be kept."""

    worse_by_ratio: NonNegative | None = None
    """How much worse the candidate may be, as a share of the baseline: 0.05 is 5 %."""
    worse_by: NonNegative | None = None
    """How much worse it may be, in the metric's unit."""
    at_most: float | None = None
    """The highest value that the candidate may have, whatever the baseline's is."""
    at_least: float | None = None
    """The lowest value that the candidate may have."""


class GateLimits(Strict, frozen=True, kw_only=True):
    """A limit for each metric that a comparison knows, under the comparison's names. None: not looked at."""

    ttft_s: MetricLimit | None = None
    tpot_s: MetricLimit | None = None
    tokens_per_s: MetricLimit | None = None
    prefill_exposed_s: MetricLimit | None = None
    exposed_s_per_token: MetricLimit | None = None
    prefill_peak_bytes: MetricLimit | None = None
    decode_peak_bytes: MetricLimit | None = None
    prefill_reserved_bytes: MetricLimit | None = None
    decode_reserved_bytes: MetricLimit | None = None
    prefill_device_used_bytes: MetricLimit | None = None
    decode_device_used_bytes: MetricLimit | None = None
    traced_prefill_peak_bytes: MetricLimit | None = None
    traced_decode_peak_bytes: MetricLimit | None = None
    kv_device_bytes: MetricLimit | None = None
    kv_host_bytes: MetricLimit | None = None
    peak_host_rss_bytes: MetricLimit | None = None
    pinned_requested_bytes: MetricLimit | None = None
    pinned_allocated_bytes: MetricLimit | None = None
    prefill_h2d_bytes: MetricLimit | None = None
    prefill_d2h_bytes: MetricLimit | None = None
    decode_h2d_bytes: MetricLimit | None = None
    decode_d2h_bytes: MetricLimit | None = None
    num_pageable_copies: MetricLimit | None = None
    mean_kl_nats: MetricLimit | None = None
    top1_agreement_ratio: MetricLimit | None = None
    first_divergence_tokens: MetricLimit | None = None
    """`nowhere` is beyond every position."""
    bit_equal: MetricLimit | None = None
    """true is 1, false is 0."""
    equal_tokens: MetricLimit | None = None
    limit_sessions: MetricLimit | None = None
    limit_traced_sessions: MetricLimit | None = None
    limit_analytic_sessions: MetricLimit | None = None


class StrategyGate(Strict, frozen=True, kw_only=True):
    """What holds for one strategy: its limits take the place of the general ones, metric by metric."""

    strategy: Text
    """Its label."""
    limits: GateLimits = GateLimits()
    allow: tuple[str, ...] = ()
    """Changes of state that break nothing, besides the general ones: `ok -> unsupported`, `ok -> missing`."""


class GateSpec(Strict, frozen=True, kw_only=True):
    """A gate file."""

    limits: GateLimits = GateLimits()
    """For every strategy."""
    allow: tuple[str, ...] = ()
    """Changes of state that break nothing. A state that gets better never does."""
    strategies: tuple[StrategyGate, ...] = ()


class GateLine(Strict, frozen=True, kw_only=True):
    """One limit on one cell, or the state of one cell."""

    workload: str
    strategy: str
    metric: str
    limit: str
    """What was to be kept, in words with its unit."""
    outcome: Literal["kept", "broken", "undecided"]
    """undecided: too few trials to tell, or a value that neither side has; it breaks nothing."""
    message: str
    """Both values and what became of the limit."""


class GateResult(Strict, frozen=True, kw_only=True):
    """A comparison held against a gate."""

    lines: tuple[GateLine, ...]

    @property
    def broken(self) -> tuple[GateLine, ...]:
        """The lines that were not kept."""
        return tuple(line for line in self.lines if line.outcome == "broken")
