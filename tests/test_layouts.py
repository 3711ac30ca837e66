"""What the layout readers refuse, what absent fields mean, and what converted configs give."""

import contextlib
import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from offload_eval.bounds.kv_footprint import ideal_kv_bytes, transformers_kv_bytes
from offload_eval.bounds.layouts.class_defaults import CLASS_DEFAULTS
from offload_eval.bounds.layouts.registry import NOT_IN_TRANSFORMERS, READERS
from offload_eval.bounds.model_shape import model_shape
from offload_eval.core.shape import LayerGroup
from offload_eval.errors import InputError, OffloadEvalError, UnknownModelStructureError

MODELS = {
    model["name"].split("/")[-1]: model["config"]
    for model in json.loads((Path(__file__).parent / "data" / "kv_models.json").read_text())["models"]
}
LLAMA = "Llama-3.1-8B"


def changed(name: str, **changes: Any) -> dict[str, Any]:
    """The model's config with decoder fields changed; ... removes one."""
    config = copy.deepcopy(MODELS[name])
    decoder = config.get("text_config", config)
    decoder.update(changes)
    for field in [field for field, value in changes.items() if value is ...]:
        del decoder[field]
    return config


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "model_type None"),
        (changed(LLAMA, model_type="brand_new"), "model_type 'brand_new'"),
        (changed(LLAMA, model_type=...), "model_type None"),
        (changed(LLAMA, num_hidden_layers=...), "num_hidden_layers is None"),
        (changed(LLAMA, sliding_window=4096), "sliding_window = 4096"),
        (changed(LLAMA, per_layer_config={"0": {"head_dim": 64}}), "per_layer_config"),
        (changed(LLAMA, v_head_dim=64), "v_head_dim = 64"),
        (changed(LLAMA, hybrid_override_pattern="M*"), "hybrid_override_pattern"),
        (changed(LLAMA, is_encoder_decoder=True), "is_encoder_decoder"),
        (changed("Mistral-7B-v0.1", sliding_window=1), "sliding_window is 1"),
        (changed("Mistral-7B-v0.1", attention_chunk_size=64), "attention_chunk_size"),
        (
            changed("Qwen3-8B", use_sliding_window=True, max_window_layers=None, sliding_window=8),
            "max_window_layers is",
        ),
        (changed("gpt-oss-20b", layer_types=["full_attention", "psychic"] * 12), "layer_types has 'psychic'"),
        (changed("c4ai-command-r7b-12-2024", sliding_window_pattern="LLX"), "sliding_window_pattern is 'LLX'"),
        (changed("gemma-3-4b-it", use_bidirectional_attention=True), "use_bidirectional_attention"),
        (changed("gemma-4-E4B-it", use_bidirectional_attention="all"), "use_bidirectional_attention is 'all'"),
        (changed("gemma-4-E4B-it", per_layer_config={"5": {"rank": 1}}), "per_layer_config has rank"),
        (changed("gemma-4-E4B-it", layer_types=["sliding_attention"] * 42), "last layer must be full_attention"),
        (changed("DeepSeek-V3", kv_lora_rank=...), "kv_lora_rank is None"),
        (changed("DeepSeek-V3", index_head_dim=128), "index_head_dim = 128"),
        (changed("DeepSeek-V3", layer_types=["sliding_attention"] * 61), "layer_types has 'sliding_attention'"),
        (changed("GLM-5", indexer_types=["half"] * 78), "indexer_types has 'half'"),
        (changed("DeepSeek-V4-Flash", compress_ratios=...), "compress_ratios is None"),
        (changed("DeepSeek-V4-Flash", compress_ratios=[0, 16] * 22), "compress_ratios has 16"),
        (changed("DeepSeek-V4-Flash", num_key_value_heads=2), "num_key_value_heads"),
        (changed("AI21-Jamba-1.5-Mini", sliding_window=4096), "sliding_window is 4096"),
        (changed("AI21-Jamba-1.5-Mini", attn_layer_offset=...), "attn_layer_offset is None"),
        (changed("Falcon-H1-7B-Instruct", attn_layer_indices=[0]), "attn_layer_indices"),
        (changed("Qwen3.5-27B", mamba_ssm_dtype="int3"), "mamba_ssm_dtype has 'int3'"),
        (changed("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", hybrid_override_pattern="M?" * 26), "has '?'"),
        (changed("Kimi-Linear-48B-A3B-Instruct", linear_attn_config={}), "linear_num_heads"),
        (changed("gpt-neo-1.3B", attention_types=[[["global", "far"], 12]]), "attention_types has 'far'"),
        (
            changed("mpt-7b", attn_config={"attn_type": "multiquery_attention"}),
            "attn_config.attn_type has 'multiquery",
        ),
        (changed("mpt-7b", attn_config={"kv_n_heads": 8}), "attn_config.kv_n_heads is 8"),
        (changed("Llama-3_3-Nemotron-Super-49B-v1", block_configs=[{}] * 80), "block_configs"),
        (
            changed("Llama-3_3-Nemotron-Super-49B-v1", block_configs=[{"attention": {"window_length": 8}}] * 80),
            "block_configs.attention.window_length is 8",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(config: dict[str, Any], named: str):
    with pytest.raises(UnknownModelStructureError, match=re.escape(named)):
        model_shape(config)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (changed(LLAMA, num_hidden_layers=-1), "num_hidden_layers is -1; allowed: an integer >= 1"),
        (changed(LLAMA, num_hidden_layers=True), "num_hidden_layers is True"),
        (
            changed(LLAMA, num_hidden_layers=10**9),
            "num_hidden_layers is 1000000000; allowed: an integer from 1 to 10000",
        ),
        (changed(LLAMA, num_attention_heads="32"), "num_attention_heads is '32'"),
        (changed(LLAMA, num_key_value_heads=8.0), "num_key_value_heads is 8.0"),
        (changed(LLAMA, hidden_size=4097), "hidden_size is 4097; allowed: a multiple of num_attention_heads (32)"),
        (changed(LLAMA, layer_types=[["full_attention"]] * 32), "layer_types has ['full_attention']"),
        (changed(LLAMA, layer_types="full_attention"), "layer_types is 'full_attention'; allowed: a list"),
        (changed("Qwen3-8B", use_sliding_window="yes"), "use_sliding_window is 'yes'; allowed: true or false"),
        (
            changed("Qwen3-8B", use_sliding_window=True, sliding_window=8, max_window_layers=-1),
            "max_window_layers is -1",
        ),
        (
            changed("gpt-oss-20b", layer_types=["full_attention"]),
            "layer_types has 1 entries; allowed: one entry for each",
        ),
        (changed("c4ai-command-r7b-12-2024", sliding_window_pattern=0), "sliding_window_pattern is 0"),
        (changed("c4ai-command-r7b-12-2024", sliding_window_pattern=""), "sliding_window_pattern is ''"),
        (changed("Llama-4-Scout-17B-16E-Instruct", no_rope_layers=[1, 0]), "no_rope_layers has 2 entries"),
        (changed("Llama-4-Scout-17B-16E-Instruct", no_rope_layers=[True] * 48), "no_rope_layers has True"),
        (changed("gemma-4-E4B-it", use_bidirectional_attention=True), "use_bidirectional_attention is True"),
        (
            changed("gemma-4-E4B-it", num_kv_shared_layers=99),
            "num_kv_shared_layers is 99; allowed: an integer from 0 to 41",
        ),
        (changed("gemma-4-E4B-it", per_layer_config={"42": {"head_dim": 1}}), "layers' numbers from 0 to 41"),
        (changed("gemma-4-E4B-it", per_layer_config={"5": {"head_dim": 0}}), "per_layer_config.head_dim is 0"),
        (changed("GLM-5", indexer_types=["full"]), "indexer_types has 1 entries"),
        (changed("DeepSeek-V4-Flash", compress_ratios=[0]), "compress_ratios is [0]"),
        (changed("DeepSeek-V4-Flash", compress_ratios=["4"] * 44), "compress_ratios has '4'"),
        (
            changed("AI21-Jamba-1.5-Mini", attn_layer_offset=8),
            "attn_layer_offset is 8; allowed: an integer from 0 to 7",
        ),
        (changed("Falcon-H1-7B-Instruct", mamba_d_head=64), "mamba_d_head is 64"),
        (
            changed("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", hybrid_override_pattern="M*"),
            "num_hidden_layers is 52; allowed: 2",
        ),
        (changed("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", hybrid_override_pattern=7), "hybrid_override_pattern is 7"),
        (
            changed(
                "Kimi-Linear-48B-A3B-Instruct",
                linear_attn_config={
                    "num_heads": 1,
                    "head_dim": 1,
                    "short_conv_kernel_size": 4,
                    "full_attn_layers": [0],
                    "kda_layers": [],
                },
            ),
            "linear_attn_config.full_attn_layers is [0]; allowed: a list of layers' numbers from 1 to 27",
        ),
        (changed("gpt-neo-1.3B", attention_types=[["global"]]), "attention_types is [['global']]"),
        (
            changed("gpt-neo-1.3B", attention_types=[[["global"], 3]]),
            "attention_types describes 3 layers; allowed: 24",
        ),
        (changed("gpt-neo-1.3B", attention_types=[[["global"], 10**15]]), "at most 24 repeats each"),
        (changed("OpenELM-270M", num_kv_heads=[3]), "num_kv_heads has 1 entries; allowed: one entry for each of 16"),
        (changed("OpenELM-270M", num_kv_heads=[0] * 16), "allowed: a list of integers >= 1"),
        (changed("Llama-3_3-Nemotron-Super-49B-v1", block_configs=[None] * 80), "block_configs has None"),
        (changed("Llama-3.2-11B-Vision-Instruct", cross_attention_layers=[40]), "numbers from 0 to 39"),
    ],
)
def test_what_no_config_may_have_is_bad_input(config: dict[str, Any], named: str):
    with pytest.raises(InputError, match=re.escape(named)):
        model_shape(config)


def groups(config: dict[str, Any]) -> list[tuple[int, str]]:
    return [(group.count, group.cache) for group in model_shape(config).layer_groups]


def test_an_absent_window_is_not_a_null_one():
    assert groups(changed("Mistral-7B-v0.1", sliding_window=...)) == [(32, "sliding")]
    assert groups(changed("Mistral-7B-v0.1", sliding_window=None)) == [(32, "full")]


def test_upper_layers_slide_where_the_window_is_switched_on():
    config = changed("Qwen3-8B", use_sliding_window=True, sliding_window=4096, max_window_layers=30)
    assert groups(config) == [(30, "full"), (6, "sliding")]


def test_a_pattern_may_be_a_string():
    assert groups(changed("c4ai-command-r7b-12-2024", sliding_window_pattern="LG")) == [(16, "sliding"), (16, "full")]


def test_shared_indexers_store_nothing():
    shape = model_shape(changed("GLM-5", indexer_types=["full", "shared"] * 39))
    assert ideal_kv_bytes(shape, 10).parts["indexer"] == 39 * 10 * 128 * 2


def test_mimo_counts_the_tokens_before_the_query():
    config = {
        "model_type": "mimo_v2_flash",
        "hidden_size": 4096,
        "num_hidden_layers": 2,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 192,
        "v_head_dim": 128,
        "hybrid_layer_pattern": [0, 1],
        "sliding_window_size": 128,
        "swa_num_key_value_heads": 8,
        "swa_head_dim": 192,
        "swa_v_head_dim": 128,
    }
    shape = model_shape(config)
    assert ideal_kv_bytes(shape, 1000).total_bytes == (1000 * 4 + 129 * 8) * 320 * 2
    footprint = transformers_kv_bytes(shape, 1000)
    assert footprint is not None
    assert footprint.total_bytes == (1000 * 4 + 128 * 8) * 320 * 2
    with pytest.raises(UnknownModelStructureError, match="swa_num_key_value_heads is 4; 8 is what"):
        model_shape(config | {"swa_num_key_value_heads": 4})


def test_a_text_only_prompt_has_no_vision_tokens():
    shape = model_shape(MODELS["Llama-3.2-11B-Vision-Instruct"])
    assert ideal_kv_bytes(shape, 1024, encoder_tokens=0).parts == {"kv": 134_217_728}


def test_bits_scale_what_is_kept_in_the_caches_dtype():
    shape = model_shape(MODELS["Qwen3.5-27B"])
    half, whole = ideal_kv_bytes(shape, 100, bits=8).parts, ideal_kv_bytes(shape, 100, bits=16).parts
    assert (whole["kv"], whole["conv"]) == (2 * half["kv"], 2 * half["conv"])
    assert whole["recurrent"] == half["recurrent"]


@pytest.mark.parametrize("fields", [{}, {"kv_heads": 1}, {"cache": "sliding", "kv_heads": 1, "key_head_dim": 1}])
def test_a_layer_without_its_fields_is_no_layer(fields: dict[str, Any]):
    with pytest.raises(ValueError, match="layer needs"):
        LayerGroup(count=1, **fields)


CONVERTED = sorted(
    name
    for name, config in MODELS.items()
    if config["model_type"] in CONFIG_MAPPING and config["model_type"] not in ("mllama", "t5", "whisper")
)


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_config_gives_the_same_layout(name: str):
    """`run` reads the complete config of transformers, `plan` the file."""
    config = CONFIG_MAPPING[MODELS[name]["model_type"]].from_dict(copy.deepcopy(MODELS[name]))
    text = config.get_text_config(decoder=True)
    assert model_shape(text.to_dict()).layer_groups == model_shape(MODELS[name]).layer_groups


@pytest.mark.parametrize("model_type", sorted(set(CLASS_DEFAULTS) - {"qwen2_5_vl"}))
def test_class_defaults_are_those_of_transformers(model_type: str):
    """The flat qwen2_5_vl file is read by the nested class, which is in the table as well."""
    config_class = CONFIG_MAPPING[model_type]
    complete = config_class().to_dict()
    for field, value in CLASS_DEFAULTS[model_type].items():
        if field in ("global_head_dim", "full_attention_interval"):
            continue  # no attributes upstream; test_a_converted_config_gives_the_same_layout holds them
        expected = complete.get(value, value) if isinstance(value, str) else value
        assert expected in (getattr(config_class, field), complete.get(field)), field


NEVER_LEFT_OUT = {"deepseek_v32", "deepseek_v4", "glm_moe_dsa", "longcat_flash", "mamba2", "mimo_v2_flash"}
"""Families that refuse an absent head_dim or sliding_window, or whose cache does not depend on it."""


@pytest.mark.parametrize("model_type", sorted(set(READERS) - NOT_IN_TRANSFORMERS - NEVER_LEFT_OUT))
@pytest.mark.parametrize("field", ["head_dim", "sliding_window", "attention_chunk_size"])
def test_a_class_default_that_decides_the_layout_is_in_the_table(model_type: str, field: str):
    """Without it an absent field would read as hidden_size / heads, or as no window."""
    default = getattr(CONFIG_MAPPING[model_type], field, None)
    if isinstance(default, int):
        assert CLASS_DEFAULTS[model_type][field] == default


def test_every_registered_family_is_one_of_transformers_or_remote_code():
    unknown = {name for name in READERS if name not in CONFIG_MAPPING}
    assert unknown == NOT_IN_TRANSFORMERS


@pytest.mark.parametrize("view", [ideal_kv_bytes, transformers_kv_bytes])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_more_tokens_are_never_fewer_bytes_except_in_a_chunk(name: str, view: Callable[..., Any]):
    shape = model_shape(MODELS[name])
    if not shape.in_transformers or any(group.cache == "chunked" for group in shape.layer_groups):
        return
    if any(group.compression for group in shape.layer_groups) and view is transformers_kv_bytes:
        return  # an unfinished stretch's buffers are freed as it closes
    totals = [view(shape, tokens).total_bytes for tokens in (1, 2, 100, 127, 128, 129, 4095, 4096, 4097, 10_000)]
    assert totals == sorted(totals)


ODD_VALUES = (None, "x", "", -1, 0, 1, True, 3.5, [], {}, [[1]], {"a": 1}, ["x"], [None])


@pytest.mark.parametrize("name", sorted(MODELS))
def test_any_odd_value_is_read_or_refused_and_never_crashes(name: str):
    decoder = MODELS[name].get("text_config", MODELS[name])
    for field in decoder:
        for value in ODD_VALUES:
            with contextlib.suppress(OffloadEvalError):
                model_shape(changed(name, **{field: value}))
    for field in MODELS[name]:
        for value in ODD_VALUES:
            with contextlib.suppress(OffloadEvalError):
                model_shape(MODELS[name] | {field: value})
