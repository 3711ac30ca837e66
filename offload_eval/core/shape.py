"""What the KV arithmetic needs to know of a model."""

from typing import Literal

from offload_eval.core.base import Strict

CacheKind = Literal["full", "sliding", "chunked", "latent", "compressed", "linear_state", "cross", "shared", "none"]
"""full: every token. sliding: the last `window_tokens`. chunked: the tokens of the current chunk of `window_tokens`.
latent: every token as a latent of key_head_dim values and a rotary key of value_head_dim values (MLA). compressed: a
window of one shared key and value vector, and one entry a closed stretch of tokens (`compression`). linear_state: a
constant `state`. cross: the encoder's tokens. shared: nothing, an earlier layer's KV is read. none: nothing."""

_WINDOWED = ("sliding", "chunked", "compressed")
_WITHOUT_ROWS = ("linear_state", "shared", "none")


class LinearState(Strict, frozen=True, kw_only=True):
    """The constant state of a convolution, a linear attention or an SSM; it does not grow with tokens."""

    conv_channels: int = 0
    conv_kernel: int = 1
    """An engine keeps the last kernel - 1 columns, transformers keeps kernel."""
    recurrent_values: int = 0
    ideal_recurrent_bits: int | None = None
    """Bits of a recurrent value in an engine; None is the cache's dtype."""
    transformers_recurrent_bits: int | None = 32
    """Bits of a recurrent value in transformers; None is the cache's dtype."""


class Compression(Strict, frozen=True, kw_only=True):
    """Long-range entries beside a window (DeepSeek-V4)."""

    ratio_tokens: int
    """Tokens that one entry of key_head_dim values stands for."""
    indexer_head_dim: int = 0
    """Width of the indexer's entry for the same tokens; 0 where there is no indexer."""
    overlaps: bool = False
    """Each entry is made of two stretches of tokens, so projections are twice as wide and one is carried over."""


class TransformersDifference(Strict, frozen=True, kw_only=True):
    """Where transformers' cache of these layers is laid out otherwise than an engine needs."""

    cache: CacheKind | None = None
    kv_heads: int | None = None
    copies_values: bool = False
    """Keys and values are one vector to an engine and two stored tensors here."""


class LayerGroup(Strict, frozen=True, kw_only=True):
    """Layers that cache alike. A layer with two caches (self and cross attention) is in two groups."""

    count: int
    cache: CacheKind = "full"
    kv_heads: int = 0
    key_head_dim: int = 0
    value_head_dim: int = 0
    window_tokens: int | None = None
    """Sliding or compressed: the window, the newest token included. Chunked: the chunk's length."""
    encoder_tokens: int | None = None
    """Cross: fixed count of encoder tokens; None where the request decides."""
    indexer_head_dim: int = 0
    """Width of a sparse-attention indexer's key, one a token; 0 where there is none."""
    state: LinearState | None = None
    """Held beside the rows by hybrid layers, alone by linear_state."""
    compression: Compression | None = None
    transformers: TransformersDifference | None = None
    """None: transformers keeps what an engine keeps, but for the rules in `bounds/kv_footprint.py`."""

    def __post_init__(self) -> None:
        """Refuses a kind without the fields it needs.

        Raises:
            ValueError: A field is missing; the message names it.
        """
        if self.cache not in _WITHOUT_ROWS and (self.kv_heads < 1 or self.key_head_dim < 1):
            raise ValueError(f"a {self.cache} layer needs kv_heads and key_head_dim")
        if self.cache in _WINDOWED and not self.window_tokens:
            raise ValueError(f"a {self.cache} layer needs window_tokens")
        if self.cache == "linear_state" and self.state is None:
            raise ValueError("a linear_state layer needs state")


class ModelShape(Strict, frozen=True, kw_only=True):
    """A decoder's cache layout, read from its config.json."""

    model_type: str
    layer_groups: tuple[LayerGroup, ...]
    layer_order: tuple[int, ...] = ()
    """For each cache from the first layer to the last, the index of its group; empty: group by group."""
    caches_per_layer: int = 1
    """2 where every layer has two caches, one after the other in `layer_order`."""
    vocab_size: int | None = None
    """None where the config does not say; the KV arithmetic does not need it."""
    hidden_size: int
    gated_mlp_size: int | None = None
    """Width of every layer's dense gated MLP; None where a family's is otherwise, or not known to be so."""
    max_position_embeddings: int | None = None
    in_transformers: bool = True
    """False: the family's cache class is its own remote code, and only the ideal view exists."""

    @property
    def order(self) -> tuple[int, ...]:
        """`layer_order`, or group by group."""
        return self.layer_order or tuple(
            index for index, group in enumerate(self.layer_groups) for _ in range(group.count)
        )


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
