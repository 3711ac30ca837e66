"""The analytic card of a cell: what each strategy must hold and move, in closed form.

T = prompt_tokens + output_tokens - 1 tokens are cached when the last token is computed, and T - 1 before it.
A layer's row is one token's keys and values: kv_heads * (key_head_dim + value_head_dim) values.
"""

from collections.abc import Callable
from fractions import Fraction
from math import ceil
from typing import Final

import msgspec

from offload_eval.bounds.admission import admission_limit
from offload_eval.core.experiment import (
    BITS_PER_VALUE,
    BudgetSpec,
    DynamicSpec,
    OffloadedSpec,
    QuantizedSpec,
    StrategySpec,
    StreamedSpec,
    Workload,
)
from offload_eval.core.judgement import Bound
from offload_eval.core.shape import ModelShape

UPSTREAM_OFFLOADED_LAYERS: Final = Fraction(5, 2)
"""Layers of KV on the device at once under transformers' offloading: the layer in use, the one prefetched after it,
and half a layer more while keys, and then values, are concatenated with the new token's."""
UPSTREAM_DEFAULTS: Final = {"nbits": 4, "q_group_size": 64, "residual_length": 128}
"""Source: transformers 5.24, cache_utils.QuantizedLayer."""
HOST_NOT_CHECKED: Final = "The sessions are the device ledger's; whether host memory holds their KV is not checked."
FP8_SCALE_BYTES_PER_LAYER: Final = 8
"""One float32 scale for keys, one for values."""


class _Rows:
    """The row sizes of a shape at a dtype, in bytes."""

    def __init__(self, shape: ModelShape, dtype: str) -> None:
        self.bits = BITS_PER_VALUE[dtype]
        groups = shape.layer_groups
        widths = [(group.count, group.kv_heads * (group.key_head_dim + group.value_head_dim)) for group in groups]
        self.layers = sum(count for count, _ in widths)
        self.values_all_layers = sum(count * width for count, width in widths)
        self.all_layers_bytes = self.values_all_layers * self.bits // 8
        self.widest_layer_bytes = max(width for _, width in widths) * self.bits // 8


def strategy_bound(
    shape: ModelShape,
    weights_bytes: int,
    dtype: str,
    workload: Workload,
    strategy: StrategySpec,
    budget: BudgetSpec,
) -> Bound:
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
        KV bytes per ledger, bytes moved at the last decode step, and the admission limit of the device ledger.
    """
    rows = _Rows(shape, dtype)
    card = _CARDS[type(strategy)](rows, workload, strategy)
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
            f"Every session holds {workload.cached_tokens:,} tokens, {rows.bits} bits a value before any quantizer.",
            "Activations, logits, quantizer transients, fragmentation and paging are not counted.",
        ),
    )


def _dynamic(rows: _Rows, workload: Workload, _: StrategySpec) -> Bound:
    return Bound(
        kv_device_bytes_per_session=workload.cached_tokens * rows.all_layers_bytes,
        assumptions=("The whole KV cache is on the device.",),
        source="2 * tokens * layers * kv_heads * head_dim * bytes",
    )


def _offloaded(rows: _Rows, workload: Workload, _: StrategySpec) -> Bound:
    tokens, batch = workload.cached_tokens, workload.batch_size
    layers = min(UPSTREAM_OFFLOADED_LAYERS, rows.layers + Fraction(1, 2))
    return Bound(
        kv_device_bytes_per_session=ceil(layers * tokens * rows.widest_layer_bytes),
        kv_host_bytes_per_session=tokens * rows.all_layers_bytes,
        h2d_bytes_per_step=batch * (tokens - 1) * rows.all_layers_bytes,
        d2h_bytes_per_step=batch * tokens * rows.all_layers_bytes,
        assumptions=(
            f"{float(layers):g} layers' KV are on the device; each layer crosses the link whole, both ways.",
            HOST_NOT_CHECKED,
        ),
        source="transformers 5.24, cache_utils.Cache.update",
    )


def _streamed(rows: _Rows, workload: Workload, strategy: StrategySpec) -> Bound:
    assert isinstance(strategy, StreamedSpec)
    tokens, batch = workload.cached_tokens, workload.batch_size
    slots = min(strategy.prefetch_layers + 1, rows.layers)
    return Bound(
        kv_device_bytes_per_session=slots * tokens * rows.widest_layer_bytes,
        kv_host_bytes_per_session=tokens * rows.all_layers_bytes,
        h2d_bytes_per_step=batch * (tokens - 1) * rows.all_layers_bytes,
        d2h_bytes_per_step=batch * rows.all_layers_bytes,
        assumptions=(
            f"{slots} scratch layers are on the device; only new tokens are written back.",
            HOST_NOT_CHECKED,
        ),
        source="offload_eval.strategies.streamed",
    )


def _quantized(rows: _Rows, workload: Workload, strategy: StrategySpec) -> Bound:
    assert isinstance(strategy, QuantizedSpec)
    tokens = workload.cached_tokens
    if strategy.backend == "fp8":
        return Bound(
            kv_device_bytes_per_session=tokens * rows.values_all_layers,
            kv_device_bytes_fixed=FP8_SCALE_BYTES_PER_LAYER * rows.layers,
            assumptions=("fp8: 8 bits a value, two float32 scales a layer, no residual window.",),
            source="transformers 5.24, cache_utils.Fp8QuantizedLayer",
        )
    options = UPSTREAM_DEFAULTS | strategy.options
    residual = residual_tokens(workload, options["residual_length"])
    bits = quantized_bits_per_value(options["nbits"], options["q_group_size"], rows.bits)
    payload = Fraction(tokens - residual) * rows.values_all_layers * bits / 8
    return Bound(
        kv_device_bytes_per_session=ceil(payload) + residual * rows.all_layers_bytes,
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


_CARDS: Final[dict[type, Callable[[_Rows, Workload, StrategySpec], Bound]]] = {
    DynamicSpec: _dynamic,
    OffloadedSpec: _offloaded,
    StreamedSpec: _streamed,
    QuantizedSpec: _quantized,
}
