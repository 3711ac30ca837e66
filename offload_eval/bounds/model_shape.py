"""Reads a decoder's cache layout out of its config.json, and refuses what it does not understand.

The config is a file's content, or a complete dictionary as transformers' `PreTrainedConfig.to_dict()` gives it.
One reader a family is registered in `bounds/layouts/registry.py`.
"""

import difflib
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from offload_eval.bounds.layouts import encoder_decoder
from offload_eval.bounds.layouts.class_defaults import CLASS_DEFAULTS
from offload_eval.bounds.layouts.fields import Fields, shown
from offload_eval.bounds.layouts.registry import NOT_IN_TRANSFORMERS, OUTER_READERS, READERS, READERS_OF_TWO_CACHES
from offload_eval.core.shape import ModelShape
from offload_eval.errors import UnknownModelStructureError

UNIFORM_FULL_ATTENTION: Final = frozenset(
    {"gemma", "granite", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"}
)
"""Families whose every layer caches every token, unless a window is set."""
GATED_MLPS: Final = UNIFORM_FULL_ATTENTION - {"mixtral"} | {
    "cohere",
    "cohere2",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "glm4",
    "olmo3",
    "qwen2_5_vl",
    "qwen2_5_vl_text",
    "qwen3_vl_text",
    "seed_oss",
}
"""Families whose every layer has a gated MLP of intermediate_size."""
_HIDDEN_SIZE_NAMES: Final = ("hidden_size", "n_embd", "d_model", "model_dim")
_CONTEXT_NAMES: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_context_length",
    "model_max_length",
    "max_target_positions",
)


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """Builds the cache layout of a model.

    Args:
        config: The model's config; a nested `text_config` is followed.

    Returns:
        Layers that cache alike in one group, in the order they first appear.

    Raises:
        UnknownModelStructureError: The model_type or a field describes a layout this arithmetic does not know, or a
            needed field is missing; the message names it.
        InputError: A field has a value that no config may have; the message names it.
    """
    text = Fields(config, {}).section("text_config") or config
    model_type = _reader_name(config, text)
    fields = Fields(text, CLASS_DEFAULTS.get(model_type, {}))
    outer_reader = OUTER_READERS.get(str(config.get("model_type")))
    layers = outer_reader(fields, config) if outer_reader and text is not config else READERS[model_type](fields)
    fields.refuse_unread()
    groups = tuple(dict.fromkeys(layers))
    counts = Counter(layers)
    return ModelShape(
        model_type=text.get("model_type") or model_type,
        layer_groups=tuple(msgspec.structs.replace(group, count=counts[group]) for group in groups),
        layer_order=tuple(map(groups.index, layers)),
        caches_per_layer=2 if READERS[model_type] in READERS_OF_TWO_CACHES else 1,
        vocab_size=_optional(fields, ("vocab_size",)),
        hidden_size=fields.positive(_first_present(fields, _HIDDEN_SIZE_NAMES) or "hidden_size"),
        gated_mlp_size=_gated_mlp_size(fields, model_type),
        max_position_embeddings=_context(fields, model_type),
        in_transformers=model_type not in NOT_IN_TRANSFORMERS,
    )


def _reader_name(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """The decoder's model_type; a nested one that does not say is the outer one's `_text`."""
    model_type = text.get("model_type") or f"{config.get('model_type')}_text"
    if text is config:
        model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in READERS:
        near = difflib.get_close_matches(str(model_type), READERS, n=3)
        known = f"near: {', '.join(near)}" if near else "none is near"
        raise UnknownModelStructureError(
            f"model_type {shown(model_type)} has no known KV layout; {known} ({len(READERS)} are known)"
        )
    return model_type


def _first_present(fields: Fields, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if fields.get(name) is not None), None)


def _optional(fields: Fields, names: tuple[str, ...]) -> int | None:
    name = _first_present(fields, names)
    return None if name is None else fields.positive(name)


def _gated_mlp_size(fields: Fields, model_type: str) -> int | None:
    if model_type not in GATED_MLPS or fields.get("intermediate_size") is None:
        return None
    return fields.positive("intermediate_size")


def _context(fields: Fields, model_type: str) -> int | None:
    """The longest sequence: with YaRN its original context times its factor. T5's positions are relative."""
    if READERS[model_type] is encoder_decoder.t5:
        return None
    stated = _optional(fields, _CONTEXT_NAMES)
    rope = fields.get("rope_scaling") or fields.get("rope_parameters")
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) != "yarn":
        return stated
    original, factor = rope.get("original_max_position_embeddings") or stated, rope.get("factor")
    if type(original) is not int or not isinstance(factor, int | float) or not 0 < original * factor < 2**31:
        return stated
    return max(stated or 0, int(original * factor))
