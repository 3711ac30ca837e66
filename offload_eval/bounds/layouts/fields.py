"""A config as the readers see it: class defaults filled in, every value checked, every read remembered."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from offload_eval.errors import UnknownModelStructureError

LAYOUT_FIELDS: Final = (
    "attention_chunk_size",
    "attention_types",
    "attn_layer_indices",
    "attn_layer_period",
    "attn_type_list",
    "block_configs",
    "compress_rates",
    "compress_ratios",
    "cross_attention_layers",
    "full_attention_interval",
    "global_head_dim",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "index_head_dim",
    "indexer_types",
    "is_encoder_decoder",
    "kv_lora_rank",
    "kv_sharing_modes",
    "layer_types",
    "layers_block_type",
    "linear_attn_config",
    "mamba_d_state",
    "multi_query",
    "new_decoder_architecture",
    "num_global_key_value_heads",
    "num_kv_shared_layers",
    "per_layer_config",
    "sliding_window",
    "sliding_window_pattern",
    "ssm_state_size",
    "state_size",
    "swa_head_dim",
    "swa_num_key_value_heads",
    "use_bidirectional_attention",
    "v_head_dim",
    "window_size",
)
"""Fields that change what is cached. One that is set, and that the family's reader never looked at, is refused."""


class Fields:
    """The fields of one decoder's config.

    Args:
        config: The decoder's config, as the file or `to_dict()` has it.
        class_defaults: Values of absent fields. A null field stays null: absent and null differ. A default that
            is the name of another field stands for that field's value.
    """

    def __init__(self, config: Mapping[str, Any], class_defaults: Mapping[str, Any]) -> None:
        self.config = config
        self._defaults = class_defaults
        self._seen: set[str] = set()

    def get(self, name: str) -> Any:
        """The field's value; None where it is absent or null."""
        self._seen.add(name)
        if name in self.config:
            return self.config[name]
        default = self._defaults.get(name)
        return self.get(default) if isinstance(default, str) and default in _REFERENCES else default

    def positive(self, name: str) -> int:
        """The field's value, which must be an int of at least 1."""
        value = self.get(name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UnknownModelStructureError(f"{name} is {value!r}; the KV arithmetic needs a positive int")
        return value

    def positive_or(self, name: str, fallback: int) -> int:
        """The field's value, or `fallback` where it is absent or null."""
        return fallback if self.get(name) is None else self.positive(name)

    def count(self, name: str) -> int:
        """The field's value, which may be 0; 0 where it is absent or null."""
        value = self.get(name)
        return 0 if value is None or (type(value) is int and value == 0) else self.positive(name)

    def flag(self, name: str) -> bool:
        """The field's value; false where it is absent or null."""
        value = self.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise UnknownModelStructureError(f"{name} is {value!r}; true or false is understood")

    def section(self, name: str) -> Mapping[str, Any] | None:
        """A nested dictionary; None where it is absent, null or empty."""
        value = self.get(name)
        if value and not isinstance(value, Mapping):
            raise UnknownModelStructureError(f"{name} is {value!r}; a dictionary is understood")
        return value or None

    def divided(self, whole: str, parts: str) -> int:
        """One field over another, without a remainder."""
        quotient, remainder = divmod(self.positive(whole), self.positive(parts))
        if remainder:
            raise UnknownModelStructureError(f"{whole} is {self.get(whole)}, which {parts} does not divide")
        return quotient

    def window(self, name: str) -> int:
        """The field's value as a window. transformers' cache of a window of 1 would keep every token."""
        tokens = self.positive(name)
        if tokens < 2:
            raise UnknownModelStructureError(f"{name} is {tokens}; a window of at least 2 tokens is understood")
        return tokens

    def choice(self, name: str, value: Any, allowed: Mapping[Any, Any]) -> Any:
        """What `allowed` gives for a value of the field."""
        if isinstance(value, list | dict) or value not in allowed:
            raise UnknownModelStructureError(
                f"{name} has {value!r}, which is not understood; known: {', '.join(map(str, allowed))}"
            )
        return allowed[value]

    def per_layer(self, name: str, layers: int) -> Sequence[Any]:
        """A list with one item a layer."""
        value = self.get(name)
        if not isinstance(value, list | tuple | str) or len(value) != layers:
            raise UnknownModelStructureError(f"{name} needs one entry for each of {layers} layers; it is {value!r}")
        return value

    def ignore(self, *names: str) -> None:
        """Says that these fields do not change this family's cache."""
        self._seen.update(names)

    def refuse_unread(self) -> None:
        """Refuses a layout field that is set and that no reader looked at.

        Raises:
            UnknownModelStructureError: The message names the field.
        """
        for name in LAYOUT_FIELDS:
            value = self.config.get(name)
            if not value or name in self._seen:
                continue
            if name == "sliding_window" and self.config.get("use_sliding_window") is False:
                continue
            raise UnknownModelStructureError(
                f"{name} = {value!r} describes a KV layout that model_type {self.config.get('model_type')!r} "
                "is not known to have"
            )


_REFERENCES: Final = frozenset({"num_attention_heads", "num_layers"})
