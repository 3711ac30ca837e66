"""Activations of a prefill in closed form."""

from typing import Final

from offload_eval.bounds.kv_views import Counts
from offload_eval.core.shape import ModelShape

_HIDDEN_COPIES: Final = 4
_INTERMEDIATE_COPIES: Final = 3
ACTIVATIONS_ASSUMPTION: Final = (
    "The activation estimate is a prefill's peak inside a dense gated MLP under flash attention, one session at a "
    "time: (4 * hidden_size + 3 * intermediate_size) values a prompt token. generate() prefills a whole batch at once."
)


def estimate_activation_bytes(
    shape: ModelShape, prompt_tokens: Counts, bits: int, tensor_parallel: int = 1
) -> Counts | None:
    """Estimates what a prefill of one session holds beside weights and KV at its peak.

    At the peak of a gated MLP these are alive: the residual stream, its copy before the norm, the normed input and
    one more in transit (4 hidden_size), and the gate, the up projection and their product (3 intermediate_size). Not
    counted: logits, score matrices, a quantizer's transients.

    Args:
        shape: The model.
        prompt_tokens: Tokens prefilled at once.
        bits: Bits of the model's dtype.
        tensor_parallel: Ranks that the MLP's width is divided over.

    Returns:
        None for a model whose MLP is not known to be dense and gated.
    """
    if shape.gated_mlp_size is None:
        return None
    rank_width = -(-shape.gated_mlp_size // tensor_parallel)
    values = _HIDDEN_COPIES * shape.hidden_size + _INTERMEDIATE_COPIES * rank_width
    return prompt_tokens * values * bits // 8
