"""What the KV arithmetic needs to know of a model."""

from typing import Literal

from offload_eval.core.base import Strict


class LayerGroup(Strict, frozen=True, kw_only=True):
    """Layers that cache alike."""

    count: int
    cache: Literal["full"] = "full"
    """Every token is kept. Other kinds are refused until the arithmetic knows them."""
    kv_heads: int
    key_head_dim: int
    value_head_dim: int


class ModelShape(Strict, frozen=True, kw_only=True):
    """A decoder's cache layout, read from its config.json."""

    model_type: str
    layer_groups: tuple[LayerGroup, ...]
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int | None = None


class ModelFacts(Strict, frozen=True, kw_only=True):
    """What is known of the model before any weight is loaded."""

    fingerprint: str
    parameters: int
    weights_bytes: int
    """Parameters and buffers in the run's dtype, tied ones once."""
    shape: ModelShape | None = None
    """None where the arithmetic refuses the structure."""
    shape_refusal: str | None = None
    """Why `shape` is None."""
    context_tokens: int | None = None
    vocab_size: int
