"""Quantized caches: the payload is what the tensors hold, at the bits an element that the layout gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_llama
from transformers import AutoConfig

from offload_eval.bounds.model_shape import model_shape
from offload_eval.bounds.strategy_bound import strategy_bound
from offload_eval.core.experiment import BudgetSpec, QuantizedSpec, Workload
from offload_eval.generation import TokenClock, generate
from offload_eval.instruments.cpu import CpuDevice
from offload_eval.strategies.backends import load_backend
from offload_eval.strategies.base import kv_payload_bytes
from offload_eval.strategies.quantized import Quantized

LAYERS, KV_HEADS, HEAD_DIM, BATCH, PROMPT = 2, 2, 64, 2, 64
TOKEN_VALUES = BATCH * LAYERS * KV_HEADS * 2 * HEAD_DIM


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(
        torch.bfloat16,
        num_hidden_layers=LAYERS,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=64,
    )


def workload(output_tokens: int, batch_size: int = BATCH, prompt_tokens: int = PROMPT) -> Workload:
    return Workload(batch_size=batch_size, prompt_tokens=prompt_tokens, output_tokens=output_tokens)


def payload_bytes(model: Any, spec: QuantizedSpec, output_tokens: int) -> int:
    device = CpuDevice()
    strategy = Quantized(spec)
    assert strategy.refusal("cpu", model.config, workload(output_tokens)) is None
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
        (QuantizedSpec(backend="hqq", nbits=2, axis_key=1, axis_value=1), 2.5),
        (QuantizedSpec(backend="hqq", nbits=1, axis_key=1, axis_value=1), 1.5),
        (QuantizedSpec(backend="quanto", nbits=4, axis_key=-1, axis_value=-1), 4.5),
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
    shape = model_shape(model.config.to_dict())
    card = strategy_bound(shape, 1, "bfloat16", workload(output_tokens), spec, BudgetSpec(device_bytes=10**9))
    expected = BATCH * card.kv_device_bytes_per_session + card.kv_device_bytes_fixed
    assert payload_bytes(model, spec, output_tokens) == expected


def small_heads() -> Any:
    """One kv head of 80 values: 64 divides few of its lengths."""
    return AutoConfig.for_model("llama", num_attention_heads=1, num_key_value_heads=1, head_dim=80, hidden_size=80)


@pytest.mark.parametrize(
    ("spec", "lengths", "words"),
    [
        (QuantizedSpec(backend="quanto"), workload(4, 1, 5), "axis 0, which do not divide 400, when 5 tokens"),
        (QuantizedSpec(backend="quanto"), workload(4, 1, 8), None),
        (QuantizedSpec(backend="quanto", residual_length=3), workload(4, 1, 8), "divide 880, when 11 tokens"),
        (QuantizedSpec(backend="quanto", axis_key=-1), workload(4, 1, 63), "axis 0, which do not divide 5,040"),
        (
            QuantizedSpec(backend="quanto", axis_key=-1, axis_value=-1),
            workload(4, 1, 63),
            "axis -1, which do not divide 63, when 63",
        ),
        (QuantizedSpec(backend="quanto", axis_key=-1, axis_value=-1), workload(4, 1, 64), None),
        (QuantizedSpec(backend="hqq"), workload(4, 1, 5), "hqq groups 64 values on axis 0, which do not divide 400"),
        (QuantizedSpec(backend="hqq"), workload(4, 4, 1), None),
        (
            QuantizedSpec(backend="hqq", nbits=2),
            workload(4, 4, 1),
            "4 groups of 2 bits together, which do not divide 5",
        ),
        (QuantizedSpec(backend="fp8"), workload(4, 1, 5), None),
    ],
)
def test_lengths_that_groups_do_not_divide_are_refused(spec: QuantizedSpec, lengths: Workload, words: str | None):
    refusal = Quantized(spec).refusal("cpu", small_heads(), lengths)
    assert (refusal is None) == (words is None)
    assert words is None or words in str(refusal)


@pytest.mark.parametrize(
    ("spec", "lengths"),
    [
        (QuantizedSpec(backend="quanto"), workload(4, 1, 5)),
        (QuantizedSpec(backend="quanto", axis_key=-1, axis_value=-1), workload(4, 1, 63)),
        (QuantizedSpec(backend="hqq"), workload(4, 1, 5)),
    ],
)
def test_upstream_fails_where_we_refuse(spec: QuantizedSpec, lengths: Workload):
    config = small_heads()
    with CpuDevice().open_link(timed=False) as link:
        cache = Quantized(spec).build_cache(config, link, lengths.cached_tokens)
        states = torch.randn(lengths.batch_size, 1, lengths.prompt_tokens, 80)
        with pytest.raises((ValueError, AssertionError)):
            cache.update(states, states, 0)


def test_a_lock_left_by_a_killed_build_is_removed():
    """Torch would wait for it without end."""
    from optimum.quanto.library.extensions.extension import get_extension

    extension = get_extension("quanto_cpp")
    load_backend("quanto", "cpu")
    lock = Path(extension.build_directory) / "lock"
    lock.touch()
    extension._lib = None
    load_backend("quanto", "cpu")
    assert not lock.exists()


def test_sliding_models_are_refused():
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=6)
    refusal = Quantized(QuantizedSpec(backend="fp8")).refusal("cpu", config, workload(4))
    assert refusal is not None
    assert "sliding_attention" in refusal


def test_upstream_refuses_them_too():
    """The refusal is upstream's own: were this to pass one day, the refusal must go."""
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=6)
    with CpuDevice().open_link(timed=False) as link, pytest.raises(ValueError, match="full attention"):
        Quantized(QuantizedSpec(backend="fp8")).build_cache(config, link, 9)
