"""What `plan` is asked beside an experiment's workloads and strategies, and what it answers."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from offload_eval.core.base import Name, NonNegativeInt, PositiveInt, Strict

TokenCount = Annotated[int, Meta(ge=0, le=2**24)]
RankCount = Annotated[int, Meta(ge=1, le=65_536)]
GroupSize = Annotated[int, Meta(ge=1, le=65_536)]
KvCacheDtype = Literal["auto", "bfloat16", "float16", "float32", "fp8", "int8", "int4", "int2"]
Percentile = Literal["p50", "p90", "p95", "p99"]
Batching = Literal["one", "group"]
LongRequestAction = Literal["refuse", "queue", "suggest"]
LimitedBy = Literal["device", "host", "context", "max_request_tokens"]


class GeneratedTokens(Strict, frozen=True, kw_only=True):
    """Tokens that the sessions of a group really generate, at percentiles. None: not known."""

    p50: PositiveInt | None = None
    p90: PositiveInt | None = None
    p95: PositiveInt | None = None
    p99: PositiveInt | None = None


class SessionGroup(Strict, frozen=True, kw_only=True):
    """Sessions alike in a population."""

    name: Name
    sessions: Annotated[int, Meta(ge=1, le=1_000_000)]
    prompt_tokens: Annotated[int, Meta(ge=1, le=2**24)]
    max_new_tokens: Annotated[int, Meta(ge=1, le=2**24)]
    """The cap on generation: what admission has to count with."""
    generated_tokens: GeneratedTokens = msgspec.field(default_factory=GeneratedTokens)
    shared_prefix_tokens: TokenCount = 0
    """Tokens at the start of the prompt that all sessions of the group have in common."""
    beams: Annotated[int, Meta(ge=1, le=1024)] = 1


class PagingSpec(Strict, frozen=True, kw_only=True):
    """How a paged engine stores the cache."""

    block_tokens: Annotated[int, Meta(ge=1, le=2**20)] = 16
    kv_cache_dtype: KvCacheDtype = "auto"
    """auto: the model's dtype."""
    q_group_size: GroupSize = 64
    """Values with one scale and one zero point; the integer formats'."""
    residual_length: TokenCount = 128
    """Newest tokens that stay unquantized; the integer formats'."""

    @property
    def label(self) -> str:
        """`paged`, with the format where it is not the model's dtype."""
        return "paged" if self.kv_cache_dtype == "auto" else f"paged-{self.kv_cache_dtype}"


class PartitionSpec(Strict, frozen=True, kw_only=True):
    """How the model is spread over devices; the budget is one device's."""

    tensor_parallel: RankCount = 1
    pipeline_parallel: RankCount = 1
    data_parallel: RankCount = 1
    """Whole replicas."""


class HostSpec(Strict, frozen=True, kw_only=True):
    """The host ledger of the machine that all devices are in."""

    memory_bytes: PositiveInt | None = None
    """RAM; None: not stated."""
    limit_bytes: PositiveInt | None = None
    """Limit of the control group or pod; None: not stated. With neither, the host ledger limits nothing."""
    reserve_bytes: NonNegativeInt = 0
    """For everything on the host that is not pinned KV."""

    @property
    def kv_bytes(self) -> int | None:
        """What pinned KV may take; None where no capacity is stated."""
        stated = [size for size in (self.memory_bytes, self.limit_bytes) if size is not None]
        return max(0, min(stated) - self.reserve_bytes) if stated else None


class LongRequestSpec(Strict, frozen=True, kw_only=True):
    """What becomes of a request over the cap or the model's context. It is never truncated."""

    action: LongRequestAction = "refuse"
    """refuse: turned away. queue: kept apart, outside the admission limit. suggest: turned away, and told the prompt
    length that would fit."""
    max_request_tokens: PositiveInt | None = None
    """Cap on prompt and generated tokens together; None: the model's context alone."""


class PlanSpec(Strict, frozen=True, kw_only=True):
    """The `plan` section of an experiment; `run` does not read it."""

    population: tuple[SessionGroup, ...] = ()
    percentile: Percentile | None = None
    """Which of the groups' `generated_tokens` the population is also summed at."""
    batching: Batching = "one"
    """How caches of transformers hold the population. one: one left-padded batch. group: a batch for each group."""
    activations_bytes: NonNegativeInt = 0
    """Device bytes kept for activations."""
    estimate_activations: bool = False
    """Take them from the closed form of `bounds/activations.py` instead."""
    prefill_chunk_tokens: PositiveInt | None = None
    """Prompt tokens prefilled at once; None: a whole prompt. Of them activations are estimated, and the windows of
    transformers' caches keep the last chunk's until the next step."""
    encoder_tokens: TokenCount | None = None
    """Tokens that cross-attention reads; None: the model's fixed count, or else the cached tokens."""
    paging: PagingSpec = msgspec.field(default_factory=PagingSpec)
    partition: PartitionSpec = msgspec.field(default_factory=PartitionSpec)
    host: HostSpec = msgspec.field(default_factory=HostSpec)
    long_requests: LongRequestSpec = msgspec.field(default_factory=LongRequestSpec)


class KvCacheBytes(Strict, frozen=True, kw_only=True):
    """KV cache of one session, in each view. None: there is no such cache for this model or format."""

    ideal: int
    """What a paged engine must hold while it computes the newest token, without rounding to pages."""
    transformers: int | None
    """transformers' DynamicCache, or its QuantizedCache in this format, at rest."""
    transformers_static: int | None
    """transformers' StaticCache built for these tokens."""
    transformers_version: str


class LayerRow(Strict, frozen=True, kw_only=True):
    """Layers that cache alike, in one session."""

    layers: int
    cache: str
    kv_heads: int
    key_head_dim: int
    value_head_dim: int
    window_tokens: int | None
    ideal_bytes: int
    transformers_bytes: int | None


class Admission(Strict, frozen=True, kw_only=True):
    """Sessions that fit: an upper bound under the plan's assumptions. Of the whole deployment, all replicas."""

    device_sessions: int | None
    """What the device ledger admits; None: nothing grows with sessions."""
    host_sessions: int | None
    """What the host ledger admits; None: the strategy holds nothing there, or no capacity is stated."""
    limit: int | None
    """The smaller of the two; 0 for a request that the long-request policy does not admit."""
    limited_by: LimitedBy | None


class DeviceLedger(Strict, frozen=True, kw_only=True):
    """One rank's device memory, and what of it is left for the KV cache."""

    budget_bytes: int
    weights_bytes: int
    activations_bytes: int
    """Stated, or estimated for `prefill_tokens`."""
    prefill_tokens: int | None
    """Prompt tokens prefilled at once, of which activations were estimated; None where they were not."""
    runtime_bytes: int
    reserve_bytes: int
    kv_bytes: int
    """What is left; never below 0."""
    budget_from: str | None = None
    """The hardware profile whose memory is the budget; None: the budget is stated."""


class HostLedger(Strict, frozen=True, kw_only=True):
    """Host memory for pinned KV. Swap is not part of it."""

    memory_bytes: int | None
    limit_bytes: int | None
    reserve_bytes: int
    kv_bytes: int | None


class PlanHardware(Strict, frozen=True, kw_only=True):
    """The hardware profile that the link's times are of."""

    name: str
    calibrated: bool
    """Measured on a machine; else from documents."""
    link: str | None = None
    """None: the profile has no link, nor have the strategies."""
    emulated: bool | None = None
    """Whether memory copies of a CPU stand for the link."""
    date: str | None = None
    """Of the oldest of its link's bandwidths."""


class PlanCell(Strict, frozen=True, kw_only=True):
    """One strategy at one combination of lengths and batch."""

    strategy: str
    kind: str
    workload: str
    prompt_tokens: int
    output_tokens: int
    batch_size: int
    cached_tokens: int
    refusal: str | None = None
    """Why there are no numbers."""
    kv_device_peak_bytes_per_session: int | None = None
    """Of one rank: the most at rest, from the end of the prefill to the last token."""
    kv_device_bytes_fixed: int | None = None
    kv_host_bytes_per_session: int | None = None
    """Of all ranks of a replica."""
    batch_device_bytes: int | None = None
    """Of one rank, for the whole batch."""
    batch_pinned_bytes: int | None = None
    """Host bytes for the whole batch, buffers rounded up as the pinned allocator does."""
    h2d_bytes_per_step: int | None = None
    """To the device for the last decode step of the whole batch; all ranks."""
    d2h_bytes_per_step: int | None = None
    link_h2d_s: float | None = None
    """Those bytes on the slowest rank's link, nothing going the other way. Times of the link are None without a
    hardware profile, without a decode step, and where the strategy does not copy."""
    link_d2h_s: float | None = None
    link_bound_tpot_s: float | None = None
    """Both directions at once, contending: no step that moves these bytes takes less. Earlier steps move less."""
    link_h2d_at_limit_s: float | None = None
    """The same for as many sessions as `admission.limit` gives each replica; None where that is unknown or 0."""
    link_d2h_at_limit_s: float | None = None
    link_bound_tpot_at_limit_s: float | None = None
    batch_fits: bool | None = None
    admission: Admission | None = None
    """None where no budget is stated."""
    assumptions: tuple[str, ...] = ()


class LongRequest(Strict, frozen=True, kw_only=True):
    """A request that does not fit, and what becomes of it."""

    name: str
    request_tokens: int
    limit_tokens: int
    limited_by: LimitedBy
    outcome: Literal["refused", "queued", "suggested"]
    fitting_prompt_tokens: int | None = None
    """The longest prompt with the same generation that the plan's `strategy` would admit; None: there is none."""


class LongestSession(Strict, frozen=True, kw_only=True):
    """The longest prompt, without generation, of a session that is the only one.

    A compressor's bytes fall where it closes a stretch of tokens: with one, a somewhat longer prompt may fit as well.
    """

    strategy: str
    tokens: int
    limited_by: LimitedBy | None
    """What stops it there; None: nothing does up to here, and none longer was tried."""


class PopulationSum(Strict, frozen=True, kw_only=True):
    """A whole population at one assumption about how much it generates."""

    at: str
    """`caps`, or a percentile."""
    sessions: int
    device_bytes: int
    """Of one rank."""
    pinned_bytes: int
    padding_device_bytes: int
    """Part of the device bytes that rows shorter than their batch's longest prompt and generation do not use."""
    padding_host_bytes: int
    """The same of the host bytes, before they are rounded up."""
    shared_prefix_saved_bytes: int
    """Device bytes that shared prefixes saved."""
    fits: bool | None
    mixes: int | None
    """Whole populations of this mix that fit."""


class PopulationCell(Strict, frozen=True, kw_only=True):
    """A population under one strategy."""

    strategy: str
    kind: str
    left_out: tuple[str, ...] = ()
    """Groups that the long-request policy keeps out; they are not summed."""
    refusal: str | None = None
    sums: tuple[PopulationSum, ...] = ()


class Plan(Strict, frozen=True, kw_only=True):
    """The answer of `plan`. The top-level figures are those of the first workload and the first strategy."""

    evidence: Literal["analytic"] = "analytic"
    statement: str
    model: str
    model_type: str
    model_source: str | None
    context_tokens: int | None
    dtype: str
    kv_cache_dtype: str
    cached_tokens: int
    kv_cache_bytes: KvCacheBytes
    parts: dict[str, dict[str, int] | None]
    """View -> bytes by what they hold."""
    layers: tuple[LayerRow, ...]
    activations_estimate_bytes: int | None
    """Prefill of one session of the first workload; None where the closed form does not cover the model."""
    device: DeviceLedger | None = None
    host: HostLedger
    hardware: PlanHardware | None = None
    strategy: str
    """Whose admission is given: the first of the strategies that the model's layers support."""
    admission: Admission | None = None
    """None without a budget, and where no strategy is supported."""
    cells: tuple[PlanCell, ...]
    longest_sessions: tuple[LongestSession, ...] = ()
    """By strategy; empty without a budget."""
    long_requests: tuple[LongRequest, ...] = ()
    population: tuple[PopulationCell, ...] = ()
    population_device: DeviceLedger | None = None
    """The ledger that the population is held against: activations are of its longest prompt."""
    assumptions: tuple[str, ...]
