"""Bytes of one session's KV cache, in two views.

ideal: what a paged engine must hold during one decode step.
transformers: the payload of transformers 5.24's DynamicCache(config=...) at rest, between two steps.

Each view is one `_View`; a rule that differs is one entry of it. Padding, beams, page rounding and quantized formats
are not counted here.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from offload_eval.core.base import Strict
from offload_eval.core.shape import CacheKind, LayerGroup, LinearState, ModelShape

TRANSFORMERS_VERSION: Final = "5.24"
_FLOAT32_BITS: Final = 32


class KvFootprint(Strict, frozen=True, kw_only=True):
    """Bytes of one session by what they hold."""

    parts: dict[str, int]
    """kv, cross, indexer, conv, recurrent; in transformers also values, buffers, overlap. Parts of 0 are left out."""

    @property
    def total_bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


class _Part(NamedTuple):
    name: str
    values: int
    bits: int | None = None
    """None: the cache's dtype."""


TokensHeld = Callable[[int, int], int]
"""(tokens, window) -> tokens whose rows a layer holds."""


@dataclass(frozen=True, kw_only=True)
class _View:
    adapt: Callable[[LayerGroup], LayerGroup]
    tokens_held: Mapping[CacheKind, TokensHeld]
    conv_columns: Callable[[int], int]
    recurrent_bits: Callable[[LinearState], int | None]
    extras: Callable[[LayerGroup, int, int], Iterator[_Part]]
    """(group, tokens, rows held) -> what this view holds beside rows, entries and states."""


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
    return _footprint(shape.layer_groups, tokens, bits, encoder_tokens, _IDEAL)


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
    return _footprint(shape.layer_groups, tokens, bits, encoder_tokens, _TRANSFORMERS)


def transformers_layer_bytes(group: LayerGroup, tokens: int, bits: int) -> int:
    """The transformers view of one layer of a group."""
    one_layer = msgspec.structs.replace(group, count=1)
    return _footprint((one_layer,), tokens, bits, None, _TRANSFORMERS).total_bytes


def as_transformers(group: LayerGroup) -> LayerGroup:
    """The group with the cache kind and the kv_heads that transformers gives it."""
    difference = group.transformers
    if difference is None:
        return group
    return msgspec.structs.replace(
        group, cache=difference.cache or group.cache, kv_heads=difference.kv_heads or group.kv_heads
    )


def _footprint(
    groups: tuple[LayerGroup, ...], tokens: int, bits: int, encoder_tokens: int | None, view: _View
) -> KvFootprint:
    parts: dict[str, int] = {}
    for group in map(view.adapt, groups):
        held = _held_tokens(group, tokens, encoder_tokens, view)
        for part in (*_rows(group, held), *_indexed(group, tokens), *_state(group, view)):
            _add(parts, group.count, part, bits)
        for part in view.extras(group, tokens, held):
            _add(parts, group.count, part, bits)
    return KvFootprint(parts=parts)


def _add(parts: dict[str, int], count: int, part: _Part, bits: int) -> None:
    num_bits = count * part.values * (part.bits or bits)
    if num_bits:
        parts[part.name] = parts.get(part.name, 0) + -(-num_bits // 8)


def _held_tokens(group: LayerGroup, tokens: int, encoder_tokens: int | None, view: _View) -> int:
    if group.cache == "cross":
        fixed = tokens if group.encoder_tokens is None else group.encoder_tokens
        return fixed if encoder_tokens is None else encoder_tokens
    return view.tokens_held[group.cache](tokens, group.window_tokens or 0)


def _rows(group: LayerGroup, held: int) -> Iterator[_Part]:
    width = group.kv_heads * (group.key_head_dim + group.value_head_dim)
    yield _Part("cross" if group.cache == "cross" else "kv", held * width)


def _indexed(group: LayerGroup, tokens: int) -> Iterator[_Part]:
    yield _Part("indexer", tokens * group.indexer_head_dim)
    if group.compression is not None:
        entries = tokens // group.compression.ratio_tokens
        yield _Part("kv", entries * group.key_head_dim)
        yield _Part("indexer", entries * group.compression.indexer_head_dim)


def _state(group: LayerGroup, view: _View) -> Iterator[_Part]:
    if group.state is not None:
        yield _Part("conv", group.state.conv_channels * view.conv_columns(group.state.conv_kernel))
        yield _Part("recurrent", group.state.recurrent_values, view.recurrent_bits(group.state))


def _nothing(_group: LayerGroup, _tokens: int, _held: int) -> Iterator[_Part]:
    yield from ()


def _transformers_extras(group: LayerGroup, tokens: int, held: int) -> Iterator[_Part]:
    """Stored copies of values, and a compressor's unfinished stretch (keys and gates) and carried-over one.

    Source: transformers 5.24, models/deepseek_v4/modeling_deepseek_v4.py (DeepseekV4HCACache, DeepseekV4CSACache);
    the carried-over gates have a float32 bias added.
    """
    if group.transformers is not None and group.transformers.copies_values:
        yield _Part("values", held * group.kv_heads * group.key_head_dim)
    if group.compression is not None:
        ratio = group.compression.ratio_tokens
        widths = group.key_head_dim + group.compression.indexer_head_dim
        projections = 2 if group.compression.overlaps else 1
        yield _Part("buffers", 2 * (tokens % ratio) * projections * widths)
        if group.compression.overlaps and tokens >= ratio:
            yield _Part("overlap", ratio * widths)
            yield _Part("overlap", ratio * widths, _FLOAT32_BITS)


def _all(tokens: int, _window: int) -> int:
    return tokens


def _none(_tokens: int, _window: int) -> int:
    return 0


def _window(tokens: int, window: int) -> int:
    return min(tokens, window)


def _window_at_rest(tokens: int, window: int) -> int:
    """The next token brings its own row. Source: transformers 5.24, cache_utils.DynamicSlidingWindowLayer."""
    return min(tokens, window - 1)


def _current_chunk(tokens: int, chunk: int) -> int:
    return (tokens - 1) % chunk + 1 if tokens else 0


_EVERYWHERE: Final[Mapping[CacheKind, TokensHeld]] = {
    "full": _all,
    "latent": _all,
    "linear_state": _none,
    "shared": _none,
    "none": _none,
}
_IDEAL: Final = _View(
    adapt=lambda group: group,
    tokens_held={**_EVERYWHERE, "sliding": _window, "compressed": _window, "chunked": _current_chunk},
    conv_columns=lambda kernel: kernel - 1,
    recurrent_bits=lambda state: state.ideal_recurrent_bits,
    extras=_nothing,
)
_TRANSFORMERS: Final = _View(
    adapt=as_transformers,
    tokens_held={
        **_EVERYWHERE,
        "sliding": _window_at_rest,
        "compressed": _window_at_rest,
        "chunked": _window_at_rest,
    },
    conv_columns=lambda kernel: kernel,
    recurrent_bits=lambda state: state.transformers_recurrent_bits,
    extras=_transformers_extras,
)
