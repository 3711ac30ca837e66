"""Layers with a constant state: Mamba 1 and 2, gated delta nets, KDA, lightning attention, and their hybrids.

Source: transformers 5.24, the modeling file of each family; conv channels and state sizes as its mixer builds them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from offload_eval.bounds.layouts.attention import Layers, attention_layer
from offload_eval.bounds.layouts.fields import Fields
from offload_eval.bounds.layouts.latent import latent_layer
from offload_eval.core.shape import LayerGroup, LinearState
from offload_eval.errors import InputError

_STATE_BITS: Final = {None: None, "float32": 32, "bfloat16": 16, "float16": 16}
_LAYER_TYPES: Final = {
    "attention": "full",
    "full_attention": "full",
    "mamba": "linear",
    "linear_attention": "linear",
    "moe": "none",
    "mlp": "none",
}
NO_CACHE: Final = LayerGroup(count=1, cache="none")


def state_only(state: LinearState) -> LayerGroup:
    """A layer that holds a state and no rows."""
    return LayerGroup(count=1, cache="linear_state", state=state)


def mamba1(fields: Fields) -> Layers:
    """Mamba, Falcon-Mamba: intermediate_size decides, expand only where it is absent."""
    channels = fields.positive_or(
        "intermediate_size", fields.positive_or("expand", 2) * fields.positive("hidden_size")
    )
    state = LinearState(
        conv_channels=channels,
        conv_kernel=fields.positive("conv_kernel"),
        recurrent_values=channels * fields.positive("state_size"),
    )
    return [state_only(state)] * fields.layers()


def mamba2(fields: Fields) -> Layers:
    """Mamba 2: the convolution runs over the inner channels and both groups' B and C."""
    inner, size = fields.positive("num_heads") * fields.positive("head_dim"), fields.positive("state_size")
    state = LinearState(
        conv_channels=inner + 2 * fields.positive("n_groups") * size,
        conv_kernel=fields.positive("conv_kernel"),
        recurrent_values=inner * size,
    )
    return [state_only(state)] * fields.layers()


def jamba(fields: Fields) -> Layers:
    """Jamba: one attention layer in attn_layer_period, Mamba 1 elsewhere."""
    period = fields.positive("attn_layer_period")
    if fields.get("attn_layer_offset") is None:
        raise fields.unknown("attn_layer_offset", "the number of the first attention layer is needed")
    offset = fields.count("attn_layer_offset")
    if offset >= period:
        raise fields.invalid("attn_layer_offset", f"an integer from 0 to {period - 1}")
    _refuse_window(fields)
    channels, size = fields.positive("mamba_expand") * fields.positive("hidden_size"), fields.positive("mamba_d_state")
    state = LinearState(
        conv_channels=channels, conv_kernel=fields.positive("mamba_d_conv"), recurrent_values=channels * size
    )
    full, linear = attention_layer(fields), state_only(state)
    layers = fields.layers()
    fields.ignore("layers_block_type", "layer_types")
    return [full if index % period == offset else linear for index in range(layers)]


def granite_hybrid(fields: Fields) -> Layers:
    """Granite 4: layer_types (layers_block_type) name attention and Mamba 2 layers."""
    return _by_type(fields, attention_layer(fields), _prefixed_mamba2(fields))


def _prefixed_mamba2(fields: Fields) -> LinearState:
    heads, size = fields.positive("mamba_n_heads"), fields.positive("mamba_d_state")
    inner = fields.positive_or("mamba_d_ssm", fields.positive_or("mamba_expand", 2) * fields.positive("hidden_size"))
    if inner % heads:
        raise fields.invalid("mamba_n_heads", f"a divisor of the {inner} inner channels")
    if fields.get("mamba_d_head") != "auto" and fields.positive_or("mamba_d_head", inner // heads) * heads != inner:
        raise fields.invalid("mamba_d_head", f"auto or {inner // heads} ({inner} inner channels over {heads} heads)")
    return LinearState(
        conv_channels=inner + 2 * fields.positive("mamba_n_groups") * size,
        conv_kernel=fields.positive("mamba_d_conv"),
        recurrent_values=inner * size,
    )


def bamba(fields: Fields) -> Layers:
    """Bamba: attention on the layers that attn_layer_indices numbers, Mamba 2 elsewhere."""
    fields.ignore("layers_block_type", "layer_types")
    layers, full = fields.layers(), attention_layer(fields)
    numbers = fields.layer_numbers("attn_layer_indices", layers) or frozenset()
    linear = state_only(_prefixed_mamba2(fields))
    return [full if index in numbers else linear for index in range(layers)]


def zamba2(fields: Fields) -> Layers:
    """Zamba 2: Mamba 2 in every layer, and on hybrid ones a shared attention that reads twice the hidden size."""
    inner, size = fields.positive("mamba_expand") * fields.positive("hidden_size"), fields.positive("mamba_d_state")
    state = LinearState(
        conv_channels=inner + 2 * fields.positive("mamba_ngroups") * size,
        conv_kernel=fields.positive("mamba_d_conv"),
        recurrent_values=inner * size,
    )
    return _with_shared_attention(fields, state)


def zamba(fields: Fields) -> Layers:
    """Zamba: as Zamba 2, with Mamba 1, whose convolution runs over the inner channels alone."""
    inner = fields.positive("mamba_expand") * fields.positive("hidden_size")
    state = LinearState(
        conv_channels=inner,
        conv_kernel=fields.positive("mamba_d_conv"),
        recurrent_values=inner * fields.positive("mamba_d_state"),
    )
    fields.ignore("attn_layer_period")
    return _with_shared_attention(fields, state)


def _with_shared_attention(fields: Fields, state: LinearState) -> Layers:
    heads, hidden_size = fields.positive("num_attention_heads"), fields.positive("hidden_size")
    if 2 * hidden_size % heads:
        raise fields.invalid("hidden_size", f"a size whose double num_attention_heads ({heads}) divides")
    head_dim = 2 * hidden_size // heads
    if fields.positive_or("attention_head_dim", head_dim) != head_dim:
        raise fields.unknown("attention_head_dim", f"{head_dim}, twice the hidden size over the heads, is understood")
    hybrid = LayerGroup(
        count=1,
        kv_heads=fields.positive("num_key_value_heads"),
        key_head_dim=head_dim,
        value_head_dim=head_dim,
        state=state,
    )
    fields.ignore("hybrid_layer_ids")
    name, declared = _declared_types(fields)
    kinds = {"hybrid": hybrid, "mamba": state_only(state), "linear_attention": state_only(state)}
    return [fields.choice(name, layer_type, kinds) for layer_type in declared]


def short_conv(fields: Fields) -> Layers:
    """LFM2: attention and short convolutions over the hidden size, named by layer_types or full_attn_idxs."""
    layers, full = fields.layers(), attention_layer(fields)
    conv = state_only(
        LinearState(conv_channels=fields.positive("hidden_size"), conv_kernel=fields.positive("conv_L_cache"))
    )
    numbers = fields.layer_numbers("full_attn_idxs", layers)
    if fields.get("layer_types") is None and numbers is not None:
        return [full if index in numbers else conv for index in range(layers)]
    kinds = {"full_attention": full, "conv": conv}
    return [fields.choice("layer_types", kind, kinds) for kind in fields.per_layer("layer_types", layers)]


def falcon_h1(fields: Fields) -> Layers:
    """Falcon-H1: every layer has attention and Mamba 2 side by side."""
    if fields.get("attn_layer_indices") is not None:
        raise fields.unknown("attn_layer_indices", "null (attention in every layer) is understood")
    layer = msgspec.structs.replace(attention_layer(fields), state=_prefixed_mamba2(fields))
    return [layer] * fields.layers()


def gated_delta_net(fields: Fields) -> Layers:
    """Qwen3-Next, Qwen3.5: one full layer in full_attention_interval, gated delta nets elsewhere."""
    keys = fields.positive("linear_num_key_heads") * fields.positive("linear_key_head_dim")
    values = fields.positive("linear_num_value_heads") * fields.positive("linear_value_head_dim")
    state = LinearState(
        conv_channels=2 * keys + values,
        conv_kernel=fields.positive("linear_conv_kernel_dim"),
        recurrent_values=values * fields.positive("linear_key_head_dim"),
        ideal_recurrent_bits=_state_bits(fields, "mamba_ssm_dtype"),
    )
    if fields.get("layer_types") is not None:
        fields.ignore("full_attention_interval")
        return _by_type(fields, attention_layer(fields), state)
    layers, interval = fields.layers(), fields.positive("full_attention_interval")
    full, linear = attention_layer(fields), state_only(state)
    return [linear if (index + 1) % interval else full for index in range(layers)]


def kimi_linear(fields: Fields) -> Layers:
    """Kimi Linear, Kimi K3: MLA layers, and KDA layers whose state is float32 in engines as well.

    linear_attn_config numbers its layers from 1; a converted config has layer_types and linear_* fields.
    """
    given: Mapping[str, Any] = fields.section("linear_attn_config") or {
        "num_heads": fields.positive("linear_num_heads"),
        "head_dim": fields.positive("linear_head_dim"),
        "short_conv_kernel_size": fields.positive("linear_conv_kernel_dim"),
    }
    section = Fields(given, section="linear_attn_config")
    heads, head_dim, kernel = (section.positive(name) for name in ("num_heads", "head_dim", "short_conv_kernel_size"))
    state = LinearState(
        conv_channels=3 * heads * head_dim,
        conv_kernel=kernel,
        recurrent_values=heads * head_dim * head_dim,
        ideal_recurrent_bits=32,
    )
    if fields.get("layer_types") is not None:
        return _by_type(fields, latent_layer(fields), state)
    full, linear = latent_layer(fields), state_only(state)
    return [full if is_full else linear for is_full in _numbered_from_1(section, fields.layers())]


def _numbered_from_1(section: Fields, layers: int) -> list[bool]:
    full, linear = (section.layer_numbers(name, layers, first=1) for name in ("full_attn_layers", "kda_layers"))
    if full is None or linear is None:
        raise section.unknown("kda_layers" if linear is None else "full_attn_layers", "numbers of layers are needed")
    if full & linear or full | linear != set(range(1, layers + 1)):
        raise InputError(f"linear_attn_config: full_attn_layers and kda_layers do not share out layers 1 to {layers}")
    return [number in full for number in range(1, layers + 1)]


def minimax(fields: Fields) -> Layers:
    """MiniMax-Text: lightning attention keeps head_dim * head_dim a head, in the model's dtype."""
    _refuse_window(fields)
    heads, full = fields.positive("num_attention_heads"), attention_layer(fields)
    state = LinearState(recurrent_values=heads * full.key_head_dim**2, transformers_recurrent_bits=None)
    if fields.get("layer_types") is not None:
        fields.ignore("attn_type_list")
        return _by_type(fields, full, state)
    kinds = {0: state_only(state), 1: full}
    layers = fields.layers()
    return [fields.choice("attn_type_list", kind, kinds) for kind in fields.per_layer("attn_type_list", layers)]


def nemotron_h(fields: Fields) -> Layers:
    """Nemotron-H: hybrid_override_pattern has * for attention, M for Mamba 2, - and E where nothing is cached."""
    _refuse_window(fields)
    inner = fields.positive("mamba_num_heads") * fields.positive("mamba_head_dim")
    size = fields.positive("ssm_state_size")
    state = LinearState(
        conv_channels=inner + 2 * fields.positive("n_groups") * size,
        conv_kernel=fields.positive("conv_kernel"),
        recurrent_values=inner * size,
        ideal_recurrent_bits=_state_bits(fields, "mamba_ssm_cache_dtype"),
    )
    pattern = fields.get("hybrid_override_pattern")
    if pattern is None:
        return _by_type(fields, attention_layer(fields), state)
    if not isinstance(pattern, str) or not pattern:
        raise fields.invalid("hybrid_override_pattern", "a text of *, M, - and E")
    fields.ignore("layers_block_type", "layer_types")
    kinds = {"*": attention_layer(fields), "M": state_only(state), "-": NO_CACHE, "E": NO_CACHE}
    if fields.positive_or("num_hidden_layers", len(pattern)) != len(pattern):
        raise fields.invalid("num_hidden_layers", f"{len(pattern)}, the length of hybrid_override_pattern, or null")
    return [fields.choice("hybrid_override_pattern", kind, kinds) for kind in pattern]


def _state_bits(fields: Fields, name: str) -> int | None:
    bits: int | None = fields.choice(name, fields.get(name), _STATE_BITS)
    return bits


def _refuse_window(fields: Fields) -> None:
    if fields.get("sliding_window") is not None:
        raise fields.unknown("sliding_window", "null is understood here")


def _by_type(fields: Fields, full: LayerGroup, state: LinearState) -> Layers:
    kinds = {"full": full, "linear": state_only(state), "none": NO_CACHE}
    name, declared = _declared_types(fields)
    return [kinds[fields.choice(name, layer_type, _LAYER_TYPES)] for layer_type in declared]


def _declared_types(fields: Fields) -> tuple[str, Sequence[str]]:
    name = "layers_block_type" if fields.get("layer_types") is None else "layer_types"
    listed = fields.sequence(name)
    layers = len(listed) if fields.get("num_hidden_layers") is None and listed else fields.layers()
    return name, fields.per_layer(name, layers)
