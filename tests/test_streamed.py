"""The streamed cache: bit-equal to dynamic, one token back a step, and never early."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from delayed_link import DelayedLink
from tiny_models import tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM

from offload_eval.core.experiment import DynamicSpec, StreamedSpec, Workload
from offload_eval.execution.fidelity import LogitsRecorder
from offload_eval.generation import TokenClock, generate
from offload_eval.instruments.cpu import CpuDevice
from offload_eval.strategies.base import kv_payload_bytes
from offload_eval.strategies.dynamic import Dynamic
from offload_eval.strategies.streamed import ScratchRing, Streamed, StreamedLayer
from offload_eval.strategies.upstream import Cache

PROMPT, OUTPUT, BATCH = 17, 9, 2
CAPACITY = PROMPT + OUTPUT - 1
LAYERS, KV_HEADS, HEAD_DIM = 5, 2, 8
ROW_BYTES = BATCH * KV_HEADS * 2 * HEAD_DIM * 4


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(
        torch.float32,
        num_hidden_layers=LAYERS,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        vocab_size=97,
    )


def run(model: Any, cache: Any, prefill_chunk_tokens: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    prompt = torch.arange(BATCH * PROMPT).reshape(BATCH, PROMPT) * 31 % 97
    logits = torch.empty(OUTPUT, BATCH, 97).numpy()
    tokens = generate(model, prompt, cache, OUTPUT, TokenClock(), [LogitsRecorder(logits)], prefill_chunk_tokens)
    return tokens, torch.from_numpy(logits)


def dynamic(model: Any, prefill_chunk_tokens: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    with CpuDevice().open_link(timed=False) as link:
        return run(model, Dynamic(DynamicSpec()).build_cache(model.config, link, CAPACITY), prefill_chunk_tokens)


@pytest.mark.parametrize("prefetch_layers", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("prefill_chunk_tokens", [None, 1, 5, 16])
def test_tokens_and_logits_are_bit_equal_to_dynamic(
    model: Any, prefetch_layers: int, prefill_chunk_tokens: int | None
):
    expected_tokens, expected_logits = dynamic(model, prefill_chunk_tokens)
    with CpuDevice().open_link(timed=False) as link:
        cache = Streamed(StreamedSpec(prefetch_layers=prefetch_layers)).build_cache(model.config, link, CAPACITY)
        tokens, logits = run(model, cache, prefill_chunk_tokens)
    assert torch.equal(tokens, expected_tokens)
    assert torch.equal(logits, expected_logits)


@pytest.mark.parametrize("prefetch_layers", [1, 2, 4])
@pytest.mark.parametrize("seed", range(8))
def test_no_copy_is_read_before_it_happened(model: Any, prefetch_layers: int, seed: int):
    """Copies that nobody waits for happen late or never; with every wait in place nothing changes."""
    expected_tokens, expected_logits = dynamic(model)
    link = DelayedLink(seed)
    cache = Streamed(StreamedSpec(prefetch_layers=prefetch_layers)).build_cache(model.config, link, CAPACITY)
    tokens, logits = run(model, cache)
    assert torch.equal(tokens, expected_tokens)
    assert torch.equal(logits, expected_logits)


def without_wait_for_fetch(ring: ScratchRing) -> None:
    original = ring.checkout

    def checkout(ordinal: int) -> torch.Tensor:
        fetch = ring._fetches.get(ring._visit)
        if fetch is not None:
            fetch.wait = lambda: None  # type: ignore[method-assign]
        return original(ordinal)

    ring.checkout = checkout  # type: ignore[method-assign]


def without_after(ring: ScratchRing) -> None:
    h2d = ring.link.h2d
    ring.link.h2d = lambda device, host, _after=(): h2d(device, host)  # type: ignore[method-assign]


def without_read_out_wait(ring: ScratchRing) -> None:
    original = ring.checkout

    def checkout(ordinal: int) -> torch.Tensor:
        ring._read_outs.pop(ring._visit % ring.num_slots, None)
        return original(ordinal)

    ring.checkout = checkout  # type: ignore[method-assign]


@pytest.mark.parametrize("break_ring", [without_wait_for_fetch, without_after, without_read_out_wait])
def test_a_missing_wait_is_seen(model: Any, break_ring: Callable[[ScratchRing], None]):
    """Each wait is needed: without it some schedule gives other logits."""
    _, expected_logits = dynamic(model)

    def differs(seed: int) -> bool:
        cache = Streamed(StreamedSpec(prefetch_layers=1)).build_cache(model.config, DelayedLink(seed), CAPACITY)
        break_ring(cache.layers[0].ring)
        return not torch.equal(run(model, cache)[1], expected_logits)

    assert any(differs(seed) for seed in range(8))


def test_each_step_writes_back_one_token_and_fetches_the_prefix_once(model: Any):
    """Decode steps see prefixes of 17 to 24 tokens; the first fetch of a step is made in the step before."""
    with CpuDevice().open_link(timed=False) as link:
        clock = TokenClock(on_first_token=lambda: setattr(link.log, "phase", "decode"))
        cache = Streamed(StreamedSpec()).build_cache(model.config, link, CAPACITY)
        generate(model, torch.ones(BATCH, PROMPT, dtype=torch.long), cache, OUTPUT, clock)
    prefill, decode = link.log.sample("prefill"), link.log.sample("decode")
    prefixes = range(PROMPT, PROMPT + OUTPUT - 1)
    assert prefill.d2h_bytes == LAYERS * PROMPT * ROW_BYTES
    assert prefill.h2d_bytes == PROMPT * ROW_BYTES
    assert decode.d2h_bytes == (OUTPUT - 1) * LAYERS * ROW_BYTES
    assert decode.h2d_bytes == (LAYERS * sum(prefixes) - PROMPT) * ROW_BYTES


def test_payload_is_the_rows_in_use_on_the_host_and_the_ring_on_the_device(model: Any):
    device = CpuDevice()
    with device.open_link(timed=False) as link:
        cache = Streamed(StreamedSpec(prefetch_layers=2)).build_cache(model.config, link, CAPACITY)
        run(model, cache)
        payload = kv_payload_bytes(cache, device.tier_of)
    assert payload == {"device": 3 * CAPACITY * ROW_BYTES, "host": LAYERS * CAPACITY * ROW_BYTES}


def test_steady_state_allocates_nothing_of_cache_size(model: Any):
    """Each decode step's peak over what was live before it stays under one layer's KV."""
    device = CpuDevice()
    device.adopt(model.parameters())
    rises: list[int] = []

    def note_rise() -> None:
        ledger = device.memory.device
        rises.append(ledger.peak_bytes - ledger.live_bytes)
        ledger.restart_peak()

    with device.open_link(timed=False) as link, device.measure_memory():
        prompt = torch.ones(BATCH, 400, dtype=torch.long)
        cache = Streamed(StreamedSpec()).build_cache(model.config, link, 419)
        generate(model, prompt, cache, 20, TokenClock(on_token=note_rise))
    one_layer_bytes = 400 * ROW_BYTES
    assert max(rises[2:]) < one_layer_bytes


def test_a_sequence_past_the_capacity_is_refused(model: Any):
    with CpuDevice().open_link(timed=False) as link:
        cache = Streamed(StreamedSpec()).build_cache(model.config, link, CAPACITY - 1)
        with pytest.raises(ValueError, match=f"{CAPACITY} tokens in a streamed cache built for {CAPACITY - 1}"):
            run(model, cache)


@pytest.mark.parametrize("seed", range(8))
def test_reset_lets_the_same_buffers_serve_again(model: Any, seed: int):
    """With room to spare a prefetch is still under way when the cache is reset."""
    expected = dynamic(model)[1]
    cache = Streamed(StreamedSpec()).build_cache(model.config, DelayedLink(seed), CAPACITY + 20)
    run(model, cache)
    cache.reset()
    assert torch.equal(run(model, cache)[1], expected)


def test_no_cache_outlives_its_last_reference(model: Any):
    """Cycles would keep a pass's cache alive, on both ledgers, until some later collection."""
    device = CpuDevice()
    device.adopt(model.parameters())
    device.release()
    gc.disable()
    try:
        before = (device.live_bytes(), device.memory.host.live_bytes)
        for _ in range(3):
            with device.open_link(timed=False) as link, device.measure_memory():
                run(model, Streamed(StreamedSpec()).build_cache(model.config, link, CAPACITY))
            assert (device.live_bytes(), device.memory.host.live_bytes) == before
    finally:
        gc.enable()


def test_models_whose_layers_share_kv_are_refused():
    """A later layer would read an earlier one's scratch after the ring has reused it."""
    config = AutoConfig.for_model("gemma3n_text", num_hidden_layers=6, num_kv_shared_layers=2)
    workload = Workload(prompt_tokens=4, output_tokens=2)
    assert "scratch ring" in (Streamed(StreamedSpec()).refusal("cpu", config, workload) or "")


def test_beam_search_and_cropping_are_refused(model: Any):
    with CpuDevice().open_link(timed=False) as link:
        cache = Streamed(StreamedSpec()).build_cache(model.config, link, CAPACITY)
        with pytest.raises(ValueError, match="beam search"):
            cache.reorder_cache(torch.tensor([0, 1]))
        with pytest.raises(ValueError, match="cropped"):
            cache.crop(-1)


def test_layers_out_of_turn_are_refused():
    with CpuDevice().open_link(timed=False) as link:
        ring = ScratchRing(link, num_layers=2, prefetch_layers=1, capacity_tokens=4)
        cache = Cache(layers=[StreamedLayer(ring), StreamedLayer(ring)])
        states = torch.ones(1, 1, 2, 4)
        cache.update(states, states, 0)
        with pytest.raises(RuntimeError, match="out of turn"):
            cache.update(states, states, 0)


def test_keys_and_values_may_differ_in_head_dim():
    with CpuDevice().open_link(timed=False) as link:
        ring = ScratchRing(link, num_layers=1, prefetch_layers=1, capacity_tokens=5)
        layer = StreamedLayer(ring)
        keys, values = torch.randn(2, 3, 4, 6), torch.randn(2, 3, 4, 10)
        layer.update(keys, values)
        step_keys, step_values = torch.randn(2, 3, 1, 6), torch.randn(2, 3, 1, 10)
        all_keys, all_values = layer.update(step_keys, step_values)
        assert torch.equal(all_keys, torch.cat([keys, step_keys], dim=2))
        assert torch.equal(all_values, torch.cat([values, step_values], dim=2))


def test_sliding_layers_stay_resident():
    config = AutoConfig.for_model(
        "gemma3_text",
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=8,
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=97,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    expected = dynamic(model)[1]
    with CpuDevice().open_link(timed=False) as link:
        cache = Streamed(StreamedSpec()).build_cache(config, link, CAPACITY)
        assert [isinstance(layer, StreamedLayer) for layer in cache.layers] == [False, True, False, True]
        assert torch.equal(run(model, cache)[1], expected)
