"""The analytic card of each strategy, against arithmetic by hand for SmolLM2-135M.

30 layers, 3 kv heads, head_dim 64: one token is 2*30*3*64 = 11,520 values, 23,040 bytes in 16 bit, 768 a layer.
Prompt 384, output 136: 519 tokens are cached when the last one is computed.
"""

from fractions import Fraction

import pytest

from offload_eval.bounds.strategy_bound import quantized_bits_per_value, residual_tokens, strategy_bound
from offload_eval.core.experiment import (
    BudgetSpec,
    DynamicSpec,
    OffloadedSpec,
    QuantizedSpec,
    StrategySpec,
    StreamedSpec,
    Workload,
)
from offload_eval.core.judgement import Bound
from offload_eval.core.shape import LayerGroup, ModelShape

SHAPE = ModelShape(
    model_type="llama",
    layer_groups=(LayerGroup(count=30, kv_heads=3, key_head_dim=64, value_head_dim=64),),
    vocab_size=49152,
    hidden_size=576,
)


def bound(strategy: StrategySpec, batch_size: int = 1, dtype: str = "bfloat16", output_tokens: int = 136) -> Bound:
    workload = Workload(batch_size=batch_size, prompt_tokens=384, output_tokens=output_tokens)
    budget = BudgetSpec(device_bytes=512 * 1024**2, runtime_bytes=1000, reserve_bytes=24)
    return strategy_bound(SHAPE, 269_030_272, dtype, workload, strategy, budget)


def test_dynamic_holds_every_token():
    card = bound(DynamicSpec())
    assert card.kv_device_bytes_per_session == 519 * 23_040
    assert (card.kv_host_bytes_per_session, card.h2d_bytes_per_step, card.d2h_bytes_per_step) == (0, 0, 0)
    assert card.sessions == (536_870_912 - 269_030_272 - 1024) // (519 * 23_040) == 22


def test_offloaded_moves_every_layer_both_ways():
    card = bound(OffloadedSpec(), batch_size=4)
    assert card.kv_device_bytes_per_session == 519 * 768 * 5 // 2
    assert card.kv_host_bytes_per_session == 519 * 23_040
    assert card.h2d_bytes_per_step == 4 * 518 * 23_040
    assert card.d2h_bytes_per_step == 4 * 519 * 23_040


def test_streamed_writes_back_one_token():
    card = bound(StreamedSpec(prefetch_layers=2), batch_size=4)
    assert card.kv_device_bytes_per_session == 3 * 519 * 768
    assert card.h2d_bytes_per_step == 4 * 518 * 23_040
    assert card.d2h_bytes_per_step == 4 * 23_040


def test_streamed_never_needs_more_scratch_than_layers():
    assert bound(StreamedSpec(prefetch_layers=500)).kv_device_bytes_per_session == 30 * 519 * 768


@pytest.mark.parametrize(
    ("nbits", "group_size", "bits"), [(4, 64, "4.5"), (4, 32, "5"), (2, 64, "2.5"), (8, 64, "8.5")]
)
def test_bits_per_value_include_scale_and_zero_point(nbits: int, group_size: int, bits: str):
    assert quantized_bits_per_value(nbits, group_size, 16) == Fraction(bits)


def test_quantized_counts_its_residual_window():
    """135 steps follow the prompt; the 128th flushes, so 7 tokens stay in 16 bit."""
    card = bound(QuantizedSpec(backend="quanto", nbits=4))
    assert card.kv_device_bytes_per_session == (519 - 7) * 11_520 * 45 // 80 + 7 * 23_040


@pytest.mark.parametrize(("output_tokens", "expected"), [(2, 1), (128, 127), (129, 0), (130, 1), (257, 0)])
def test_residual_tokens(output_tokens: int, expected: int):
    assert residual_tokens(Workload(prompt_tokens=9, output_tokens=output_tokens), 128) == expected


def test_fp8_is_one_byte_a_value_and_two_scales_a_layer():
    card = bound(QuantizedSpec(backend="fp8"))
    assert card.kv_device_bytes_per_session == 519 * 11_520
    assert card.kv_device_bytes_fixed == 30 * 8


def test_float32_doubles_the_cache():
    assert bound(DynamicSpec(), dtype="float32").kv_device_bytes_per_session == 2 * 519 * 23_040


def test_every_card_says_what_it_does_not_count():
    assert any("not counted" in assumption for assumption in bound(DynamicSpec()).assumptions)
