"""What an absent field of a config.json means: the class defaults of transformers 5.24 that decide a layout.

Only defaults that real files rely on; an absent field without one is refused. A default that names another field
stands for its value.
"""

from collections.abc import Mapping
from typing import Any, Final

_HEADS: Final = {"num_key_value_heads": "num_attention_heads"}
_QWEN_WINDOW: Final = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

CLASS_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "cohere": _HEADS,
    "cohere2": {**_HEADS, "sliding_window": 4096},
    "falcon": {"multi_query": True, "new_decoder_architecture": False},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {
        "num_hidden_layers": 26,
        "hidden_size": 2304,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    },
    "gemma3n_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "sliding_window": 512,
        "num_kv_shared_layers": 15,
    },
    "gemma4_text": {
        "head_dim": 256,
        "sliding_window": 512,
        "global_head_dim": 512,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 0,
    },
    "gpt_bigcode": {"multi_query": True},
    "gpt_neo": {"window_size": 256, "attention_types": [[["global", "local"], 12]]},
    "gpt_oss": {"head_dim": 64, "sliding_window": 128},
    "granite": _HEADS,
    "granitemoehybrid": {**_HEADS, "mamba_d_conv": 4, "mamba_n_groups": 1},
    "kimi_linear": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "llama": _HEADS,
    "llama4_text": {"head_dim": 128, "attention_chunk_size": 8192},
    "mistral": {"sliding_window": 4096},
    "mllama_text_model": {"cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]},
    "nemotron_h": {"head_dim": 128, "mamba_ssm_cache_dtype": "float32"},
    "olmo2": _HEADS,
    "phi3": _HEADS,
    "qwen2": _QWEN_WINDOW,
    "qwen2_5_vl": {**_QWEN_WINDOW, "max_window_layers": 80},
    "qwen2_5_vl_text": {**_QWEN_WINDOW, "max_window_layers": 80},
    "qwen3": {**_QWEN_WINDOW, "head_dim": 128},
    "qwen3_5_text": {"head_dim": 256, "full_attention_interval": 4},
    "qwen3_moe": {"use_sliding_window": False, "sliding_window": 4096},
    "qwen3_next": {"head_dim": 256, "full_attention_interval": 4},
    "qwen3_vl_text": {"head_dim": 128},
    "t5": {"num_decoder_layers": "num_layers"},
    "whisper": {"max_source_positions": 1500},
}
