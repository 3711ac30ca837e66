"""What one session holds and moves under each strategy, in closed form, for a whole grid of lengths at once.

With T cached tokens when the last token is computed, T - 1 were cached before it. What the unquantized layers hold is
the transformers view of `bounds/kv_views.py`, at rest.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np

from offload_eval.bounds.cached_layers import CachedLayers, Lengths, count_layers, row_values
from offload_eval.bounds.host_rows import host_head_bytes, num_resident, num_slots
from offload_eval.bounds.kv_format import FP8_SCALE_BYTES_PER_LAYER
from offload_eval.bounds.kv_views import Counts
from offload_eval.core.experiment import (
    DynamicSpec,
    OffloadedSpec,
    OffloadedStaticSpec,
    QuantizedSpec,
    StaticSpec,
    StrategySpec,
    StreamedSpec,
)
from offload_eval.core.shape import LayerGroup, ModelShape

UPSTREAM_DEFAULTS: Final = {"nbits": 4, "q_group_size": 64, "residual_length": 128}
"""Source: transformers 5.24, cache_utils.QuantizedLayer."""
Refusal = str
"""Why a strategy has no card for a model."""
_INDEXER_KEYS_LEAVE: Final = (
    "transformers' offloading sends an indexer's keys to the host, where the indexer cannot read them"
)


@dataclass(frozen=True, kw_only=True)
class HostBuffers:
    """Buffers of pinned memory that are alike. Sessions of a batch share each buffer, which grows with them."""

    count: int
    bytes: Counts
    """Of one buffer for one session when the last token is computed."""


@dataclass(frozen=True, kw_only=True)
class SessionCard:
    """Bytes of one session at each of the lengths."""

    device_bytes: Counts
    """On the device when the last token is computed."""
    device_peak_bytes: Counts
    """The most that the strategy's tensors take on the device from the end of the prefill to the last token. Of the
    in-GPU caches what is alive between two steps; of the others with what they need inside one."""
    device_fixed_bytes: int = 0
    """On the device, however many sessions there are."""
    host_buffers: tuple[HostBuffers, ...] = ()
    host_bytes: Counts
    h2d_bytes: Counts
    """To the device for the last decode step."""
    d2h_bytes: Counts
    assumptions: tuple[str, ...]
    source: str


def session_card(
    shape: ModelShape, bits: int, lengths: Lengths, strategy: StrategySpec, encoder_tokens: int | None = None
) -> SessionCard | Refusal:
    """Computes the card of one session.

    Counts KV payload and the device scratch that a strategy cannot do without. Does not count activations, logits,
    a quantizer's transients or the allocator's rounding.

    Args:
        shape: The model's cache layout.
        bits: Bits of a value of the unquantized cache.
        lengths: Lengths of the sessions.
        strategy: The cache strategy.
        encoder_tokens: Tokens that cross-attention reads. None: the model's fixed count, or else the cached tokens.

    Returns:
        Why there is none, where the strategy does not support these layers, or the model's cache is not transformers'.
    """
    if not shape.in_transformers:
        return "the model's cache is its own code, not transformers'"
    return _CARDS[type(strategy)](CachedLayers(shape, bits, encoder_tokens), lengths, strategy)


def in_gpu_card(
    device_bytes: Counts, peak_bytes: Counts, assumptions: tuple[str, ...], source: str, fixed_bytes: int = 0
) -> SessionCard:
    """The card of a cache that never leaves the device."""
    nothing = np.zeros_like(device_bytes)
    return SessionCard(
        device_bytes=device_bytes,
        device_peak_bytes=peak_bytes,
        device_fixed_bytes=fixed_bytes,
        host_bytes=nothing,
        h2d_bytes=nothing,
        d2h_bytes=nothing,
        assumptions=assumptions,
        source=source,
    )


def _dynamic(layers: CachedLayers, lengths: Lengths, _: StrategySpec) -> SessionCard | Refusal:
    return in_gpu_card(
        layers.held_bytes(layers.groups, lengths.cached_tokens),
        layers.peak_bytes(layers.groups, lengths),
        ("The whole KV cache is on the device.", *_other_layers(layers)),
        "2 * tokens * layers * kv_heads * head_dim * bytes",
    )


def _static(layers: CachedLayers, lengths: Lengths, _: StrategySpec) -> SessionCard | Refusal:
    refusal = _static_refusal(layers)
    if refusal is not None:
        return refusal
    buffers_bytes = layers.buffer_bytes(layers.groups, lengths.cached_tokens)
    words = ("Buffers for every token of the workload are on the device from the first one on.",)
    return in_gpu_card(buffers_bytes, buffers_bytes, words, "transformers 5.24, cache_utils.StaticCache")


def _offloaded_static(layers: CachedLayers, lengths: Lengths, _: StrategySpec) -> SessionCard | Refusal:
    """Layers of full attention are moved, two of them on the device at once; windows and states stay."""
    refusal = _static_refusal(layers)
    if refusal is not None:
        return refusal
    if any(group.indexer_head_dim for group in layers.groups):
        return _INDEXER_KEYS_LEAVE
    moved = tuple(group for group in layers.groups if group.cache in ("full", "latent") and group.state is None)
    stay = tuple(group for group in layers.groups if group not in moved)
    if not moved:
        return "no layer of full attention to move"
    tokens, with_step = lengths.cached_tokens, lengths.steps > 0
    on_device = min(2, count_layers(moved))
    widest: Counts = np.maximum.reduce([layers.layer_buffer_bytes(group, tokens) for group in moved])
    moved_bytes = layers.buffer_bytes(moved, tokens)
    device_bytes = on_device * widest + layers.buffer_bytes(stay, tokens)
    return SessionCard(
        device_bytes=device_bytes,
        device_peak_bytes=device_bytes,
        host_bytes=moved_bytes,
        host_buffers=tuple(_keys_and_values(layers, moved, tokens)),
        h2d_bytes=np.where(with_step, moved_bytes, 0),
        d2h_bytes=np.where(with_step, moved_bytes, 0),
        assumptions=(
            f"{on_device} layers' buffers are on the device; each crosses the link whole, both ways, filled or not.",
            *((f"{count_layers(stay)} layers without full attention stay on the device.",) if stay else ()),
        ),
        source="transformers 5.24, cache_utils.Cache.update",
    )


def _static_refusal(layers: CachedLayers) -> Refusal | None:
    without = tuple(group for group in layers.groups if group.compression or group.cache in ("cross", "shared"))
    return f"{_kinds(without)} layers have no static form here" if without else None


def _other_layers(layers: CachedLayers) -> tuple[str, ...]:
    kinds = _kinds(tuple(group for group in layers.others if group.window_tokens is not None))
    if not kinds:
        return ()
    return (
        f"{kinds} layers: from the end of a prefill to the next step, windows are views of the whole prompt's keys "
        "and values; what a prefill holds inside a step is not counted.",
    )


def _kinds(groups: tuple[LayerGroup, ...]) -> str:
    return ", ".join(sorted({group.cache.replace("_", " ") for group in groups}))


def _offloaded(layers: CachedLayers, lengths: Lengths, _: StrategySpec) -> SessionCard | Refusal:
    with_state = tuple(group for group in layers.groups if group.state or group.compression)
    if with_state:
        return f"how upstream moves {_kinds(with_state)} layers is not modelled"
    if any(group.indexer_head_dim for group in layers.groups):
        return _INDEXER_KEYS_LEAVE
    if any(group.cache == "cross" for group in layers.groups):
        return "transformers' offloading leaves cross-attention on the host"
    tokens = lengths.cached_tokens
    held_bytes = layers.held_bytes(layers.groups, tokens)
    device_bytes = _offloaded_device_bytes(layers, tokens)
    with_step = lengths.steps > 0
    return SessionCard(
        device_bytes=device_bytes,
        device_peak_bytes=device_bytes,
        host_bytes=held_bytes,
        host_buffers=tuple(_keys_and_values(layers, layers.groups, tokens)),
        h2d_bytes=np.where(with_step, layers.held_bytes(layers.groups, tokens - 1), 0),
        d2h_bytes=np.where(with_step, held_bytes, 0),
        assumptions=(
            "The layer in use, what concatenating new tokens to it takes, and the next layer are on the device; each "
            "layer crosses the link whole, both ways.",
            "Smaller pinned blocks that a growing buffer leaves behind in torch's allocator are not counted.",
            *_other_layers(layers),
        ),
        source="transformers 5.24, cache_utils.Cache.update",
    )


def _keys_and_values(layers: CachedLayers, groups: tuple[LayerGroup, ...], tokens: Counts) -> Iterator[HostBuffers]:
    """One buffer for the keys of a layer, and one for its values."""
    for group in groups:
        layer_bytes = layers.layer_bytes(group, tokens)
        key_bytes = layer_bytes * group.key_head_dim // max(1, group.key_head_dim + group.value_head_dim)
        for size in (key_bytes, layer_bytes - key_bytes):
            if np.any(size):
                yield HostBuffers(count=group.count, bytes=size)


def _offloaded_device_bytes(layers: CachedLayers, tokens: Counts) -> Counts:
    """The layer in use while new tokens are concatenated to it, and the one that is prefetched after it.

    Layers that hold nothing are passed over; after the last layer comes the first.
    """
    sizes = [layers.layer_bytes(group, tokens) for group in layers.groups]
    in_use = [_concatenated_bytes(group, size) for group, size in zip(layers.groups, sizes, strict=True)]
    holding = [index for index in layers.order if row_values(layers.groups[index])]
    if not holding:
        return np.zeros_like(tokens)
    if len(holding) == 1:
        return in_use[holding[0]]
    pairs = set(zip(holding, [*holding[1:], holding[0]], strict=True))
    most: Counts = np.maximum.reduce([in_use[used] + sizes[after] for used, after in pairs])
    return most


def _concatenated_bytes(group: LayerGroup, layer_bytes: Counts) -> Counts:
    """A layer with the copies that an update makes: a full one frees its old keys before it makes new values.

    Source: transformers 5.24, cache_utils.DynamicLayer.update and DynamicSlidingWindowLayer.update.
    """
    if group.window_tokens is not None:
        return 2 * layer_bytes
    wider = max(group.key_head_dim, group.value_head_dim)
    return layer_bytes + layer_bytes * wider // max(1, group.key_head_dim + group.value_head_dim)


def _streamed(layers: CachedLayers, lengths: Lengths, strategy: StrategySpec) -> SessionCard | Refusal:
    assert isinstance(strategy, StreamedSpec)
    rows = {(group.kv_heads, group.key_head_dim, group.value_head_dim) for group in layers.plain}
    if any(group.cache in ("shared", "cross") for group in layers.others):
        return f"{_kinds(layers.others)} layers cannot be streamed"
    if len(rows) != 1:
        return "layers of different rows cannot share a scratch" if rows else "no layer of full attention to stream"
    tokens, (kv_heads, key_dim, value_dim) = lengths.cached_tokens, rows.pop()
    head_bytes = (host_head_bytes(strategy.host_dtype, dim, layers.bits // 8) for dim in (key_dim, value_dim))
    host_row_bytes = kv_heads * sum(head_bytes)
    resident = _resident_of_a_share(strategy, layers.count)
    streamed = layers.count - resident
    slots = num_slots(strategy, streamed)
    working = int(strategy.host_dtype != "native" and streamed > 0)
    moves = (lengths.steps > 0) & (streamed > 0)
    others = (f"{count_layers(layers.others)} layers without full attention stay on the device.",)
    scratch_bytes = tokens * ((resident + working) * layers.widest_row_bytes + slots * host_row_bytes)
    return SessionCard(
        device_bytes=scratch_bytes + layers.held_bytes(layers.others, tokens),
        device_peak_bytes=scratch_bytes + layers.peak_bytes(layers.others, lengths),
        host_bytes=streamed * tokens * host_row_bytes,
        host_buffers=(HostBuffers(count=streamed, bytes=tokens * host_row_bytes),) if streamed else (),
        h2d_bytes=np.where(moves & (streamed > slots), (tokens - 1) * streamed * host_row_bytes, 0),
        d2h_bytes=np.where(moves, streamed * host_row_bytes, 0),
        assumptions=(
            f"{slots} slots of scratch are on the device, {_SLOT_WORDS[working]}; only new tokens are written back.",
            *_streamed_assumptions(strategy, resident),
            *(others if layers.others else ()),
            *_other_layers(layers),
        ),
        source="offload_eval.strategies.streamed",
    )


_SLOT_WORDS: Final = ("a layer each", "a layer's codes each, and one layer of unquantized rows")


def _resident_of_a_share(strategy: StreamedSpec, num_layers: int) -> int:
    """Resident layers as far as they do not depend on the batch."""
    if strategy.resident_bytes is not None or strategy.resident_share == "auto":
        return 0
    return num_resident(strategy, num_layers, 1)


def _streamed_assumptions(strategy: StreamedSpec, resident: int) -> Iterator[str]:
    if resident:
        yield f"{resident} full-attention layers are resident, in buffers for every token of the workload."
    if strategy.resident_share == "auto":
        yield "auto keeps resident what room a trace finds; here no layer is, so that the most sessions fit."
    if strategy.resident_bytes is not None:
        yield "What resident_bytes hold depends on the batch: no layer is counted as resident, so that the most fit."
    if strategy.host_dtype != "native":
        yield f"{strategy.host_dtype} rows with their scales cross the link; one layer is read back at a time."


def _quantized(layers: CachedLayers, lengths: Lengths, strategy: StrategySpec) -> SessionCard | Refusal:
    assert isinstance(strategy, QuantizedSpec)
    if layers.others:
        return f"transformers quantizes full attention only; the model has {_kinds(layers.others)} layers"
    return _fp8(layers, lengths) if strategy.backend == "fp8" else _groupwise(layers, lengths, strategy)


def _fp8(layers: CachedLayers, lengths: Lengths) -> SessionCard:
    payload_bytes = lengths.cached_tokens * layers.values_a_token
    return in_gpu_card(
        payload_bytes,
        payload_bytes,
        ("8 bits a value, two float32 scales a layer, no residual window.",),
        "transformers 5.24, cache_utils.Fp8QuantizedLayer",
        fixed_bytes=FP8_SCALE_BYTES_PER_LAYER * layers.count,
    )


def _groupwise(layers: CachedLayers, lengths: Lengths, strategy: QuantizedSpec) -> SessionCard:
    options = UPSTREAM_DEFAULTS | strategy.options
    residual_length, steps = options["residual_length"], lengths.steps
    bits = quantized_bits_per_value(options["nbits"], options["q_group_size"], layers.bits)

    def payload_bytes(step: Counts) -> Counts:
        residual = residual_tokens(step, residual_length)
        values = (lengths.prompt_tokens + step - residual) * layers.values_a_token
        return -(-values * bits.numerator // (8 * bits.denominator)) + residual * layers.bytes_a_token

    # The window is fullest on the last step before a flush; up to the first one it only fills.
    before_flush = (steps + 1) // residual_length * residual_length - 1
    end_bytes = payload_bytes(steps)
    peak_bytes = np.maximum(end_bytes, np.where(before_flush > 0, payload_bytes(np.maximum(before_flush, 0)), 0))
    return in_gpu_card(
        end_bytes,
        peak_bytes,
        (
            f"{float(bits):g} bits a quantized value, scale and zero point included; the newest tokens, up to "
            f"{residual_length - 1}, are unquantized until the next flush.",
            *_uneven_groups(layers, options["q_group_size"]),
        ),
        "transformers 5.24, cache_utils.QuantizedLayer",
    )


def _uneven_groups(layers: CachedLayers, group_size: int) -> tuple[str, ...]:
    if all(group.kv_heads * dim % group_size == 0 for group in layers.plain for dim in _head_dims(group)):
        return ()
    return (f"Lengths at which groups of {group_size} do not divide a layer's values are refused when they are run.",)


def _head_dims(group: LayerGroup) -> tuple[int, int]:
    return group.key_head_dim, group.value_head_dim


def quantized_bits_per_value(nbits: int, group_size: int, value_bits: int) -> Fraction:
    """Bits one quantized value takes: its own, and its share of a group's scale and zero point.

    Args:
        nbits: Bits of a quantized value.
        group_size: Values that share one scale and one zero point.
        value_bits: Bits of the scale and of the zero point: the unquantized dtype's.
    """
    return nbits + Fraction(2 * value_bits, group_size)


def residual_tokens(steps: Counts, residual_length: int) -> Counts:
    """Unquantized tokens a session holds after so many decode steps.

    The prompt is quantized whole; each step appends one token, and the step that fills the window quantizes
    everything, so the window holds the steps since the last flush.
    """
    return steps % residual_length


_CARDS: Final[Mapping[type, Callable[[CachedLayers, Lengths, StrategySpec], SessionCard | Refusal]]] = {
    DynamicSpec: _dynamic,
    StaticSpec: _static,
    OffloadedSpec: _offloaded,
    OffloadedStaticSpec: _offloaded_static,
    StreamedSpec: _streamed,
    QuantizedSpec: _quantized,
}
