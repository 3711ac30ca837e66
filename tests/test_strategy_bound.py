"""The analytic card of each strategy, against arithmetic by hand for SmolLM2-135M.

30 layers, 3 kv heads, head_dim 64: one token is 2*30*3*64 = 11,520 values, 23,040 bytes in 16 bit, 768 a layer.
Prompt 384, output 136: 519 tokens are cached when the last one is computed.
"""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from offload_eval.bounds.model_shape import model_shape
from offload_eval.bounds.session_card import quantized_bits_per_value, residual_tokens
from offload_eval.bounds.strategy_bound import strategy_bound
from offload_eval.core.experiment import (
    BudgetSpec,
    DynamicSpec,
    OffloadedSpec,
    OffloadedStaticSpec,
    QuantizedSpec,
    StaticSpec,
    StrategySpec,
    StreamedSpec,
    Workload,
)
from offload_eval.core.judgement import Bound
from offload_eval.core.shape import LayerGroup, LinearState, ModelShape, TransformersDifference
from offload_eval.generation import TokenClock, generate
from offload_eval.instruments.cpu import CpuDevice
from offload_eval.strategies.base import kv_payload_bytes
from offload_eval.strategies.dynamic import Dynamic
from offload_eval.strategies.streamed import Streamed

SHAPE = ModelShape(
    model_type="llama",
    layer_groups=(LayerGroup(count=30, kv_heads=3, key_head_dim=64, value_head_dim=64),),
    vocab_size=49152,
    hidden_size=576,
)


def bound(strategy: StrategySpec, batch_size: int = 1, dtype: str = "bfloat16", output_tokens: int = 136) -> Bound:
    workload = Workload(batch_size=batch_size, prompt_tokens=384, output_tokens=output_tokens)
    budget = BudgetSpec(device_bytes=512 * 1024**2, runtime_bytes=1000, reserve_bytes=24)
    card = strategy_bound(SHAPE, 269_030_272, dtype, workload, strategy, budget)
    assert card is not None
    return card


def mixed_bound(strategy: StrategySpec, *groups: LayerGroup, **changes: Any) -> Bound | None:
    """The card of 2 full and 4 sliding layers of 16 bytes a row, unless told otherwise; 519 tokens, batch 2."""
    shape = replace(SHAPE, layer_groups=groups or (TWO_FULL, FOUR_SLIDING), **changes)
    workload = Workload(batch_size=2, prompt_tokens=384, output_tokens=136)
    return strategy_bound(shape, 1, "bfloat16", workload, strategy, BudgetSpec(device_bytes=10**9))


TWO_FULL = LayerGroup(count=2, kv_heads=1, key_head_dim=4, value_head_dim=4)
FOUR_SLIDING = replace(TWO_FULL, count=4, cache="sliding", window_tokens=100)


def test_dynamic_keeps_one_token_less_than_the_window():
    card = mixed_bound(DynamicSpec())
    assert card is not None
    assert card.kv_device_bytes_per_session == (2 * 519 + 4 * 99) * 16
    assert any("sliding" in assumption for assumption in card.assumptions)


def test_streamed_keeps_sliding_layers_on_the_device():
    card = mixed_bound(StreamedSpec(prefetch_layers=2))
    assert card is not None
    assert card.kv_device_bytes_per_session == (2 * 519 + 4 * 99) * 16
    assert card.kv_host_bytes_per_session == 2 * 519 * 16
    assert (card.h2d_bytes_per_step, card.d2h_bytes_per_step) == (0, 2 * 2 * 16), "both layers stay in their slots"


def test_offloaded_moves_what_each_layer_holds():
    """On the device one and a half times a layer in use and the one after it: here both are full ones."""
    card = mixed_bound(OffloadedSpec())
    assert card is not None
    assert card.kv_device_bytes_per_session == 519 * 16 * 5 // 2
    assert card.kv_host_bytes_per_session == (2 * 519 + 4 * 99) * 16
    assert card.h2d_bytes_per_step == 2 * (2 * 518 + 4 * 99) * 16
    assert card.d2h_bytes_per_step == 2 * (2 * 519 + 4 * 99) * 16


def test_offloaded_holds_what_concatenation_takes():
    """A full layer frees old keys before it makes new values, so the wider comes twice; a window has all twice."""
    latent = replace(TWO_FULL, cache="latent", key_head_dim=6, value_head_dim=2)
    card = mixed_bound(OffloadedSpec(), latent)
    assert card is not None
    assert card.kv_device_bytes_per_session == 519 * 2 * (8 + 6 + 8)
    windows = mixed_bound(OffloadedSpec(), FOUR_SLIDING)
    assert windows is not None
    assert windows.kv_device_bytes_per_session == 99 * 16 * 3


def test_offloaded_holds_the_neighbours_in_their_order():
    """Full layers apart: 1.5 of a full one and a sliding one; full at both ends: the first comes after the last."""
    apart = mixed_bound(OffloadedSpec(), layer_order=(0, 1, 1, 0, 1, 1))
    around = mixed_bound(OffloadedSpec(), layer_order=(0, 1, 1, 1, 1, 0))
    assert apart is not None
    assert around is not None
    assert apart.kv_device_bytes_per_session == 519 * 16 * 3 // 2 + 99 * 16
    assert around.kv_device_bytes_per_session == 519 * 16 * 5 // 2


def test_a_windows_storage_is_the_whole_prompt_until_the_next_step():
    """384 prompt tokens in each of 4 sliding layers beside those in 2 full ones: more than 519 and 100 at the end."""
    card = mixed_bound(DynamicSpec())
    assert card is not None
    assert card.kv_device_bytes_per_session == (2 * 519 + 4 * 99) * 16
    assert card.kv_device_peak_bytes_per_session == 6 * 384 * 16


def test_static_buffers_have_room_for_every_token():
    """519 rows in each full layer, 100 slots in each sliding one."""
    card = mixed_bound(StaticSpec())
    assert card is not None
    assert card.kv_device_bytes_per_session == card.kv_device_peak_bytes_per_session == (2 * 519 + 4 * 100) * 16


def test_offloaded_static_moves_whole_buffers_of_full_layers():
    card = mixed_bound(OffloadedStaticSpec())
    assert card is not None
    assert card.kv_device_bytes_per_session == (2 * 519 + 4 * 100) * 16
    assert card.kv_host_bytes_per_session == 2 * 519 * 16
    assert card.h2d_bytes_per_step == card.d2h_bytes_per_step == 2 * 2 * 519 * 16


def test_transformers_layout_decides_what_runs():
    """GPT-Neo's local layers are full ones to transformers, so every strategy sees six full layers."""
    local = replace(FOUR_SLIDING, transformers=TransformersDifference(cache="full"))
    for strategy in (StreamedSpec(), QuantizedSpec(backend="fp8")):
        six = mixed_bound(strategy, replace(TWO_FULL, count=6))
        assert six is not None
        assert mixed_bound(strategy, TWO_FULL, local) == six


@pytest.mark.parametrize(
    ("strategy", "group"),
    [
        (QuantizedSpec(backend="quanto"), FOUR_SLIDING),
        (QuantizedSpec(backend="fp8"), replace(TWO_FULL, cache="latent", indexer_head_dim=4)),
        (StreamedSpec(), LayerGroup(count=1, cache="shared")),
        (StreamedSpec(), replace(TWO_FULL, kv_heads=2)),
        (OffloadedSpec(), replace(TWO_FULL, cache="latent", indexer_head_dim=4)),
        (OffloadedSpec(), LayerGroup(count=1, cache="cross", kv_heads=1, key_head_dim=4)),
        (StaticSpec(), LayerGroup(count=1, cache="cross", kv_heads=1, key_head_dim=4)),
        (OffloadedSpec(), LayerGroup(count=1, cache="linear_state", state=LinearState(recurrent_values=8))),
    ],
)
def test_no_card_where_the_strategy_does_not_support_the_layers(strategy: StrategySpec, group: LayerGroup):
    assert mixed_bound(strategy, TWO_FULL, group) is None


def test_no_card_for_streamed_without_a_full_layer_nor_for_remote_code():
    assert mixed_bound(StreamedSpec(), FOUR_SLIDING) is None
    assert mixed_bound(DynamicSpec(), in_transformers=False) is None


@pytest.mark.parametrize(
    "spec",
    [
        DynamicSpec(),
        StreamedSpec(),
        StreamedSpec(prefetch_layers=1, resident_share=0.5),
        StreamedSpec(resident_share=1.0),
        StreamedSpec(prefetch_layers=1, resident_bytes=2 * 20 * 64),
        StreamedSpec(prefetch_layers=1, host_dtype="int4"),
        StreamedSpec(resident_share=0.5, host_dtype="fp8"),
    ],
)
def test_the_card_of_a_sliding_model_is_exact(spec: DynamicSpec | StreamedSpec):
    """Two full and two sliding layers of Gemma 2, run for real: the payload at the end is the card's."""
    sizes = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 97, "head_dim": 8}
    config = AutoConfig.for_model("gemma2", sliding_window=8, num_attention_heads=4, num_key_value_heads=2, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    workload = Workload(batch_size=2, prompt_tokens=17, output_tokens=4)
    budget = BudgetSpec(device_bytes=10**9)
    card = strategy_bound(model_shape(config.to_dict()), 1, "bfloat16", workload, spec, budget)
    strategy = Dynamic(spec) if isinstance(spec, DynamicSpec) else Streamed(spec)
    device = CpuDevice()
    with device.open_link(timed=False) as link:
        cache = strategy.build_cache(config, link, workload.cached_tokens)
        generate(model, torch.arange(34).reshape(2, 17), cache, workload.output_tokens, TokenClock())
        payload = kv_payload_bytes(cache, device.tier_of)
    assert card is not None
    assert payload["device"] == 2 * card.kv_device_bytes_per_session
    assert payload["host"] == 2 * card.kv_host_bytes_per_session


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


def test_resident_layers_take_whole_buffers_and_cross_nothing():
    """15 of 30 layers are resident; three slots serve the other 15."""
    card = bound(StreamedSpec(resident_share=0.5))
    assert card.kv_device_bytes_per_session == (15 + 3) * 519 * 768
    assert card.kv_host_bytes_per_session == 15 * 519 * 768
    assert (card.h2d_bytes_per_step, card.d2h_bytes_per_step) == (15 * 518 * 768, 15 * 768)
    whole = bound(StreamedSpec(resident_share=1.0))
    assert whole.kv_device_bytes_per_session == 30 * 519 * 768
    assert (whole.kv_host_bytes_per_session, whole.h2d_bytes_per_step, whole.d2h_bytes_per_step) == (0, 0, 0)


@pytest.mark.parametrize(("share", "resident"), [(0.099, 2), (0.1, 3), (0.7, 21), (0.999, 29)])
def test_a_share_is_rounded_down_to_whole_layers(share: float, resident: int):
    assert bound(StreamedSpec(resident_share=share)).kv_host_bytes_per_session == (30 - resident) * 519 * 768


def test_resident_bytes_hold_whole_layers_of_the_batch():
    """Two sessions: 797,184 bytes a layer, so 4 MB hold five; the most sessions fit where they hold none."""
    card = bound(StreamedSpec(resident_bytes=4_000_000), batch_size=2)
    assert card.kv_device_bytes_per_session == (5 + 3) * 519 * 768
    assert card.kv_host_bytes_per_session == 25 * 519 * 768
    assert card.sessions == (536_870_912 - 269_030_272 - 1024) // (3 * 519 * 768)


@pytest.mark.parametrize(("host_dtype", "head_bytes"), [("fp8", 64 + 2), ("int8", 64 + 4), ("int4", 32 + 4)])
def test_quantized_rows_carry_their_scales(host_dtype: str, head_bytes: int):
    """3 heads of 64 values, keys and values; two slots of them, and one layer of 16-bit rows to read them into."""
    card = bound(StreamedSpec(host_dtype=host_dtype))  # type: ignore[arg-type]
    row_bytes = 2 * 3 * head_bytes
    assert card.kv_device_bytes_per_session == 2 * 519 * row_bytes + 519 * 768
    assert card.kv_host_bytes_per_session == 30 * 519 * row_bytes
    assert (card.h2d_bytes_per_step, card.d2h_bytes_per_step) == (30 * 518 * row_bytes, 30 * row_bytes)


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


def test_quantized_admits_by_its_fullest_window():
    """The payload is largest before the flush of step 128: 127 tokens in 16 bit beside the prompt's 384."""
    card = bound(QuantizedSpec(backend="quanto", nbits=4))
    most_bytes = 384 * 11_520 * 45 // 80 + 127 * 23_040
    assert card.kv_device_peak_bytes_per_session == most_bytes > card.kv_device_bytes_per_session
    assert card.sessions == (536_870_912 - 269_030_272 - 1024) // most_bytes


def test_quantized_peak_is_its_end_before_the_first_flush_and_after_a_long_run():
    """127 steps only fill the window. After 511 the window is full again: 384 + 384 quantized tokens, 127 others."""
    for output_tokens, quantized, residual in ((128, 384, 127), (512, 384 + 384, 127)):
        card = bound(QuantizedSpec(backend="quanto", nbits=4), output_tokens=output_tokens)
        expected = quantized * 11_520 * 45 // 80 + residual * 23_040
        assert card.kv_device_bytes_per_session == card.kv_device_peak_bytes_per_session == expected


@pytest.mark.parametrize(("steps", "expected"), [(1, 1), (127, 127), (128, 0), (129, 1), (256, 0)])
def test_residual_tokens(steps: int, expected: int):
    assert residual_tokens(np.asarray(steps), 128) == expected


def test_fp8_is_one_byte_a_value_and_two_scales_a_layer():
    card = bound(QuantizedSpec(backend="fp8"))
    assert card.kv_device_bytes_per_session == 519 * 11_520
    assert card.kv_device_bytes_fixed == 30 * 8


def test_float32_doubles_the_cache():
    assert bound(DynamicSpec(), dtype="float32").kv_device_bytes_per_session == 2 * 519 * 23_040


def test_every_card_says_what_it_does_not_count():
    assert any("not counted" in assumption for assumption in bound(DynamicSpec()).assumptions)
