"""Who holds what of a session's KV cache: one `KvView` a holder, each rule that differs an entry of it.

Token counts are arrays, so that one call answers a whole grid of lengths.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from offload_eval.core.shape import CacheKind, LayerGroup, LinearState

Counts = NDArray[np.int64]
"""Tokens, sessions or bytes; every shape broadcasts."""
TRANSFORMERS_VERSION: Final = "5.24"
_FLOAT32_BITS: Final = 32


class Extra(NamedTuple):
    """What a view holds beside rows, entries and states."""

    part: str
    values: Counts
    bits: int | None = None
    """None: the cache's unquantized dtype."""


@dataclass(frozen=True, kw_only=True)
class KvView:
    """The rules of one holder."""

    adapt: Callable[[LayerGroup], LayerGroup]
    tokens_held: Mapping[CacheKind, Callable[[Counts, int], Counts]]
    """(tokens, window) -> tokens whose rows a layer holds."""
    conv_columns: Callable[[int], int]
    recurrent_bits: Callable[[LinearState], int | None]
    extras: Callable[[LayerGroup, Counts, Counts], Iterator[Extra]]
    """(group, tokens, rows held)."""
    page_tokens: int = 1
    """Rows come in whole pages of so many tokens."""

    def rows(self, group: LayerGroup, tokens: Counts) -> Counts:
        """Rows that one layer has room for, once `tokens` are cached; cross layers are given encoder tokens."""
        if group.cache == "cross":
            return self.whole_pages(tokens)
        held = self.tokens_held[group.cache](tokens, group.window_tokens or 0)
        if self.page_tokens > 1 and group.window_tokens:
            return np.minimum(self.whole_pages(tokens), self._most_pages(group) * self.page_tokens)
        return self.whole_pages(held)

    def _most_pages(self, group: LayerGroup) -> int:
        """Pages that a window touches at the worst alignment; a chunk starts at a multiple of its length."""
        assert group.window_tokens is not None
        if group.cache == "chunked" and group.window_tokens % self.page_tokens == 0:
            return group.window_tokens // self.page_tokens
        return -(-(group.window_tokens - 1) // self.page_tokens) + 1

    def whole_pages(self, tokens: Counts) -> Counts:
        """Tokens rounded up to pages."""
        return -(-tokens // self.page_tokens) * self.page_tokens


def paged_view(page_tokens: int) -> KvView:
    """What a paged engine holds at most on the way to `tokens`: the ideal view, in whole pages.

    A windowed layer holds every page that its window touches, at the worst alignment; a chunked one a whole chunk.
    Does not count pages that a prefill keeps for a window it has passed.
    """
    return replace(IDEAL, tokens_held={**IDEAL.tokens_held, "chunked": _window}, page_tokens=page_tokens)


def as_transformers(group: LayerGroup) -> LayerGroup:
    """The group with the cache kind and the kv_heads that transformers gives it."""
    difference = group.transformers
    if difference is None:
        return group
    return msgspec.structs.replace(
        group, cache=difference.cache or group.cache, kv_heads=difference.kv_heads or group.kv_heads
    )


def _nothing(_group: LayerGroup, _tokens: Counts, _held: Counts) -> Iterator[Extra]:
    yield from ()


def _transformers_extras(group: LayerGroup, tokens: Counts, held: Counts) -> Iterator[Extra]:
    """Stored copies of values, and a compressor's unfinished stretch (keys and gates) and carried-over one.

    Source: transformers 5.24, models/deepseek_v4/modeling_deepseek_v4.py (DeepseekV4HCACache, DeepseekV4CSACache);
    the carried-over gates have a float32 bias added.
    """
    if group.transformers is not None and group.transformers.copies_values:
        yield Extra("values", held * group.kv_heads * group.key_head_dim)
    if group.compression is not None:
        ratio = group.compression.ratio_tokens
        widths = group.key_head_dim + group.compression.indexer_head_dim
        projections = 2 if group.compression.overlaps else 1
        yield Extra("buffers", 2 * (tokens % ratio) * projections * widths)
        if group.compression.overlaps:
            carried = np.where(tokens >= ratio, ratio * widths, 0)
            yield Extra("overlap", carried)
            yield Extra("overlap", carried, _FLOAT32_BITS)


def _all(tokens: Counts, _window: int) -> Counts:
    return tokens


def _none(tokens: Counts, _window: int) -> Counts:
    return np.zeros_like(tokens)


def _window(tokens: Counts, window: int) -> Counts:
    return np.minimum(tokens, window)


def _window_at_rest(tokens: Counts, window: int) -> Counts:
    """The next token brings its own row. Source: transformers 5.24, cache_utils.DynamicSlidingWindowLayer."""
    return np.minimum(tokens, window - 1)


def _current_chunk(tokens: Counts, chunk: int) -> Counts:
    return np.where(tokens > 0, (tokens - 1) % chunk + 1, 0)


_EVERYWHERE: Final[Mapping[CacheKind, Callable[[Counts, int], Counts]]] = {
    "full": _all,
    "latent": _all,
    "linear_state": _none,
    "shared": _none,
    "none": _none,
}
IDEAL: Final = KvView(
    adapt=lambda group: group,
    tokens_held={**_EVERYWHERE, "sliding": _window, "compressed": _window, "chunked": _current_chunk},
    conv_columns=lambda kernel: kernel - 1,
    recurrent_bits=lambda state: state.ideal_recurrent_bits,
    extras=_nothing,
)
"""What an engine must hold while it computes the newest token, without pages."""
TRANSFORMERS: Final = KvView(
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
"""transformers' DynamicCache at rest, between two steps."""
TRANSFORMERS_STATIC: Final = replace(
    TRANSFORMERS, tokens_held={**_EVERYWHERE, "sliding": _window, "compressed": _window, "chunked": _window}
)
"""transformers' StaticCache built for so many tokens. Source: transformers 5.24, cache_utils.StaticSlidingWindowLayer:
min(max_cache_len, window) slots. Also what is alive in a DynamicCache between two steps: its windows are views of a
tensor that has the newest row as well."""
TRANSFORMERS_PREFILLED: Final = replace(
    TRANSFORMERS, tokens_held={**_EVERYWHERE, "sliding": _all, "compressed": _all, "chunked": _all}
)
"""What is alive in a DynamicCache from the end of a prefill to the next step: its windows are views of the whole
prompt's keys and values. Source: transformers 5.24, cache_utils.DynamicSlidingWindowLayer.update."""
