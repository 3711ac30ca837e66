"""Traces one strategy on one workload: the real generate(), modeling code and cache, on tensors without data."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from typing import Any, Final

import msgspec
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from offload_eval.bounds.host_rows import num_resident
from offload_eval.core.experiment import DeviceName, QuantizedSpec, StrategySpec, StreamedSpec, Workload, compile_mode
from offload_eval.core.trace import PhaseTrace, StepTrace, Trace
from offload_eval.errors import UnableError
from offload_eval.generation import TokenClock, generate
from offload_eval.strategies.base import kv_payload_bytes
from offload_eval.strategies.registry import load_strategy
from offload_eval.strategies.streamed import num_streamable
from offload_eval.tracing.attention import attention_assumptions, attention_name, attention_refusal
from offload_eval.tracing.dataless_model import without_data
from offload_eval.tracing.known_values import assume_ones
from offload_eval.tracing.ledger import PROMPT, Label, TracedMemory
from offload_eval.tracing.link import CopyAccount, TracedLink
from offload_eval.tracing.repeats import Repeats
from offload_eval.tracing.schedule import (
    EARLY_CHUNKS,
    MOST_CHUNKS,
    MOST_STEPS,
    SKIPPED_CHUNKS,
    SKIPPED_STEPS,
    counts_of,
    pieces_before,
    steps_to_trace,
    sum_of_chunks,
)
from offload_eval.tracing.tracer import GENERATE, Tracer, UntraceableError
from offload_eval.tracing.upstream import HQQ_ASSUMPTION, forward_arguments, upstream_without_data
from offload_eval.tracing.work import WorkAccount, experts_per_token

HOST_ASSUMPTION: Final = (
    "Host bytes are those asked for; a pinned allocator may round each buffer up to a power of two."
)
ONLY_STEP: Final = "The only decode step is the last, which may fetch nothing ahead: a step before it moves more."
COMPILED_ASSUMPTION: Final = (
    "The code is followed before it is compiled. Compiled code fuses operators and holds fewer activations; CUDA "
    "graphs keep a pool of memory of their own, which is not counted."
)
TOKENS_ASSUMPTION: Final = "Tokens that generate() copies to the host, 8 bytes a session and step, are not counted."


def trace_strategy(
    model: Any,
    strategy: StrategySpec,
    workload: Workload,
    *,
    device: DeviceName = "cuda",
) -> Trace:
    """Follows one generate() on tensors without data.

    Counts every tensor an operator returns, weights included, until it dies; not what a kernel allocates and frees
    inside itself, and no rounding or fragmentation of an allocator.

    Args:
        model: A causal language model in evaluation mode, built on `meta` by `build_traceable`, or loaded.
        strategy: The cache strategy. One that is compiled is followed as it is before that.
        workload: Batch size, lengths and chunks of the prefill. Its attention is the model's: build one for each.
        device: Whose kernels and code paths are followed. No such device is needed.

    Returns:
        Live and peak bytes, bytes moved and work, of prefill and of the decode steps that decide.

    Raises:
        UnableError: The strategy refuses the model or the workload, or an operator needs data (UntraceableError).
    """
    tracing = _Tracing(model, strategy, workload, device)
    refusal = attention_refusal(model.config, device) or strategy_refusal(strategy, workload, model.config, device)
    if refusal is not None:
        raise UnableError(f"{strategy.label} cannot be traced: {refusal}")
    try:
        with torch.no_grad(), tracing.opened():
            return tracing.trace()
    except UnableError:
        raise
    except Exception as error:
        words = (str(error).splitlines() or [""])[0][:200]
        raise UntraceableError(
            f"{strategy.label} cannot be traced: the model's code fails ({type(error).__name__}: {words})"
        ) from error


def strategy_refusal(strategy: StrategySpec, workload: Workload, config: Any, device: DeviceName) -> str | None:
    """Why a strategy cannot be traced on a workload for a device; None where nothing of it speaks against that."""
    # A quantizer runs without data where it runs at all, and needs no compiler for the GPU.
    followed_on = "cpu" if isinstance(strategy, QuantizedSpec) else device
    return load_strategy(_uncompiled(strategy)).refusal(followed_on, config, workload)


class _Tracing:
    """What the runs of one trace share: each fills a fresh cache from scratch."""

    def __init__(self, model: Any, strategy: StrategySpec, workload: Workload, device: DeviceName) -> None:
        self.model = model
        self.strategy = load_strategy(_uncompiled(strategy))
        self.spec = strategy
        self.workload = workload
        self.device = device
        self.chunk_tokens = workload.prefill_chunk_tokens
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.repeats = Repeats(self.fakes if device == "cpu" else None)
        self.weights: list[torch.Tensor] = []
        self.residual_length: int | None = None
        self.backend = strategy.backend if isinstance(strategy, QuantizedSpec) else None
        self.assumptions = [TOKENS_ASSUMPTION, *attention_assumptions(model.config, device)]
        if self.strategy.uses_link:
            self.assumptions.append(HOST_ASSUMPTION)
        if self.strategy.uses_link and workload.output_tokens == 2:
            self.assumptions.append(ONLY_STEP)
        if isinstance(strategy, StreamedSpec) and strategy.resident_share is not None:
            layers = num_streamable(model.config)
            resident = num_resident(strategy, layers, layer_bytes=1)  # a share does not ask
            self.assumptions.append(f"{strategy.label}: {resident} of {layers} full-attention layers are resident.")
        if compile_mode(strategy) is not None:
            self.assumptions.append(COMPILED_ASSUMPTION)
        if self.backend == "hqq":
            self.assumptions.append(HQQ_ASSUMPTION)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Takes the model's data away while the context is open."""
        memory = TracedMemory(self.device, self.fakes)
        with without_data(self.model, memory) as self.weights:
            yield

    def trace(self) -> Trace:
        """Runs what must be run."""
        first = _Run(self)
        self.residual_length = getattr(first.cache.layers[0], "residual_length", None) if first.cache.layers else None
        if self.residual_length is not None and self.chunk_tokens and self.chunk_tokens < self.workload.prompt_tokens:
            raise UnableError(
                f"{self.spec.label} cannot be traced with a chunked prefill: which chunks it quantizes depends on all "
                "before them"
            )
        wanted = steps_to_trace(self.workload, self.residual_length, uses_link=self.strategy.uses_link)
        in_full = self.workload.output_tokens - 1 <= MOST_STEPS
        prefill, *steps = self._from_the_start(first, self.workload.output_tokens if in_full else 2)
        held = first.held
        del first
        phases = dict(zip(wanted, steps, strict=False))
        for step in wanted[len(phases) :]:
            phases[step] = self._late_step(step, held)
        if not in_full:
            self.assumptions.append(
                SKIPPED_STEPS.format(steps=self.workload.output_tokens - 1, traced=", ".join(map(str, wanted)))
            )
        return Trace(
            strategy=self.spec,
            workload=self.workload,
            device=self.device,
            attn_implementation=attention_name(self.model.config),
            weights_bytes=sum(tensor.nbytes for tensor in self.weights),
            logits_modules=_logits_modules(self.model),
            prefill=prefill,
            steps=tuple(self._as_step(step, phase) for step, phase in phases.items()),
            assumptions=tuple(self.assumptions),
        )

    def _as_step(self, step: int, phase: PhaseTrace) -> StepTrace:
        requantizes = self.residual_length is not None and step % self.residual_length == 0
        return StepTrace(**msgspec.structs.asdict(phase), step=step, requantizes=requantizes)

    def _from_the_start(self, run: "_Run", output_tokens: int) -> list[PhaseTrace]:
        """The prefill, and the steps up to `output_tokens`."""
        chunk, prompt = self.chunk_tokens, self.workload.prompt_tokens
        num_chunks = ceil(prompt / chunk) if chunk else 1
        if chunk is None or num_chunks <= MOST_CHUNKS:
            return run.generate(prompt, output_tokens, chunk)
        early = [counts_of(run.forward(chunk)) for _ in range(EARLY_CHUNKS)]
        run.forward((num_chunks - MOST_CHUNKS) * chunk)
        run.forward(chunk)
        prefill, *steps = run.generate(prompt, output_tokens, chunk)
        first_of_late, both = run.second_forward, counts_of(prefill)
        late = [first_of_late, {name: both[name] - first_of_late[name] for name in both}]
        self.assumptions.append(SKIPPED_CHUNKS.format(chunks=num_chunks))
        return [msgspec.structs.replace(prefill, **sum_of_chunks(early, late, num_chunks)), *steps]

    def _late_step(self, step: int, held: Counter[Label]) -> PhaseTrace:
        """One decode step: the one before it is the prefill of a generate() that finds a filled cache."""
        run = _Run(self)
        for tokens in pieces_before(step, self.workload, self.residual_length):
            run.forward(tokens)
        return run.generate(self.workload.prompt_tokens + step - 1, 2, None, held)[1]


def _uncompiled(strategy: StrategySpec) -> StrategySpec:
    return strategy if compile_mode(strategy) is None else msgspec.structs.replace(strategy, compile=None)


def _logits_modules(model: Any) -> tuple[str, ...]:
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if module is head and head is not None]
    return (*names[:1], type(model).__name__, GENERATE)


class _Run:
    """A fresh cache, and what follows the operators that fill it."""

    def __init__(self, tracing: _Tracing) -> None:
        self._model = tracing.model
        self._workload = tracing.workload
        self._backend = tracing.backend
        self._memory = TracedMemory(tracing.device, tracing.fakes)
        for tensor in tracing.weights:
            self._memory.enter(tensor)
        account = CopyAccount()
        work = WorkAccount(tracing.weights, experts_per_token(tracing.model.config))
        self._tracer = Tracer(self._memory, account, tracing.repeats, work)
        self.held: Counter[Label] = Counter()
        """What generate() holds because of the prompt's length, once the first token is out."""
        self.second_forward: dict[str, int] = {}
        """What had been counted when the model was called for the second time in prefill."""
        with self._followed():
            link = TracedLink(self._memory, account)
            self.cache = tracing.strategy.build_cache(self._model.config, link, self._workload.cached_tokens)

    def forward(self, tokens: int) -> PhaseTrace:
        """Appends tokens to the cache by one forward pass."""
        with self._followed():
            self._tracer.start()
            self._model(input_ids=self._tokens(tokens), **forward_arguments(self._model, self.cache))
            return self._tracer.take_phase()

    def generate(
        self, prompt_tokens: int, output_tokens: int, chunk_tokens: int | None, held: Counter[Label] | None = None
    ) -> list[PhaseTrace]:
        """Runs generate() on a prompt whose start may be in the cache already.

        Args:
            prompt_tokens: Tokens a session, those in the cache included.
            output_tokens: Tokens to generate for each.
            chunk_tokens: Prefill in chunks of this many tokens.
            held: What a generate() on the workload's own prompt holds; where this prompt is longer, the rest is
                taken out.

        Returns:
            The prefill, and each decode step.
        """
        phases: list[PhaseTrace] = []

        def end_phase() -> None:
            if not phases:
                self.second_forward = self._tracer.forwards[1] if len(self._tracer.forwards) > 1 else {}
                self.held = self._memory.device.held(PROMPT)
            payload = kv_payload_bytes(self.cache, self._memory.tier_of)
            phases.append(
                msgspec.structs.replace(
                    self._tracer.take_phase(), kv_device_bytes=payload["device"], kv_host_bytes=payload["host"]
                )
            )
            if held is not None and len(phases) == 1:
                self._memory.device.correct({label: self.held[label] - held[label] for label in self.held})

        with self._followed():
            self._tracer.start()
            prompt_BN = self._tokens(prompt_tokens)
            generate(
                self._model, prompt_BN, self.cache, output_tokens, TokenClock(on_token=end_phase), (), chunk_tokens
            )
        return phases

    def _tokens(self, tokens: int) -> torch.Tensor:
        device = self._memory.torch_device
        with self._memory.without_data(device):
            return assume_ones(torch.ones(self._workload.batch_size, tokens, dtype=torch.long, device=device))

    @contextmanager
    def _followed(self) -> Iterator[None]:
        with (
            upstream_without_data(self._tracer, self._backend),
            self._tracer.naming(self._model),
            self._tracer.refusing(),
            self._tracer,
        ):
            yield
