"""The strategies on a real device: everything that streams and pinned memory could break. Skipped without CUDA."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tiny_models import tiny_llama

from offload_eval.core.experiment import (
    BudgetSpec,
    CpuSpec,
    DynamicSpec,
    MeasurementPlan,
    ModelSpec,
    OffloadedSpec,
    QuantizedSpec,
    RandomPrompt,
    StaticSpec,
    StrategySpec,
    StreamedSpec,
    Workload,
)
from offload_eval.core.records import Conditions
from offload_eval.core.run_spec import RunSpec
from offload_eval.execution.cell import measure_cell, record_reference
from offload_eval.execution.recovery_check import check_generation
from offload_eval.execution.reference import ReferenceFiles
from offload_eval.strategies.backends import backend_refusal

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]

LAYERS, KV_HEADS, HEAD_DIM, PROMPT, OUTPUT = 6, 4, 64, 257, 40
STRATEGIES: list[Any] = [
    OffloadedSpec(),
    StreamedSpec(prefetch_layers=1),
    StreamedSpec(prefetch_layers=2),
    pytest.param(
        QuantizedSpec(backend="fp8"),
        marks=pytest.mark.skipif(backend_refusal("fp8") is not None, reason="this transformers has no fp8 cache"),
    ),
]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(
        torch.bfloat16,
        num_hidden_layers=LAYERS,
        hidden_size=512,
        intermediate_size=1024,
        num_attention_heads=8,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=1000,
    ).to("cuda")


def spec_of(strategy: StrategySpec, batch_size: int) -> RunSpec:
    return RunSpec(
        experiment="cuda",
        model=ModelSpec(config="unused", weights="random"),
        model_fingerprint="0",
        prompt_fingerprint="0",
        device="cuda",
        cpu=CpuSpec(),
        budget=BudgetSpec(device_bytes=10**9),
        workload=Workload(batch_size=batch_size, prompt_tokens=PROMPT, output_tokens=OUTPUT, prompt=RandomPrompt()),
        strategy=strategy,
        baseline=DynamicSpec(),
        measurement=MeasurementPlan(trials=2),
    )


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.label)
def test_a_cell_is_measured_and_lossless_strategies_are_bit_equal(
    model: Any, tmp_path: Path, strategy: StrategySpec, batch_size: int
):
    from offload_eval.instruments.cuda import CudaDevice

    device = CudaDevice()
    spec = spec_of(strategy, batch_size)
    prompt = torch.randint(1000, (batch_size, PROMPT), generator=torch.Generator().manual_seed(1))
    ReferenceFiles(tmp_path, spec.reference_key).save_prompt(prompt.numpy())
    record_reference(spec_of(DynamicSpec(), batch_size), model, device, tmp_path)
    result = measure_cell(spec, model, device, tmp_path, Conditions(), lambda *_: None)
    assert result.status == "ok", result.failure
    assert result.conditions.leaked_bytes == 0
    assert result.fidelity is not None
    assert result.fidelity.bit_equal == strategy.lossless
    trial = result.trials[0]
    step_bytes = LAYERS * batch_size * KV_HEADS * 2 * HEAD_DIM * 2
    steps = OUTPUT - 1
    prefixes = sum(range(PROMPT, PROMPT + steps))
    if strategy.kind == "streamed":
        assert trial.decode.d2h_bytes == steps * step_bytes
        assert (trial.prefill.h2d_bytes or 0) + (trial.decode.h2d_bytes or 0) == prefixes * step_bytes
    if strategy.kind == "offloaded":
        assert trial.decode.d2h_bytes == (prefixes + steps) * step_bytes
    if strategy.kind in ("streamed", "offloaded"):
        assert trial.prefill.num_pageable_copies == trial.decode.num_pageable_copies == 0
        assert trial.profiled_copies is not None
        for seen in (trial.profiled_copies.h2d, trial.profiled_copies.d2h):
            assert (seen.bytes, seen.num_copies) == (seen.accounted_bytes, seen.num_accounted_copies)
            assert seen.num_pageable_copies in (0, None)
        assert (trial.decode.h2d_busy_s or 0) > 0
        assert (trial.kv_cache_host_bytes or 0) > 0


@pytest.mark.parametrize("drill", ["oom_prefill", "oom_decode", "host_refused"])
@pytest.mark.parametrize("strategy", [DynamicSpec(), StaticSpec(), *STRATEGIES], ids=lambda strategy: strategy.label)
def test_after_a_drill_the_device_holds_and_computes_what_it_did_before(
    model: Any, tmp_path: Path, strategy: StrategySpec, drill: Any
):
    from offload_eval.instruments.cuda import CudaDevice

    device = CudaDevice()
    spec = msgspec.structs.replace(spec_of(strategy, 4), role=drill)
    prompt = torch.randint(1000, (4, PROMPT), generator=torch.Generator().manual_seed(1))
    ReferenceFiles(tmp_path, spec.reference_key).save_prompt(prompt.numpy())
    before = check_generation(spec, model, device, tmp_path)
    assert before.message == ""
    result = measure_cell(spec, model, device, tmp_path, Conditions(), lambda *_: None)
    assert result.failure is not None
    if drill == "host_refused" and strategy.kind != "streamed":
        assert result.status == "unsupported"
    else:
        ledger = "host" if drill == "host_refused" else "device"
        phase = "decode" if drill == "oom_decode" else "prefill"
        assert (result.status, result.failure.ledger, result.failure.phase) == ("oom", ledger, phase), result.failure
        assert result.conditions.recovery is not None
        assert result.conditions.recovery.leaked == ()
    after = check_generation(spec, model, device, tmp_path)
    assert (after.tokens_digest, after.logits_digest) == (before.tokens_digest, before.logits_digest)
