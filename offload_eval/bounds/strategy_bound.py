"""The analytic card of a cell: what each strategy must hold and move, in closed form.

T = prompt_tokens + output_tokens - 1 tokens are cached when the last token is computed, and T - 1 before it.
What the unquantized layers hold is the transformers view of `bounds/kv_footprint.py`, at rest. A layer's row is one
token's keys and values: kv_heads * (key_head_dim + value_head_dim) values.
"""

from collections.abc import Callable
from fractions import Fraction
from math import ceil
from typing import Final

import msgspec

from offload_eval.bounds.admission import admission_limit
from offload_eval.bounds.kv_footprint import as_transformers, transformers_layer_bytes
from offload_eval.core.experiment import (
    BITS_PER_VALUE,
    BudgetSpec,
    DynamicSpec,
    OffloadedSpec,
    QuantizedSpec,
    RunSpec,
    StrategySpec,
    StreamedSpec,
    Workload,
)
from offload_eval.core.judgement import Bound
from offload_eval.core.shape import LayerGroup, ModelFacts, ModelShape

UPSTREAM_OFFLOADED_LAYERS: Final = Fraction(5, 2)
"""Layers of KV on the device at once under transformers' offloading: the layer in use, the one prefetched after it,
and half a layer more while keys, and then values, are concatenated with the new token's."""
UPSTREAM_DEFAULTS: Final = {"nbits": 4, "q_group_size": 64, "residual_length": 128}
"""Source: transformers 5.24, cache_utils.QuantizedLayer."""
HOST_NOT_CHECKED: Final = "The sessions are the device ledger's; whether host memory holds their KV is not checked."
FP8_SCALE_BYTES_PER_LAYER: Final = 8
"""One float32 scale for keys, one for values."""


class _Layers:
    """The layers of a shape as transformers caches them, at a dtype."""

    def __init__(self, shape: ModelShape, dtype: str) -> None:
        self.bits = BITS_PER_VALUE[dtype]
        self.groups = tuple(map(as_transformers, shape.layer_groups))
        indexed = any(group.indexer_head_dim for group in self.groups)
        kinds = ("full",) if indexed else ("full", "latent")
        self.plain = tuple(group for group in self.groups if group.cache in kinds and group.state is None)
        """Layers that are a DynamicLayer: every token's keys and values, nothing else. In a model with indexers
        the layers without one have its layer class all the same."""
        self.others = tuple(group for group in self.groups if group not in self.plain)
        self.count = sum(group.count for group in self.plain)
        widths = [(group.count, group.kv_heads * (group.key_head_dim + group.value_head_dim)) for group in self.plain]
        self.values_a_token = sum(count * width for count, width in widths)
        self.bytes_a_token = self.values_a_token * self.bits // 8
        self.widest_row_bytes = max((width for _, width in widths), default=0) * self.bits // 8

    def held_bytes(self, groups: tuple[LayerGroup, ...], tokens: int) -> int:
        """The payload of these groups when `tokens` are cached."""
        return sum(group.count * self.layer_bytes(group, tokens) for group in groups)

    def layer_bytes(self, group: LayerGroup, tokens: int) -> int:
        """The payload of one layer of a group."""
        return transformers_layer_bytes(group, tokens, self.bits)


def cell_bound(spec: RunSpec, model: ModelFacts) -> Bound | None:
    """The analytic card of a cell; None where the arithmetic refuses the model, or `strategy_bound` has none."""
    if model.shape is None:
        return None
    return strategy_bound(
        model.shape, model.weights_bytes, spec.model.dtype, spec.workload, spec.strategy, spec.budget
    )


def strategy_bound(
    shape: ModelShape,
    weights_bytes: int,
    dtype: str,
    workload: Workload,
    strategy: StrategySpec,
    budget: BudgetSpec,
) -> Bound | None:
    """Computes the analytic card of one cell.

    Counts KV payload and the device scratch that a strategy cannot do without. Does not count activations,
    logits, a quantizer's transients or the allocator's rounding: those are why it is an upper bound.

    Args:
        shape: The model's cache layout.
        weights_bytes: Bytes of weights, where the budget does not state them.
        dtype: dtype of the unquantized cache.
        workload: Lengths and batch size.
        strategy: The cache strategy.
        budget: The device ledger.

    Returns:
        KV bytes per ledger, bytes moved at the last decode step, and the admission limit of the device ledger;
        None where the strategy does not support these layers, or the model's cache is not transformers'.
    """
    layers = _Layers(shape, dtype)
    card = _CARDS[type(strategy)](layers, workload, strategy) if shape.in_transformers else None
    if card is None:
        return None
    weights = budget.weights_bytes or weights_bytes
    sessions = admission_limit(
        budget.device_bytes,
        weights,
        budget.runtime_bytes,
        budget.reserve_bytes + card.kv_device_bytes_fixed,
        card.kv_device_bytes_per_session,
    )
    return msgspec.structs.replace(
        card,
        sessions=sessions,
        assumptions=(
            *card.assumptions,
            f"Every session holds {workload.cached_tokens:,} tokens, {layers.bits} bits a value before any quantizer.",
            "Activations, logits, quantizer transients, fragmentation and paging are not counted.",
        ),
    )


def _dynamic(layers: _Layers, workload: Workload, _: StrategySpec) -> Bound | None:
    return Bound(
        kv_device_bytes_per_session=layers.held_bytes(layers.groups, workload.cached_tokens),
        assumptions=("The whole KV cache is on the device.", *_other_layers(layers)),
        source="2 * tokens * layers * kv_heads * head_dim * bytes",
    )


def _other_layers(layers: _Layers) -> tuple[str, ...]:
    kinds = sorted({group.cache for group in layers.others} - {"none", "shared"})
    if not kinds:
        return ()
    return (f"Layers of {', '.join(kinds)} attention are counted at rest; a prefill holds more for a while.",)


def _offloaded(layers: _Layers, workload: Workload, _: StrategySpec) -> Bound | None:
    if any(group.state or group.compression for group in layers.groups):
        return None  # upstream moves states by other rules, which are not modelled
    tokens, batch = workload.cached_tokens, workload.batch_size
    held_bytes = layers.held_bytes(layers.groups, tokens)
    layers_on_device, device_bytes = _offloaded_device_bytes(layers, tokens)
    return Bound(
        kv_device_bytes_per_session=device_bytes,
        kv_host_bytes_per_session=held_bytes,
        h2d_bytes_per_step=batch * layers.held_bytes(layers.groups, tokens - 1),
        d2h_bytes_per_step=batch * held_bytes,
        assumptions=(
            f"{float(layers_on_device):g} layers' KV are on the device; each layer crosses the link whole, both ways.",
            *_other_layers(layers),
            HOST_NOT_CHECKED,
        ),
        source="transformers 5.24, cache_utils.Cache.update",
    )


def _offloaded_device_bytes(layers: _Layers, tokens: int) -> tuple[Fraction, int]:
    """Layers on the device at once, and their bytes: the widest one and a half times, the others the narrowest.

    Layers that hold nothing are not counted. Where layers differ this is the least they can be, whatever their order.
    """
    sizes = [(layers.layer_bytes(group, tokens), group.count) for group in layers.groups]
    count = sum(group_count for size, group_count in sizes if size)
    on_device = min(UPSTREAM_OFFLOADED_LAYERS, count + Fraction(1, 2))
    widest = max((size for size, _ in sizes), default=0)
    narrowest = min((size for size, _ in sizes if size), default=0)
    in_use = min(Fraction(3, 2), on_device)
    return on_device, ceil(in_use * widest + (on_device - in_use) * narrowest)


def _streamed(layers: _Layers, workload: Workload, strategy: StrategySpec) -> Bound | None:
    assert isinstance(strategy, StreamedSpec)
    rows = {(group.kv_heads, group.key_head_dim, group.value_head_dim) for group in layers.plain}
    if len(rows) != 1 or any(group.cache in ("shared", "cross") for group in layers.others):
        return None
    tokens, batch = workload.cached_tokens, workload.batch_size
    slots = min(strategy.prefetch_layers + 1, layers.count)
    scratch_bytes = slots * tokens * layers.widest_row_bytes
    resident = (f"{_count(layers.others)} layers without full attention stay on the device.",)
    return Bound(
        kv_device_bytes_per_session=scratch_bytes + layers.held_bytes(layers.others, tokens),
        kv_host_bytes_per_session=tokens * layers.bytes_a_token,
        h2d_bytes_per_step=batch * (tokens - 1) * layers.bytes_a_token,
        d2h_bytes_per_step=batch * layers.bytes_a_token,
        assumptions=(
            f"{slots} scratch layers are on the device; only new tokens are written back.",
            *(resident if layers.others else ()),
            *_other_layers(layers),
            HOST_NOT_CHECKED,
        ),
        source="offload_eval.strategies.streamed",
    )


def _count(groups: tuple[LayerGroup, ...]) -> int:
    return sum(group.count for group in groups)


def _quantized(layers: _Layers, workload: Workload, strategy: StrategySpec) -> Bound | None:
    assert isinstance(strategy, QuantizedSpec)
    if layers.others:
        return None
    tokens = workload.cached_tokens
    if strategy.backend == "fp8":
        return Bound(
            kv_device_bytes_per_session=tokens * layers.values_a_token,
            kv_device_bytes_fixed=FP8_SCALE_BYTES_PER_LAYER * layers.count,
            assumptions=("fp8: 8 bits a value, two float32 scales a layer, no residual window.",),
            source="transformers 5.24, cache_utils.Fp8QuantizedLayer",
        )
    options = UPSTREAM_DEFAULTS | strategy.options
    residual = residual_tokens(workload, options["residual_length"])
    bits = quantized_bits_per_value(options["nbits"], options["q_group_size"], layers.bits)
    payload = Fraction(tokens - residual) * layers.values_a_token * bits / 8
    return Bound(
        kv_device_bytes_per_session=ceil(payload) + residual * layers.bytes_a_token,
        assumptions=(
            f"{float(bits):g} bits a quantized value, scale and zero point included; "
            f"{residual} residual tokens unquantized when generation ends.",
        ),
        source="transformers 5.24, cache_utils.QuantizedLayer",
    )


def quantized_bits_per_value(nbits: int, group_size: int, value_bits: int) -> Fraction:
    """Bits one quantized value takes: its own, and its share of a group's scale and zero point.

    Args:
        nbits: Bits of a quantized value.
        group_size: Values that share one scale and one zero point.
        value_bits: Bits of the scale and of the zero point: the unquantized dtype's.
    """
    return nbits + Fraction(2 * value_bits, group_size)


def residual_tokens(workload: Workload, residual_length: int) -> int:
    """Unquantized tokens a session holds when generation ends.

    The prompt is quantized whole; each step appends one token, and the step that fills the window quantizes
    everything, so the window holds the steps since the last flush.
    """
    return (workload.output_tokens - 1) % residual_length


_CARDS: Final[dict[type, Callable[[_Layers, Workload, StrategySpec], Bound | None]]] = {
    DynamicSpec: _dynamic,
    OffloadedSpec: _offloaded,
    StreamedSpec: _streamed,
    QuantizedSpec: _quantized,
}
