"""The passes of a cell: each is one full-length generate() with one kind of instrument attached."""

import time
import traceback
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import torch
from transformers import LogitsProcessor

from offload_eval.core.experiment import compile_mode
from offload_eval.core.records import PHASES, FidelitySample, PhaseSample, TrialSample
from offload_eval.core.run_spec import RunSpec
from offload_eval.errors import CellUnsupportedError, UnableError
from offload_eval.execution.compilation import count_compilations
from offload_eval.execution.fidelity import FidelityMeter, ForcedTokens, LogitsRecorder
from offload_eval.execution.reference import ReferenceFiles
from offload_eval.generation import TokenClock, generate
from offload_eval.instruments.copy_profile import compare_with_account
from offload_eval.instruments.device import Device, Link
from offload_eval.instruments.host_meter import HostMemoryMeter, HostTrafficMeter
from offload_eval.strategies.base import CacheStrategy, kv_payload_bytes

PROFILED_TOKENS: Final = 17
"""Sixteen decode steps: every copy of a step is seen that often."""


@dataclass
class CellRun:
    """A loaded model, one cell's spec and what its passes share."""

    model: Any
    device: Device
    strategy: CacheStrategy
    spec: RunSpec
    prompt_BN: torch.Tensor
    tokens_BN: torch.Tensor | None
    """The baseline's tokens; None where it has recorded none, and the strategy runs on its own."""
    files: ReferenceFiles
    clock: TokenClock = field(default_factory=TokenClock)
    """The clock of the pass that runs, or ran last."""
    generate_s: float = 0.0
    """Time inside generate(), all passes together."""
    warmups_s: list[float] = field(default_factory=list)
    """Time inside generate() of each warm-up."""
    num_compilations: int | None = None
    """Graphs compiled before anything was timed; None while nothing is compiled."""

    def forced(self) -> list[LogitsProcessor]:
        """The processor that forces the baseline's tokens, if there are any."""
        return [] if self.tokens_BN is None else [ForcedTokens(self.tokens_BN)]

    def generate(
        self,
        link: Link,
        clock: TokenClock,
        processors: list[LogitsProcessor],
        prefill_chunk_tokens: int | None = None,
        output_tokens: int | None = None,
    ) -> tuple[torch.Tensor, Any]:
        """Builds a fresh cache, fills it with one generate(), and returns the tokens and the cache.

        The prompt is prefilled as the workload says, unless the pass has chunks of its own.
        `output_tokens` cuts the generation short; the cache has the workload's capacity all the same.
        """
        workload = self.spec.workload
        self.clock = clock
        cache = self.strategy.build_cache(self.model.config, link, workload.cached_tokens)
        started = time.perf_counter()
        try:
            tokens_BN = generate(
                self.model,
                self.prompt_BN,
                cache,
                output_tokens or workload.output_tokens,
                clock,
                processors,
                prefill_chunk_tokens or workload.prefill_chunk_tokens,
                compile_mode(self.spec.strategy),
            )
            self.device.synchronize()
        finally:
            self.generate_s += time.perf_counter() - started
        return tokens_BN, cache


def warm_up(run: CellRun) -> None:
    """One full-length run with nothing attached; its time is kept apart from the trials'."""
    before_s = run.generate_s
    with run.device.open_link(timed=False) as link:
        run.generate(link, TokenClock(), run.forced())
    run.warmups_s.append(run.generate_s - before_s)


def warm_up_compiled(run: CellRun) -> None:
    """The first use of a compiled strategy, which compiles it.

    Raises:
        CellUnsupportedError: generate() ran the model as it is.
    """
    warm_up(run)
    if count_compilations() == 0:
        raise CellUnsupportedError(
            f"generate() compiled nothing of {type(run.model).__name__} with {run.spec.strategy.label}: its criteria "
            "for compilation are not met"
        )


def record_reference(run: CellRun) -> None:
    """Runs the baseline freely and keeps its tokens on disk, and its logits where fidelity is wanted."""
    workload = run.spec.workload
    processors: list[LogitsProcessor] = []
    if run.spec.measurement.fidelity:
        shape_NBV = (workload.output_tokens, workload.batch_size, _vocab_size(run))
        processors.append(LogitsRecorder(run.files.create_logits(shape_NBV)))
    with run.device.open_link(timed=False) as link:
        tokens_BN, _ = run.generate(link, TokenClock(), processors)
    run.files.save_tokens(tokens_BN.cpu().numpy())


def measure_fidelity(run: CellRun, prefill_chunk_tokens: int | None = None) -> FidelitySample:
    """Compares the strategy's logits with the baseline's on the baseline's tokens."""
    assert run.tokens_BN is not None
    meter = FidelityMeter(run.files.open_logits(), run.tokens_BN)
    with run.device.open_link(timed=False) as link:
        run.generate(link, TokenClock(), [meter, *run.forced()], prefill_chunk_tokens)
    return meter.sample("baseline" if prefill_chunk_tokens is None else "chunked_prefill")


def measure_timing(run: CellRun, trial: TrialSample) -> TrialSample:
    """Times every token; nothing else is attached but counters, which are read before and after."""
    compiled = None if compile_mode(run.spec.strategy) is None else count_compilations()
    if run.num_compilations is None:
        run.num_compilations = compiled
    with run.device.open_link(timed=False) as link:
        run.device.synchronize()
        with HostTrafficMeter() as host:
            tokens_BN, _ = run.generate(link, TokenClock(), run.forced())
    return msgspec.structs.replace(
        trial,
        ttft_s=run.clock.ttft_s,
        inter_token_latencies_s=run.clock.inter_token_latencies_s,
        e2e_latency_s=run.clock.e2e_latency_s,
        output_tokens=tokens_BN.shape[1],
        swap_in_bytes=host.swap_in_bytes,
        swap_out_bytes=host.swap_out_bytes,
        num_major_faults=host.num_major_faults,
        num_minor_faults=host.num_minor_faults,
        num_compilations=None if compiled is None else count_compilations() - compiled,
    )


def measure_memory(run: CellRun, trial: TrialSample) -> TrialSample:
    """Peaks by phase and the cache's payload, from a clean allocator; bytes over the link, if the cache uses it."""
    run.device.release()
    with run.device.open_link(timed=False) as link, HostMemoryMeter() as host:
        with run.device.measure_memory() as meter:

            def begin_decode() -> None:
                meter.begin_decode()
                link.log.phase = "decode"

            def observe() -> None:
                meter.observe()
                host.observe()

            _, cache = run.generate(link, TokenClock(begin_decode, observe), run.forced())
        payload = kv_payload_bytes(cache, run.device.tier_of)
        pinned_requested, pinned_allocated = run.device.pinned_bytes()
    moved = {phase: link.log.sample(phase) if run.strategy.uses_link else PhaseSample() for phase in PHASES}
    return msgspec.structs.replace(
        trial,
        prefill=_merged(trial.prefill, meter.sample("prefill"), moved["prefill"]),
        decode=_merged(trial.decode, meter.sample("decode"), moved["decode"]),
        kv_cache_device_bytes=payload["device"],
        kv_cache_host_bytes=payload["host"],
        peak_host_rss_bytes=host.peak_host_rss_bytes,
        peak_cgroup_bytes=host.cgroup.peak_bytes,
        cgroup_limit_bytes=host.cgroup.limit_bytes,
        cgroup_swap_bytes=host.cgroup.swap_bytes,
        pinned_requested_bytes=pinned_requested,
        pinned_allocated_bytes=pinned_allocated,
        num_alloc_retries=meter.num_alloc_retries,
    )


def measure_transfer(run: CellRun, trial: TrialSample) -> TrialSample:
    """Times every copy, and every wait of computation for one."""
    with run.device.open_link(timed=True) as link:

        def begin_decode() -> None:
            link.log.phase = "decode"

        run.generate(link, TokenClock(begin_decode), run.forced())
    return msgspec.structs.replace(
        trial,
        prefill=_merged(trial.prefill, link.log.sample("prefill")),
        decode=_merged(trial.decode, link.log.sample("decode")),
    )


def profile_transfer(run: CellRun, trial: TrialSample) -> TrialSample:
    """Lays the device's own records of copies beside the account of the same pass.

    The pass is cut short: a profile holds every kernel, and one of a whole generation would not fit in memory. A
    profiler whose records cannot be read costs the cross-check, not the cell.
    """
    output_tokens = min(run.spec.workload.output_tokens, PROFILED_TOKENS)
    try:
        with run.device.profile_copies() as copies, run.device.open_link(timed=True) as link:

            def begin_decode() -> None:
                link.log.phase = "decode"

            run.generate(link, TokenClock(begin_decode), run.forced(), output_tokens=output_tokens)
    except UnableError:
        traceback.print_exc()
        return trial
    profiled = compare_with_account(
        copies, link.log, output_tokens=output_tokens, most_token_bytes=run.prompt_BN.nbytes
    )
    return msgspec.structs.replace(trial, profiled_copies=profiled)


def _merged(*samples: PhaseSample) -> PhaseSample:
    """Later samples fill in or replace what they measured."""
    merged = samples[0]
    for sample in samples[1:]:
        measured = {name: value for name in sample.__struct_fields__ if (value := getattr(sample, name)) is not None}
        merged = msgspec.structs.replace(merged, **measured)
    return merged


def _vocab_size(run: CellRun) -> int:
    """Width of the logits: the output embedding's rows, which may be padded past the vocabulary."""
    return int(run.model.get_output_embeddings().weight.shape[0])
