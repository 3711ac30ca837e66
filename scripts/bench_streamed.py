"""The streamed cache against what its link allows, interleaved in one process.

compute is streamed's own TPOT with every layer resident: the same rows, no copies. transfer is the bytes of a step
over the bandwidth of the link. No schedule is faster than the longer of the two.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import torch
from msgspec.structs import replace

from offload_eval.core.experiment import ModelSpec, OffloadedSpec, StrategySpec, StreamedSpec, Workload
from offload_eval.execution.devices import open_device
from offload_eval.execution.model_loading import build_traceable, load_config, load_model
from offload_eval.generation import TokenClock, generate
from offload_eval.instruments.cpu import CpuDevice
from offload_eval.instruments.device import Device
from offload_eval.instruments.link_calibration import measure_link
from offload_eval.store.model_config import load_model_config
from offload_eval.strategies.registry import load_strategy
from offload_eval.tracing.trace import trace_strategy
from offload_eval.units import MIB

MODEL: Final = Path("models/SmolLM2-135M-Instruct")
PROMPT_TOKENS, STEPS, ROUNDS = 1024, 24, 5
RATIOS: Final = (0.5, 1, 4)
SHARES: Final = (0, 0.5, 1)
SHARES_RATIO: Final = 4
"""Of transfer to compute where the resident share is varied: even half of the layers' copies are not hidden."""
STREAMED: Final = StreamedSpec()
RESIDENT: Final = StreamedSpec(resident_share=1.0)
BIG_MODEL: Final = "llama-3.1-8b"
BIG_PROMPTS: Final = (4096, 32_768)


class Step(NamedTuple):
    """The decode steps of one generation."""

    tpot_s: float
    exposed_s: float
    """Of a step."""
    moved_bytes: float
    """Of a step, both directions."""


def run(model: Any, device: Device, strategy: StrategySpec, prompt_tokens: int) -> Step:
    prompt = (torch.arange(prompt_tokens, device=device.torch_device)[None] * 7 + 11) % 40_000
    with device.open_link(timed=True) as link:

        def begin_decode() -> None:
            link.log.phase = "decode"

        clock = TokenClock(begin_decode)
        cache = load_strategy(strategy).build_cache(model.config, link, prompt_tokens + STEPS)
        generate(model, prompt, cache, STEPS + 1, clock)
        device.synchronize()
    decode = link.log.sample("decode")
    assert decode.h2d_bytes is not None
    assert decode.d2h_bytes is not None
    assert decode.exposed_transfer_s is not None
    tpot_s = median(clock.inter_token_latencies_s)
    return Step(tpot_s, decode.exposed_transfer_s / STEPS, (decode.h2d_bytes + decode.d2h_bytes) / STEPS)


def over_bound(step: Step, compute_s: float, link_bytes_per_s: float) -> float:
    return step.tpot_s / max(compute_s, step.moved_bytes / link_bytes_per_s)


def bench_streamed() -> dict[str, Any]:
    return bench_cpu() | bench_traced() | (bench_cuda() if torch.cuda.is_available() else {})


def bench_cpu() -> dict[str, Any]:
    torch.set_num_threads(1)
    model = load_model(ModelSpec(source=str(MODEL)), torch.device("cpu"))

    def paced(strategy: StrategySpec, bytes_per_s: float | None) -> Step:
        device = CpuDevice(None if bytes_per_s is None else int(bytes_per_s))
        return run(model, device, strategy, PROMPT_TOKENS)

    step_bytes = paced(STREAMED, None).moved_bytes  # warms up, too
    bounds: dict[str, list[float]] = {f"{ratio:g}": [] for ratio in RATIOS}
    exposed: dict[str, list[float]] = {f"{share:g}": [] for share in SHARES}
    waited: dict[str, list[float]] = {f"{share:g}": [] for share in SHARES}
    compute_samples = []
    for _ in progress("rounds on cpu"):
        compute_s = paced(RESIDENT, None).tpot_s
        compute_samples.append(compute_s)
        for ratio in RATIOS:
            bytes_per_s = step_bytes / (ratio * compute_s)
            bounds[f"{ratio:g}"].append(over_bound(paced(STREAMED, bytes_per_s), compute_s, bytes_per_s))
        for share in SHARES:
            step = paced(replace(STREAMED, resident_share=float(share)), step_bytes / (SHARES_RATIO * compute_s))
            exposed[f"{share:g}"].append(step.exposed_s / step.tpot_s)
            waited[f"{share:g}"].append(step.exposed_s / compute_s)
    return {
        **spread("streamed_over_bound", bounds),
        **spread("exposed_share_by_resident_share", exposed),
        **spread("exposed_over_compute_by_resident_share", waited),
        "streamed_prefetch_layers": STREAMED.prefetch_layers,
        "streamed_compute_s": median(compute_samples),
    }


def bench_traced() -> dict[str, Any]:
    config = str(load_model_config(BIG_MODEL).origin)
    spec = ModelSpec(config=config, weights="random")
    model = build_traceable(spec, load_config(spec))
    workload = Workload(prompt_tokens=BIG_PROMPTS[-1], output_tokens=6)

    def moved_bytes(strategy: StrategySpec) -> int:
        step = trace_strategy(model, strategy, workload).busiest_step
        return step.h2d_bytes + step.d2h_bytes

    native = moved_bytes(STREAMED)
    return {
        "offloaded_over_streamed_bytes": moved_bytes(OffloadedSpec()) / native,
        "int4_over_native_bytes": moved_bytes(replace(STREAMED, host_dtype="int4")) / native,
    }


def bench_cuda() -> dict[str, Any]:
    """The real link, whatever its ratio to computing is at these lengths; needs no weights."""
    from offload_eval.core.experiment import CpuSpec

    device = open_device("cuda", CpuSpec())
    spec = ModelSpec(config=str(load_model_config(BIG_MODEL).origin), weights="random")
    model = load_model(spec, device.torch_device)
    with device.open_copy_bench() as bench:
        series = measure_link(bench, [64 * MIB], repeats=5)
    alone = next(each for each in series if (each.direction, each.memory, each.opposed) == ("h2d", "pinned", False))
    link_bytes_per_s = alone.size_bytes / median(alone.copy_times_s)
    bounds: dict[str, list[float]] = {str(tokens): [] for tokens in BIG_PROMPTS}
    exposed: dict[str, list[float]] = {f"{share:g}": [] for share in SHARES}
    over_offloaded: dict[str, list[float]] = {str(tokens): [] for tokens in BIG_PROMPTS}
    run(model, device, STREAMED, BIG_PROMPTS[0])
    for _ in progress("rounds on cuda"):
        for tokens in BIG_PROMPTS:
            compute_s = run(model, device, RESIDENT, tokens).tpot_s
            streamed = run(model, device, STREAMED, tokens)
            bounds[str(tokens)].append(over_bound(streamed, compute_s, link_bytes_per_s))
            offloaded = run(model, device, OffloadedSpec(), tokens)
            over_offloaded[str(tokens)].append(offloaded.tpot_s / streamed.tpot_s)
        for share in SHARES:
            step = run(model, device, replace(STREAMED, resident_share=float(share)), BIG_PROMPTS[-1])
            exposed[f"{share:g}"].append(step.exposed_s / step.tpot_s)
    return {
        **spread("cuda_streamed_over_bound_by_prompt_tokens", bounds),
        **spread("cuda_exposed_share_by_resident_share", exposed),
        **spread("offloaded_over_streamed_tpot", over_offloaded),
        "cuda_link_bytes_per_s": link_bytes_per_s,
    }


def spread(key: str, samples: dict[str, list[float]]) -> dict[str, Any]:
    """Medians under `key`, and what they are the medians of beside them."""
    return {
        key: {name: median(each) for name, each in samples.items()},
        f"{key}_samples": samples,
    }


def progress(words: str, rounds: Sequence[int] = range(ROUNDS)) -> Iterator[int]:
    for number in rounds:
        print(f"{words}: {number + 1} of {len(rounds)}", file=sys.stderr)
        yield number
