"""A model's layers as transformers caches them, and what they hold at each of many lengths.

A layer's row is one token's keys and values: kv_heads * (key_head_dim + value_head_dim) values.
"""

from dataclasses import dataclass

import numpy as np

from offload_eval.bounds.kv_footprint import kv_total, layer_total
from offload_eval.bounds.kv_format import KvFormat, plain_format
from offload_eval.bounds.kv_views import (
    TRANSFORMERS,
    TRANSFORMERS_PREFILLED,
    TRANSFORMERS_STATIC,
    Counts,
    as_transformers,
)
from offload_eval.core.experiment import Workload
from offload_eval.core.shape import LayerGroup, ModelShape


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths of sessions. Both arrays have one shape."""

    prompt_tokens: Counts
    output_tokens: Counts
    """0 asks for the prompt alone."""
    prefill_chunk_tokens: int | None = None
    """Prompt tokens prefilled at once; None: the whole prompt."""

    @property
    def steps(self) -> Counts:
        """Decode steps: the prefill gives the first token."""
        return np.maximum(self.output_tokens - 1, 0)

    @property
    def cached_tokens(self) -> Counts:
        """Tokens cached when generation ends; the last one is never cached."""
        return self.prompt_tokens + self.steps


def workload_lengths(workload: Workload) -> Lengths:
    """The lengths of one workload."""
    return Lengths(
        prompt_tokens=np.asarray(workload.prompt_tokens),
        output_tokens=np.asarray(workload.output_tokens),
        prefill_chunk_tokens=workload.prefill_chunk_tokens,
    )


class CachedLayers:
    """The layers of a shape as transformers caches them, at a dtype."""

    def __init__(self, shape: ModelShape, bits: int, encoder_tokens: int | None) -> None:
        self.bits = bits
        self.encoder_tokens = encoder_tokens
        self.groups = tuple(map(as_transformers, shape.layer_groups))
        self.order = shape.order
        indexed = any(group.indexer_head_dim for group in self.groups)
        kinds = ("full",) if indexed else ("full", "latent")
        self.plain = tuple(group for group in self.groups if group.cache in kinds and group.state is None)
        """Layers that are a DynamicLayer: every token's keys and values, nothing else. In a model with indexers
        the layers without one have its layer class all the same."""
        self.others = tuple(group for group in self.groups if group not in self.plain)
        self.count = sum(group.count for group in self.plain)
        self.values_a_token = sum(group.count * row_values(group) for group in self.plain)
        self.bytes_a_token = self.values_a_token * bits // 8
        self.widest_row_bytes = max(map(row_values, self.plain), default=0) * bits // 8

    def held_bytes(self, groups: tuple[LayerGroup, ...], tokens: Counts) -> Counts:
        """The payload of these groups when `tokens` are cached."""
        sizes = (group.count * self.layer_bytes(group, tokens) for group in groups)
        return sum(sizes, start=np.zeros_like(tokens))

    def layer_bytes(self, group: LayerGroup, tokens: Counts) -> Counts:
        """The payload of one layer of a group."""
        return layer_total(group, tokens, TRANSFORMERS, plain_format(self.bits), self.encoder_tokens)

    def buffer_bytes(self, groups: tuple[LayerGroup, ...], tokens: Counts) -> Counts:
        """Static buffers of these groups, with room for `tokens`."""
        return kv_total(groups, tokens, TRANSFORMERS_STATIC, plain_format(self.bits), self.encoder_tokens)

    def layer_buffer_bytes(self, group: LayerGroup, tokens: Counts) -> Counts:
        """Static buffers of one layer of a group."""
        return layer_total(group, tokens, TRANSFORMERS_STATIC, plain_format(self.bits), self.encoder_tokens)

    def peak_bytes(self, groups: tuple[LayerGroup, ...], lengths: Lengths) -> Counts:
        """The most that is alive of these groups between two steps, from the end of the prefill on."""
        stored = plain_format(self.bits)
        alive = kv_total(groups, lengths.cached_tokens, TRANSFORMERS_STATIC, stored, self.encoder_tokens)
        peak_bytes = np.maximum(alive, self._prefilled_bytes(groups, lengths, stored))
        for ratio in {group.compression.ratio_tokens for group in groups if group.compression}:
            # A compressor holds most just before it closes a stretch of tokens.
            before_close = (lengths.cached_tokens + 1) // ratio * ratio - 1
            was_alive = kv_total(groups, np.maximum(before_close, 0), TRANSFORMERS_STATIC, stored)
            peak_bytes = np.maximum(peak_bytes, np.where(before_close > 0, was_alive, 0))
        return peak_bytes

    def _prefilled_bytes(self, groups: tuple[LayerGroup, ...], lengths: Lengths, stored: KvFormat) -> Counts:
        """At the end of the prefill a windowed layer still has the rows of its last chunk, and those before it."""
        total = np.zeros_like(lengths.prompt_tokens)
        for group in groups:
            view, tokens = TRANSFORMERS_PREFILLED, lengths.prompt_tokens
            if group.window_tokens is not None and lengths.prefill_chunk_tokens is not None:
                last_chunk = (tokens - 1) % lengths.prefill_chunk_tokens + 1
                tokens = np.minimum(tokens, group.window_tokens - 1 + last_chunk)
            if group.compression is not None:
                view = TRANSFORMERS_STATIC  # its rows and entries are cut apart: what a prefill keeps is not modelled
            total = total + kv_total((group,), tokens, view, stored, self.encoder_tokens)
        return total


def row_values(group: LayerGroup) -> int:
    """Values of one token's keys and values in one layer."""
    return group.kv_heads * (group.key_head_dim + group.value_head_dim)


def count_layers(groups: tuple[LayerGroup, ...]) -> int:
    """Layers of these groups together."""
    return sum(group.count for group in groups)
