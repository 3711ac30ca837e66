"""The streamed cache: bit-equal to dynamic, one token back a step, and never early."""

import gc
from collections.abc import Callable
from pydoc_data.topics import topics
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from delayed_link import DelayedLink
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from offload_eval.core.experiment import DynamicSpec, ModelSpec, QuantizedSpec, StreamedSpec, Workload
from offload_eval.execution.fidelity import FidelityMeter, ForcedTokens, LogitsRecorder
from offload_eval.execution.model_loading import load_model
from offload_eval.generation import TokenClock, generate
from offload_eval.instruments.cpu import CpuDevice
from offload_eval.strategies.base import kv_payload_bytes
from offload_eval.strategies.dynamic import Dynamic
from offload_eval.strategies.host_rows import RowFormat
from offload_eval.strategies.quantized import Quantized
from offload_eval.strategies.scratch_ring import ScratchRing
from offload_eval.strategies.streamed import Placement, Streamed, StreamedLayer
from offload_eval.strategies.upstream import Cache, DynamicCache, cache_argument

PROMPT, OUTPUT, BATCH = 17, 9, 2
CAPACITY = PROMPT + OUTPUT - 1
LAYERS, KV_HEADS, HEAD_DIM = 5, 2, 8
ROW_BYTES = BATCH * KV_HEADS * 2 * HEAD_DIM * 4
SIZES = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": 97,
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(torch.float32, **SIZES)


def run(model: Any, cache: Any, prefill_chunk_tokens: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    prompt = torch.arange(BATCH * PROMPT).reshape(BATCH, PROMPT) * 31 % 97
    logits = torch.empty(OUTPUT, BATCH, 97).numpy()
    tokens = generate(model, prompt, cache, OUTPUT, TokenClock(), [LogitsRecorder(logits)], prefill_chunk_tokens)
    return tokens, torch.from_numpy(logits)


def dynamic(model: Any, prefill_chunk_tokens: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    with CpuDevice().open_link(timed=False) as link:
        return run(model, Dynamic(DynamicSpec()).build_cache(model.config, link, CAPACITY), prefill_chunk_tokens)


def run_streamed(
    model: Any, spec: StreamedSpec, link: Any = None, prefill_chunk_tokens: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    with CpuDevice().open_link(timed=False) as real_link:
        cache = Streamed(spec).build_cache(model.config, link or real_link, CAPACITY)
        return run(model, cache, prefill_chunk_tokens)


@pytest.mark.parametrize("prefetch_layers", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("resident_share", [None, 0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("prefill_chunk_tokens", [None, 1, 5, 16])
def test_tokens_and_logits_are_bit_equal_to_dynamic(
    model: Any, prefetch_layers: int, resident_share: float | None, prefill_chunk_tokens: int | None
):
    expected_tokens, expected_logits = dynamic(model, prefill_chunk_tokens)
    spec = StreamedSpec(prefetch_layers=prefetch_layers, resident_share=resident_share)
    tokens, logits = run_streamed(model, spec, prefill_chunk_tokens=prefill_chunk_tokens)
    assert torch.equal(tokens, expected_tokens)
    assert torch.equal(logits, expected_logits)


schedules = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "prefetch_layers": st.integers(1, 6),
        "resident_share": st.sampled_from([None, 0.2, 0.4, 0.6, 0.8]),
        "host_dtype": st.sampled_from(["native", "native", "fp8", "int8", "int4"]),
        "prefill_chunk_tokens": st.sampled_from([None, 1, 7, 16]),
    }
)


@given(schedules)
@settings(max_examples=120, deadline=None)
def test_no_copy_is_read_before_it_happened(model: Any, schedule: dict[str, Any]):
    """Copies that nobody waits for happen late or never; with every wait in place nothing changes."""
    seed, chunk = schedule.pop("seed"), schedule.pop("prefill_chunk_tokens")
    spec = StreamedSpec(**schedule)
    expected = dynamic(model, chunk) if spec.lossless else run_streamed(model, spec, None, chunk)
    tokens, logits = run_streamed(model, spec, DelayedLink(seed), chunk)
    assert torch.equal(tokens, expected[0])
    assert torch.equal(logits, expected[1])


def without_wait_for_fetch(patch: pytest.MonkeyPatch) -> None:
    original = ScratchRing.checkout

    def checkout(ring: ScratchRing, ordinal: int) -> torch.Tensor:
        ring._fetch(ring._visit)
        fetch = ring._fetches.get(ring._slot(ring._visit))
        if fetch is not None:
            fetch.wait = lambda: None  # type: ignore[method-assign]
        return original(ring, ordinal)

    patch.setattr(ScratchRing, "checkout", checkout)


def without_after(patch: pytest.MonkeyPatch) -> None:
    h2d = DelayedLink.h2d
    patch.setattr(DelayedLink, "h2d", lambda link, device, host, _after=(): h2d(link, device, host))


def without_read_out_wait(patch: pytest.MonkeyPatch) -> None:
    original = ScratchRing.checkout

    def checkout(ring: ScratchRing, ordinal: int) -> torch.Tensor:
        ring._read_outs.pop(ring._slot(ring._visit), None)
        return original(ring, ordinal)

    patch.setattr(ScratchRing, "checkout", checkout)


@pytest.mark.parametrize("host_dtype", ["native", "int4"])
@pytest.mark.parametrize("break_ring", [without_wait_for_fetch, without_after, without_read_out_wait])
def test_a_missing_wait_is_seen(
    model: Any, monkeypatch: pytest.MonkeyPatch, host_dtype: Any, break_ring: Callable[[pytest.MonkeyPatch], None]
):
    """Each wait is needed: without it some schedule gives other logits."""
    spec = StreamedSpec(host_dtype=host_dtype, resident_share=0.25)
    expected_logits = run_streamed(model, spec)[1]
    break_ring(monkeypatch)
    seen = (run_streamed(model, spec, DelayedLink(seed))[1] for seed in range(24))
    assert any(not torch.equal(logits, expected_logits) for logits in seen)


def test_each_step_writes_back_one_token_and_fetches_the_prefix_once(model: Any):
    """Decode steps see prefixes of 17 to 24 tokens; the first fetch of a step is made in the step before."""
    with CpuDevice().open_link(timed=False) as link:
        clock = TokenClock(on_first_token=lambda: setattr(link.log, "phase", "decode"))
        cache = Streamed(StreamedSpec(prefetch_layers=1)).build_cache(model.config, link, CAPACITY)
        generate(model, torch.ones(BATCH, PROMPT, dtype=torch.long), cache, OUTPUT, clock)
    prefill, decode = link.log.sample("prefill"), link.log.sample("decode")
    prefixes = range(PROMPT, PROMPT + OUTPUT - 1)
    assert prefill.d2h_bytes == LAYERS * PROMPT * ROW_BYTES
    assert prefill.h2d_bytes == PROMPT * ROW_BYTES
    assert decode.d2h_bytes == (OUTPUT - 1) * LAYERS * ROW_BYTES
    assert decode.h2d_bytes == (LAYERS * sum(prefixes) - PROMPT) * ROW_BYTES


@pytest.mark.parametrize("resident_share", [0.0, 0.4])
def test_a_chunked_prefill_fetches_each_prefix_once(model: Any, resident_share: float):
    """17 tokens in chunks of 5: each later chunk needs the 5, 10 and 15 tokens before it, of every streamed layer.

    One layer is fetched ahead for the first decode step.
    """
    with CpuDevice().open_link(timed=False) as link:
        clock = TokenClock(on_first_token=lambda: setattr(link.log, "phase", "decode"))
        cache = Streamed(StreamedSpec(prefetch_layers=1, resident_share=resident_share)).build_cache(
            model.config, link, CAPACITY
        )
        generate(model, torch.ones(BATCH, PROMPT, dtype=torch.long), cache, OUTPUT, clock, (), 5)
    prefill, streamed = link.log.sample("prefill"), round(LAYERS * (1 - resident_share))
    assert prefill.h2d_bytes == (streamed * (5 + 10 + 15) + 1 * PROMPT) * ROW_BYTES
    assert prefill.d2h_bytes == streamed * PROMPT * ROW_BYTES


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


def streamed_layers(link: Any, num_layers: int, capacity_tokens: int, **knobs: Any) -> list[StreamedLayer]:
    placement = Placement(link, StreamedSpec(**knobs), num_layers, capacity_tokens)
    return [StreamedLayer(placement, index) for index in range(num_layers)]


def test_layers_out_of_turn_are_refused():
    with CpuDevice().open_link(timed=False) as link:
        cache = Cache(layers=streamed_layers(link, num_layers=2, capacity_tokens=6))
        states = torch.ones(1, 1, 2, 4)
        for layer in (0, 1, 0):
            cache.update(states, states, layer)
        with pytest.raises(RuntimeError, match="out of turn"):
            cache.update(states, states, 0)


def test_keys_and_values_may_differ_in_head_dim():
    with CpuDevice().open_link(timed=False) as link:
        (layer,) = streamed_layers(link, num_layers=1, capacity_tokens=5)
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


STEPS = {"int8": 255, "int4": 15}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("host_dtype", ["int8", "int4", "fp8"])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (128, 128), (96, 40), (5, 3), (192, 0)])
def test_a_quantized_row_comes_back_close(dtype: torch.dtype, host_dtype: Any, key_dim: int, value_dim: int):
    """Within half a step of its group, or 1/16 of an fp8 value, and what rounding scale and offset adds."""
    torch.manual_seed(0)
    row_format = RowFormat(2, 3, key_dim, value_dim, dtype, torch.device("cpu"), host_dtype)
    rows = (torch.randn(7, row_format.row_values) * 3 + 1).to(dtype)
    rows[3] = 2.5  # a group without a range
    rows[4] = 0.0
    host = torch.full(row_format.host_shape(7), 0xFF, dtype=torch.uint8)
    row_format.quantize(rows, host)
    back = torch.full_like(rows, float("nan"))
    row_format.dequantize(host, back)
    parts = zip(row_format.keys_and_values(rows), row_format.keys_and_values(back), strict=True)
    for values, read in (part for part in parts if part[0].shape[-1]):
        group = 64 if values.shape[-1] % 64 == 0 else values.shape[-1]
        error = (read.double() - values.double()).abs().reshape(-1, group)
        grouped = values.double().reshape(-1, group)
        rounding = torch.finfo(dtype).eps * grouped.abs().amax(-1, keepdim=True)
        if host_dtype == "fp8":
            assert (error <= grouped.abs() / 16 + grouped.abs().amax(-1, keepdim=True) / 448 / 512 + rounding).all()
        else:
            span = grouped.amax(-1, keepdim=True) - grouped.amin(-1, keepdim=True)
            assert (error <= span / STEPS[host_dtype] / 2 * 1.01 + 2 * rounding).all()
    assert torch.equal(back[3], rows[3])
    assert torch.equal(back[4], rows[4])


def test_a_real_beam_search_is_refused_with_the_reason(model: Any):
    with CpuDevice().open_link(timed=False) as link:
        cache = Streamed(StreamedSpec()).build_cache(model.config, link, CAPACITY)
        with pytest.raises(ValueError, match="beam search is not supported"):
            model.generate(
                torch.ones(1, PROMPT, dtype=torch.long),
                num_beams=2,
                max_new_tokens=4,
                do_sample=False,
                eos_token_id=None,
                **{cache_argument(model): cache},
            )


class TwoDeviceLink(DelayedLink):
    """Moves nothing to or from the second device, which has no data, and notes which tier's rows each copy is of."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.fetched_tokens: dict[str, list[int]] = {"cpu": [], "meta": []}

    def h2d(self, device: torch.Tensor, host: torch.Tensor, after: Any = ()) -> Any:
        self.fetched_tokens[device.device.type].append(device.shape[0])
        return super().h2d(device, host if device.device.type == "cpu" else torch.empty_like(device), after)

    def d2h(self, host: torch.Tensor, device: torch.Tensor, after: Any = ()) -> Any:
        return super().d2h(host, device if device.device.type == "cpu" else torch.zeros_like(host), after)


def test_layers_on_two_devices_have_a_ring_each():
    """Six layers, the last three elsewhere: each device's three layers take turns in two slots of its own."""
    link = TwoDeviceLink(seed=0)
    layers = streamed_layers(link, num_layers=6, capacity_tokens=8, prefetch_layers=1)
    states = {index: [] for index in range(3)}  # type: dict[int, list[torch.Tensor]]
    for visit, tokens in enumerate((4, 1, 1)):
        for index, layer in enumerate(layers):
            device = "cpu" if index < 3 else "meta"
            keys = torch.full((1, 2, tokens, 4), float(10 * visit + index), device=device)
            all_keys, all_values = layer.update(keys, keys + 0.5)
            if index < 3:
                states[index].append(keys)
                assert torch.equal(all_keys, torch.cat(states[index], dim=2))
                assert torch.equal(all_values, torch.cat(states[index], dim=2) + 0.5)
            else:
                assert all_keys.shape == (1, 2, 4 + visit, 4)
                assert all_keys.device.type == "meta"
    rings = {layer.rows.ring for layer in layers}  # type: ignore[union-attr]
    assert sorted(ring.slots[0].device.type for ring in rings) == ["cpu", "meta"]
    assert {len(ring.slots) for ring in rings} == {2}
    assert link.fetched_tokens["cpu"] == link.fetched_tokens["meta"]


STATED_KL_NATS = {"int8": 0.003, "fp8": 0.008, "int4": 0.12}
"""Mean over the steps after the prompt; README.md states it."""


@pytest.fixture(scope="module")
def real(demo_model: Any) -> tuple[Any, torch.Tensor, torch.Tensor, Any]:
    """The demo's model, a prompt, the baseline's tokens and its logits."""
    real_model = load_model(ModelSpec(source=str(demo_model)), torch.device("cpu"))
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    prompt = tokenizer(topics["assert"] + topics["class"], return_tensors="pt").input_ids[:, :256]
    logits = np.empty((48, 1, real_model.config.vocab_size), dtype=np.float32)
    cache = DynamicCache(config=real_model.config)
    tokens = generate(real_model, prompt, cache, 48, TokenClock(), [LogitsRecorder(logits)])
    return real_model, prompt, tokens, logits


def mean_kl_nats(real: tuple[Any, torch.Tensor, torch.Tensor, Any], cache: Any) -> float:
    real_model, prompt, tokens, logits = real
    meter = FidelityMeter(logits, tokens)
    generate(real_model, prompt, cache, 48, TokenClock(), [meter, ForcedTokens(tokens)])
    return fmean(meter.sample("baseline").kl_nats[1:])


def test_quantized_host_rows_stay_within_the_stated_kl(real: Any):
    """8 bits are no worse than upstream's fp8 cache; 4 bits are worse than 8, and cost what is stated at most."""
    upstream = mean_kl_nats(real, Quantized(QuantizedSpec(backend="fp8")).build_cache(real[0].config, None, 303))
    seen = {}
    for host_dtype in STATED_KL_NATS:
        with CpuDevice().open_link(timed=False) as link:
            spec = StreamedSpec(host_dtype=host_dtype)  # type: ignore[arg-type]
            seen[host_dtype] = mean_kl_nats(real, Streamed(spec).build_cache(real[0].config, link, 303))
    assert all(0 < seen[name] <= stated for name, stated in STATED_KL_NATS.items()), seen
    assert seen["int8"] < seen["fp8"] < 1.5 * upstream
    assert seen["int4"] > seen["int8"]


@pytest.mark.parametrize("host_dtype", ["native", "int8"])
def test_waiting_falls_in_proportion_to_the_resident_share(host_dtype: Any):
    """With a link so slow that computing is nothing, a step waits for what crosses: 8, 4 and 0 of 8 layers' rows."""
    slow = tiny_llama(torch.float32, **{**SIZES, "num_hidden_layers": 8})

    def exposed_and_moved_s(share: float) -> tuple[float, float]:
        bytes_per_s = 2_000_000
        with CpuDevice(bytes_per_s).open_link(timed=True) as link:
            clock = TokenClock(on_first_token=lambda: setattr(link.log, "phase", "decode"))
            spec = StreamedSpec(prefetch_layers=1, resident_share=share, host_dtype=host_dtype)
            cache = Streamed(spec).build_cache(slow.config, link, 305)
            generate(slow, torch.ones(BATCH, 300, dtype=torch.long), cache, 6, clock)
        decode = link.log.sample("decode")
        moved = (decode.h2d_bytes or 0) + (decode.d2h_bytes or 0)
        return decode.exposed_transfer_s or 0.0, moved / bytes_per_s

    (none_s, all_moved_s), (half_s, half_moved_s), nothing = (exposed_and_moved_s(share) for share in (0, 0.5, 1))
    assert nothing == (0.0, 0.0)
    assert half_moved_s == pytest.approx(all_moved_s / 2, rel=0.15)  # one fetch fewer of an odd step
    assert none_s == pytest.approx(all_moved_s, rel=0.15)
    assert half_s == pytest.approx(half_moved_s, rel=0.2)
