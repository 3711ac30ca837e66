# ruff: noqa: E501 - one row a case
"""Ways to get a config.json wrong, each with the exit code it must end with and what its message must say."""

import json
from pathlib import Path
from typing import Any

GOOD: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
ABSENT = object()
BAD_INPUT, UNKNOWN = 2, 3
GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 6}
FALCON_H1 = {
    "model_type": "falcon_h1",
    "mamba_n_heads": 24,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_d_ssm": 3072,
}
LATENT = {"model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
JAMBA = {
    "model_type": "jamba",
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_expand": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
}

# Each row: the whole file (text or bytes), or changes to GOOD; the exit code; what the message must say.
MALFORMED: dict[str, tuple[str | bytes | dict[str, Any], int, list[str]]] = {
    "empty file": ("", BAD_INPUT, ["not JSON", "line 1, column 1"]),
    "blank file": (" \n ", BAD_INPUT, ["not JSON", "line 2"]),
    "empty object": ("{}", BAD_INPUT, ["an empty object", "JSON object"]),
    "a list": ("[]", BAD_INPUT, ["[]", "JSON object"]),
    "a number": ("7", BAD_INPUT, ["7", "JSON object"]),
    "null": ("null", BAD_INPUT, ["null", "JSON object"]),
    "cut off": ('{"model_type": "llama",\n "hidden_size": ', BAD_INPUT, ["not JSON", "line 2, column 17"]),
    "comma after the last field": ('{"model_type": "llama",}', BAD_INPUT, ["not JSON", "line 1, column 24"]),
    "single quotes": ("{'model_type': 'llama'}", BAD_INPUT, ["not JSON", "line 1, column 2"]),
    "a comment": ('{"model_type": "llama"} // x', BAD_INPUT, ["not JSON", "line 1, column 25"]),
    "YAML": ("model_type: llama\n", BAD_INPUT, ["not JSON", "line 1, column 1"]),
    "a key twice": ('{"model_type": "llama", "hidden_size": 1, "hidden_size": 2}', BAD_INPUT, ["'hidden_size' is given twice"]),
    "a nested key twice": ('{"model_type": "x", "text_config": {"a": 1, "a": 1}}', BAD_INPUT, ["'a' is given twice"]),
    "nested too deeply": ('{"a":' * 100_000, BAD_INPUT, ["nested too deeply"]),
    "an endless number": ('{"a": ' + "9" * 10_000 + "}", BAD_INPUT, ["not JSON that can be read", "4300"]),
    "GGUF": (b"GGUF\x03\x00\x00\x00", BAD_INPUT, ["GGUF", "config.json is needed"]),
    "safetensors": (b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ", BAD_INPUT, ["a binary file", "config.json is needed"]),
    "Latin-1": ('{"model_type": "lläma"}'.encode("latin-1"), BAD_INPUT, ["byte 18 is not UTF-8"]),
    "UTF-16": ('{"model_type": "llama"}'.encode("utf-16"), BAD_INPUT, ["byte 0 is not UTF-8"]),
    "over 10 MB": ('{"a": "' + "x" * 10_000_000 + '"}', BAD_INPUT, ["more than 10,000,000 bytes"]),
    "the key preset alone": ('{"preset": {"name": "a", "source": "b", "parameters": null}}', BAD_INPUT, ["holds no field"]),
    "preset as text": ({"preset": "llama"}, BAD_INPUT, ["preset: 'llama'", "name, source and parameters"]),
    "preset without a source": ({"preset": {"name": "a", "parameters": 1}}, BAD_INPUT, ["name, source and parameters"]),
    "preset with an empty name": ({"preset": {"name": "", "source": "b", "parameters": 1}}, BAD_INPUT, ["preset.name: ''"]),
    "preset with parameters as text": ({"preset": {"name": "a", "source": "b", "parameters": "8B"}}, BAD_INPUT, ["preset.parameters: '8B'", "integer >= 1"]),
    "preset with no parameters left": ({"preset": {"name": "a", "source": "b", "parameters": 0}}, BAD_INPUT, ["preset.parameters: 0"]),
    "no model_type": ({"model_type": ABSENT}, UNKNOWN, ["model_type None"]),
    "an unknown model_type": ({"model_type": "brand_new"}, UNKNOWN, ["model_type 'brand_new'"]),
    "no hidden_size": ({"hidden_size": ABSENT}, UNKNOWN, ["hidden_size is None"]),
    "no heads": ({"num_attention_heads": ABSENT}, UNKNOWN, ["num_attention_heads is None"]),
    "null kv heads": ({"num_key_value_heads": None}, UNKNOWN, ["num_key_value_heads is None"]),
    "no layers": ({"num_hidden_layers": ABSENT}, UNKNOWN, ["num_hidden_layers is None"]),
    "zero layers": ({"num_hidden_layers": 0}, BAD_INPUT, ["num_hidden_layers is 0", "integer >= 1"]),
    "negative layers": ({"num_hidden_layers": -32}, BAD_INPUT, ["num_hidden_layers is -32", "integer >= 1"]),
    "a trillion layers": ({"num_hidden_layers": 10**12}, BAD_INPUT, ["num_hidden_layers is 1000000000000", "1 to 10000"]),
    "layers as text": ({"num_hidden_layers": "32"}, BAD_INPUT, ["num_hidden_layers is '32'", "integer >= 1"]),
    "layers as a float": ({"num_hidden_layers": 32.0}, BAD_INPUT, ["num_hidden_layers is 32.0", "integer >= 1"]),
    "layers as a bool": ({"num_hidden_layers": True}, BAD_INPUT, ["num_hidden_layers is True", "integer >= 1"]),
    "zero kv heads": ({"num_key_value_heads": 0}, BAD_INPUT, ["num_key_value_heads is 0", "integer >= 1"]),
    "kv heads as a list": ({"num_key_value_heads": [8] * 32}, BAD_INPUT, ["num_key_value_heads is [8", "integer >= 1"]),
    "negative head_dim": ({"head_dim": -128}, BAD_INPUT, ["head_dim is -128", "integer >= 1"]),
    "a head_dim that no model has": ({"head_dim": 2**63}, BAD_INPUT, ["head_dim is 9223372036854775808", "1 to 1000000000"]),
    "heads that do not divide": ({"num_attention_heads": 31}, BAD_INPUT, ["hidden_size is 4096", "multiple of num_attention_heads (31)"]),
    "hidden_size as infinity": ('{"model_type": "llama", "hidden_size": Infinity, "num_hidden_layers": 1, "num_attention_heads": 1}', BAD_INPUT, ["hidden_size is inf", "integer >= 1"]),
    "hidden_size as not a number": ('{"model_type": "llama", "hidden_size": NaN, "num_hidden_layers": 1, "num_attention_heads": 1}', BAD_INPUT, ["hidden_size is nan"]),
    "a vocabulary of zero": ({"vocab_size": 0}, BAD_INPUT, ["vocab_size is 0", "integer >= 1"]),
    "a window where none is known": ({"sliding_window": 4096}, UNKNOWN, ["sliding_window = 4096", "'llama'"]),
    "latent attention where none is known": ({"kv_lora_rank": 512}, UNKNOWN, ["kv_lora_rank = 512"]),
    "an unknown layer type": ({"layer_types": ["psychic_attention"] * 32}, UNKNOWN, ["layer_types has 'psychic_attention'", "full_attention"]),
    "too few layer types": ({"layer_types": ["full_attention"]}, BAD_INPUT, ["layer_types has 1 entries", "each of 32 layers"]),
    "no layer types": ({"layer_types": []}, BAD_INPUT, ["layer_types has 0 entries", "each of 32 layers"]),
    "layer types as text": ({"layer_types": "full_attention"}, BAD_INPUT, ["layer_types is 'full_attention'", "a list"]),
    "layer types as numbers": ({"layer_types": [0] * 32}, BAD_INPUT, ["layer_types has 0", "full_attention"]),
    "layer types in lists": ({"layer_types": [["full_attention"]] * 32}, BAD_INPUT, ["layer_types has ['full_attention']"]),
    "layer types in objects": ({"layer_types": {"0": "full_attention"}}, BAD_INPUT, ["layer_types is {", "a list"]),
    "text_config as text": ({"text_config": "llama"}, BAD_INPUT, ["text_config is 'llama'", "an object"]),
    "text_config as a list": ({"text_config": [GOOD]}, BAD_INPUT, ["text_config is [", "an object"]),
    "a nested model_type that is unknown": ({"text_config": {"model_type": "brand_new"}}, UNKNOWN, ["model_type 'brand_new'"]),
    "a window of zero": (GEMMA | {"sliding_window": 0}, BAD_INPUT, ["sliding_window is 0", "integer >= 1"]),
    "a window of one": (GEMMA | {"sliding_window": 1}, UNKNOWN, ["sliding_window is 1", "at least 2"]),
    "a null window where layers slide": (GEMMA | {"sliding_window": None}, UNKNOWN, ["sliding_window is None"]),
    "a pattern of zero": (GEMMA | {"sliding_window_pattern": 0}, BAD_INPUT, ["sliding_window_pattern is 0"]),
    "a pattern of an unknown letter": (GEMMA | {"sliding_window_pattern": "LX"}, UNKNOWN, ["sliding_window_pattern is 'LX'", "L and G"]),
    "a switch as text": ({"model_type": "qwen3", "use_sliding_window": "false"}, BAD_INPUT, ["use_sliding_window is 'false'", "true or false"]),
    "a switch as a number": ({"model_type": "qwen3", "use_sliding_window": 0}, BAD_INPUT, ["use_sliding_window is 0", "true or false"]),
    "no latent rank": ({"model_type": "deepseek_v3", "qk_rope_head_dim": 64}, UNKNOWN, ["kv_lora_rank is None"]),
    "an indexer where none is known": (LATENT | {"index_head_dim": 128}, UNKNOWN, ["index_head_dim = 128"]),
    "an offset past its period": (JAMBA | {"attn_layer_offset": 8}, BAD_INPUT, ["attn_layer_offset is 8", "0 to 7"]),
    "an offset as a bool": (JAMBA | {"attn_layer_offset": True}, BAD_INPUT, ["attn_layer_offset is True"]),
    "state heads that do not divide": (FALCON_H1 | {"mamba_n_heads": 7}, BAD_INPUT, ["mamba_n_heads is 7", "divisor of the 3072"]),
    "a state head size that disagrees": (FALCON_H1 | {"mamba_d_head": 64}, BAD_INPUT, ["mamba_d_head is 64", "auto or 128"]),
    "attention on some layers": (FALCON_H1 | {"attn_layer_indices": [0]}, UNKNOWN, ["attn_layer_indices is [0]"]),
    "a cross layer out of range": ({"model_type": "mllama_text_model", "cross_attention_layers": [32]}, BAD_INPUT, ["cross_attention_layers is [32]", "0 to 31"]),
    "a list for a section": ({"model_type": "kimi_linear", "linear_attn_config": []}, BAD_INPUT, ["linear_attn_config is []", "an object"]),
}  # fmt: skip


def content(case: str | bytes | dict[str, Any]) -> bytes:
    """The bytes of a case's file."""
    if isinstance(case, bytes):
        return case
    if isinstance(case, str):
        return case.encode()
    return json.dumps({key: value for key, value in (GOOD | case).items() if value is not ABSENT}).encode()


def write(case: str | bytes | dict[str, Any], folder: Path) -> Path:
    """Writes a case's file into the folder."""
    path = folder / "config.json"
    path.write_bytes(content(case))
    return path
