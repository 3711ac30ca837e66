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
_MAX_DIGITS = 9


def gemma3n(fields: Fields) -> Layers:
    """Every fifth layer is full; the last num_kv_shared_layers layers store nothing."""
    return _share(fields, one_full_in(5)(fields))


def gemma4(fields: Fields) -> Layers:
    """Full layers have their own head size, and their own kv heads where attention_k_eq_v; K and V are both stored."""
    bidirectional = fields.get("use_bidirectional_attention")
    if bidirectional not in (None, "vision"):
        if not isinstance(bidirectional, str):
            raise fields.invalid("use_bidirectional_attention", "null or a text")
        raise fields.unknown(
            "use_bidirectional_attention", "null and vision are understood; another changes the window"
        )
    layers = one_full_in(6)(fields)
    if layers[-1].cache != "full":
        if fields.get("layer_types") is not None:
            raise UnknownModelStructureError("layer_types: the last layer must be full_attention")
        layers[-1] = msgspec.structs.replace(layers[-1], cache="full", window_tokens=None)
    overrides = _by_index(fields, fields.section("per_layer_config") or _global_heads(fields, layers), len(layers))
    fields.ignore("global_head_dim", "num_global_key_value_heads")
    return _share(fields, [_override(layer, overrides.get(index, {})) for index, layer in enumerate(layers)])


def _by_index(fields: Fields, overrides: Mapping[Any, Mapping[str, Any]], layers: int) -> dict[int, Mapping[str, Any]]:
    """Layer numbers are text in a converted config."""
    numbered = {_number(index): override for index, override in overrides.items()}
    if not all(index in range(layers) and isinstance(override, Mapping) for index, override in numbered.items()):
        raise fields.invalid("per_layer_config", f"an object of fields for layers' numbers from 0 to {layers - 1}")
    return numbered


def _number(index: Any) -> int:
    text = str(index)
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else -1


def _override(layer: LayerGroup, override: Mapping[str, Any]) -> LayerGroup:
    unknown = sorted(set(override) - _OVERRIDES)
    if unknown:
        raise UnknownModelStructureError(f"per_layer_config has {', '.join(unknown)}; known: {sorted(_OVERRIDES)}")
    fields = Fields(override, section="per_layer_config")
    head_dim = fields.positive_or("head_dim", layer.key_head_dim)
    return msgspec.structs.replace(
        layer,
        kv_heads=fields.positive_or("num_key_value_heads", layer.kv_heads),
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
        raise fields.invalid("num_kv_shared_layers", f"an integer from 0 to {len(layers) - 1}")
    return layers[: len(layers) - shared] + [LayerGroup(count=1, cache="shared")] * shared
