"""The shape read from a config, against the cache that transformers fills for that config."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from offload_eval.bounds.kv import kv_bytes
from offload_eval.bounds.model_shape import UNIFORM_FULL_ATTENTION, model_shape
from offload_eval.errors import InputError, UnknownModelStructureError
from offload_eval.strategies.upstream import cache_argument

TINY = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OWN_FIELDS: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 20},
    "mistral": {"sliding_window": None, "head_dim": 20},
    "mixtral": {"sliding_window": None, "num_local_experts": 2, "num_experts_per_tok": 1},
    "phi3": {"sliding_window": None},
    "qwen3": {"head_dim": 20},
    "smollm3": {"no_rope_layers": [1, 1, 0]},
}


def tiny_config(model_type: str) -> Any:
    return AutoConfig.for_model(model_type, **(TINY | OWN_FIELDS.get(model_type, {})))


@pytest.mark.parametrize("model_type", sorted(UNIFORM_FULL_ATTENTION))
def test_shape_gives_the_real_caches_bytes(model_type: str):
    config = tiny_config(model_type)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(torch.zeros(2, 11, dtype=torch.long), **{cache_argument(model): cache}, use_cache=True)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    (group,) = model_shape(config.to_dict()).layer_groups
    assert kv_bytes(2 * 11, group.count, group.kv_heads, group.key_head_dim, bytes_per_value=4) == held


def test_nested_text_config_is_followed():
    shape = model_shape({"model_type": "a_vlm", "text_config": tiny_config("llama").to_dict()})
    assert shape.layer_groups[0].kv_heads == 2


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "a_new_model"}, "model_type 'a_new_model'"),
        ({"model_type": None}, "model_type None"),
        ({"kv_lora_rank": 512}, "kv_lora_rank = 512"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"num_kv_shared_layers": 15}, "num_kv_shared_layers"),
        ({"layers_block_type": ["mamba"]}, "layers_block_type"),
        ({"layer_types": ["full_attention", "full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"num_key_value_heads": None}, "num_key_value_heads is None"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(changes: dict[str, Any], named: str):
    config = tiny_config("llama").to_dict() | changes
    with pytest.raises(UnknownModelStructureError, match=named):
        model_shape(config)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": 0}, "vocab_size is 0"),
    ],
)
def test_a_value_that_no_config_may_have_is_bad_input(changes: dict[str, Any], named: str):
    with pytest.raises(InputError, match=named):
        model_shape(tiny_config("llama").to_dict() | changes)


def test_a_window_that_is_switched_off_is_no_window():
    assert model_shape(tiny_config("llama").to_dict() | {"sliding_window": 4096, "use_sliding_window": False})
