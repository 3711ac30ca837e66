"""Decoders under the standard field names: num_key_value_heads, head_dim, sliding_window, layer_types.

Families differ in which layers slide when the file has no layer_types. Source: transformers 5.24, each family's
configuration_*.py (`__post_init__`) and cache_utils.get_layer_types_and_kwargs.
"""

from collections.abc import Callable, Sequence
from functools import partial

from offload_eval.bounds.layouts.fields import Fields
from offload_eval.core.shape import LayerGroup

Layers = list[LayerGroup]
"""One group of one layer, for every layer in turn."""


def attention_layer(fields: Fields) -> LayerGroup:
    """One layer of full attention; the head size is head_dim where the file or the class has one."""
    head_dim = _head_dim(fields)
    return LayerGroup(
        count=1, kv_heads=fields.positive("num_key_value_heads"), key_head_dim=head_dim, value_head_dim=head_dim
    )


def _head_dim(fields: Fields) -> int:
    if fields.get("head_dim") is not None:
        return fields.positive("head_dim")
    return fields.divided("hidden_size", "num_attention_heads")


def sliding(layer: LayerGroup, window_tokens: int) -> LayerGroup:
    """The layer with a window."""
    return LayerGroup(
        count=1,
        cache="sliding",
        kv_heads=layer.kv_heads,
        key_head_dim=layer.key_head_dim,
        value_head_dim=layer.value_head_dim,
        window_tokens=window_tokens,
    )


def full_only(fields: Fields) -> Layers:
    """Every layer keeps every token: Llama, Gemma, Granite, OLMo 2."""
    return repeated(fields, attention_layer(fields), "full_attention")


def repeated(fields: Fields, layer: LayerGroup, layer_type: str) -> Layers:
    """The layer num_hidden_layers times; layer_types, where it is there, may name `layer_type` alone."""
    layers = fields.layers()
    if fields.get("layer_types") is None:
        return [layer] * layers
    return [
        fields.choice("layer_types", kind, {layer_type: layer}) for kind in fields.per_layer("layer_types", layers)
    ]


def every_layer_slides(fields: Fields) -> Layers:
    """A sliding_window that is not null makes every layer slide: Mistral, Mixtral, Phi-3."""
    layers = fields.layers()
    if fields.get("layer_types") is not None:
        return _declared(fields, layers)
    if fields.get("sliding_window") is None:
        return [attention_layer(fields)] * layers
    return [sliding(attention_layer(fields), fields.window("sliding_window"))] * layers


def switched_window(fields: Fields) -> Layers:
    """As `every_layer_slides`, where use_sliding_window is true; else none does: Qwen3-MoE, SmolLM3."""
    if fields.flag("use_sliding_window"):
        return every_layer_slides(fields)
    fields.ignore("sliding_window")
    return full_only(fields)


def upper_layers_slide(fields: Fields) -> Layers:
    """Where use_sliding_window is true, as `late_layers_slide`; else none does: Qwen2, Qwen3, Qwen2.5-VL."""
    if fields.get("layer_types") is not None or fields.flag("use_sliding_window"):
        return late_layers_slide(fields)
    fields.ignore("sliding_window")
    return [attention_layer(fields)] * fields.layers()


def never_switched(fields: Fields) -> Layers:
    """Every layer is full unless layer_types says otherwise; use_sliding_window must be false: Qwen2-MoE.

    With the switch on, transformers lets every second layer below max_window_layers slide, unlike other Qwen models.
    """
    layers = fields.layers()
    if fields.get("layer_types") is not None:
        return _declared(fields, layers)
    if fields.flag("use_sliding_window"):
        raise fields.unknown("use_sliding_window", "false is understood for this family")
    fields.ignore("sliding_window")
    return [attention_layer(fields)] * layers


def late_layers_slide(fields: Fields) -> Layers:
    """A sliding_window that is not null makes layers from max_window_layers on slide: dots.llm1."""
    layers = fields.layers()
    if fields.get("layer_types") is not None:
        return _declared(fields, layers)
    if fields.get("sliding_window") is None:
        return [attention_layer(fields)] * layers
    if fields.get("max_window_layers") is None:
        raise fields.unknown("max_window_layers", "the number of the first sliding layer is needed")
    first = fields.count("max_window_layers")
    full, slides = attention_layer(fields), sliding(attention_layer(fields), fields.window("sliding_window"))
    return [slides if index >= first else full for index in range(layers)]


def one_full_in(period: int, period_name: str = "sliding_window_pattern") -> Callable[[Fields], Layers]:
    """A reader of families whose every `period`th layer is full and the others slide.

    The period is 2 for Gemma 2 and gpt-oss, 4 for Cohere 2, OLMo 3 and EXAONE 4, 6 for Gemma 3. The field
    `period_name` says otherwise: a number, or a string of L (sliding) and G (full) that repeats.
    """
    return partial(_one_full_in, period, period_name)


def _one_full_in(period: int, period_name: str, fields: Fields) -> Layers:
    layers = fields.layers()
    pattern = fields.get(period_name)
    if fields.get("layer_types") is not None:
        return _declared(fields, layers)
    if isinstance(pattern, str):
        slides = _lettered(fields, period_name, pattern, layers)
    else:
        every = fields.positive_or(period_name, period)
        slides = [bool((index + 1) % every) for index in range(layers)]
    return _mixed(fields, ["sliding_attention" if slide else "full_attention" for slide in slides])


def _lettered(fields: Fields, name: str, pattern: str, layers: int) -> list[bool]:
    if not pattern:
        raise fields.invalid(name, "an integer >= 1, or a text of L and G")
    if set(pattern) - {"L", "G"}:
        raise fields.unknown(name, "a number or L and G are understood")
    return [pattern[index % len(pattern)] == "L" for index in range(layers)]


def full_first_of(period: int) -> Callable[[Fields], Layers]:
    """A reader of families whose first of every `period` layers is full and the others slide: CWM, Granite SWA."""
    return partial(_full_first_of, period)


def _full_first_of(period: int, fields: Fields) -> Layers:
    layers = fields.layers()
    if fields.get("layer_types") is not None:
        return _declared(fields, layers)
    return _mixed(fields, ["sliding_attention" if index % period else "full_attention" for index in range(layers)])


def chunked_with_rope(fields: Fields) -> Layers:
    """Llama 4: layers with rotary embeddings (no_rope_layers is 1) see their chunk, those without see all."""
    layers = fields.layers()
    if fields.get("layer_types") is not None:
        return _declared(fields, layers)
    if fields.sequence("no_rope_layers"):
        kinds = {0: "full_attention", 1: "chunked_attention"}
        with_rope = fields.per_layer("no_rope_layers", layers)
        return _mixed(fields, [fields.choice("no_rope_layers", rope, kinds) for rope in with_rope])
    interval = fields.positive_or("no_rope_layer_interval", 4)
    return _mixed(
        fields, ["chunked_attention" if (index + 1) % interval else "full_attention" for index in range(layers)]
    )


def _declared(fields: Fields, layers: int) -> Layers:
    return _mixed(fields, fields.per_layer("layer_types", layers))


def _mixed(fields: Fields, layer_types: Sequence[str]) -> Layers:
    fields.ignore("sliding_window", "attention_chunk_size")
    full = attention_layer(fields)
    by_type = {"full_attention": full}
    if "sliding_attention" in layer_types:
        by_type["sliding_attention"] = sliding(full, fields.window("sliding_window"))
    if "chunked_attention" in layer_types:
        by_type["chunked_attention"] = LayerGroup(
            count=1,
            cache="chunked",
            kv_heads=full.kv_heads,
            key_head_dim=full.key_head_dim,
            value_head_dim=full.value_head_dim,
            window_tokens=fields.window("attention_chunk_size"),
        )
    return [fields.choice("layer_types", layer_type, by_type) for layer_type in layer_types]
