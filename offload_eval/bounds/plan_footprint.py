"""One session's KV cache in both views, for a plan."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

import msgspec

from offload_eval.bounds.kv_footprint import kv_footprint, static_kv_bytes, transformers_kv_bytes
from offload_eval.bounds.kv_views import IDEAL, TRANSFORMERS_VERSION
from offload_eval.bounds.plan_request import PlanRequest, PlanWorkload, columns
from offload_eval.bounds.session_card import session_card
from offload_eval.core.experiment import QuantizedSpec
from offload_eval.core.plan import KvCacheBytes, LayerRow

_QUANTIZED: Final[Mapping[str, QuantizedSpec]] = {
    "fp8": QuantizedSpec(backend="fp8"),
    "int8": QuantizedSpec(backend="hqq", nbits=8),
    "int4": QuantizedSpec(backend="quanto", nbits=4),
    "int2": QuantizedSpec(backend="quanto", nbits=2),
}
"""The cache of transformers that stores the same format."""

Parts = dict[str, int]
"""Bytes by what they hold."""


def footprint_parts(request: PlanRequest, workload: PlanWorkload) -> dict[str, Parts | None]:
    """One session's bytes by what they hold: `ideal` and `transformers`, which is None where it has no such cache."""
    shape, tokens, encoder_tokens = request.model.shape, workload.cached_tokens, request.spec.encoder_tokens
    ideal = kv_footprint(shape, tokens, IDEAL, request.stored, encoder_tokens).parts
    if request.spec.paging.kv_cache_dtype in _QUANTIZED:
        return {"ideal": ideal, "transformers": _quantized_parts(request, workload)}
    if request.stored.bits != request.bits:
        return {"ideal": ideal, "transformers": None}  # a DynamicCache is in the model's dtype
    dynamic = transformers_kv_bytes(shape, tokens, request.bits, encoder_tokens)
    return {"ideal": ideal, "transformers": None if dynamic is None else dynamic.parts}


def kv_cache_bytes(request: PlanRequest, workload: PlanWorkload) -> KvCacheBytes:
    """One session's bytes in each view."""
    parts = footprint_parts(request, workload)
    return KvCacheBytes(
        ideal=sum((parts["ideal"] or {}).values()),
        transformers=None if parts["transformers"] is None else sum(parts["transformers"].values()),
        transformers_static=_static_bytes(request, workload),
        transformers_version=TRANSFORMERS_VERSION,
    )


def _static_bytes(request: PlanRequest, workload: PlanWorkload) -> int | None:
    if request.spec.paging.kv_cache_dtype in _QUANTIZED or request.stored.bits != request.bits:
        return None
    shape, bits = request.model.shape, request.bits
    static = static_kv_bytes(shape, workload.cached_tokens, bits, request.spec.encoder_tokens)
    return None if static is None else static.total_bytes


def _quantized_parts(request: PlanRequest, workload: PlanWorkload) -> Parts | None:
    """The payload of transformers' own quantized cache when generation ends."""
    paging = request.spec.paging
    spec = _QUANTIZED[paging.kv_cache_dtype]
    if spec.nbits is not None:
        if paging.residual_length == 0:
            return None  # upstream's cache always has a residual window
        spec = msgspec.structs.replace(spec, q_group_size=paging.q_group_size, residual_length=paging.residual_length)
    lengths, _ = columns([workload])
    card = session_card(request.model.shape, request.bits, lengths, spec, request.spec.encoder_tokens)
    return None if isinstance(card, str) else {"payload": int(card.device_bytes[0]) + card.device_fixed_bytes}


def layer_rows(request: PlanRequest, workload: PlanWorkload) -> Iterator[LayerRow]:
    """One row for all layers that cache alike."""
    shape = request.model.shape
    has_whole = footprint_parts(request, workload)["transformers"] is not None
    for group in shape.layer_groups:
        of_group = replace(request.model, shape=msgspec.structs.replace(shape, layer_groups=(group,)))
        parts = footprint_parts(replace(request, model=of_group), workload)
        transformers = parts["transformers"]
        yield LayerRow(
            layers=group.count,
            cache=group.cache,
            kv_heads=group.kv_heads,
            key_head_dim=group.key_head_dim,
            value_head_dim=group.value_head_dim,
            window_tokens=group.window_tokens,
            ideal_bytes=sum((parts["ideal"] or {}).values()),
            transformers_bytes=sum(transformers.values()) if has_whole and transformers is not None else None,
        )
