"""Which attention kernel a run without data stands for.

On the CPU torch chooses by itself, from shapes, as it does with data. For CUDA the choice is made here, since a torch
built without CUDA would take the composite fallback, whose score matrix no GPU allocates.
"""

from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface

from offload_eval.core.experiment import DeviceName

CUDA_SDPA_ASSUMPTION: Final = (
    "scaled_dot_product_attention on CUDA takes the flash kernel where there is no mask, the dtype has 16 bits and "
    "keys and values are equally wide, up to 256; else the memory-efficient kernel where no heads are shared; else "
    "the composite one, which holds the score matrix."
)
FLASH_ASSUMPTION: Final = "Flash attention allocates its output and the log-sum-exp of each row, and no score matrix."
FLASH: Final = "offload_eval_fused"
"""Name under which the stand-in for a flash attention package is registered. transformers looks for a package behind
every name with "flash" in it."""
_LARGEST_FLASH_HEAD: Final = 256
_ALIGNMENT: Final = 8
"""Elements that rows of heads and of masks are padded to."""
_ATEN: Final = torch.ops.aten


class CudaAttention(TorchFunctionMode):
    """Sends scaled_dot_product_attention to the operator that a CUDA device would run."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Intercepts the one function."""
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Source: torch 2.13, aten/src/ATen/native/transformers/attention.cpp and cuda/sdp_utils.cpp."""
    head_dim = query.shape[-1]
    is_dense = query.dim() == 4 and dropout_p == 0.0
    if is_dense and attn_mask is None and head_dim == value.shape[-1] <= _LARGEST_FLASH_HEAD and query.itemsize == 2:
        padding = -head_dim % _ALIGNMENT
        padded = [F.pad(states, (0, padding)) if padding else states for states in (query, key, value)]
        output = _ATEN._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, scale=scale)[0]
        return output[..., :head_dim]
    if is_dense and query.shape[1] == key.shape[1]:
        bias = _as_bias(attn_mask, query)
        return _ATEN._scaled_dot_product_efficient_attention(
            query, key, value, bias, False, dropout_p, is_causal, scale=scale
        )[0]
    return _ATEN._scaled_dot_product_attention_math(
        query, key, value, _as_bias(attn_mask, query), dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]


def _as_bias(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """A boolean mask becomes an additive one, padded to the kernels' alignment; they read it broadcast."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.scalar_tensor(-torch.inf, dtype=query.dtype, device=query.device))
    tokens = mask.shape[-1]
    padding = -tokens % _ALIGNMENT
    if padding:
        mask = F.pad(mask, (0, padding))[..., :tokens]
    return mask.expand(-1, query.shape[1], -1, -1)


def flash_attention_forward(
    module: torch.nn.Module,  # noqa: ARG001
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001
    **_kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Stands for a flash attention package, which need not be installed.

    Args:
        module: The attention module.
        query: `[batch, heads, new_tokens, head_dim]`.
        key: `[batch, kv_heads, tokens, head_dim]`.
        value: `[batch, kv_heads, tokens, value_head_dim]`; padded to head_dim, as upstream pads it.
        attention_mask: None, from `no_mask`.

    Returns:
        `[batch, new_tokens, heads, value_head_dim]`.
    """
    padding = query.shape[-1] - value.shape[-1]
    padded = F.pad(value, (0, padding)) if padding else value
    output_BHTD = _ATEN._scaled_dot_product_flash_attention(query, key, padded, 0.0, True)[0]
    return output_BHTD[..., : value.shape[-1]].transpose(1, 2), None


def no_mask(*_args: Any, **_kwargs: Any) -> None:
    """A flash kernel knows what is causal."""


def traceable_attention(attn_implementation: str) -> str:
    """The name to build a model with: a flash attention package is replaced by a stand-in."""
    if "flash" not in attn_implementation:
        return attn_implementation
    AttentionInterface.register(FLASH, flash_attention_forward)
    AttentionMaskInterface.register(FLASH, no_mask)
    return FLASH


def attention_name(config: Any) -> str:
    """The attention a model was built with, in the user's words."""
    return "flash" if config._attn_implementation == FLASH else str(config._attn_implementation)


def attention_refusal(config: Any, device: DeviceName) -> str | None:
    """Why a model's attention does not run on a device; None where it does."""
    if config._attn_implementation == FLASH and device == "cpu":
        return "flash attention packages do not run on a CPU; use sdpa or eager"
    return None


def attention_assumptions(config: Any, device: DeviceName) -> tuple[str, ...]:
    """What a trace assumes of the kernels of a model's attention."""
    if config._attn_implementation == FLASH:
        return (FLASH_ASSUMPTION,)
    return (CUDA_SDPA_ASSUMPTION,) if config._attn_implementation == "sdpa" and device == "cuda" else ()
