"""What was seen and what is kept. Raw samples only: statistics are derived, never stored instead."""

from typing import Final, Literal

import msgspec

from offload_eval.core.base import Strict
from offload_eval.core.machine import Machine
from offload_eval.core.run_spec import RunSpec, content_hash
from offload_eval.core.shape import ModelFacts
from offload_eval.core.trace import Trace

SCHEMA_VERSION = 1

Evidence = Literal["analytic", "traced", "emulated", "measured"]
Status = Literal["ok", "oom", "unsupported", "timeout", "failed"]
Phase = Literal["prefill", "decode"]
PHASES: Final[tuple[Phase, ...]] = ("prefill", "decode")
Direction = Literal["h2d", "d2h"]


class PhaseSample(Strict, frozen=True, kw_only=True):
    """One phase of one trial. Prefill ends when the first token is on the host."""

    peak_allocated_bytes: int | None = None
    """Highest live device bytes, weights included."""
    peak_reserved_bytes: int | None = None
    """Highest bytes the allocator held from the device."""
    peak_device_used_bytes: int | None = None
    """Highest device-wide use seen at token boundaries: context, workspaces and other processes included."""
    h2d_bytes: int | None = None
    d2h_bytes: int | None = None
    num_h2d_copies: int | None = None
    num_d2h_copies: int | None = None
    num_pageable_copies: int | None = None
    """Copies of either direction whose host side is not pinned; emulated: was not made by the link."""
    h2d_busy_s: float | None = None
    """Time the link spent copying host to device."""
    d2h_busy_s: float | None = None
    exposed_transfer_s: float | None = None
    """Time computation waited for copies."""


class ProfiledDirection(Strict, frozen=True, kw_only=True):
    """Copies of one direction in one short pass, by the device's profiler and by the link's own account.

    Copies that generate() makes itself, such as tokens for the host, are apart: see `num_other_copies`.
    """

    bytes: int
    """Of the copies that the profiler saw."""
    num_copies: int
    num_pageable_copies: int | None
    """Those of them whose host side was not pinned; None where the profiler does not say."""
    copy_s: float
    """Sum of the copies' durations on the device."""
    accounted_bytes: int
    """Of the same pass, by the account."""
    num_accounted_copies: int
    accounted_busy_s: float
    """Between events on the copying stream: the copies, and some µs between two events each."""
    num_other_copies: int
    """Copies that were left out: of a size that the account does not have, and no larger than the prompt's tokens."""


class ProfiledCopies(Strict, frozen=True, kw_only=True):
    """What the device's profiler saw cross the link, beside the account of the same pass."""

    output_tokens: int
    """Tokens generated in the pass: it is cut short, since a profile of a whole generation is large."""
    h2d: ProfiledDirection
    d2h: ProfiledDirection


class TrialSample(Strict, frozen=True, kw_only=True):
    """One round through the passes. A pass that the round did not take leaves its fields None."""

    ttft_s: float | None = None
    """From the call of generate() to the first token on the host."""
    inter_token_latencies_s: tuple[float, ...] | None = None
    """Between consecutive tokens on the host; the first token's latency is not among them."""
    e2e_latency_s: float | None = None
    """From the call of generate() to the last token on the host."""
    output_tokens: int | None = None
    """Tokens generated for each session, counted from the result."""
    prefill: PhaseSample = msgspec.field(default_factory=PhaseSample)
    decode: PhaseSample = msgspec.field(default_factory=PhaseSample)
    profiled_copies: ProfiledCopies | None = None
    """Of a pass of its own, where the device has a profiler and the strategy uses the link."""
    kv_cache_device_bytes: int | None = None
    """Payload of the cache's tensors on the device when generation ends, scales and zero points included."""
    kv_cache_host_bytes: int | None = None
    peak_host_rss_bytes: int | None = None
    """Highest resident set of the worker during the memory pass."""
    pinned_requested_bytes: int | None = None
    pinned_allocated_bytes: int | None = None
    """What the pinned allocator took for the request; it rounds up."""
    swap_in_bytes: int | None = None
    """System-wide, during the timing pass."""
    swap_out_bytes: int | None = None
    num_major_faults: int | None = None
    """Page faults of the worker that waited for a disk, during the timing pass."""
    num_minor_faults: int | None = None
    """Page faults that did not, during the timing pass."""
    peak_cgroup_bytes: int | None = None
    """Highest usage seen of the control group with the tightest memory limit, else of the worker's own, page cache
    included, during the memory pass: all its processes'."""
    cgroup_limit_bytes: int | None = None
    """That limit; None: there is none."""
    cgroup_swap_bytes: int | None = None
    """Highest swap in use by that control group during the memory pass; None where it is not counted."""
    num_alloc_retries: int | None = None
    num_compilations: int | None = None
    """Graphs that torch compiled during the timing pass, which should be none; None: the strategy is not compiled."""


class FidelitySample(Strict, frozen=True, kw_only=True):
    """The strategy's logits against the baseline's on the same forced tokens, position by position.

    For the baseline itself: against its own run, prefilled in chunks. That is the noise floor.
    """

    against: Literal["baseline", "chunked_prefill"]
    kl_nats: tuple[float, ...]
    """KL(baseline || strategy) at each output position, mean over the batch."""
    max_kl_nats: float
    """Highest over positions and sessions."""
    top1_agreement_ratio: float
    """Share of positions with the same most likely token."""
    nll_change_nats: float
    """Mean negative log likelihood of the forced tokens, strategy minus baseline."""
    first_divergence_tokens: tuple[int | None, ...]
    """Per session, the output position where free-running greedy decoding would first differ; None: nowhere."""
    bit_equal: bool
    """Whether every logit is identical."""
    baseline_top1_margin_nats: float
    """Smallest lead of the baseline's chosen token over its runner-up: how fragile top-1 is here."""


class Failure(Strict, frozen=True, kw_only=True):
    """Why a cell has no result."""

    type: str
    message: str
    stage: str
    """`support`, `load`, `trace`, or the name of the pass that ran."""
    phase: Phase | None = None
    """Where generation was; None outside a pass."""
    ledger: Literal["device", "host"] | None = None
    """Which memory ran out; None where none did."""


class RecoverySample(Strict, frozen=True, kw_only=True):
    """How a strategy's worker came back after a cell that failed.

    Before the first failure and after each one the worker runs the same short generation of one session; `equal`
    means that its tokens and its logits are the same, bit by bit.
    """

    in_new_worker: bool
    """Whether the failure took the worker with it."""
    recovery_s: float | None = None
    """From the failure's end until memory was released; of a new worker, until its model was loaded."""
    check_s: float | None = None
    """Time of the short generation after it."""
    tokens_equal: bool | None = None
    """None: there was none before the failure to compare with, or none could be made after it."""
    logits_equal: bool | None = None
    leaked_bytes: int | None = None
    """Device bytes live after the release beyond those before the cell."""
    leaked: tuple[str, ...] = ()
    """Tensors that are among them: shape, dtype, bytes and what holds them."""
    message: str = ""
    """Why there was no short generation."""


class Conditions(Strict, frozen=True, kw_only=True):
    """The state of the worker around a cell."""

    compute_threads: int | None = None
    contention_ratio: float | None = None
    """Wall over CPU time of a small parallel operation at the worker's start; 1.0: nobody else wants the cores."""
    forced_tokens: bool | None = None
    """Whether the cell was given the baseline's tokens; False: it ran on its own, and is compared with nothing."""
    baseline_bytes: int | None = None
    """Device bytes live before the cell: the weights, and the workspaces of libraries that use the allocator."""
    leaked_bytes: int | None = None
    """Device bytes live after the cell beyond `baseline_bytes`."""
    cap_bytes: int | None = None
    """Enforced limit on allocations in the memory, transfer and timing passes."""
    host_cap_bytes: int | None = None
    """Enforced limit on the link's host buffers in the same passes; None: there was none."""
    noise_floor_chunk_tokens: int | None = None
    """Size of the chunks that the baseline was prefilled in for its comparison with itself."""
    warmups_s: tuple[float, ...] = ()
    """Time inside generate() of every warm-up pass, in order, raw; of a compiled strategy the first compiles. The
    fidelity pass, which warms up too, is not among them: it computes on every token's logits."""
    num_compilations: int | None = None
    """Graphs that torch compiled in all passes before the first timed one; None: the strategy is not compiled."""
    generate_s: float | None = None
    """Time inside generate(), all passes together."""
    load_s: float | None = None
    """Time this worker took to load the model; shared by all its cells."""
    recovery: RecoverySample | None = None
    """Of a cell that ended badly; None elsewhere."""


class RunRecord(Strict, frozen=True, kw_only=True):
    """One finished cell, run or traced."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    """`record_id` of the cell: what resume keys on."""
    spec: RunSpec
    machine: Machine
    model: ModelFacts
    evidence: Evidence
    status: Status
    failure: Failure | None = None
    trials: tuple[TrialSample, ...] = ()
    fidelity: FidelitySample | None = None
    conditions: Conditions = msgspec.field(default_factory=Conditions)
    trace: Trace | None = None
    """Of a traced record; None in every other."""
    started_at_utc: str
    duration_s: float


def record_id(spec: RunSpec, evidence: Evidence) -> str:
    """Names a cell's record: the hash of its spec for a run, that of the spec and the rung for a trace."""
    return content_hash((spec, evidence)) if evidence == "traced" else content_hash(spec)
