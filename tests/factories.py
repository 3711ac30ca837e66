"""Builders of records, for tests. The default cell is small enough to check by hand.

Shape: 2 layers, 2 kv_heads, head_dim 4, bfloat16: 2 * 2 * (4 + 4) values * 2 bytes = 64 bytes a token.
Workload: batch 2, prompt 100, output 157: 100 + 157 - 1 = 256 cached tokens, so 16,384 bytes of KV a session.
Budget: 2,000,000 - 1,000,000 of weights - 100,000 of runtime = 900,000 bytes for KV.
"""

from typing import Any

from offload_eval.core.experiment import (
    BudgetSpec,
    CpuSpec,
    DynamicSpec,
    Experiment,
    MeasurementPlan,
    ModelSpec,
    QuantizedSpec,
    StrategySpec,
    StreamedSpec,
    Workload,
)
from offload_eval.core.machine import Machine
from offload_eval.core.records import (
    Conditions,
    Failure,
    FidelitySample,
    PhaseSample,
    RunRecord,
    TrialSample,
    record_id,
)
from offload_eval.core.run_spec import RunSpec, content_hash
from offload_eval.core.shape import LayerGroup, ModelFacts, ModelShape
from offload_eval.core.trace import Contributor, PhaseTrace, StepTrace, Trace

WEIGHTS_BYTES = 1_000_000
DYNAMIC = DynamicSpec()
STREAMED = StreamedSpec(name="streamed", prefetch_layers=1)
"""Two slots, so that its few layers take turns."""
QUANTIZED = QuantizedSpec(backend="hqq")


def make_shape(**changes: Any) -> ModelShape:
    group = LayerGroup(count=2, kv_heads=2, key_head_dim=4, value_head_dim=4)
    return ModelShape(
        **{"model_type": "llama", "layer_groups": (group,), "vocab_size": 97, "hidden_size": 16} | changes
    )


def make_facts(**changes: Any) -> ModelFacts:
    base = {
        "fingerprint": "feedfacefeedface",
        "parameters": WEIGHTS_BYTES // 2,
        "weights_bytes": WEIGHTS_BYTES,
        "shape": make_shape(),
        "context_tokens": 4096,
        "vocab_size": 97,
    }
    return ModelFacts(**base | changes)


def make_machine(**changes: Any) -> Machine:
    base = {
        "platform": "Linux-6.1-x86_64",
        "python": "3.11.7",
        "cpu": "Test CPU",
        "cpu_cores": 2,
        "host_memory_bytes": 8 * 1024**3,
        "swap_bytes": 0,
        "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
    }
    return Machine(**base | changes)


def make_workload(**changes: Any) -> Workload:
    return Workload(**{"name": "small", "batch_size": 2, "prompt_tokens": 100, "output_tokens": 157} | changes)


def make_budget(**changes: Any) -> BudgetSpec:
    return BudgetSpec(**{"device_bytes": 2_000_000, "runtime_bytes": 100_000} | changes)


def make_experiment(**changes: Any) -> Experiment:
    base = {
        "name": "does-it-pay",
        "question": "Does streaming the KV cache pay?",
        "model": ModelSpec(source="tests/tiny"),
        "device": "cpu",
        "budget": make_budget(),
        "workloads": (make_workload(),),
        "strategies": (DYNAMIC, STREAMED, QUANTIZED),
    }
    return Experiment(**base | changes)


def make_spec(strategy: StrategySpec = DYNAMIC, **changes: Any) -> RunSpec:
    base = {
        "experiment": "does-it-pay",
        "model": ModelSpec(source="tests/tiny"),
        "model_fingerprint": "feedfacefeedface",
        "prompt_fingerprint": "0123456789abcdef",
        "device": "cpu",
        "cpu": CpuSpec(),
        "budget": make_budget(),
        "workload": make_workload(),
        "strategy": strategy,
        "baseline": DYNAMIC,
        "measurement": MeasurementPlan(),
    }
    return RunSpec(**base | changes)


def make_phase(peak_bytes: int | None = 1_040_000, moved_bytes: int | None = None, **changes: Any) -> PhaseSample:
    base = {"peak_allocated_bytes": peak_bytes, "h2d_bytes": moved_bytes, "d2h_bytes": moved_bytes}
    return PhaseSample(**base | changes)


def make_timing(tpot_s: float = 0.010, **changes: Any) -> TrialSample:
    """A timed round of 157 tokens: TTFT 0.5 s, then 156 intervals of `tpot_s`."""
    base = {
        "ttft_s": 0.5,
        "inter_token_latencies_s": (tpot_s,) * 156,
        "e2e_latency_s": 0.5 + 156 * tpot_s,
        "output_tokens": 157,
    }
    return TrialSample(**base | changes)


def make_trial(tpot_s: float = 0.010, **changes: Any) -> TrialSample:
    """A round that took every pass: 45 sessions by peak, 54 by arithmetic, under `dynamic`."""
    base = {
        "prefill": make_phase(),
        "decode": make_phase(1_036_000),
        "kv_cache_device_bytes": 32_768,
        "kv_cache_host_bytes": 0,
        "swap_in_bytes": 0,
        "swap_out_bytes": 0,
        "num_alloc_retries": 0,
    }
    return make_timing(tpot_s, **base | changes)


def make_trials(tpot_s: float = 0.010, **changes: Any) -> tuple[TrialSample, ...]:
    """Three rounds, of which only the first looked at memory and transfers."""
    return (make_trial(tpot_s, **changes), make_timing(tpot_s), make_timing(tpot_s))


def make_fidelity(kl_nats: float = 0.001, **changes: Any) -> FidelitySample:
    base = {
        "against": "baseline",
        "kl_nats": (kl_nats,) * 157,
        "max_kl_nats": kl_nats,
        "top1_agreement_ratio": 1.0,
        "nll_change_nats": 0.0,
        "first_divergence_tokens": (None, None),
        "bit_equal": kl_nats == 0,
        "baseline_top1_margin_nats": 0.1,
    }
    return FidelitySample(**base | changes)


def make_conditions(**changes: Any) -> Conditions:
    base = {"contention_ratio": 1.0, "forced_tokens": True, "baseline_bytes": WEIGHTS_BYTES, "leaked_bytes": 0}
    return Conditions(**base | changes)


def make_record(strategy: StrategySpec = DYNAMIC, spec: RunSpec | None = None, **changes: Any) -> RunRecord:
    """One clean cell; without changes, a baseline whose noise floor is 0.001 nats."""
    spec = spec or make_spec(strategy)
    base = {
        "run_id": content_hash(spec),
        "spec": spec,
        "machine": make_machine(),
        "model": make_facts(),
        "evidence": "emulated",
        "status": "ok",
        "trials": make_trials(),
        "fidelity": make_fidelity(against="chunked_prefill" if spec.is_baseline else "baseline"),
        "conditions": make_conditions(),
        "started_at_utc": "2026-01-02T03:04:05Z",
        "duration_s": 12.5,
    }
    return RunRecord(**base | changes)


def make_streamed(**changes: Any) -> RunRecord:
    """A clean lossless cell that moves KV: 15,600,000 bytes over 156 steps and 2 sessions, 50,000 a token.

    It waits for copies for 0.78 s / 156 = 5 ms a step: what its steps take longer than the baseline's.
    Both layers are scratch (2 slots of 256 rows of 32 bytes a session): the device holds as much as under
    `dynamic`, and the host holds all KV as well.
    """
    decode = make_phase(1_030_000, 7_800_000, exposed_transfer_s=0.78, h2d_busy_s=0.9, d2h_busy_s=0.1)
    trials = make_trials(0.015, decode=decode, kv_cache_device_bytes=32_768, kv_cache_host_bytes=32_768)
    return make_record(STREAMED, **{"trials": trials, "fidelity": make_fidelity(0.0)} | changes)


def make_quantized(**changes: Any) -> RunRecord:
    """A clean lossy cell: 156 % 128 = 28 residual tokens of 64 bytes, 228 tokens of 32 values at 4.5 bits.

    ceil(228 * 32 * 4.5 / 8) + 28 * 64 = 4,104 + 1,792 = 5,896 bytes a session, 11,792 for both.
    """
    trials = make_trials(0.012, prefill=make_phase(1_038_000), kv_cache_device_bytes=11_792)
    base = {"trials": trials, "fidelity": make_fidelity(0.02, top1_agreement_ratio=0.95)}
    return make_record(QUANTIZED, **base | changes)


def make_phase_trace(peak_bytes: int, kv_bytes: int, parts: dict[str, int], **changes: Any) -> dict[str, Any]:
    """Fields of a traced phase whose peak the given parts and the weights make up; all else is 0."""
    held = {"weights": WEIGHTS_BYTES} | parts
    assert sum(held.values()) == peak_bytes
    base = {
        "live_device_bytes": WEIGHTS_BYTES + kv_bytes,
        "peak_device_bytes": peak_bytes,
        "kv_device_bytes": kv_bytes,
        "contributors": tuple(
            Contributor(module=module, operator="", bytes=size)
            for module, size in sorted(held.items(), key=lambda part: -part[1])
        ),
        "timeline_bytes": (peak_bytes,),
    }
    return dict.fromkeys(PhaseTrace.__struct_fields__, 0) | base | changes


def make_trace(strategy: StrategySpec = DYNAMIC, **changes: Any) -> Trace:
    """A trace that explains `make_record` to the byte.

    Its peaks are 2,512 bytes under that record's: 2 sessions * 157 forced tokens * 8 bytes. The prompt's KV is
    2 * 100 * 64 = 12,800 bytes, and the cache holds 1,000 more at the prefill's peak. Logits: 6,000 and 400 bytes;
    activations: 17,688 and 320.
    """
    attention = "model.layers.*.self_attn"
    prefill = {f"{attention}.kv_cache": 13_800, "lm_head": 4_000, "generate": 2_000, "model.layers.*.mlp": 17_688}
    decode = {f"{attention}.kv_cache": 32_768, "TinyForCausalLM": 300, "generate": 100, attention: 320}
    base = {
        "strategy": strategy,
        "workload": make_workload(),
        "device": "cpu",
        "attn_implementation": "sdpa",
        "weights_bytes": WEIGHTS_BYTES,
        "logits_modules": ("lm_head", "TinyForCausalLM", "generate"),
        "prefill": PhaseTrace(**make_phase_trace(1_037_488, 12_800, prefill)),
        "steps": (StepTrace(step=156, **make_phase_trace(1_033_488, 32_768, decode)),),
    }
    return Trace(**base | changes)


def make_traced(strategy: StrategySpec = DYNAMIC, spec: RunSpec | None = None, **changes: Any) -> RunRecord:
    """The traced record of a cell."""
    spec = spec or make_spec(strategy)
    base = {
        "run_id": record_id(spec, "traced"),
        "evidence": "traced",
        "trace": make_trace(spec.strategy),
        "trials": (),
        "fidelity": None,
        "conditions": Conditions(),
        "duration_s": 0.25,
    }
    return make_record(spec=spec, **base | changes)


def make_failure(
    status: str,
    strategy: StrategySpec = STREAMED,
    message: str = "no memory",
    failed: dict[str, Any] | None = None,
    **changes: Any,
) -> RunRecord:
    """A cell without a result: it ended in the prefill of the memory pass, unless `failed` says otherwise."""
    place = {"stage": "memory", "phase": "prefill", "ledger": "device" if status == "oom" else None}
    failure = Failure(**{"type": "ProblemError", "message": message} | place | (failed or {}))
    return make_record(strategy, **{"status": status, "failure": failure, "trials": (), "fidelity": None} | changes)
