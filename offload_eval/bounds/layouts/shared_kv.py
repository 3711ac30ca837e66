"""Gemma 3n and Gemma 4: late layers read the KV of earlier ones and store none.

Source: transformers 5.24, models/gemma3n and models/gemma4 (configuration: layer_types, per_layer_config,
kv_sharing_modes).
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from offload_eval.bounds.layouts.attention import Layers, one_full_in
from offload_eval.bounds.layouts.fields import Fields
from offload_eval.core.shape import LayerGroup
from offload_eval.errors import UnknownModelStructureError

_OVERRIDES = {"head_dim", "num_key_value_heads"}


def gemma3n(fields: Fields) -> Layers:
    """Every fifth layer is full; the last num_kv_shared_layers layers store nothing."""
    return _share(fields, one_full_in(5)(fields))


def gemma4(fields: Fields) -> Layers:
    """Full layers have their own head size, and their own kv heads where attention_k_eq_v; K and V are both stored."""
    if fields.get("use_bidirectional_attention") not in (None, "vision"):
        raise UnknownModelStructureError(
            f"use_bidirectional_attention = {fields.get('use_bidirectional_attention')!r} changes the window"
        )
    layers = one_full_in(6)(fields)
    if layers[-1].cache != "full":
        if fields.get("layer_types"):
            raise UnknownModelStructureError("layer_types: the last layer must be full_attention")
        layers[-1] = msgspec.structs.replace(layers[-1], cache="full", window_tokens=None)
    overrides = _by_index(fields.section("per_layer_config") or _global_heads(fields, layers))
    fields.ignore("global_head_dim", "num_global_key_value_heads")
    return _share(fields, [_override(layer, overrides.get(index, {})) for index, layer in enumerate(layers)])


def _by_index(overrides: Mapping[Any, Mapping[str, int]]) -> dict[int, Mapping[str, int]]:
    """Layer numbers are text in a converted config."""
    if not all(str(index).isdecimal() and isinstance(override, Mapping) for index, override in overrides.items()):
        raise UnknownModelStructureError(
            f"per_layer_config is {overrides!r}; a layer's number with its fields is known"
        )
    return {int(index): override for index, override in overrides.items()}


def _override(layer: LayerGroup, override: Mapping[str, int]) -> LayerGroup:
    unknown = sorted(set(override) - _OVERRIDES)
    if unknown:
        raise UnknownModelStructureError(f"per_layer_config has {', '.join(unknown)}; known: {sorted(_OVERRIDES)}")
    head_dim = override.get("head_dim", layer.key_head_dim)
    return msgspec.structs.replace(
        layer,
        kv_heads=override.get("num_key_value_heads", layer.kv_heads),
        key_head_dim=head_dim,
        value_head_dim=head_dim,
    )


def _global_heads(fields: Fields, layers: Layers) -> Mapping[Any, Mapping[str, int]]:
    override = {"head_dim": fields.positive("global_head_dim")}
    if fields.flag("attention_k_eq_v") and fields.get("num_global_key_value_heads") is not None:
        override["num_key_value_heads"] = fields.positive("num_global_key_value_heads")
    return {index: override for index, layer in enumerate(layers) if layer.cache == "full"}


def _share(fields: Fields, layers: Layers) -> Layers:
    shared = fields.count("num_kv_shared_layers")
    if shared >= len(layers):
        raise UnknownModelStructureError(f"num_kv_shared_layers is {shared!r}; fewer than {len(layers)} are possible")
    return layers[: len(layers) - shared] + [LayerGroup(count=1, cache="shared")] * shared
