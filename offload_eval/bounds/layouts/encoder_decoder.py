"""Decoders that also cache keys and values of encoder tokens.

Source: transformers 5.24, models/t5, models/bart, models/whisper, models/mllama; cache_utils.EncoderDecoderCache.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from offload_eval.bounds.layouts.attention import Layers, attention_layer
from offload_eval.bounds.layouts.fields import Fields
from offload_eval.core.shape import LayerGroup


def t5(fields: Fields) -> Layers:
    """T5: heads * d_kv, which is not d_model; the request decides the encoder's length."""
    width = fields.positive("d_kv")
    return _self_and_cross(fields, fields.layers("num_decoder_layers"), fields.positive("num_heads"), width, None)


def bart(fields: Fields) -> Layers:
    """BART: the decoder's own layers and heads."""
    return _decoder(fields, None)


def whisper(fields: Fields) -> Layers:
    """Whisper: every request has max_source_positions encoder frames."""
    return _decoder(fields, fields.positive("max_source_positions"))


def _decoder(fields: Fields, encoder_tokens: int | None) -> Layers:
    heads = fields.positive("decoder_attention_heads")
    width = fields.divided("d_model", "decoder_attention_heads")
    return _self_and_cross(fields, fields.layers("decoder_layers"), heads, width, encoder_tokens)


def _self_and_cross(fields: Fields, layers: int, heads: int, head_dim: int, encoder_tokens: int | None) -> Layers:
    fields.ignore("is_encoder_decoder")
    own = LayerGroup(count=1, kv_heads=heads, key_head_dim=head_dim, value_head_dim=head_dim)
    cross = msgspec.structs.replace(own, cache="cross", encoder_tokens=encoder_tokens)
    return [own, cross] * layers


def llama_vision(fields: Fields) -> Layers:
    """Llama 3.2 Vision: cross_attention_layers hold the vision tokens alone, none for a text-only prompt."""
    return _llama_vision(fields, 0)


def llama_vision_with_image(fields: Fields, outer: Mapping[str, Any]) -> Layers:
    """The same, for a prompt with one image: max_num_tiles * ((image_size / patch_size)^2 + 1) vision tokens.

    Args:
        fields: The text config.
        outer: The file that holds the text config and the vision config.
    """
    vision = Fields(Fields(outer).section("vision_config") or {}, section="vision_config")
    patches = vision.divided("image_size", "patch_size")
    return _llama_vision(fields, vision.positive("max_num_tiles") * (patches**2 + 1))


def _llama_vision(fields: Fields, vision_tokens: int) -> Layers:
    own = attention_layer(fields)
    cross = msgspec.structs.replace(own, cache="cross", encoder_tokens=vision_tokens)
    layers = fields.layers()
    cross_layers = fields.layer_numbers("cross_attention_layers", layers)
    if cross_layers is None:
        raise fields.unknown("cross_attention_layers", "numbers of layers are needed")
    return [cross if index in cross_layers else own for index in range(layers)]
