"""Traces against what really happens: a trace has every byte of a CPU run, and the tracker's are the profiler's.

Models are tiny, so that the real runs cost little; the shapes of large ones run without data alone.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from test_real_caches import CONFIGS, WINDOWED
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from offload_eval.core.experiment import (
    DeviceName,
    DynamicSpec,
    ModelSpec,
    OffloadedSpec,
    OffloadedStaticSpec,
    QuantizedSpec,
    StaticSpec,
    StrategySpec,
    StreamedSpec,
    Workload,
)
from offload_eval.core.trace import PhaseTrace, Trace
from offload_eval.errors import UnableError
from offload_eval.execution.model_loading import build_traceable, read_model_facts
from offload_eval.generation import TokenClock, generate
from offload_eval.instruments.cpu import CpuDevice
from offload_eval.instruments.live_storage import LiveStorageTracker
from offload_eval.instruments.transfers import TransferLog
from offload_eval.strategies.registry import load_strategy
from offload_eval.tracing import trace
from offload_eval.tracing.ledger import TracedMemory
from offload_eval.tracing.link import CopyAccount
from offload_eval.tracing.repeats import Repeats
from offload_eval.tracing.trace import trace_strategy
from offload_eval.tracing.tracer import Tracer, UntraceableError
from offload_eval.tracing.work import WorkAccount
from offload_eval.units import GIB

BATCH, PROMPT = 2, 19
HEADS_64 = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 64,
}
OF_TYPE = {
    "mixtral": {"sliding_window": None, "num_local_experts": 2, "num_experts_per_tok": 1},
    "gpt2": {"n_embd": 128, "n_head": 2, "n_layer": 2},
}
IMAGE_MODEL = {
    "text_config": {**WINDOWED, "num_hidden_layers": 6, "head_dim": 16},
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
}
MODELS: dict[str, dict[str, Any]] = {
    name: CONFIGS[name]
    for name in (
        "llama",
        "qwen3",
        "gemma3_text",
        "mixtral",
        "qwen3_moe",
        "deepseek_v3",
        "gpt2",
        "qwen3_next",
        "granitemoehybrid",
        "gemma4_text",
        "llama4_text",
    )
} | {"gemma3": IMAGE_MODEL}
RUN_ON_CPU = (
    DynamicSpec(),
    StaticSpec(),
    StreamedSpec(),
    StreamedSpec(prefetch_layers=1, resident_share=0.25),
    StreamedSpec(prefetch_layers=1, host_dtype="int4"),
    QuantizedSpec(backend="fp8"),
)
LLAMA_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 2**18,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def flash_like(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Allocates its output alone, on any device."""
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None


AttentionInterface.register("output_alone", flash_like)
AttentionMaskInterface.register("output_alone", lambda *_, **__: None)


def build(
    model_type: str,
    sizes: dict[str, Any],
    attention: str = "sdpa",
    *,
    with_data: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**sizes)
    with torch.device("cpu" if with_data else "meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).eval()


def workload(
    output_tokens: int = 4, prompt_tokens: int = PROMPT, batch_size: int = BATCH, chunk_tokens: int | None = None
) -> Workload:
    return Workload(
        batch_size=batch_size,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        prefill_chunk_tokens=chunk_tokens,
    )


def run_tracked(model: Any, strategy: StrategySpec, work: Workload) -> list[tuple[int, int, int]]:
    """A real run on the CPU: live and peak bytes of the device, and live bytes of the host, at each token."""
    device = CpuDevice()
    device.adopt([*model.parameters(), *model.buffers()])
    seen: list[tuple[int, int, int]] = []

    def note() -> None:
        ledger = device.memory.device
        seen.append((ledger.live_bytes, ledger.peak_bytes, device.memory.host.live_bytes))
        ledger.restart_peak()

    prompt_BN = torch.ones(work.batch_size, work.prompt_tokens, dtype=torch.long)
    with device.open_link(timed=False) as link, LiveStorageTracker(device.memory):
        cache = load_strategy(strategy).build_cache(model.config, link, work.cached_tokens)
        device.memory.device.restart_peak()
        clock = TokenClock(on_token=note)
        generate(model, prompt_BN, cache, work.output_tokens, clock, (), work.prefill_chunk_tokens)
    return seen


def in_bytes(phase: PhaseTrace) -> tuple[int, int, int]:
    return phase.live_device_bytes, phase.peak_device_bytes, phase.live_host_bytes


def runs_on_cpu(strategy: StrategySpec, model: Any) -> bool:
    return load_strategy(strategy).refusal("cpu", model.config, workload()) is None


@pytest.mark.parametrize("model_type", MODELS)
def test_every_byte_of_a_trace_is_a_byte_of_a_cpu_run(model_type: str):
    """Live and peak, in prefill and at every decode step, for every strategy that runs on a CPU."""
    real, dataless = (build(model_type, MODELS[model_type], with_data=with_data) for with_data in (True, False))
    for strategy in RUN_ON_CPU:
        if runs_on_cpu(strategy, real):
            traced = trace_strategy(dataless, strategy, workload(), device="cpu")
            phases = [in_bytes(phase) for phase in (traced.prefill, *traced.steps)]
            assert phases == run_tracked(real, strategy, workload()), strategy.label


@pytest.mark.parametrize("attention", ["eager", "output_alone"])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_so_it_is_with_other_attention(model_type: str, attention: str):
    real, dataless = (build(model_type, MODELS[model_type], attention, with_data=data) for data in (True, False))
    for strategy in (DynamicSpec(), StreamedSpec()):
        traced = trace_strategy(dataless, strategy, workload(), device="cpu")
        phases = [in_bytes(phase) for phase in (traced.prefill, *traced.steps)]
        assert phases == run_tracked(real, strategy, workload())


@pytest.mark.parametrize(
    "strategy",
    [
        QuantizedSpec(backend="quanto", residual_length=4),
        QuantizedSpec(backend="quanto", nbits=2, residual_length=4),
        QuantizedSpec(backend="hqq", axis_key=1, axis_value=1, residual_length=4),
    ],
    ids=lambda strategy: strategy.label,
)
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mixtral", "olmo2", "gpt2"])
def test_so_it_is_through_a_quantizers_own_code(model_type: str, strategy: QuantizedSpec):
    """Past flushes: traced whole, and with the steps before the last flush skipped."""
    sizes = {**HEADS_64, **OF_TYPE.get(model_type, {})}
    real, dataless = (build(model_type, sizes, with_data=with_data) for with_data in (True, False))
    for output_tokens, flushes in ((6, [4]), (16, [12])):
        work = workload(output_tokens, prompt_tokens=64)
        load_strategy(strategy).prepare("cpu")
        seen = run_tracked(real, strategy, work)
        traced = trace_strategy(dataless, strategy, work, device="cpu")
        assert in_bytes(traced.prefill) == seen[0]
        assert [in_bytes(step) for step in traced.steps] == [seen[step.step] for step in traced.steps]
        assert [step.step for step in traced.steps if step.requantizes] == flushes
        assert traced.decode_peak_device_bytes == max(peak for _, peak, _ in seen[1:])


@pytest.mark.parametrize(
    ("model_type", "strategies"),
    [
        ("llama", RUN_ON_CPU),
        ("gemma3_text", (DynamicSpec(),)),
        ("qwen3_next", (DynamicSpec(),)),
        ("mixtral", (DynamicSpec(), StaticSpec())),
    ],
)
def test_the_last_step_is_reached_without_the_steps_before_it(model_type: str, strategies: tuple[StrategySpec, ...]):
    real, dataless = (build(model_type, MODELS[model_type], with_data=with_data) for with_data in (True, False))
    for strategy in strategies:
        seen = run_tracked(real, strategy, workload(12))
        traced = trace_strategy(dataless, strategy, workload(12), device="cpu")
        steps = [1, 10, 11] if isinstance(strategy, StreamedSpec) else [1, 11]
        assert [step.step for step in traced.steps] == steps
        assert [in_bytes(step) for step in traced.steps] == [seen[step] for step in steps]
        words = f"11 decode steps, {', '.join(map(str, steps))} were traced"
        assert any(words in text for text in traced.assumptions)


@pytest.mark.parametrize(
    ("model_type", "strategy", "chunk_tokens", "spare_bytes"),
    [
        ("llama", DynamicSpec(), 9, 0),
        ("llama", DynamicSpec(), 3, 0),
        ("llama", StreamedSpec(), 3, 0),
        ("llama", StaticSpec(), 9, 0),
        ("llama", StaticSpec(), 3, 24),
        ("mixtral", DynamicSpec(), 3, 0),
        ("deepseek_v3", DynamicSpec(), 2, 0),
        ("deepseek_v3", StreamedSpec(prefetch_layers=1), 2, 0),
        ("llama", StreamedSpec(prefetch_layers=1, host_dtype="int4"), 2, 0),
    ],
)
def test_chunked_prefill_is_exact_and_its_middle_may_be_skipped(
    model_type: str, strategy: StrategySpec, chunk_tokens: int, spare_bytes: int
):
    """27 tokens in chunks of 3 are 9, and in chunks of 2 the last one is short.

    A static cache whose start was skipped has three scalars more.
    """
    real, dataless = (build(model_type, MODELS[model_type], with_data=with_data) for with_data in (True, False))
    work = workload(2, prompt_tokens=27, chunk_tokens=chunk_tokens)
    seen = run_tracked(real, strategy, work)
    traced = trace_strategy(dataless, strategy, work, device="cpu")
    assert traced.prefill.peak_device_bytes - seen[0][1] == spare_bytes
    assert traced.prefill.live_device_bytes == seen[0][0]
    assert in_bytes(traced.decode) == seen[1]


def test_what_skipped_chunks_move_and_compute_is_their_sum(monkeypatch: pytest.MonkeyPatch):
    dataless = build("llama", CONFIGS["llama"])
    strategies = (OffloadedSpec(), OffloadedStaticSpec(), StreamedSpec())
    work = workload(2, prompt_tokens=32, chunk_tokens=3)
    skipped = [trace_strategy(dataless, strategy, work).prefill for strategy in strategies]
    monkeypatch.setattr(trace, "MOST_CHUNKS", 99)
    for strategy, phase in zip(strategies, skipped, strict=True):
        whole = trace_strategy(dataless, strategy, work).prefill
        for name in ("h2d_bytes", "d2h_bytes", "num_h2d_copies", "num_d2h_copies"):
            assert getattr(phase, name) == getattr(whole, name), (strategy.label, name)
        assert phase.matmul_flops == pytest.approx(whole.matmul_flops, rel=0.01)


LLAMA_TOKEN_BYTES = BATCH * 2 * 2 * (48 // 4) * 2
"""One layer's K and V of one token: batch, K and V, kv_heads, head_dim, bytes."""


def traced_on_cuda(strategy: StrategySpec, output_tokens: int = 5) -> Trace:
    return trace_strategy(build("llama", CONFIGS["llama"]), strategy, workload(output_tokens))


def test_offloading_moves_the_whole_cache_both_ways_for_each_token():
    """H2D 2*B*Hkv*S*D*b a layer, and the first layer again, one token longer, for the next step; D2H with S + 1."""
    layers, traced = 4, traced_on_cuda(OffloadedSpec())
    for step in traced.steps:
        cached = PROMPT + step.step - 1
        assert step.h2d_bytes == LLAMA_TOKEN_BYTES * (layers * cached + 1)
        assert step.d2h_bytes == LLAMA_TOKEN_BYTES * layers * (cached + 1)
        assert (step.num_h2d_copies, step.num_d2h_copies) == (2 * layers, 2 * layers)
        # The first layer is on the device again by then; the tokens just read are on the host.
        assert step.live_host_bytes == (layers - 1) * LLAMA_TOKEN_BYTES * (cached + 1) + BATCH * 8
        assert step.peak_host_bytes >= step.live_host_bytes


def test_static_offloading_moves_its_full_buffers():
    traced = traced_on_cuda(OffloadedStaticSpec())
    for step in traced.steps:
        assert step.h2d_bytes == step.d2h_bytes == 4 * LLAMA_TOKEN_BYTES * workload(5).cached_tokens


def test_streaming_writes_one_token_a_layer_back():
    traced = traced_on_cuda(StreamedSpec())
    for step in traced.steps:
        assert step.d2h_bytes == 4 * LLAMA_TOKEN_BYTES
        assert step.num_d2h_copies == 4
        assert 0 < step.h2d_bytes <= 4 * LLAMA_TOKEN_BYTES * (PROMPT + step.step)


def test_a_cache_on_the_device_moves_nothing():
    for strategy in (DynamicSpec(), QuantizedSpec(backend="fp8")):
        traced = traced_on_cuda(strategy)
        moved = {(phase.h2d_bytes, phase.d2h_bytes) for phase in (traced.prefill, *traced.steps)}
        assert moved == {(0, 0)}


def test_contributors_add_up_to_the_peak_and_name_modules():
    traced = traced_on_cuda(DynamicSpec())
    for phase in (traced.prefill, *traced.steps):
        assert sum(part.bytes for part in phase.contributors) == phase.peak_device_bytes
        assert [part.bytes for part in phase.contributors] == sorted(
            (part.bytes for part in phase.contributors), reverse=True
        )
        assert max(phase.timeline_bytes) == phase.peak_device_bytes
    assert msgspec.json.decode(msgspec.json.encode(traced), type=Trace) == traced
    held = {(part.module, part.operator): part.bytes for part in traced.decode.contributors}
    assert held["weights", ""] == traced.weights_bytes
    kv_bytes = 4 * LLAMA_TOKEN_BYTES * (workload(5).cached_tokens - 1)
    assert held["model.layers.*.self_attn.kv_cache", "cat"] >= kv_bytes
    assert traced.logits_modules == ("lm_head", "LlamaForCausalLM", "generate")


@pytest.mark.parametrize(
    ("strategy", "device_layers", "host_layers"),
    [(DynamicSpec(), 4, 0), (StaticSpec(), 4, 0), (StreamedSpec(), 3, 4), (OffloadedSpec(), 1, 3)],
    ids=lambda value: getattr(value, "label", None),
)
def test_payloads_are_the_arithmetic_to_the_byte(strategy: StrategySpec, device_layers: int, host_layers: int):
    """When the last token is computed; static buffers and scratch have their length from the first token on."""
    traced = traced_on_cuda(strategy)
    tokens = workload(5).cached_tokens
    assert traced.decode.kv_device_bytes == device_layers * LLAMA_TOKEN_BYTES * tokens
    assert traced.decode.kv_host_bytes == host_layers * LLAMA_TOKEN_BYTES * tokens
    in_full = isinstance(strategy, StaticSpec | StreamedSpec)
    assert traced.prefill.kv_device_bytes == device_layers * LLAMA_TOKEN_BYTES * (tokens if in_full else PROMPT)
    assert traced.prefill.kv_host_bytes == host_layers * LLAMA_TOKEN_BYTES * PROMPT


@pytest.mark.parametrize(
    ("model_type", "attention", "holds_scores"),
    [("llama", "eager", True), ("llama", "sdpa", False), ("llama", "flash_attention_2", False)],
)
def test_only_eager_attention_holds_a_score_matrix_on_cuda(model_type: str, attention: str, holds_scores: bool):
    spec = ModelSpec(config="unread", weights="random", attn_implementation=attention)
    model = build_traceable(spec, CONFIG_MAPPING[model_type](**CONFIGS[model_type]))
    tokens = 600
    traced = trace_strategy(model, DynamicSpec(), workload(2, prompt_tokens=tokens))
    one_score_matrix_bytes = BATCH * 4 * tokens * tokens * 2
    beyond_weights = traced.prefill.peak_device_bytes - traced.weights_bytes
    assert (beyond_weights > one_score_matrix_bytes) == holds_scores


def test_flash_attention_is_refused_on_a_cpu():
    spec = ModelSpec(config="unread", weights="random", attn_implementation="flash_attention_2")
    model = build_traceable(spec, CONFIG_MAPPING["llama"](**CONFIGS["llama"]))
    with pytest.raises(UnableError, match="do not run on a CPU"):
        trace_strategy(model, DynamicSpec(), workload(), device="cpu")


def test_a_model_that_reads_its_routing_is_refused_by_operator():
    model = build("longcat_flash", CONFIGS["longcat_flash"])
    with pytest.raises(UntraceableError, match=r"layers\.0\.mlp\.experts: the operator aten\.nonzero"):
        trace_strategy(model, DynamicSpec(), workload())


def test_upstreams_offloading_leaves_an_indexers_keys_on_the_host():
    """DeepSeek-V3.2 updates its cache, which offloads the layer, then its indexer: were this to pass, remove it."""
    with pytest.raises(
        UnableError, match=r"indexer\.kv_cache: the operator aten\.cat\.default is given a tensor in host memory"
    ):
        trace_strategy(build("deepseek_v32", CONFIGS["deepseek_v32"]), OffloadedSpec(), workload())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    "read",
    [torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.nonzero, lambda x: x[x > 0], lambda x: float(x.sum())],
)
def test_whatever_looks_for_data_is_refused_by_module(read: Callable[[torch.Tensor], Any], device: Any):
    model = build("llama", HEADS_64)

    def reading(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        read(args[0])

    model.model.layers[1].mlp.register_forward_pre_hook(reading)
    with pytest.raises(UntraceableError, match=r"model\.layers\.1\.mlp: .* needs the values of its input"):
        trace_strategy(model, DynamicSpec(), workload(), device=device)


def test_a_strategy_refuses_in_its_own_words():
    with pytest.raises(UnableError, match="sliding_attention"):
        trace_strategy(build("gemma3_text", CONFIGS["gemma3_text"]), QuantizedSpec(backend="fp8"), workload())


def test_nothing_is_left_replaced():
    model = build("llama", HEADS_64, with_data=True)
    before = list(model.parameters())
    named: list[Callable[..., Any]] = [torch.Stream, torch.cuda.default_stream, torch.cuda.empty_cache]
    for device in ("cpu", "cuda"):
        trace_strategy(model, StreamedSpec(), workload(), device=device)  # type: ignore[arg-type]
    assert all(now is then for now, then in zip(model.parameters(), before, strict=True))
    assert named == [torch.Stream, torch.cuda.default_stream, torch.cuda.empty_cache]
    assert not torch.nn.modules.module._global_forward_hooks
    assert torch.isfinite(model(torch.ones(1, 3, dtype=torch.long)).logits).all()


def test_weights_are_the_facts_weights():
    config = CONFIG_MAPPING["gemma3_text"](**CONFIGS["gemma3_text"])  # its embeddings are tied
    spec = ModelSpec(config="unread", weights="random")
    traced = trace_strategy(build_traceable(spec, config), DynamicSpec(), workload())
    assert traced.weights_bytes == read_model_facts(spec, config).weights_bytes


def test_flops_of_a_step_are_the_weights_and_the_scores():
    """Two a multiply-add: every weight of a product once a token, and two products with the cached tokens."""
    model = build("llama", CONFIGS["llama"], "eager")
    products = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    for device in ("cpu", "cuda"):
        traced = trace_strategy(model, DynamicSpec(), workload(3), device=device)  # type: ignore[arg-type]
        scores = 4 * BATCH * 4 * 12 * workload(3).cached_tokens * 2
        rotary = 4 * BATCH * 12
        assert 0 <= traced.decode.matmul_flops - 2 * BATCH * products - 2 * scores <= rotary
    assert traced.decode.touched_bytes > traced.weights_bytes - model.get_input_embeddings().weight.nbytes


@pytest.mark.parametrize(
    ("strategy", "prompt_tokens", "gib"),
    [
        (DynamicSpec(), 4096, (15.913, 15.465, 15.458, 0.0)),
        (DynamicSpec(), 32768, (22.599, 19.020, 18.958, 0.0)),
        (OffloadedSpec(), 4096, (15.428, 14.997, 14.973, 0.484)),
        (OffloadedSpec(), 32768, (18.724, 15.270, 15.083, 3.875)),
        (DynamicSpec(), 131_056, (45.5, 31.2, None, None)),
        (OffloadedSpec(), 131_056, (30.0, 16.2, None, None)),
    ],
)
def test_llama_8b_is_what_another_tracer_found(
    strategy: StrategySpec, prompt_tokens: int, gib: tuple[float | None, ...]
):
    """Prefill peak, decode peak, live on the device and on the host after it, in GiB."""
    model = build("llama", LLAMA_8B)
    traced = trace_strategy(model, strategy, workload(2, prompt_tokens, batch_size=1))
    assert traced.weights_bytes / GIB == pytest.approx(14.958, rel=0.001)
    prefill, decode = traced.prefill, traced.decode
    found = (
        prefill.peak_device_bytes,
        decode.peak_device_bytes,
        decode.live_device_bytes,
        decode.live_host_bytes,
    )
    for num_bytes, expected in zip(found, gib, strict=True):
        if expected is not None:
            assert num_bytes / GIB == pytest.approx(expected, rel=0.005, abs=1e-6)


LARGE_TRACE = """
import json, resource, sys, time
import torch
torch.set_num_threads(1)
from transformers import AutoConfig, AutoModelForCausalLM
from offload_eval.core.experiment import DynamicSpec, Workload
from offload_eval.tracing.trace import trace_strategy
started = time.process_time()
config = AutoConfig.for_model("llama", num_hidden_layers=126, hidden_size=16384, intermediate_size=53248,
    num_attention_heads=128, num_key_value_heads=8, vocab_size=128256, max_position_embeddings=2**18)
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
traced = trace_strategy(model, DynamicSpec(), Workload(prompt_tokens=131_072, output_tokens=257))
print(json.dumps({
    "seconds": time.process_time() - started,
    "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "decode_live_bytes": traced.decode.live_device_bytes,
    "weights_bytes": traced.weights_bytes,
}))
"""


def test_the_largest_model_takes_seconds_and_little_memory():
    """405 billion parameters at 131,072 tokens."""
    ran = subprocess.run([sys.executable, "-c", LARGE_TRACE], capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout)
    assert found["seconds"] < 5
    assert found["rss_bytes"] < 1.5 * GIB
    kv_bytes = 126 * 2 * 8 * 128 * 2 * (131_072 + 256)
    assert 0 < found["decode_live_bytes"] - found["weights_bytes"] - kv_bytes < 2**23


KERNELS_WITH_TEMPORARIES = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::mm",  # packs 16-bit operands
    "aten::addmm",
    "aten::bmm",
)
"""What they allocate and free inside themselves is the profiler's alone."""


def profiled_peak_bytes(profiler: profile) -> int:
    """The highest running sum of torch's own allocation events; a kernel with temporaries counts when it returns."""
    events = list(profiler.profiler.kineto_results.events())
    kernels = [
        (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.name() in KERNELS_WITH_TEMPORARIES
    ]

    def counts_at(event: Any) -> int:
        inside = (end for start, end in kernels if start <= event.start_ns() <= end)
        return int(next(inside, event.start_ns()))

    memory = [(counts_at(event), event.nbytes()) for event in events if event.name() == "[memory]"]
    live = highest = 0
    for time in sorted({at for at, _ in memory}):
        changes = [num_bytes for at, num_bytes in memory if at == time]
        inside_a_kernel = any(time == end for _, end in kernels)
        for change in [sum(changes)] if inside_a_kernel else changes:
            live += change
            highest = max(highest, live)
    return highest


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_the_tracker_agrees_with_the_profiler(model_type: str, attention: str):
    """An independent count of the same prefill and decode step."""
    model = build(model_type, CONFIGS[model_type], attention, with_data=True)
    prompt_BN = torch.ones(BATCH, 62, dtype=torch.long)
    device = CpuDevice()
    device.adopt([*model.parameters(), *model.buffers(), prompt_BN])
    cache = load_strategy(DynamicSpec()).build_cache(model.config, device.open_link(timed=False), 64)
    before_bytes = device.memory.device.live_bytes
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
        LiveStorageTracker(device.memory),
    ):
        generate(model, prompt_BN, cache, 2, TokenClock())
    assert abs(device.memory.device.peak_bytes - before_bytes - profiled_peak_bytes(profiler)) <= 64


@pytest.mark.parametrize(
    "strategy", [DynamicSpec(), StaticSpec(), OffloadedSpec()], ids=lambda strategy: strategy.label
)
def test_many_long_sessions_are_traced_without_their_tokens(strategy: StrategySpec):
    """Eight million tokens of prompt: what is known of their masks is one value. Memory is linear in sessions."""
    model = build("llama", CONFIGS["llama"])
    half, whole = (
        trace_strategy(model, strategy, workload(7, prompt_tokens=16_384, batch_size=sessions))
        for sessions in (256, 512)
    )
    for one, two in ((half.prefill, whole.prefill), (half.decode, whole.decode)):
        per_session = (two.peak_device_bytes - one.peak_device_bytes) / 256
        assert one.peak_device_bytes == pytest.approx(half.weights_bytes + 256 * per_session, rel=0.001)


def test_a_copy_of_nothing_is_none_in_a_trace_as_in_a_run():
    traced, run = CopyAccount(), TransferLog(timed=False)
    for account_add in (traced.add, run.add_copy):
        account_add("h2d", 0)
        account_add("h2d", 7)
        account_add("d2h", 0)
    assert traced.counts() == {"h2d_bytes": 7, "d2h_bytes": 0, "num_h2d_copies": 1, "num_d2h_copies": 0}
    sample = run.sample("prefill")
    assert {name: getattr(sample, name) for name in traced.counts()} == traced.counts()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_values_that_follow_from_lengths_are_known_and_overwritten_ones_are_not(device: Any):
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    memory = TracedMemory(device, fakes)
    with torch.no_grad(), Tracer(memory, CopyAccount(), Repeats(fakes if device == "cpu" else None), WorkAccount([])):
        ones = torch.ones(4, dtype=torch.long, device=memory.torch_device)
        middle = ones[1:3]
        middle.add_(5)
        assert (int(ones.sum()), bool((ones == 1).all())) == (14, False)
        counter = torch.tensor(3)  # made on the CPU, as the length of a static cache is
        counter.add_(1)
        assert int(counter.to(memory.torch_device) + 1) == 5
        middle.copy_(torch.empty(2, device=memory.torch_device).long())
        with pytest.raises(UntraceableError, match="_local_scalar_dense"):
            int(ones.sum())


def test_a_quantized_cache_with_a_chunked_prefill_is_refused():
    model = build("llama", HEADS_64)
    strategy = QuantizedSpec(backend="quanto", residual_length=20)
    with pytest.raises(UnableError, match="chunked prefill"):
        trace_strategy(model, strategy, workload(4, prompt_tokens=64, chunk_tokens=16), device="cpu")


def test_what_a_window_shows_is_what_crosses():
    """Gemma 3 under transformers' offloading: a window is a view of the prompt, and only its rows reach the host."""
    model = build("gemma3_text", MODELS["gemma3_text"])
    traced = trace_strategy(model, OffloadedSpec(), workload(3, prompt_tokens=40), device="cuda")
    assert traced.prefill.live_host_bytes <= traced.prefill.d2h_bytes + 8 * BATCH


@pytest.mark.parametrize("model_type", MODELS)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_forward_pass_reads_no_weight_twice(model_type: str, device: DeviceName):
    model = build(model_type, MODELS[model_type])
    traced = trace_strategy(model, DynamicSpec(), workload(3, batch_size=8), device=device)
    assert 0 < traced.decode.weights_read_bytes <= traced.weights_bytes
    assert traced.prefill.weights_read_bytes <= traced.weights_bytes


def test_a_copy_over_the_link_touches_device_memory_once():
    """Beside its copies, offloading touches what the in-GPU cache touches."""
    model = build("llama", MODELS["llama"], "output_alone")
    dynamic, offloaded = (trace_strategy(model, each, workload(4)) for each in (DynamicSpec(), OffloadedSpec()))
    copied_bytes = offloaded.decode.h2d_bytes + offloaded.decode.d2h_bytes
    assert offloaded.decode.touched_bytes - copied_bytes == dynamic.decode.touched_bytes


def test_a_causal_kernel_skips_half_of_a_square_and_nothing_of_a_row():
    model = build("llama", MODELS["llama"])
    traced = trace_strategy(model, DynamicSpec(), workload(3), device="cuda")
    assert traced.prefill.hidden_flops == traced.prefill.attention_flops // 4 * (PROMPT - 1) // (2 * PROMPT) * 4
    assert traced.decode.hidden_flops == 0


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_in_float32_are_traced_to_the_byte(model_type: str):
    real, dataless = (
        build(model_type, MODELS[model_type], with_data=with_data, dtype=torch.float32) for with_data in (True, False)
    )
    traced = trace_strategy(dataless, DynamicSpec(), workload(), device="cpu")
    phases = [in_bytes(phase) for phase in (traced.prefill, *traced.steps)]
    assert phases == run_tracked(real, DynamicSpec(), workload())


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_the_least_that_experts_read_is_one_tokens(model_type: str):
    """A batch of 8 may be routed to the experts of one token; it looks up 7 rows of embeddings more."""
    model = build(model_type, MODELS[model_type])
    one, eight = (
        trace_strategy(model, DynamicSpec(), workload(3, batch_size=batch), device="cuda").decode.weights_read_bytes
        for batch in (1, 8)
    )
    row_bytes = model.config.hidden_size * 2
    assert eight - one == 7 * row_bytes


def test_streaming_moves_half_of_what_offloading_does_and_int4_less_than_a_third_of_that():
    """At 32,768 tokens: offloading moves 2S + 1 tokens a layer, streaming S + 1; int4 4.5 bits for every 16."""
    dataless = build("llama", LLAMA_8B)
    work = Workload(batch_size=1, prompt_tokens=32_768, output_tokens=6)

    def moved_bytes(strategy: StrategySpec) -> int:
        step = trace_strategy(dataless, strategy, work).busiest_step
        return step.h2d_bytes + step.d2h_bytes

    native = moved_bytes(StreamedSpec())
    assert native == 4096 * (32 * (32_768 + 3) + 2 + 32), "two layers are fetched for the next step, a token longer"
    assert moved_bytes(OffloadedSpec()) / native >= 1.99
    assert moved_bytes(StreamedSpec(host_dtype="int4")) == native * 9 // 32 <= 0.29 * native


@pytest.mark.parametrize("host_dtype", ["native", "int4"])
def test_the_device_peak_is_resident_layers_the_ring_and_one_step(host_dtype: Any):
    """Whatever the share, what is left after the buffers is the same step, in the trace and in a run, to the byte."""
    sizes = MODELS["llama"] | {"num_hidden_layers": 8, "layer_types": ["full_attention"] * 8}
    real, dataless = (build("llama", sizes, with_data=with_data) for with_data in (True, False))
    work = workload(4, prompt_tokens=48)
    layer_bytes = LLAMA_TOKEN_BYTES * work.cached_tokens
    heads = BATCH * 2  # of keys and of values alike, 12 values each
    host_layer_bytes = 2 * heads * (6 + 2 * 2) * work.cached_tokens
    steps = set()
    for resident in (0, 1, 4, 5):
        spec = StreamedSpec(prefetch_layers=1, resident_share=resident / 8, host_dtype=host_dtype)
        scratch_bytes = 2 * layer_bytes if host_dtype == "native" else layer_bytes + host_layer_bytes
        buffers_bytes = resident * layer_bytes + scratch_bytes
        traced = trace_strategy(dataless, spec, work, device="cpu")
        peaks = [step.peak_device_bytes for step in traced.steps]
        assert peaks == [peak for _, peak, _ in run_tracked(real, spec, work)[1:]]
        steps.add(peaks[-2] - buffers_bytes - traced.weights_bytes)
    assert len(steps) == 1
    assert 0 < steps.pop() < layer_bytes
