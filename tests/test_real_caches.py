"""The transformers view against the caches that generate() fills: tiny random models, a few layers of every kind.

bfloat16, so that states kept in float32 show. Windows are 8 tokens, chunks and compression stretches 8 and 4.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from offload_eval.bounds.kv_footprint import transformers_kv_bytes
from offload_eval.bounds.model_shape import model_shape
from offload_eval.errors import UnknownModelStructureError
from offload_eval.strategies.base import kv_payload_bytes

WINDOW = 8
NEW_TOKENS = 3
CACHED_TOKENS = (WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW + 1)
VOCABULARY = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
STANDARD = {
    **VOCABULARY,
    "num_hidden_layers": 4,
    "hidden_size": 48,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
WINDOWED = {**STANDARD, "sliding_window": WINDOW}
EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
GPT2 = {**VOCABULARY, "n_embd": 48, "n_head": 4, "n_layer": 3, "n_positions": 64}
ROUTED = {
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
LATENT = {
    **STANDARD,
    **ROUTED,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
}
INDEXED = {**LATENT, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4}
DELTA_NET = {
    **STANDARD,
    **EXPERTS,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2}

ZAMBA = {
    **STANDARD,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "n_mamba_heads": 4,
    "num_mem_blocks": 1,
    "use_mamba_kernels": False,
    "layers_block_type": ["linear_attention", "linear_attention", "hybrid", "hybrid"],
}

CONFIGS: dict[str, dict[str, Any]] = {
    "afmoe": {**WINDOWED, **EXPERTS, "head_dim": 16, "num_shared_experts": 1},
    "apertus": STANDARD,
    "arcee": STANDARD,
    "axk1": LATENT,
    "bamba": {**STANDARD, **MAMBA2, "attn_layer_indices": [1]},
    "biogpt": STANDARD,
    "codegen": {**GPT2, "rotary_dim": 8},
    "cwm": {**WINDOWED, "head_dim": 16},
    "dbrx": {
        **VOCABULARY,
        "d_model": 48,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 2, "moe_top_k": 1},
    },
    "diffllama": STANDARD,
    "dots1": {**WINDOWED, **ROUTED, "max_window_layers": 2},
    "dots1 (no window)": {**STANDARD, **ROUTED, "sliding_window": None},
    "ernie4_5": {**STANDARD, "head_dim": 16},
    "ernie4_5_moe": {**STANDARD, "moe_num_experts": 2, "moe_k": 1, "moe_intermediate_size": 16},
    "exaone": STANDARD,
    "exaone4": WINDOWED,
    "exaone_moe": {**WINDOWED, **EXPERTS, "head_dim": 16},
    "flex_olmo": {**STANDARD, **EXPERTS},
    "glm": {**STANDARD, "head_dim": 16},
    "glm4": {**STANDARD, "head_dim": 16},
    "glm4_moe": {**STANDARD, **ROUTED, "head_dim": 16},
    "gpt_neox_japanese": STANDARD,
    "granite_swa": WINDOWED,
    "granitemoe": {**STANDARD, **EXPERTS},
    "granitemoe_swa": {**WINDOWED, **EXPERTS},
    "granitemoeshared": {**STANDARD, **EXPERTS, "shared_intermediate_size": 16},
    "helium": {**STANDARD, "head_dim": 12},
    "hunyuan_v1_dense": {**STANDARD, "head_dim": 16},
    "hunyuan_v1_moe": {**STANDARD, "num_experts": 2, "moe_topk": 1, "head_dim": 16},
    "hy_v3": {**STANDARD, **EXPERTS, "head_dim": 16},
    "hyperclovax": STANDARD,
    "internlm3": {**STANDARD, "head_dim": 16},
    "iquestcoder": {**STANDARD, "head_dim": 16},
    "jais2": STANDARD,
    "lfm2": {**STANDARD, "layer_types": ["conv", "full_attention", "conv", "conv"]},
    "lfm2 (numbers of layers)": {**STANDARD, "full_attn_idxs": [1], "conv_L_cache": 5},
    "lfm2_moe": {**STANDARD, **EXPERTS, "layer_types": ["conv", "full_attention", "conv", "conv"]},
    "minicpm3": LATENT,
    "minimax_m2": {**STANDARD, **EXPERTS, "head_dim": 16, "rotary_dim": 8},
    "ministral": {**WINDOWED, "head_dim": 16},
    "ministral3": {**WINDOWED, "head_dim": 16},
    "nanochat": STANDARD,
    "nemotron": STANDARD,
    "olmo": STANDARD,
    "olmo3": WINDOWED,
    "olmo_hybrid": DELTA_NET,
    "olmoe": {**STANDARD, **EXPERTS},
    "persimmon": STANDARD,
    "phi": STANDARD,
    "phimoe": {**WINDOWED, **EXPERTS},
    "qwen2_moe": {**STANDARD, **EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_5_moe_text": DELTA_NET,
    "sarvam_mla": LATENT,
    "sarvam_moe": {**STANDARD, **EXPERTS, "head_dim": 16},
    "seed_oss": {**STANDARD, "head_dim": 16},
    "solar_open": {**STANDARD, **ROUTED, "head_dim": 16},
    "stablelm": {**STANDARD, "partial_rotary_factor": 0.5},
    "starcoder2": WINDOWED,
    "vaultgemma": {**WINDOWED, "head_dim": 16},
    "xglm": {
        **VOCABULARY,
        "d_model": 48,
        "attention_heads": 4,
        "num_layers": 3,
        "ffn_dim": 32,
        "max_position_embeddings": 64,
    },
    "youtu": LATENT,
    "zamba": {**ZAMBA, "mamba_dt_rank": 4},
    "zamba2": {**ZAMBA, "mamba_ngroups": 2, "use_mem_eff_path": False},
    "bloom": {**VOCABULARY, "hidden_size": 48, "n_head": 4, "n_layer": 3},
    "cohere": STANDARD,
    "cohere2": WINDOWED,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": INDEXED,
    "deepseek_v4": {
        **WINDOWED,
        **ROUTED,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "index_head_dim": 8,
        "index_n_heads": 2,
        "index_topk": 2,
        "qk_rope_head_dim": 8,
        "layer_types": [
            "sliding_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "sliding_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": WINDOW},
    },
    "falcon": {**STANDARD, "num_attention_heads": 4, "multi_query": True, "new_decoder_architecture": False},
    "falcon (new block)": {
        **STANDARD,
        "num_kv_heads": 2,
        "multi_query": True,
        "new_decoder_architecture": True,
        "bias": False,
    },
    "falcon (all heads)": {**STANDARD, "multi_query": False, "new_decoder_architecture": False},
    "falcon_h1": {**STANDARD, **MAMBA2, "mamba_d_ssm": 96},
    "falcon_mamba": {**VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 8},
    "gemma": {**STANDARD, "head_dim": 20},
    "gemma2": {**WINDOWED, "head_dim": 16},
    "gemma3_text": {**WINDOWED, "num_hidden_layers": 6, "head_dim": 16},
    "gemma3n_text": {
        **WINDOWED,
        "num_hidden_layers": 5,
        "head_dim": 16,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4_text": {
        **WINDOWED,
        "head_dim": 16,
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
    },
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": INDEXED,
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "gpt_bigcode (all heads)": {**GPT2, "multi_query": False},
    "gpt_neo": {
        **VOCABULARY,
        "hidden_size": 48,
        "num_heads": 4,
        "num_layers": 4,
        "attention_types": [[["global", "local"], 2]],
        "window_size": WINDOW,
        "max_position_embeddings": 64,
    },
    "gpt_neox": STANDARD,
    "gpt_oss": {**WINDOWED, **EXPERTS, "head_dim": 16},
    "gptj": {**GPT2, "rotary_dim": 8},
    "granite": STANDARD,
    "granitemoehybrid": {
        **STANDARD,
        **MAMBA2,
        "num_local_experts": 0,
        "shared_intermediate_size": 16,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
    },
    "jamba": {
        **STANDARD,
        "num_experts": 2,
        "mamba_d_state": 8,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "kimi_linear": {
        **LATENT,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "llama": STANDARD,
    "llama4_text": {
        **STANDARD,
        **EXPERTS,
        "head_dim": 16,
        "intermediate_size_mlp": 32,
        "attention_chunk_size": WINDOW,
    },
    "longcat_flash": {
        **LATENT,
        "num_layers": 2,
        "head_dim": 8,
        "ffn_hidden_size": 32,
        "expert_ffn_hidden_size": 16,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "mamba": {**VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 8},
    "mamba2": {
        **VOCABULARY,
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 12,
        "state_size": 16,
        "n_groups": 2,
    },
    "mimo_v2_flash": {
        **WINDOWED,
        **ROUTED,
        "head_dim": 16,
        "v_head_dim": 12,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "minimax": {**STANDARD, **EXPERTS, "head_dim": 16, "block_size": 8},
    "mistral": WINDOWED,
    "mistral (no window)": {**STANDARD, "sliding_window": None},
    "mixtral": {**WINDOWED, **EXPERTS},
    "mpt": {**VOCABULARY, "d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 64},
    "nemotron_h": {
        **STANDARD,
        **ROUTED,
        "head_dim": 16,
        "hybrid_override_pattern": "M*-M",
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "ssm_state_size": 16,
        "n_groups": 2,
        "use_mamba_kernels": False,
    },
    "olmo2": STANDARD,
    "opt": {**STANDARD, "ffn_dim": 32, "word_embed_proj_dim": 48},
    "phi3": WINDOWED,
    "qwen2": {**WINDOWED, "use_sliding_window": True, "max_window_layers": 2},
    "qwen2 (switched off)": {**WINDOWED, "use_sliding_window": False},
    "qwen3": {**WINDOWED, "use_sliding_window": True, "max_window_layers": 2, "head_dim": 16},
    "qwen3_5_text": {**DELTA_NET},
    "qwen3_moe": {**STANDARD, **EXPERTS, "head_dim": 16},
    "qwen3_next": DELTA_NET,
    "smollm3": STANDARD,
}
BART = {
    **VOCABULARY,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 64,
}
T5 = {**VOCABULARY, "d_model": 48, "d_kv": 10, "d_ff": 32, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 4}
ENCODER_DECODERS: dict[str, dict[str, Any]] = {
    "bart": BART,
    "m2m_100": BART,
    "marian": BART,
    "mbart": BART,
    "mt5": T5,
    "pegasus": BART,
    "t5": T5,
    "umt5": T5,
}
WITHOUT_A_HEAD: dict[str, dict[str, Any]] = {
    "mistral4": LATENT,
    "qwen2_5_vl_text": {
        **STANDARD,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 2, 2]},
    },
    "qwen3_vl_moe_text": {**STANDARD, **EXPERTS, "head_dim": 16},
    "qwen3_vl_text": {**STANDARD, "head_dim": 16},
}
"""Text models that have no class of their own with a language model's head: parts of a vision model."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small spend their time on waking threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def held_bytes(cache: Any) -> int:
    """Keys and values; for MiniMax's own cache class its states too."""
    payload = kv_payload_bytes(cache, lambda _tensor: "device")
    states = getattr(cache, "linear_cache", ())
    return payload["device"] + sum(state.nbytes for state in states if isinstance(state, torch.Tensor))


def generate_cache(model: Any, prompt_tokens: int, new_tokens: int = NEW_TOKENS) -> Any:
    with torch.no_grad():
        output = model.generate(
            torch.randint(3, 64, (1, prompt_tokens)),
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            use_cache=True,
        )
    return output.past_key_values


@pytest.mark.parametrize("variant", sorted(CONFIGS))
def test_generated_cache_has_the_views_bytes(variant: str):
    """Prompts below, at and above the window; the config as `run` reads it."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[variant.split()[0]](**CONFIGS[variant])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    shape = model_shape(config.to_dict())
    for tokens in CACHED_TOKENS:
        footprint = transformers_kv_bytes(shape, tokens)
        assert footprint is not None
        assert held_bytes(generate_cache(model, tokens - NEW_TOKENS + 1)) == footprint.total_bytes, tokens


@pytest.mark.parametrize("model_type", sorted(ENCODER_DECODERS))
def test_cross_attention_holds_the_encoders_tokens(model_type: str):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**ENCODER_DECODERS[model_type], decoder_start_token_id=1)
    model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.bfloat16).eval()
    cache = generate_cache(model, prompt_tokens=7, new_tokens=5)
    footprint = transformers_kv_bytes(model_shape(config.to_dict()), tokens=5, encoder_tokens=7)
    assert footprint is not None
    assert held_bytes(cache.self_attention_cache) == footprint.parts["kv"]
    assert held_bytes(cache.cross_attention_cache) == footprint.parts["cross"]


@pytest.mark.parametrize("model_type", sorted(WITHOUT_A_HEAD))
def test_a_text_model_without_a_head_fills_the_views_bytes(model_type: str):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**WITHOUT_A_HEAD[model_type])
    model = AutoModel.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        cache = model(torch.randint(3, 64, (1, 11)), use_cache=True).past_key_values
    footprint = transformers_kv_bytes(model_shape(config.to_dict()), 11)
    assert footprint is not None
    assert held_bytes(cache) == footprint.total_bytes


@pytest.mark.parametrize("variant", sorted(CONFIGS))
def test_the_file_says_what_the_converted_config_says(variant: str):
    """Fields that a file leaves to the class are either the table's defaults or refused by name."""
    model_type = variant.split()[0]
    converted = model_shape(CONFIG_MAPPING[model_type](**CONFIGS[variant]).to_dict())
    with contextlib.suppress(UnknownModelStructureError):
        assert model_shape({"model_type": model_type, **CONFIGS[variant]}).layer_groups == converted.layer_groups
