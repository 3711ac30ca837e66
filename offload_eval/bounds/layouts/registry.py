"""model_type -> the reader of that family's layout. A model_type that is not here is refused."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from offload_eval.bounds.layouts import attention, encoder_decoder, latent, linear, own_names, shared_kv, uneven
from offload_eval.bounds.layouts.attention import Layers
from offload_eval.bounds.layouts.fields import Fields

Reader = Callable[[Fields], Layers]

READERS: Final[Mapping[str, Reader]] = {
    "bart": encoder_decoder.bart,
    "bloom": own_names.all_heads(own_names.BLOOM_NAMES),
    "cohere": attention.full_only,
    "cohere2": attention.one_full_in(4),
    "deepseek_v2": latent.mla,
    "deepseek_v3": latent.mla,
    "deepseek_v32": latent.mla_with_indexer,
    "deepseek_v4": latent.deepseek_v4,
    "falcon": own_names.falcon,
    "falcon_h1": linear.falcon_h1,
    "falcon_mamba": linear.mamba1,
    "gemma": attention.full_only,
    "gemma2": attention.one_full_in(2),
    "gemma3_text": attention.one_full_in(6),
    "gemma3n_text": shared_kv.gemma3n,
    "gemma4_text": shared_kv.gemma4,
    "glm4_moe_lite": latent.mla,
    "glm_moe_dsa": latent.mla_with_indexer,
    "gpt2": own_names.all_heads(own_names.GPT2_NAMES),
    "gpt_bigcode": own_names.gpt_bigcode,
    "gpt_neo": own_names.gpt_neo,
    "gpt_neox": own_names.all_heads(own_names.STANDARD_NAMES),
    "gpt_oss": attention.one_full_in(2),
    "gptj": own_names.all_heads(own_names.GPT2_NAMES),
    "granite": attention.full_only,
    "granitemoehybrid": linear.granite_hybrid,
    "jamba": linear.jamba,
    "kimi_linear": linear.kimi_linear,
    "llama": attention.full_only,
    "llama4_text": attention.chunked_with_rope,
    "longcat_flash": latent.longcat,
    "mamba": linear.mamba1,
    "mamba2": linear.mamba2,
    "mimo_v2_flash": uneven.mimo_v2,
    "minimax": linear.minimax,
    "mistral": attention.every_layer_slides,
    "mixtral": attention.every_layer_slides,
    "mllama_text_model": encoder_decoder.llama_vision,
    "mpt": own_names.mpt,
    "nemotron-nas": uneven.nemotron_nas,
    "nemotron_h": linear.nemotron_h,
    "olmo2": attention.full_only,
    "openelm": uneven.openelm,
    "opt": own_names.all_heads(own_names.STANDARD_NAMES),
    "phi3": attention.every_layer_slides,
    "qwen2": attention.upper_layers_slide,
    "qwen2_5_vl": attention.upper_layers_slide,
    "qwen2_5_vl_text": attention.upper_layers_slide,
    "qwen3": attention.upper_layers_slide,
    "qwen3_5_text": linear.gated_delta_net,
    "qwen3_moe": attention.switched_window,
    "qwen3_next": linear.gated_delta_net,
    "qwen3_vl_text": attention.full_only,
    "smollm3": attention.switched_window,
    "t5": encoder_decoder.t5,
    "whisper": encoder_decoder.whisper,
}

NOT_IN_TRANSFORMERS: Final = frozenset({"nemotron-nas", "openelm"})
"""Families that run on remote code alone: there is no transformers view."""

OUTER_READERS: Final[Mapping[str, Callable[[Fields, Mapping[str, Any]], Layers]]] = {
    "mllama": encoder_decoder.llama_vision_with_image,
}
"""Files whose nested text config does not say everything: readers of both."""
