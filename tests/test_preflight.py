"""What is refused before any weight is loaded, for every kind of model."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from offload_eval.core.experiment import (
    BudgetSpec,
    CpuSpec,
    DynamicSpec,
    Experiment,
    ModelSpec,
    RandomPrompt,
    StreamedSpec,
    Workload,
)
from offload_eval.errors import InputError
from offload_eval.execution.messages import Preflight
from offload_eval.execution.preflight import run_preflight
from offload_eval.instruments.environment import usable_cores

TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}


def check(folder: Path, model_type: str, changes: dict[str, Any] | None = None, **model: Any) -> Preflight:
    AutoConfig.for_model(model_type, **(TINY | (changes or {}))).save_pretrained(folder)
    experiment = Experiment(
        name="x",
        model=ModelSpec(config=str(folder), weights="random", **model),
        device="cpu",
        budget=BudgetSpec(device_bytes=10**9),
        workloads=(Workload(prompt_tokens=4, output_tokens=2, prompt=RandomPrompt()),),
        strategies=(DynamicSpec(), StreamedSpec()),
    )
    return run_preflight(experiment)


def test_a_known_family_has_a_bound_and_no_refusal(tmp_path: Path):
    checked = check(tmp_path, "llama", {"num_attention_heads": 4})
    assert checked.model.shape is not None
    assert set(checked.refusals.values()) == {None}


def test_an_unknown_family_runs_without_a_bound(tmp_path: Path):
    checked = check(tmp_path, "jetmoe", {"kv_channels": 8, "num_local_experts": 2, "num_experts_per_tok": 1})
    assert checked.model.shape is None
    assert "jetmoe" in (checked.model.shape_refusal or "")
    assert set(checked.refusals.values()) == {None}


def test_a_model_without_attention_is_unsupported(tmp_path: Path):
    checked = check(tmp_path, "mamba", {"state_size": 4}, attn_implementation="eager")
    assert "no attention layer" in (checked.refusals["b1-p4-o2", "dynamic"] or "")
    assert checked.refusals["b1-p4-o2", "streamed"] is not None


def test_an_encoder_decoder_is_no_causal_language_model(tmp_path: Path):
    with pytest.raises(InputError, match="model_type 't5' is no causal language model") as refused:
        check(tmp_path, "t5")
    assert len(str(refused.value)) < 400


def test_an_attention_that_is_not_there_names_its_key(tmp_path: Path):
    with pytest.raises(InputError, match=r"model\.attn_implementation: 'no_such'"):
        check(tmp_path, "llama", {"num_attention_heads": 4}, attn_implementation="no_such")


def test_quantized_weights_need_their_bytes_stated(tmp_path: Path):
    quantized = {"num_attention_heads": 4, "quantization_config": {"quant_method": "fp8"}}
    with pytest.raises(InputError, match=r"state budget\.weights_bytes"):
        check(tmp_path, "llama", quantized)


def test_more_compute_threads_than_cores_are_refused(tmp_path: Path):
    AutoConfig.for_model("llama", **TINY, num_attention_heads=4).save_pretrained(tmp_path)
    experiment = Experiment(
        name="x",
        model=ModelSpec(config=str(tmp_path), weights="random"),
        device="cpu",
        cpu=CpuSpec(compute_threads=usable_cores() + 1),
        budget=BudgetSpec(device_bytes=10**9),
        workloads=(Workload(prompt_tokens=4, output_tokens=2, prompt=RandomPrompt()),),
        strategies=(DynamicSpec(),),
    )
    with pytest.raises(InputError, match=r"cpu\.compute_threads: .*allowed: 1 to"):
        run_preflight(experiment)
