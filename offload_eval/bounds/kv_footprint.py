"""Bytes of one session's KV cache, by the views of `bounds/kv_views.py`.

Padding and beams are not counted here.
"""

from collections.abc import Iterator

import msgspec
import numpy as np

from offload_eval.bounds.kv_format import KvFormat, plain_format
from offload_eval.bounds.kv_views import IDEAL, TRANSFORMERS, TRANSFORMERS_STATIC, Counts, KvView
from offload_eval.core.base import Strict
from offload_eval.core.shape import LayerGroup, ModelShape
from offload_eval.errors import InputError


class KvFootprint(Strict, frozen=True, kw_only=True):
    """Bytes of one session by what they hold."""

    parts: dict[str, int]
    """kv, cross, indexer, conv, recurrent; quantized also scales, residual; in transformers also values, buffers,
    overlap. Parts of 0 are left out."""

    @property
    def total_bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


def ideal_kv_bytes(shape: ModelShape, tokens: int, bits: int = 16, encoder_tokens: int | None = None) -> KvFootprint:
    """What a paged engine must hold for one session while it computes the newest token.

    Args:
        shape: The model's cache layout.
        tokens: Cached tokens, the newest included.
        bits: Bits of a cached value.
        encoder_tokens: Tokens that cross-attention reads. None: the model's fixed count, or else `tokens`.

    Returns:
        Bytes by part, without rounding to pages.
    """
    return kv_footprint(shape, tokens, IDEAL, plain_format(bits), encoder_tokens)


def transformers_kv_bytes(
    shape: ModelShape, tokens: int, bits: int = 16, encoder_tokens: int | None = None
) -> KvFootprint | None:
    """The payload of transformers' DynamicCache (EncoderDecoderCache) for one session, at rest.

    Counts the elements that each tensor names, as `kv_payload_bytes` does: not the storage behind a view, which
    right after a prefill can be the whole prompt's. A tensor held under two names counts once.

    Args:
        shape: The model's cache layout.
        tokens: Cached tokens.
        bits: Bits of a cached value.
        encoder_tokens: As for `ideal_kv_bytes`.

    Returns:
        Bytes by part; None for a family whose cache is not transformers'.
    """
    if not shape.in_transformers:
        return None
    return kv_footprint(shape, tokens, TRANSFORMERS, plain_format(bits), encoder_tokens)


def static_kv_bytes(
    shape: ModelShape, tokens: int, bits: int = 16, encoder_tokens: int | None = None
) -> KvFootprint | None:
    """The payload of transformers' StaticCache built for `tokens`, whatever of it is filled.

    Returns:
        Bytes by part; None for a family whose cache is not transformers', and for compressed layers, which have no
        static form.
    """
    if not shape.in_transformers or any(group.compression for group in shape.layer_groups):
        return None
    return kv_footprint(shape, tokens, TRANSFORMERS_STATIC, plain_format(bits), encoder_tokens)


def kv_footprint(
    shape: ModelShape, tokens: int, view: KvView, kv_format: KvFormat, encoder_tokens: int | None = None
) -> KvFootprint:
    """Bytes of one session under any view and format."""
    parts = kv_parts(shape.layer_groups, np.asarray(tokens, np.int64), view, kv_format, encoder_tokens)
    return KvFootprint(parts={name: int(size) for name, size in parts.items() if size})


def kv_total(
    groups: tuple[LayerGroup, ...],
    tokens: Counts,
    view: KvView,
    kv_format: KvFormat,
    encoder_tokens: int | None = None,
) -> Counts:
    """Bytes of one session in these groups, at each of `tokens`."""
    parts = kv_parts(groups, tokens, view, kv_format, encoder_tokens)
    return sum(parts.values(), start=np.zeros_like(tokens))


def kv_parts(
    groups: tuple[LayerGroup, ...],
    tokens: Counts,
    view: KvView,
    kv_format: KvFormat,
    encoder_tokens: int | None = None,
) -> dict[str, Counts]:
    """Bytes of one session in these groups by what they hold, at each of `tokens`."""
    parts: dict[str, Counts] = {}
    for group in map(view.adapt, groups):
        _refuse_overflow(group, max(int(np.max(tokens, initial=0)), encoder_tokens or group.encoder_tokens or 0))
        for name, values, bits in _group_parts(group, tokens, view, kv_format, encoder_tokens):
            num_bytes = -(-(group.count * values * bits) // 8)
            parts[name] = parts[name] + num_bytes if name in parts else num_bytes
    return parts


def _refuse_overflow(group: LayerGroup, tokens: int) -> None:
    """In Python's integers: what is counted afterwards fits 64 bits.

    Raises:
        InputError: No machine holds one session of so many heads, of such sizes.
    """
    width = group.kv_heads * (group.key_head_dim + group.value_head_dim) + group.indexer_head_dim
    state = group.state
    values = 0 if state is None else state.conv_channels * state.conv_kernel + state.recurrent_values
    if group.count * (width * (tokens + 2**20) + values) >= 2**54:
        raise InputError(
            f"one session of {tokens:,} tokens holds more than any machine in {group.count:,} {group.cache} layers of "
            f"{group.kv_heads:,} kv heads and {group.key_head_dim:,} + {group.value_head_dim:,} values a head"
        )


_Part = tuple[str, Counts, int]
"""Name, values of one layer, bits a value."""


def _group_parts(
    group: LayerGroup, tokens: Counts, view: KvView, kv_format: KvFormat, encoder_tokens: int | None
) -> Iterator[_Part]:
    rows = view.rows(group, _encoder_tokens(group, tokens, encoder_tokens) if group.cache == "cross" else tokens)
    yield from _rows(group, rows, kv_format)
    unquantized_bits = kv_format.unquantized_bits
    if group.indexer_head_dim:
        yield "indexer", view.whole_pages(tokens) * group.indexer_head_dim, unquantized_bits
    if group.compression is not None:
        entries = view.whole_pages(tokens) // group.compression.ratio_tokens
        yield "kv", entries * group.key_head_dim, unquantized_bits
        yield "indexer", entries * group.compression.indexer_head_dim, unquantized_bits
    if group.state is not None:
        constant = np.ones_like(tokens)
        columns = view.conv_columns(group.state.conv_kernel)
        yield "conv", constant * group.state.conv_channels * columns, unquantized_bits
        recurrent_bits = view.recurrent_bits(group.state) or unquantized_bits
        yield "recurrent", constant * group.state.recurrent_values, recurrent_bits
    for name, values, bits in view.extras(group, tokens, rows):
        yield name, values, bits or unquantized_bits


def _encoder_tokens(group: LayerGroup, tokens: Counts, asked: int | None) -> Counts:
    fixed = group.encoder_tokens if asked is None else asked
    return tokens if fixed is None else np.full_like(tokens, fixed)


def _rows(group: LayerGroup, rows: Counts, kv_format: KvFormat) -> Iterator[_Part]:
    width = group.kv_heads * (group.key_head_dim + group.value_head_dim)
    name = "cross" if group.cache == "cross" else "kv"
    if kv_format.group_values is None:
        yield name, rows * width, kv_format.bits
    else:
        residual = np.minimum(rows, kv_format.residual_tokens)
        quantized_values = (rows - residual) * width
        yield name, quantized_values, kv_format.bits
        yield "scales", -(-quantized_values // kv_format.group_values), kv_format.group_bits
        yield "residual", residual * width, kv_format.unquantized_bits


def layer_total(
    group: LayerGroup, tokens: Counts, view: KvView, kv_format: KvFormat, encoder_tokens: int | None = None
) -> Counts:
    """Bytes of one session in one layer of a group, at each of `tokens`."""
    return kv_total((msgspec.structs.replace(group, count=1),), tokens, view, kv_format, encoder_tokens)
