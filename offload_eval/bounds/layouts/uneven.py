"""Decoders whose layers differ in kv heads or head sizes, listed layer by layer."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from offload_eval.bounds.layouts.attention import Layers, attention_layer
from offload_eval.bounds.layouts.fields import Fields, shown
from offload_eval.core.shape import LayerGroup
from offload_eval.errors import InputError, UnknownModelStructureError

_NAS_UNKNOWN: Final = ("window_length", "num_sink_tokens", "sparsify", "unshifted_sink")


def nemotron_nas(fields: Fields) -> Layers:
    """Llama-Nemotron (NAS): block_configs gives each layer's heads in a group; no_op attention stores nothing.

    Source: nvidia/Llama-3_3-Nemotron-Super-49B-v1, configuration_decilm.py; formula only, not measured.
    """
    heads = fields.positive("num_attention_heads")
    head_dim = fields.divided("hidden_size", "num_attention_heads")
    blocks = fields.per_layer("block_configs", fields.layers())
    return [_nas_layer(block, heads, head_dim) for block in blocks]


def _nas_layer(block: Any, heads: int, head_dim: int) -> LayerGroup:
    if not isinstance(block, Mapping):
        raise InputError(f"block_configs has {shown(block)}; allowed: an object for each layer")
    section = Fields(block, section="block_configs").section("attention")
    if section is None:
        raise UnknownModelStructureError("block_configs: a block has no attention entry")
    attention = Fields({**section, "num_attention_heads": heads}, section="block_configs.attention")
    if attention.flag("no_op") or attention.flag("replace_with_linear"):
        return LayerGroup(count=1, cache="none")
    for name in _NAS_UNKNOWN:
        if attention.get(name):
            raise attention.unknown(name, "a layout with it is not known here")
    kv_heads = attention.divided("num_attention_heads", "n_heads_in_group")
    return LayerGroup(count=1, kv_heads=kv_heads, key_head_dim=head_dim, value_head_dim=head_dim)


def openelm(fields: Fields) -> Layers:
    """OpenELM: num_kv_heads is a list. Source: apple/OpenELM, configuration_openelm.py; formula only, not measured."""
    head_dim = fields.positive("head_dim")
    heads = fields.per_layer("num_kv_heads", fields.layers("num_transformer_layers"))
    if not all(type(count) is int and count > 0 for count in heads):
        raise fields.invalid("num_kv_heads", "a list of integers >= 1")
    return [LayerGroup(count=1, kv_heads=count, key_head_dim=head_dim, value_head_dim=head_dim) for count in heads]


def mimo_v2(fields: Fields) -> Layers:
    """MiMo-V2-Flash: keys wider than values, and twice the kv heads on sliding layers.

    The original file counts the tokens before the query (sliding_window_size), so its window is one more; a
    converted config has the window itself. Source: transformers 5.24, models/mimo_v2_flash.
    """
    layers = fields.layers()
    full = msgspec.structs.replace(attention_layer(fields), value_head_dim=fields.positive("v_head_dim"))
    _check_sliding_heads(fields, full)
    wider = msgspec.structs.replace(full, kv_heads=2 * full.kv_heads)
    before = fields.get("sliding_window_size")
    window = fields.window("sliding_window") if before is None else fields.positive("sliding_window_size") + 1
    slides = msgspec.structs.replace(wider, cache="sliding", window_tokens=window)
    fields.ignore("sliding_window", "attention_chunk_size")
    if fields.get("layer_types") is not None:
        fields.ignore("hybrid_layer_pattern")
        kinds = {"full_attention": full, "sliding_attention": slides}
        return [fields.choice("layer_types", kind, kinds) for kind in fields.per_layer("layer_types", layers)]
    pattern = fields.per_layer("hybrid_layer_pattern", layers)
    return [fields.choice("hybrid_layer_pattern", kind, {0: full, 1: slides}) for kind in pattern]


def _check_sliding_heads(fields: Fields, full: LayerGroup) -> None:
    """The original file states what transformers derives."""
    derived = {
        "swa_num_key_value_heads": 2 * full.kv_heads,
        "swa_head_dim": full.key_head_dim,
        "swa_v_head_dim": full.value_head_dim,
    }
    for name, value in derived.items():
        if fields.positive_or(name, value) != value:
            raise fields.unknown(name, f"{value} is what transformers caches")
