"""Tiny models with random weights, the same ones every time."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def tiny_llama(dtype: torch.dtype, **sizes: int) -> Any:
    """A Llama of the given sizes, ready to generate on the CPU."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes), dtype=dtype).eval()
