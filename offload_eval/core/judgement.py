"""What is computed about records and what is concluded from them."""

from typing import Literal

from offload_eval.core.base import Strict
from offload_eval.core.records import Evidence, Phase, Status
from offload_eval.core.run_spec import Drill, Role

Ledger = Literal["device", "host"]
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
    device_sessions: int | None = None
    """Those that the device ledger admits."""
    host_sessions: int | None = None
    """Those that the host ledger admits; None: the budget states none, or nothing of the strategy's is there."""
    limiting_ledger: Ledger | None = None
    """The one that admits fewer; None: the budget states no host memory, so that the device's is the only one."""
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


class LinkUse(Strict, frozen=True, kw_only=True):
    """One direction of the link in one phase of one cell."""

    bytes: int
    num_copies: int | None = None
    """None in records made before copies were counted."""
    busy_s: float | None = None
    """Time the link spent on the copies, hidden or not; None where no transfer pass looked."""
    bytes_per_s: float | None = None
    """bytes / busy_s."""
    calibrated_bytes_per_s: float | None = None
    """The bandwidth that the link was calibrated to, with the other direction busy for as long as it was."""
    expected_s: float | None = None
    """num_copies * latency + bytes / calibrated_bytes_per_s."""
    latency_s: float | None = None
    """Of one copy, in `expected_s`."""
    of_link_ratio: float | None = None
    """expected_s / busy_s: 1.0 is the calibrated link."""


class PhaseTransfer(Strict, frozen=True, kw_only=True):
    """What crossed the link in one phase of one cell, what it cost, and what the link allows."""

    workload: str
    strategy: str
    phase: Phase
    run_id: str
    evidence: Evidence
    steps: int
    """Decode steps; 1 for prefill."""
    h2d: LinkUse
    d2h: LinkUse
    num_pageable_copies: int | None = None
    link: str | None = None
    """What the link is held against; None: nothing calibrated fits the rung."""
    exposed_by_waits_s: float | None = None
    """Time a step in which computation stood still for copies."""
    exposed_by_difference_s: float | None = None
    """Time a step that the reference does not take at the same length; it may be negative."""
    difference_noise_s: float | None = None
    """How far the two may lie apart by chance."""
    reference: str | None = None
    """The strategy that `exposed_by_difference_s` is against."""
    hidden_ratio: float | None = None
    """1 - exposed by waits / (h2d busy + d2h busy), at least 0; both directions busy at once count twice."""
    end_latency_s: float | None = None
    """TTFT; of decode the median latency of the last tenth of the steps, as the bounds are those of the last ones."""
    ideal_s: float | None = None
    """Of the prefill up to its token, or of the last decode steps."""
    scheduled_s: float | None = None
    serial_s: float | None = None
    floor_s: float | None = None
    """No TTFT, or TPOT, can beat it: `ideal_s` of a prefill; of decode the lowest ideal bound of any traced step, each
    with the shortest cache."""


class FailureRecovery(Strict, frozen=True, kw_only=True):
    """One failure, on purpose or not, and how the worker came back: a record's failure beside its `RecoverySample`."""

    workload: str
    strategy: str
    run_id: str
    evidence: Evidence
    role: Role
    drill: Drill | None = None
    """None: nobody brought it about."""
    status: Status
    raised: str | None = None
    """The exception's type, or what became of the worker."""
    message: str | None = None
    stage: str | None = None
    phase: Phase | None = None
    ledger: Literal["device", "host"] | None = None
    in_new_worker: bool | None = None
    """None: it is not known how the worker came back."""
    recovery_s: float | None = None
    check_s: float | None = None
    tokens_equal: bool | None = None
    logits_equal: bool | None = None
    leaked_bytes: int | None = None
    leaked: tuple[str, ...] = ()
    unchecked: str = ""
    """Why there was no short generation."""


class FailureGroup(Strict, frozen=True, kw_only=True):
    """Failures of one strategy that were alike."""

    first: FailureRecovery
    times: int
    median_recovery_s: float | None = None
    longest_recovery_s: float | None = None
    most_leaked_bytes: int | None = None
    num_compared: int
    """Those that have a short generation before and after."""
    num_tokens_equal: int
    num_logits_equal: int


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
