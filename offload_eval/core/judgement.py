"""What is computed about records and what is concluded from them."""

from typing import Literal

from offload_eval.core.base import Strict
from offload_eval.core.records import Evidence, Phase, Status

Severity = Literal["error", "warning", "note"]


class Bound(Strict, frozen=True, kw_only=True):
    """Closed-form bytes of one strategy on one workload, with what they assume."""

    evidence: Evidence = "analytic"
    kv_device_bytes_per_session: int
    """KV bytes a session holds on the device when its last token is computed."""
    kv_device_peak_bytes_per_session: int
    """The most of them at rest, over the whole generation; more than at its end where a quantizer flushes."""
    kv_device_bytes_fixed: int = 0
    """KV bytes on the device that do not grow with sessions held elsewhere."""
    kv_host_bytes_per_session: int = 0
    h2d_bytes_per_step: int = 0
    """Bytes to the device for one decode step of the whole batch, at the last step."""
    d2h_bytes_per_step: int = 0
    sessions: int | None = None
    """Sessions that fit the budget: an upper bound under the assumptions."""
    assumptions: tuple[str, ...] = ()
    source: str = ""


class PhaseMemory(Strict, frozen=True, kw_only=True):
    """Device memory of one phase of one cell on three rungs, and what lies between them. Every part is bytes.

    analytic + weights, KV, cache transients, logits and activations = traced peak; that + workspaces, forced tokens
    and what is unexplained = the run's peak; that + allocator = reserved; that + context = in use on the device.
    """

    workload: str
    strategy: str
    phase: Phase
    step: int | None = None
    """The decode step: that of the highest traced peak, else the last; None for prefill."""
    run_id: str | None = None
    """The run's; None where the cell has not run."""
    run_evidence: Evidence | None = None
    run_status: Status | None = None
    traced_run_id: str | None = None
    analytic_bytes: int | None = None
    """Weights, and the KV cache at rest when the prefill or the step ends."""
    weights_beyond_bytes: int | None = None
    """Traced weights beyond the analytic ones."""
    kv_beyond_bytes: int | None = None
    """KV that the traced cache holds at the peak, beyond the analytic one; negative before all layers have theirs."""
    traced_kv_bytes: int | None = None
    """The same KV in full."""
    cache_transient_bytes: int | None = None
    """What the cache has allocated besides: a quantizer's work, copies, layers in flight."""
    logits_bytes: int | None = None
    """Of the output head, of what follows it in the model, and of generate()."""
    activations_bytes: int | None = None
    """All that the model holds besides, the prompt's tokens and masks included."""
    traced_peak_bytes: int | None = None
    workspaces_bytes: int | None = None
    """Live on the device before the run's cell, beyond the traced weights."""
    forced_tokens_bytes: int | None = None
    """The baseline's tokens, which the run is given."""
    unexplained_bytes: int | None = None
    """What is left of the run's peak; an allocator's rounding of each block is in it."""
    peak_allocated_bytes: int | None = None
    allocator_bytes: int | None = None
    """Peak reserved by the allocator beyond its peak allocated: cached blocks and fragments."""
    context_bytes: int | None = None
    """Peak in use on the device beyond the peak reserved: context, libraries, other processes."""


class Finding(Strict, frozen=True, kw_only=True):
    """Something the reader must know before trusting a number."""

    code: str
    severity: Severity
    message: str
    remedy: str = ""
    run_ids: tuple[str, ...] = ()


class Interval(Strict, frozen=True, kw_only=True):
    """A median with the range that holds the true one."""

    median: float
    low: float
    high: float
    samples: int
    confidence: float | None
    """Coverage of [low, high]; None when there are too few samples for one, and the range is min to max."""


class Comparison(Strict, frozen=True, kw_only=True):
    """One strategy against the baseline on the same workload. Ratios are strategy over baseline; 1.0 is equal."""

    workload: str
    strategy: str
    run_id: str
    baseline_run_id: str
    tpot_ratio: float | None = None
    ttft_ratio: float | None = None
    throughput_ratio: float | None = None
    prefill_peak_saved_bytes: int | None = None
    decode_peak_saved_bytes: int | None = None
    kv_device_saved_bytes: int | None = None
    sessions_gained: int | None = None
    extra_bytes_moved_per_token: float | None = None
    mean_kl_nats: float | None = None
    noise_floor_nats: float | None = None
