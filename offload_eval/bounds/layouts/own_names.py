"""Older decoders under their own field names; every query head has its own keys and values unless multi_query."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from offload_eval.bounds.layouts.attention import Layers, sliding
from offload_eval.bounds.layouts.fields import Fields
from offload_eval.core.shape import LayerGroup, TransformersDifference
from offload_eval.errors import InputError

Names = tuple[str, str, str]
"""The names of hidden size, heads and layers."""
GPT2_NAMES: Final[Names] = ("n_embd", "n_head", "n_layer")
STANDARD_NAMES: Final[Names] = ("hidden_size", "num_attention_heads", "num_hidden_layers")
BLOOM_NAMES: Final[Names] = ("hidden_size", "n_head", "n_layer")
MPT_NAMES: Final[Names] = ("d_model", "n_heads", "n_layers")
XGLM_NAMES: Final[Names] = ("d_model", "attention_heads", "num_layers")
GPT_NEO_NAMES: Final[Names] = ("hidden_size", "num_heads", "num_layers")


def all_heads(names: Names) -> Callable[[Fields], Layers]:
    """A reader of plain multi-head attention: kv heads = heads, head size = hidden size / heads."""
    return partial(_all_heads, names)


def _all_heads(names: Names, fields: Fields) -> Layers:
    return [_layer(names, fields)] * fields.layers(names[2])


def _layer(names: Names, fields: Fields, kv_heads: int | None = None) -> LayerGroup:
    heads, head_dim = fields.positive(names[1]), fields.divided(names[0], names[1])
    return LayerGroup(count=1, kv_heads=kv_heads or heads, key_head_dim=head_dim, value_head_dim=head_dim)


def mpt(fields: Fields) -> Layers:
    """MPT: plain multi-head attention; the remote code's grouped variants are not in transformers."""
    attention = Fields(fields.section("attn_config") or {}, section="attn_config")
    attention.choice("attn_type", attention.get("attn_type"), {None: True, "multihead_attention": True})
    if attention.get("kv_n_heads") is not None:
        raise attention.unknown("kv_n_heads", "null is understood; transformers gives every head its own keys")
    return _all_heads(MPT_NAMES, fields)


def gpt_bigcode(fields: Fields) -> Layers:
    """GPT-BigCode: one kv head where multi_query. Source: models/gpt_bigcode."""
    kv_heads = 1 if fields.flag("multi_query") else None
    return [_layer(GPT2_NAMES, fields, kv_heads)] * fields.layers("n_layer")


def dbrx(fields: Fields) -> Layers:
    """DBRX: attn_config has the kv heads."""
    attention = Fields(fields.section("attn_config") or {}, section="attn_config")
    kv_heads = attention.positive("kv_n_heads")
    return [_layer(MPT_NAMES, fields, kv_heads)] * fields.layers("n_layers")


def falcon(fields: Fields) -> Layers:
    """Falcon: the old block has one kv head (multi_query) or all; the new one has num_kv_heads.

    The new block repeats keys and values over all query heads before it caches them. Source: transformers 5.24,
    models/falcon/modeling_falcon.py (`_split_heads`).
    """
    layers, heads = fields.layers(), fields.positive("num_attention_heads")
    if not fields.flag("new_decoder_architecture"):
        return [_layer(STANDARD_NAMES, fields, 1 if fields.flag("multi_query") else None)] * layers
    fields.ignore("multi_query")
    plain = _layer(STANDARD_NAMES, fields, fields.positive("num_kv_heads"))
    layer = LayerGroup(
        count=1,
        kv_heads=plain.kv_heads,
        key_head_dim=plain.key_head_dim,
        value_head_dim=plain.value_head_dim,
        transformers=TransformersDifference(kv_heads=heads),
    )
    return [layer] * layers


def gpt_neo(fields: Fields) -> Layers:
    """GPT-Neo: local layers see window_size tokens, and transformers keeps every token in all layers.

    attention_types is a list of (pattern, repeats). Source: models/gpt_neo/configuration_gpt_neo.py.
    """
    layers, full = fields.layers("num_layers"), _layer(GPT_NEO_NAMES, fields)
    windowed = sliding(full, fields.window("window_size"))
    local = LayerGroup(
        count=1,
        cache="sliding",
        kv_heads=full.kv_heads,
        key_head_dim=full.key_head_dim,
        value_head_dim=full.value_head_dim,
        window_tokens=windowed.window_tokens,
        transformers=TransformersDifference(cache="full"),
    )
    kinds: Mapping[str, LayerGroup] = {"global": full, "local": local}
    names = _attention_names(fields, layers)
    fields.ignore("attention_layers")
    return [fields.choice("attention_types", name, kinds) for name in names]


def _attention_names(fields: Fields, layers: int) -> list[Any]:
    entries = fields.sequence("attention_types")
    if entries is None:
        raise fields.unknown("attention_types", "a list of (pattern, repeats) is needed")
    if not all(_is_repeated_pattern(entry, layers) for entry in entries):
        raise fields.invalid("attention_types", f"a list of (pattern, repeats), at most {layers} repeats each")
    names = [name for pattern, repeats in entries for name in list(pattern) * repeats]
    if len(names) != layers:
        raise InputError(f"attention_types describes {len(names)} layers; allowed: {layers}, which num_layers is")
    return names


def _is_repeated_pattern(entry: Any, layers: int) -> bool:
    if not isinstance(entry, list | tuple) or len(entry) != 2:
        return False
    pattern, repeats = entry
    return isinstance(pattern, list | tuple) and type(repeats) is int and 0 <= repeats <= layers
