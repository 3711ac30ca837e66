"""What the user asks for: an experiment."""

from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from offload_eval.core.base import Name, NonNegativeInt, PositiveInt, Strict
from offload_eval.core.capacity import CapacitySpec
from offload_eval.core.plan import PlanSpec

DeviceName = Literal["cpu", "cuda"]
Attention = Literal["eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"]
"""transformers' names of the attention that a workload may ask for."""
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
"""torch.compile's modes; `reduce-overhead` and `max-autotune` replay CUDA graphs."""
BatchSize = Annotated[int, Meta(ge=1, le=65_536)]
ChunkTokens = Annotated[int, Meta(ge=1, le=2**24)]

BITS_PER_VALUE = {"bfloat16": 16, "float16": 16, "float32": 32}


class ModelSpec(Strict, frozen=True, kw_only=True):
    """Where the model comes from. Exactly one of `source` and `config` is given."""

    source: str | None = None
    """Hub id, local folder, or GGUF file."""
    config: str | None = None
    """A config.json (or its folder) to build the model from; needs `weights: random`."""
    weights: Literal["pretrained", "random"] = "pretrained"
    revision: str | None = None
    """Hub revision of `source`."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    attn_implementation: Annotated[str, Meta(min_length=1)] = "sdpa"
    trust_remote_code: bool = False
    """Runs code shipped with the model; only ever on when this file says so."""

    @property
    def location(self) -> str:
        """The path or hub id, whichever form was given."""
        return self.source or self.config or ""


class BudgetSpec(Strict, frozen=True, kw_only=True):
    """The memory a deployment may use on the device and on the host, and what of it the KV cache cannot have."""

    device_bytes: PositiveInt
    weights_bytes: PositiveInt | None = None
    """None: counted from the model."""
    runtime_bytes: NonNegativeInt = 0
    """What lies outside the allocator: the device context, and libraries that allocate by themselves."""
    reserve_bytes: NonNegativeInt = 0
    """Headroom kept free on top of everything that is counted."""
    enforce: bool = False
    """Cap a cell's allocations at `device_bytes - runtime_bytes`, so that it can run out of memory. Probes of a
    capacity search are always capped, and keep the reserve free too."""
    host_bytes: PositiveInt | None = None
    """Host memory that the cache may take, in buffers of the link; None: whatever the machine gives. Enforced where
    `enforce` is, and by the capacity search."""

    @property
    def available_bytes(self) -> int:
        """What weights, cache and activations may take."""
        return self.device_bytes - self.runtime_bytes - self.reserve_bytes

    def cap_bytes(self, loaded_bytes: int) -> int:
        """The same for a model of `loaded_bytes`, where the budget states other weights than the loaded ones."""
        return max(0, self.available_bytes - (self.weights_bytes or loaded_bytes) + loaded_bytes)


class PydocPrompt(Strict, frozen=True, kw_only=True, tag_field="kind", tag="pydoc"):
    """English text that every Python carries: the standard library's pydoc topics."""


class TextPrompt(Strict, frozen=True, kw_only=True, tag_field="kind", tag="text"):
    """A UTF-8 text file."""

    path: str


class JsonlPrompt(Strict, frozen=True, kw_only=True, tag_field="kind", tag="jsonl"):
    """One field of every line of a JSON Lines file, joined by blank lines."""

    path: str
    field: str = "text"


class RandomPrompt(Strict, frozen=True, kw_only=True, tag_field="kind", tag="random"):
    """Uniform random token ids, for models whose weights are random."""


PromptSource = PydocPrompt | TextPrompt | JsonlPrompt | RandomPrompt


class Workload(Strict, frozen=True, kw_only=True):
    """One generation job. Lengths are exact and enforced: never truncated, never padded."""

    name: Name | None = None
    batch_size: BatchSize = 1
    prompt_tokens: Annotated[int, Meta(ge=1, le=2**24)]
    output_tokens: Annotated[int, Meta(ge=2, le=2**24)]
    """At least two: TPOT is undefined for a single token."""
    seed: NonNegativeInt = 0
    """Where in the text the prompts start, or the random tokens' seed."""
    prompt: PromptSource = msgspec.field(default_factory=PydocPrompt)
    prefill_chunk_tokens: ChunkTokens | None = None
    """Prompt tokens prefilled at once, fewer than the prompt has; None: the whole prompt."""
    attn_implementation: Attention | None = None
    """None: the model's. Every attention has a baseline of its own."""

    @property
    def label(self) -> str:
        """The name, or the three lengths and what differs from the model's own attention and a whole prefill."""
        parts = [
            f"b{self.batch_size}-p{self.prompt_tokens}-o{self.output_tokens}",
            *([] if self.prefill_chunk_tokens is None else [f"chunk{self.prefill_chunk_tokens}"]),
            *([] if self.attn_implementation is None else [self.attn_implementation]),
        ]
        return self.name or "-".join(parts)

    @property
    def cached_tokens(self) -> int:
        """Tokens a session holds in its cache when generation ends; the last one is never cached."""
        return self.prompt_tokens + self.output_tokens - 1

    @property
    def forced_tokens_bytes(self) -> int:
        """The baseline's tokens, an int64 each, which a run has on the device and a trace has not."""
        return self.batch_size * self.output_tokens * 8


class FactorsSpec(Strict, frozen=True, kw_only=True):
    """Values that every workload runs at, in all combinations. An empty list leaves each workload its own value."""

    batch_size: tuple[BatchSize, ...] = ()
    prefill_chunk_tokens: tuple[ChunkTokens | None, ...] = ()
    """null: the whole prompt at once."""
    attn_implementation: tuple[Attention | None, ...] = ()
    """null: the model's."""


class DynamicSpec(Strict, frozen=True, kw_only=True, tag_field="kind", tag="dynamic"):
    """transformers' DynamicCache: the whole KV cache on the device."""

    kind: ClassVar[str] = "dynamic"
    lossless: ClassVar[bool] = True
    name: Name | None = None

    @property
    def label(self) -> str:
        """The name, or the kind."""
        return self.name or self.kind


class OffloadedSpec(Strict, frozen=True, kw_only=True, tag_field="kind", tag="offloaded"):
    """transformers' own offloading: each layer's whole KV crosses the link both ways for each token."""

    kind: ClassVar[str] = "offloaded"
    lossless: ClassVar[bool] = True
    name: Name | None = None

    @property
    def label(self) -> str:
        """The name, or the kind."""
        return self.name or self.kind


class StaticSpec(Strict, frozen=True, kw_only=True, tag_field="kind", tag="static"):
    """transformers' StaticCache: room for every token of the workload, on the device from the first one on."""

    kind: ClassVar[str] = "static"
    name: Name | None = None
    compile: CompileMode | None = None
    """Mode in which generate() has torch.compile compile the decode step; None: not compiled."""

    @property
    def lossless(self) -> bool:
        """Whether the output must equal the baseline's: compiled code rounds in another order."""
        return self.compile is None

    @property
    def label(self) -> str:
        """The name, or the kind with the mode it is compiled in."""
        return self.name or (self.kind if self.compile is None else f"{self.kind}-compile-{self.compile}")


class OffloadedStaticSpec(Strict, frozen=True, kw_only=True, tag_field="kind", tag="offloaded_static"):
    """transformers' StaticCache, offloaded: each layer's whole buffer crosses the link both ways for each token."""

    kind: ClassVar[str] = "offloaded_static"
    name: Name | None = None
    compile: CompileMode | None = None
    """Mode in which generate() has torch.compile compile the decode step; None: not compiled."""

    @property
    def lossless(self) -> bool:
        """Whether the output must equal the baseline's: compiled code rounds in another order."""
        return self.compile is None

    @property
    def label(self) -> str:
        """The name, or the kind with the mode it is compiled in."""
        return self.name or (self.kind if self.compile is None else f"{self.kind}-compile-{self.compile}")


HostDtype = Literal["native", "fp8", "int8", "int4"]


class StreamedSpec(Strict, frozen=True, kw_only=True, tag_field="kind", tag="streamed"):
    """Ours: KV lives on the host, only new tokens are written back, layers are fetched ahead of use."""

    kind: ClassVar[str] = "streamed"
    name: Name | None = None
    prefetch_layers: PositiveInt = 2
    """Layers fetched ahead of the one that computes; the device holds one scratch layer more. The link is idle while
    nothing is left to fetch ahead, as through a long output head: where copying takes about as long as computing, one
    layer ahead is not enough."""
    resident_share: Literal["auto"] | Annotated[float, Meta(ge=0, le=1)] | None = None
    """Share of the full-attention layers whose KV stays on the device, evenly among the others, rounded down to whole
    layers; `auto`: as many as the budget leaves room for, by trace. None: none, or what `resident_bytes` says."""
    resident_bytes: NonNegativeInt | None = None
    """Device bytes that resident layers may take, instead of a share; of the whole batch at full length."""
    host_dtype: HostDtype = "native"
    """How streamed layers' KV is kept on the host and crosses the link: as the model computes it, or quantized."""

    @property
    def lossless(self) -> bool:
        """Whether the output must equal the baseline's."""
        return self.host_dtype == "native"

    @property
    def label(self) -> str:
        """The name, or the kind with what differs from the default."""
        parts = [
            *([] if self.prefetch_layers == 2 else [f"ahead{self.prefetch_layers}"]),
            *([] if self.resident_share is None else [f"resident{_short(self.resident_share)}"]),
            *([] if self.resident_bytes is None else [f"residentbytes{self.resident_bytes}"]),
            *([] if self.host_dtype == "native" else [self.host_dtype]),
        ]
        return self.name or "-".join([self.kind, *parts])


class QuantizedSpec(Strict, frozen=True, kw_only=True, tag_field="kind", tag="quantized"):
    """transformers' QuantizedCache, with upstream's option names. None leaves an option at upstream's default."""

    kind: ClassVar[str] = "quantized"
    lossless: ClassVar[bool] = False
    name: Name | None = None
    backend: Literal["quanto", "hqq", "fp8"]
    nbits: PositiveInt | None = None
    axis_key: int | None = None
    axis_value: int | None = None
    q_group_size: PositiveInt | None = None
    residual_length: PositiveInt | None = None

    @property
    def options(self) -> dict[str, int]:
        """The group-wise options that were set, under upstream's names."""
        names = ("nbits", "axis_key", "axis_value", "q_group_size", "residual_length")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def label(self) -> str:
        """The name, or the backend with every option that was set."""
        parts = [f"{name.replace('_', '')}{value}" for name, value in self.options.items() if name != "nbits"]
        bits = [] if self.backend == "fp8" else [f"int{self.nbits or 4}"]
        return self.name or "-".join([self.kind, self.backend, *bits, *parts])


StrategySpec = DynamicSpec | StaticSpec | OffloadedSpec | OffloadedStaticSpec | StreamedSpec | QuantizedSpec


class MeasurementPlan(Strict, frozen=True, kw_only=True):
    """How often each pass runs, and when a cell is given up. One pass is one full-length generate()."""

    warmups: NonNegativeInt = 0
    """Full-length runs before anything is timed, besides the fidelity pass, which warms up too. A compiled strategy
    takes at least one, before anything else."""
    trials: Annotated[int, Meta(ge=0, le=10_000)] = 3
    """At least one in an experiment; a probe of the capacity search may take none."""
    memory_trials: NonNegativeInt = 1
    transfer_trials: NonNegativeInt = 1
    fidelity: bool = True
    noise_floor_chunk_tokens: PositiveInt = 255
    """The baseline is compared with itself prefilled in chunks of this size, or of about half of what it prefills at
    once, if that is less. Odd: chunks that fall on an attention kernel's tiles may give equal bits, and no floor."""
    cell_timeout_s: Annotated[float, Meta(gt=0)] = 3600.0
    """For loading the model, for recording a reference, and for the passes of a cell, each."""


class CpuSpec(Strict, frozen=True, kw_only=True):
    """Knobs of the emulated device."""

    compute_threads: PositiveInt | None = None
    """None: cores minus one, which is the copy thread's."""
    link_bytes_per_s: PositiveInt | None = None
    """Paces every copy between the tiers to this bandwidth; None: as fast as memory copies."""


class Experiment(Strict, frozen=True, kw_only=True):
    """One experiment file."""

    name: Name
    question: str = ""
    """What the report is to answer, in the reader's words."""
    model: ModelSpec
    device: Literal["auto", "cuda", "cpu"] = "auto"
    cpu: CpuSpec = msgspec.field(default_factory=CpuSpec)
    budget: BudgetSpec
    workloads: Annotated[tuple[Workload, ...], Meta(min_length=1)]
    """As written; what is run is `core.factors.expand_workloads` of them."""
    factors: FactorsSpec = msgspec.field(default_factory=FactorsSpec)
    strategies: Annotated[tuple[StrategySpec, ...], Meta(min_length=1)]
    baseline: str = "dynamic"
    """Label of the strategy whose tokens every other one is given."""
    measurement: MeasurementPlan = msgspec.field(default_factory=MeasurementPlan)
    hardware: Annotated[str, Meta(min_length=1)] | None = None
    """A hardware profile, by path or by name, such as `offload-eval link --out` writes: the report holds transfers and
    times against it. It decides no result, so it is in no cell's name."""
    capacity: CapacitySpec | None = None
    """How `capacity` searches; None: `run` searches for no limits, and `capacity` with the defaults."""
    trace: bool = True
    """Trace every cell as well, without data and before anything is measured."""
    plan: PlanSpec = msgspec.field(default_factory=PlanSpec)

    @property
    def baseline_strategy(self) -> StrategySpec:
        """The strategy that `baseline` names."""
        return next(strategy for strategy in self.strategies if strategy.label == self.baseline)

    @property
    def in_gpu_strategy(self) -> StrategySpec | None:
        """The cache that is whole and unquantized on the device: the baseline where it is, else the first such one."""
        candidates = (self.baseline_strategy, *self.strategies)
        return next((each for each in candidates if isinstance(each, DynamicSpec | StaticSpec)), None)


def is_auto(strategy: StrategySpec) -> bool:
    """Whether a strategy leaves its resident share to a budget."""
    return isinstance(strategy, StreamedSpec) and strategy.resident_share == "auto"


def as_searched(strategy: StrategySpec) -> StrategySpec:
    """A strategy as a capacity search runs it: `resident_share: auto` admits most sessions with nothing resident."""
    if not (is_auto(strategy) and isinstance(strategy, StreamedSpec)):
        return strategy
    return msgspec.structs.replace(strategy, name=strategy.label, resident_share=0.0)


def compile_mode(strategy: StrategySpec) -> CompileMode | None:
    """The mode a strategy is compiled in; None where it is not."""
    return strategy.compile if isinstance(strategy, StaticSpec | OffloadedStaticSpec) else None


def _short(value: float | str) -> str:
    """In as few digits as name no other number."""
    return str(value).removesuffix(".0")
