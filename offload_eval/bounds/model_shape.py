"""Reads a decoder's cache layout out of its config.json, and refuses what it does not understand.

The config is a file's content, or a complete dictionary as transformers' `PreTrainedConfig.to_dict()` gives it.
One reader a family is registered in `bounds/layouts/registry.py`.
"""

import difflib
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from offload_eval.bounds.layouts.class_defaults import CLASS_DEFAULTS
from offload_eval.bounds.layouts.fields import Fields, shown
from offload_eval.bounds.layouts.registry import NOT_IN_TRANSFORMERS, OUTER_READERS, READERS, READERS_OF_TWO_CACHES
from offload_eval.core.shape import ModelShape
from offload_eval.errors import UnknownModelStructureError

UNIFORM_FULL_ATTENTION: Final = frozenset(
    {"gemma", "granite", "llama", "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "smollm3"}
)
"""Families whose every layer caches every token, unless a window is set."""
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
_EXPERT_COUNT_NAMES: Final = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


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
        intermediate_size=_dense_intermediate_size(fields),
        max_position_embeddings=_optional(fields, _CONTEXT_NAMES),
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


def _dense_intermediate_size(fields: Fields) -> int | None:
    has_experts = any(fields.get(name) for name in _EXPERT_COUNT_NAMES)
    size = fields.get("intermediate_size")
    return size if isinstance(size, int) and size > 0 and not has_experts else None
