"""Quantized caches: the payload is what the tensors hold, at the bits an element that the layout gives."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from offload_eval.bounds.model_shape import model_shape
from offload_eval.bounds.strategy_bound import strategy_bound
from offload_eval.core.experiment import BudgetSpec, QuantizedSpec, Workload
from offload_eval.execution.generation import TokenClock, generate
from offload_eval.instruments.cpu import CpuDevice
from offload_eval.strategies.base import kv_payload_bytes
from offload_eval.strategies.quantized import Quantized

LAYERS, KV_HEADS, HEAD_DIM, BATCH, PROMPT = 2, 2, 64, 2, 64
TOKEN_VALUES = BATCH * LAYERS * KV_HEADS * 2 * HEAD_DIM


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        num_hidden_layers=LAYERS,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=64,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def payload_bytes(model: Any, spec: QuantizedSpec, output_tokens: int) -> int:
    device = CpuDevice()
    strategy = Quantized(spec)
    assert strategy.refusal("cpu", model.config) is None
    with device.open_link(timed=False) as link:
        cache = strategy.build_cache(model.config, link, PROMPT + output_tokens - 1)
        generate(model, torch.ones(BATCH, PROMPT, dtype=torch.long), cache, output_tokens, TokenClock())
        payload = kv_payload_bytes(cache, device.tier_of)
    assert payload["host"] == 0
    return payload["device"]


@pytest.mark.parametrize(
    ("spec", "bits"),
    [
        (QuantizedSpec(backend="quanto", nbits=4), 4.5),
        (QuantizedSpec(backend="quanto", nbits=4, q_group_size=32), 5.0),
        (QuantizedSpec(backend="quanto", nbits=2), 2.5),
        (QuantizedSpec(backend="hqq", nbits=4, axis_key=1, axis_value=1), 4.5),
        (QuantizedSpec(backend="hqq", nbits=8, axis_key=1, axis_value=1), 8.5),
    ],
)
def test_payload_is_bits_a_value_plus_the_residual_window(model: Any, spec: QuantizedSpec, bits: float):
    """Five steps after the prompt: the prompt is quantized, five tokens are not."""
    assert payload_bytes(model, spec, 6) == PROMPT * TOKEN_VALUES * bits / 8 + 5 * TOKEN_VALUES * 2


def test_a_flush_quantizes_the_window(model: Any):
    """With a window of 4, the fourth and eighth of 9 steps flush: 8 steps are quantized, one is not."""
    spec = QuantizedSpec(backend="quanto", nbits=4, residual_length=4)
    assert payload_bytes(model, spec, 10) == (PROMPT + 8) * TOKEN_VALUES * 4.5 / 8 + TOKEN_VALUES * 2


def test_fp8_is_one_byte_a_value_and_two_scales_a_layer(model: Any):
    assert payload_bytes(model, QuantizedSpec(backend="fp8"), 6) == (PROMPT + 5) * TOKEN_VALUES + LAYERS * 2 * 4


@pytest.mark.parametrize("output_tokens", [2, 6, 9])
@pytest.mark.parametrize(
    "spec",
    [
        QuantizedSpec(backend="quanto", nbits=4, residual_length=4),
        QuantizedSpec(backend="hqq", nbits=4, axis_key=1, axis_value=1, residual_length=4),
        QuantizedSpec(backend="fp8"),
    ],
)
def test_the_analytic_card_is_exact(model: Any, spec: QuantizedSpec, output_tokens: int):
    workload = Workload(batch_size=BATCH, prompt_tokens=PROMPT, output_tokens=output_tokens)
    shape = model_shape(model.config.to_dict())
    card = strategy_bound(shape, 1, "bfloat16", workload, spec, BudgetSpec(device_bytes=10**9))
    expected = BATCH * card.kv_device_bytes_per_session + card.kv_device_bytes_fixed
    assert payload_bytes(model, spec, output_tokens) == expected


def test_sliding_models_are_refused():
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=6)
    refusal = Quantized(QuantizedSpec(backend="fp8")).refusal("cpu", config)
    assert refusal is not None
    assert "sliding_attention" in refusal


def test_upstream_refuses_them_too():
    """The refusal is upstream's own: were this to pass one day, the refusal must go."""
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=6)
    with CpuDevice().open_link(timed=False) as link, pytest.raises(ValueError, match="full attention"):
        Quantized(QuantizedSpec(backend="fp8")).build_cache(config, link, 9)
