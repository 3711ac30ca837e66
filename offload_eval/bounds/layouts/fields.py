"""A config as the readers see it: class defaults filled in, every value checked, every read remembered.

A value that no config may have (a wrong type, a count below 1, a list of the wrong length) is bad input. A field
that is absent, or that says something this arithmetic does not know, is an unknown structure.
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from offload_eval.errors import InputError, UnknownModelStructureError

LAYOUT_FIELDS: Final = (
    "attention_chunk_size",
    "attention_types",
    "attention_window_size",
    "attn_config",
    "attn_layer_indices",
    "attn_layer_period",
    "attn_type_list",
    "block_configs",
    "block_types",
    "compress_rates",
    "compress_ratios",
    "conv_L_cache",
    "cross_attention_layers",
    "full_attention_interval",
    "full_attn_idxs",
    "global_attn_every_n_layers",
    "global_head_dim",
    "hybrid_layer_ids",
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
MAX_LAYERS: Final = 10_000
"""More layers than any model has; a larger count is a mistake."""
MAX_COUNT: Final = 10**9
"""More heads, values or tokens than any model has; a larger count is a mistake."""
_SHOW: Final = reprlib.Repr()
_SHOW.maxlevel, _SHOW.maxstring, _SHOW.maxother = 3, 80, 80


def shown(value: Any) -> str:
    """The value on one line, shortened; a deeply nested one as well."""
    return _SHOW.repr(value)


class Fields:
    """The fields of one decoder's config.

    Args:
        config: The decoder's config, as the file or `to_dict()` has it.
        class_defaults: Values of absent fields. A null field stays null: absent and null differ. A default that
            is the name of another field stands for that field's value.
        section: The name of the object that holds the fields, where it is not the decoder's own; for messages.
    """

    def __init__(
        self, config: Mapping[str, Any], class_defaults: Mapping[str, Any] | None = None, section: str = ""
    ) -> None:
        self.config = config
        self._defaults = class_defaults or {}
        self._prefix = f"{section}." if section else ""
        self._seen: set[str] = set()

    def get(self, name: str) -> Any:
        """The field's value; None where it is absent or null."""
        self._seen.add(name)
        if name in self.config:
            return self.config[name]
        default = self._defaults.get(name)
        return self.get(default) if isinstance(default, str) and default in _REFERENCES else default

    def invalid(self, name: str, allowed: str) -> InputError:
        """The refusal of a value that no config may have."""
        return InputError(f"{self._prefix}{name} is {shown(self.get(name))}; allowed: {allowed}")

    def unknown(self, name: str, understood: str) -> UnknownModelStructureError:
        """The refusal of an absent value, or of one that says what this arithmetic does not know."""
        return UnknownModelStructureError(f"{self._prefix}{name} is {shown(self.get(name))}; {understood}")

    def positive(self, name: str, at_most: int = MAX_COUNT) -> int:
        """The field's value, which must be an int of at least 1."""
        value = self.get(name)
        if value is None:
            raise self.unknown(name, "the KV arithmetic needs an integer >= 1")
        if type(value) is not int or not 1 <= value <= at_most:
            raise self.invalid(name, f"an integer from 1 to {at_most}" if _too_large(value) else "an integer >= 1")
        return value

    def layers(self, name: str = "num_hidden_layers") -> int:
        """A number of layers."""
        return self.positive(name, MAX_LAYERS)

    def positive_or(self, name: str, fallback: int) -> int:
        """The field's value, or `fallback` where it is absent or null."""
        return fallback if self.get(name) is None else self.positive(name)

    def count(self, name: str) -> int:
        """The field's value, which may be 0; 0 where it is absent or null."""
        value = self.get(name)
        if value is None or (type(value) is int and value == 0):
            return 0
        if type(value) is not int or value < 0:
            raise self.invalid(name, "an integer >= 0")
        return self.positive(name)

    def flag(self, name: str) -> bool:
        """The field's value; false where it is absent or null."""
        value = self.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        raise self.invalid(name, "true or false")

    def section(self, name: str) -> Mapping[str, Any] | None:
        """A nested dictionary; None where it is absent, null or empty."""
        value = self.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.invalid(name, "an object")
        return value or None

    def divided(self, whole: str, parts: str) -> int:
        """One field over another, without a remainder."""
        quotient, remainder = divmod(self.positive(whole), self.positive(parts))
        if remainder:
            raise self.invalid(whole, f"a multiple of {parts} ({self.get(parts)})")
        return quotient

    def window(self, name: str) -> int:
        """The field's value as a window. transformers' cache of a window of 1 would keep every token."""
        tokens = self.positive(name)
        if tokens < 2:
            raise self.unknown(name, "a window of at least 2 tokens is understood")
        return tokens

    def choice(self, name: str, value: Any, allowed: Mapping[Any, Any]) -> Any:
        """What `allowed` gives for a value of the field."""
        known = ", ".join(map(str, allowed))
        if type(value) not in {type(key) for key in allowed}:
            raise InputError(f"{self._prefix}{name} has {shown(value)}; allowed: one of {known}")
        if value not in allowed:
            raise UnknownModelStructureError(
                f"{self._prefix}{name} has {shown(value)}, which is not understood; known: {known}"
            )
        return allowed[value]

    def sequence(self, name: str) -> Sequence[Any] | None:
        """A list; None where it is absent or null."""
        value = self.get(name)
        if value is None or isinstance(value, list | tuple):
            return value
        raise self.invalid(name, "a list")

    def per_layer(self, name: str, layers: int) -> Sequence[Any]:
        """A list with one item a layer."""
        value = self.sequence(name)
        if value is None:
            raise self.unknown(name, f"the KV arithmetic needs a list with one entry for each of {layers} layers")
        if len(value) != layers:
            raise InputError(
                f"{self._prefix}{name} has {len(value)} entries; allowed: one entry for each of {layers} layers"
            )
        return value

    def layer_numbers(self, name: str, layers: int, first: int = 0) -> frozenset[int] | None:
        """A list of layers' numbers, the lowest of which is `first`; None where it is absent or null."""
        value, last = self.sequence(name), first + layers - 1
        if value is None:
            return None
        if not all(type(number) is int and first <= number <= last for number in value):
            raise self.invalid(name, f"a list of layers' numbers from {first} to {last}")
        return frozenset(value)

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
                f"{name} = {shown(value)} describes a KV layout that model_type "
                f"{shown(self.config.get('model_type'))} is not known to have"
            )


def _too_large(value: Any) -> bool:
    return type(value) is int and value > 1


_REFERENCES: Final = frozenset({"num_attention_heads", "num_layers"})
"""What the name of another field is, among defaults."""
