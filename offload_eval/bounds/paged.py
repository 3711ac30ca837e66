"""The cache of a paged engine: whole pages, any format, prefixes that sessions share."""

from dataclasses import replace
from typing import Final

import numpy as np

from offload_eval.bounds.cached_layers import Lengths
from offload_eval.bounds.kv_footprint import kv_total
from offload_eval.bounds.kv_format import kv_format
from offload_eval.bounds.kv_views import Counts, paged_view
from offload_eval.bounds.session_card import SessionCard, in_gpu_card
from offload_eval.core.plan import PagingSpec
from offload_eval.core.shape import ModelShape

_UNQUANTIZED: Final = "states, indexer keys and compressed entries keep the model's dtype"


def paged_card(
    shape: ModelShape, bits: int, lengths: Lengths, paging: PagingSpec, encoder_tokens: int | None = None
) -> SessionCard:
    """Computes the card of one session in a paged engine.

    Args:
        shape: The model's cache layout.
        bits: Bits of the model's dtype.
        lengths: Lengths of the sessions.
        paging: Page size and format.
        encoder_tokens: Tokens that cross-attention reads. None: the model's fixed count, or else the cached tokens.
    """
    view, stored = paged_view(paging.block_tokens), kv_format(paging, bits)
    device_bytes = kv_total(shape.layer_groups, lengths.cached_tokens, view, stored, encoder_tokens)
    return in_gpu_card(
        device_bytes,
        device_bytes,
        (
            f"Whole blocks of {paging.block_tokens} tokens; a windowed layer holds every block its window "
            "touches. Not counted: blocks that a prefill keeps for a window it has passed, and the padding with "
            "which hybrid models make their layers' pages equal.",
            *_format_assumptions(paging, stored.bits),
        ),
        "offload_eval.bounds.kv_views.paged_view",
        fixed_bytes=stored.layer_bytes * sum(group.count for group in shape.layer_groups if group.kv_heads),
    )


def _format_assumptions(paging: PagingSpec, bits: int) -> tuple[str, ...]:
    if paging.kv_cache_dtype == "fp8":
        return (f"8 bits a value of keys and values, two float32 scales a layer; {_UNQUANTIZED}.",)
    if not paging.kv_cache_dtype.startswith("int"):
        return ()
    return (
        f"{bits} bits a value, a scale and a zero point in the model's dtype for "
        f"{paging.q_group_size} values, the newest {paging.residual_length} tokens of a layer unquantized; "
        f"{_UNQUANTIZED}.",
    )


def shared_prefix_bytes(
    shape: ModelShape, bits: int, prefix_tokens: Counts, lengths: Lengths, paging: PagingSpec
) -> Counts:
    """Bytes of a prefix that one copy serves for every session.

    Shared are its whole blocks, in layers that keep every token, and in windowed ones that a whole session fits into.
    Layers with a state share nothing. The prompt's newest tokens, as many as an unquantized residual window holds,
    are each session's own.
    """
    stored = kv_format(paging, bits)
    block = paging.block_tokens
    quantized = np.maximum(lengths.prompt_tokens - stored.residual_tokens, 0)
    tokens = np.minimum(prefix_tokens, quantized) // block * block
    total = np.zeros_like(tokens)
    for group in shape.layer_groups:
        if group.state is None and group.cache in ("full", "latent", "sliding"):
            in_window = group.window_tokens is None or lengths.cached_tokens <= group.window_tokens
            shared = np.where(in_window, tokens, 0)
            total = total + kv_total((group,), shared, paged_view(1), replace(stored, residual_tokens=0))
    return total
