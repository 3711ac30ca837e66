"""Older decoders under their own field names; every query head has its own keys and values unless multi_query."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from offload_eval.bounds.layouts.attention import Layers, sliding
from offload_eval.bounds.layouts.fields import Fields
from offload_eval.core.shape import LayerGroup, TransformersDifference
from offload_eval.errors import UnknownModelStructureError

Names = tuple[str, str, str]
"""The names of hidden size, heads and layers."""
GPT2_NAMES: Final[Names] = ("n_embd", "n_head", "n_layer")
STANDARD_NAMES: Final[Names] = ("hidden_size", "num_attention_heads", "num_hidden_layers")
BLOOM_NAMES: Final[Names] = ("hidden_size", "n_head", "n_layer")
MPT_NAMES: Final[Names] = ("d_model", "n_heads", "n_layers")
GPT_NEO_NAMES: Final[Names] = ("hidden_size", "num_heads", "num_layers")


def all_heads(names: Names) -> Callable[[Fields], Layers]:
    """A reader of plain multi-head attention: kv heads = heads, head size = hidden size / heads."""
    return partial(_all_heads, names)


def _all_heads(names: Names, fields: Fields) -> Layers:
    return [_layer(names, fields)] * fields.positive(names[2])


def _layer(names: Names, fields: Fields, kv_heads: int | None = None) -> LayerGroup:
    heads, head_dim = fields.positive(names[1]), fields.divided(names[0], names[1])
    return LayerGroup(count=1, kv_heads=kv_heads or heads, key_head_dim=head_dim, value_head_dim=head_dim)


def gpt_bigcode(fields: Fields) -> Layers:
    """GPT-BigCode: one kv head where multi_query. Source: models/gpt_bigcode."""
    kv_heads = 1 if fields.flag("multi_query") else None
    return [_layer(GPT2_NAMES, fields, kv_heads)] * fields.positive("n_layer")


def falcon(fields: Fields) -> Layers:
    """Falcon: the old block has one kv head (multi_query) or all; the new one has num_kv_heads.

    The new block repeats keys and values over all query heads before it caches them. Source: transformers 5.24,
    models/falcon/modeling_falcon.py (`_split_heads`).
    """
    layers, heads = fields.positive("num_hidden_layers"), fields.positive("num_attention_heads")
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
    layers, full = fields.positive("num_layers"), _layer(GPT_NEO_NAMES, fields)
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
    try:
        names = [name for pattern, repeats in fields.get("attention_types") for name in pattern * repeats]
    except (TypeError, ValueError):
        raise UnknownModelStructureError(
            f"attention_types is {fields.get('attention_types')!r}; a list of (pattern, repeats) is understood"
        ) from None
    if len(names) != layers:
        raise UnknownModelStructureError(f"attention_types describes {len(names)} layers, num_layers is {layers}")
    fields.ignore("attention_layers")
    return [fields.choice("attention_types", name, kinds) for name in names]
