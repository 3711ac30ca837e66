"""What must hold of the arithmetic for any model, any mix and any card."""

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from offload_eval.bounds.cached_layers import Lengths
from offload_eval.bounds.grid import Ledgers, ReplicaCard, replica_card, strategy_grid
from offload_eval.bounds.ledgers import pinned_bytes, pinned_sessions, sessions_that_fit
from offload_eval.bounds.model_shape import model_shape
from offload_eval.bounds.paged import paged_card
from offload_eval.bounds.partition import rank_shapes
from offload_eval.bounds.population import Deployment, sum_population
from offload_eval.bounds.session_card import HostBuffers, session_card
from offload_eval.core.experiment import DynamicSpec, OffloadedSpec, StreamedSpec
from offload_eval.core.plan import PagingSpec, PartitionSpec, SessionGroup
from offload_eval.core.shape import ModelShape
from offload_eval.store.model_config import load_model_config, preset_names

SHAPES = {name: model_shape(load_model_config(name).config) for name in preset_names()}
FORMATS = ("int2", "int4", "int8", "auto", "float32")
"""From the fewest bits to the most."""

shapes = st.sampled_from(sorted(SHAPES)).map(SHAPES.__getitem__)
tokens = st.integers(1, 200_000)
blocks = st.sampled_from([1, 8, 16, 64, 256])
formats = st.sampled_from([*FORMATS, "fp8"])
pagings = st.builds(
    PagingSpec,
    block_tokens=blocks,
    kv_cache_dtype=formats,
    q_group_size=st.sampled_from([32, 64]),
    residual_length=st.sampled_from([0, 32, 128]),
)
groups = st.lists(
    st.builds(
        SessionGroup,
        name=st.just("group"),
        sessions=st.integers(1, 50),
        prompt_tokens=st.integers(100, 20_000),
        max_new_tokens=st.integers(1, 2000),
        beams=st.integers(1, 4),
    ),
    min_size=1,
    max_size=3,
)


def lengths(prompt_tokens: int, output_tokens: int = 0) -> Lengths:
    return Lengths(prompt_tokens=np.asarray(prompt_tokens), output_tokens=np.asarray(output_tokens))


def session_bytes(shape: ModelShape, prompt_tokens: int, paging: PagingSpec) -> int:
    return int(paged_card(shape, 16, lengths(prompt_tokens), paging).device_peak_bytes)


def anywhere(shape: ModelShape) -> Deployment:
    return Deployment(shape=shape, bits=16, partition=PartitionSpec(), ledgers=Ledgers(), batching="one")


def population_bytes(shape: ModelShape, mix: list[SessionGroup], paging: PagingSpec) -> int:
    sums = sum_population(mix, None, paging, anywhere(shape))
    assert not isinstance(sums, str)
    return sums[0].device_bytes


@given(shapes, pagings, tokens, tokens)
def test_bytes_never_fall_with_tokens(shape: ModelShape, paging: PagingSpec, one: int, other: int):
    fewer, more = sorted((one, other))
    assert session_bytes(shape, fewer, paging) <= session_bytes(shape, more, paging)


@given(shapes, tokens, tokens)
def test_what_dynamic_holds_never_falls_with_tokens(shape: ModelShape, one: int, other: int):
    assume(shape.in_transformers and not any(group.compression for group in shape.layer_groups))
    cards = [session_card(shape, 16, lengths(prompt), DynamicSpec()) for prompt in sorted((one, other))]
    fewer, more = (int(card.device_peak_bytes) for card in cards if not isinstance(card, str))
    assert fewer <= more


@given(shapes, pagings, tokens)
def test_bytes_never_fall_with_bits(shape: ModelShape, paging: PagingSpec, prompt_tokens: int):
    sizes = [session_bytes(shape, prompt_tokens, replace(paging, kv_cache_dtype=name)) for name in FORMATS]
    assert sizes == sorted(sizes)
    assert session_bytes(shape, prompt_tokens, replace(paging, kv_cache_dtype="fp8")) <= sizes[FORMATS.index("auto")]


@given(shapes, pagings, tokens, st.integers(2, 64))
def test_bytes_of_a_batch_grow_with_its_sessions(
    shape: ModelShape, paging: PagingSpec, prompt_tokens: int, sessions: int
):
    card = paged(shape, paging, prompt_tokens)
    one, smaller, larger = (card.batch_device_bytes(np.asarray(each)) for each in (1, sessions - 1, sessions))
    fixed = card.device_fixed_bytes
    assert smaller < larger == sessions * (one - fixed) + fixed


def paged(shape: ModelShape, paging: PagingSpec, prompt_tokens: int, **partition: int) -> ReplicaCard:
    card = replica_card(shape, 16, lengths(prompt_tokens), paging, PartitionSpec(**partition))
    assert isinstance(card, ReplicaCard)
    return card


@given(shapes, pagings, tokens)
def test_rounding_to_blocks_never_lowers(shape: ModelShape, paging: PagingSpec, prompt_tokens: int):
    exact = session_bytes(shape, prompt_tokens, replace(paging, block_tokens=1))
    assert exact <= session_bytes(shape, prompt_tokens, paging)


@given(shapes, pagings, tokens)
def test_rounding_adds_less_than_two_blocks_a_layer(shape: ModelShape, paging: PagingSpec, prompt_tokens: int):
    rounded = session_bytes(shape, prompt_tokens, paging)
    exact = session_bytes(shape, prompt_tokens, replace(paging, block_tokens=1))
    rows = 2 * paging.block_tokens
    widths = sum(
        group.count * (group.kv_heads * (group.key_head_dim + group.value_head_dim) + group.indexer_head_dim)
        + group.count * (group.key_head_dim + group.compression.indexer_head_dim if group.compression else 0)
        for group in shape.layer_groups
    )
    assert rounded - exact <= rows * widths * 4


@given(shapes, pagings, groups, st.integers(0, 100))
def test_a_shared_prefix_never_raises(shape: ModelShape, paging: PagingSpec, mix: list[SessionGroup], prefix: int):
    sharing = [replace(group, shared_prefix_tokens=prefix) for group in mix]
    assert 0 < population_bytes(shape, sharing, paging) <= population_bytes(shape, mix, paging)


@given(shapes, pagings, groups)
def test_beams_cost_no_more_than_sessions(shape: ModelShape, paging: PagingSpec, mix: list[SessionGroup]):
    as_sessions = [replace(group, sessions=group.sessions * group.beams, beams=1) for group in mix]
    assert population_bytes(shape, mix, paging) <= population_bytes(shape, as_sessions, paging)


@given(shapes, pagings, groups)
def test_a_percentile_costs_no_more_than_the_caps(shape: ModelShape, paging: PagingSpec, mix: list[SessionGroup]):
    shorter = [
        replace(group, generated_tokens=replace(group.generated_tokens, p95=max(1, group.max_new_tokens // 2)))
        for group in mix
    ]
    sums = sum_population(shorter, "p95", paging, anywhere(shape))
    assert not isinstance(sums, str)
    at_caps, at_p95 = sums
    assert at_p95.device_bytes <= at_caps.device_bytes


@given(shapes, pagings, tokens, st.integers(1, 64))
def test_tensor_parallel_ranks_together_hold_at_least_the_whole(
    shape: ModelShape, paging: PagingSpec, prompt_tokens: int, ranks: int
):
    whole, rank = (paged(shape, paging, prompt_tokens, tensor_parallel=tp) for tp in (1, ranks))
    assert ranks * int(rank.device_bytes) >= int(whole.device_bytes)
    assert int(rank.device_bytes) <= int(whole.device_bytes)


@given(shapes, st.integers(1, 16), tokens)
def test_pipeline_stages_together_hold_the_whole(shape: ModelShape, stages: int, prompt_tokens: int):
    assume(stages <= sum(group.count for group in shape.layer_groups) // shape.caches_per_layer)
    assume(stages == 1 or all(group.cache != "shared" for group in shape.layer_groups))
    paging = PagingSpec()
    cards = [paged_card(stage, 16, lengths(prompt_tokens), paging) for stage in rank_shapes(shape, 1, stages)]
    assert sum(int(card.device_bytes) for card in cards) == session_bytes(shape, prompt_tokens, paging)
    fullest = int(paged(shape, paging, prompt_tokens, pipeline_parallel=stages).device_bytes)
    assert fullest == max(int(card.device_bytes) for card in cards)


@given(st.integers(0, 2**50), st.integers(1, 2**40))
def test_the_limit_fits_and_one_more_does_not(available_bytes: int, bytes_per_session: int):
    limit = int(sessions_that_fit(available_bytes, np.asarray(bytes_per_session)))
    assert limit * bytes_per_session <= available_bytes < (limit + 1) * bytes_per_session


buffers = st.lists(
    st.builds(HostBuffers, count=st.integers(1, 100), bytes=st.integers(1, 2**30).map(np.asarray)),
    min_size=1,
    max_size=4,
)


@given(buffers, st.integers(1, 1000))
def test_pinned_buffers_are_at_most_twice_what_was_asked(found: list[HostBuffers], sessions: int):
    asked = sum(each.count * sessions * int(each.bytes) for each in found)
    assert asked <= int(pinned_bytes(found, np.asarray(sessions))) < 2 * asked


@given(buffers, st.integers(0, 2**44))
def test_the_host_limit_fits_and_one_more_does_not(found: list[HostBuffers], available_bytes: int):
    limit = pinned_sessions(found, available_bytes)
    assert int(pinned_bytes(found, limit)) <= available_bytes < int(pinned_bytes(found, limit + 1))


@given(tokens, st.integers(2, 4000), st.sampled_from([DynamicSpec(), OffloadedSpec(), StreamedSpec()]))
@settings(max_examples=50)
def test_the_admitted_batch_fits_both_ledgers(prompt_tokens: int, output_tokens: int, strategy: Any):
    ledgers = Ledgers(device_bytes=40 * 2**30, host_bytes=100 * 2**30)
    shape = SHAPES["llama-3.1-8b"]
    card = replica_card(shape, 16, lengths(prompt_tokens, output_tokens), strategy, PartitionSpec())
    assert isinstance(card, ReplicaCard)
    grid = strategy_grid(card, np.asarray(1), ledgers)
    assert grid.limit is not None
    for sessions, fits in ((grid.limit, True), (grid.limit + 1, False)):
        device_fits = card.batch_device_bytes(sessions) <= 40 * 2**30
        host_fits = pinned_bytes(card.host_buffers, sessions) <= 100 * 2**30
        assert bool(device_fits and host_fits) is fits


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_every_preset_has_an_order_of_its_layers(name: str):
    shape = SHAPES[name]
    counted = [shape.layer_order.count(index) for index in range(len(shape.layer_groups))]
    assert counted == [group.count for group in shape.layer_groups]
