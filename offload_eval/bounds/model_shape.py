"""Reads a decoder's cache layout out of its config, and refuses what it does not understand.

The fields are transformers' (5.24); the config is a complete dictionary, class defaults filled in, as
`PreTrainedConfig.to_dict()` gives it.
"""

from collections.abc import Mapping
from typing import Any, Final

from offload_eval.core.shape import LayerGroup, ModelShape
from offload_eval.errors import UnknownModelStructureError

UNIFORM_FULL_ATTENTION: Final = frozenset(
    {"gemma", "granite", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"}
)
"""Families whose every layer caches every token under the fields below; each was compared with its real cache."""

_OTHER_LAYOUTS: Final = ("kv_lora_rank", "attention_chunk_size", "num_kv_shared_layers", "layers_block_type")


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Builds the shape of a model whose layers all keep full attention.

    Args:
        config: The model's complete config; a nested `text_config` is followed.

    Returns:
        One layer group.

    Raises:
        UnknownModelStructureError: A field describes a layout this arithmetic does not know, or a needed
            field is missing; the message names it.
    """
    text = config.get("text_config") or config
    _refuse_other_layouts(text)
    heads = _positive(text, "num_attention_heads")
    hidden_size = _positive(text, "hidden_size")
    head_dim = text.get("head_dim") or hidden_size // heads
    group = LayerGroup(
        count=_positive(text, "num_hidden_layers"),
        kv_heads=_positive(text, "num_key_value_heads"),
        key_head_dim=head_dim,
        value_head_dim=head_dim,
    )
    return ModelShape(
        model_type=text["model_type"],
        layer_groups=(group,),
        vocab_size=_positive(text, "vocab_size"),
        hidden_size=hidden_size,
        max_position_embeddings=text.get("max_position_embeddings"),
    )


def _refuse_other_layouts(text: Mapping[str, Any]) -> None:
    model_type = text.get("model_type")
    if model_type not in UNIFORM_FULL_ATTENTION:
        known = ", ".join(sorted(UNIFORM_FULL_ATTENTION))
        raise UnknownModelStructureError(f"model_type {model_type!r} has no known KV layout; known: {known}")
    for name in _OTHER_LAYOUTS:
        if text.get(name):
            raise UnknownModelStructureError(f"{name} = {text[name]!r} describes a KV layout that is not known here")
    layer_types = set(text.get("layer_types") or ())
    if layer_types - {"full_attention"}:
        raise UnknownModelStructureError(f"layer_types has {sorted(layer_types)}; known: full_attention alone")
    window = text.get("sliding_window")
    if window is not None and not layer_types and text.get("use_sliding_window", True):
        raise UnknownModelStructureError(f"sliding_window = {window}: sliding layers are not known here")


def _positive(text: Mapping[str, Any], name: str) -> int:
    value = text.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnknownModelStructureError(f"{name} is {value!r}; the KV arithmetic needs a positive int")
    return value
