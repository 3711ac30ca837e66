"""transformers' QuantizedCache with the quanto, hqq and fp8 backends."""

from collections.abc import Iterator
from itertools import product
from typing import Any, ClassVar

from offload_eval.bounds.kv_views import as_transformers
from offload_eval.bounds.model_shape import model_shape
from offload_eval.bounds.session_card import UPSTREAM_DEFAULTS
from offload_eval.core.experiment import DeviceName, QuantizedSpec, Workload
from offload_eval.errors import InputError, UnknownModelStructureError
from offload_eval.strategies.backends import backend_refusal, load_backend
from offload_eval.strategies.link import Link
from offload_eval.strategies.upstream import layer_types, quantized_cache

_HQQ_GROUPS_PER_BYTE = {1: 8, 2: 4}
"""hqq packs these bits without padding: the count of groups must divide."""


class Quantized:
    """The prompt is quantized after its own prefill; each step dequantizes every layer whole."""

    uses_link: ClassVar[bool] = False

    def __init__(self, spec: QuantizedSpec) -> None:
        self.spec = spec

    def refusal(self, device: DeviceName, config: Any, workload: Workload) -> str | None:
        """Needs the backend's package, full attention in every layer, and KV that the groups divide."""
        if config.is_encoder_decoder:
            return "transformers' quantized cache does not support encoder-decoder models"
        other = sorted(set(layer_types(config)) - {"full_attention", "DynamicLayer"})
        if other:
            return (
                f"transformers' quantized cache needs full attention in every layer; this model has {', '.join(other)}"
            )
        return backend_refusal(self.spec.backend, device=device) or self._group_refusal(config, workload)

    def prepare(self, device: DeviceName) -> None:
        """Builds and loads the backend's extension."""
        load_backend(self.spec.backend, device)

    def build_cache(self, config: Any, _link: Link, _capacity_tokens: int) -> Any:
        """Upstream's cache; options that the spec leaves unset keep upstream's defaults."""
        return quantized_cache(self.spec.backend, config.get_text_config(decoder=True), self.spec.options)

    def _group_refusal(self, config: Any, workload: Workload) -> str | None:
        """Groups must divide the KV at the prompt and at every flush.

        Source: optimum-quanto 0.2.7, tensor/grouped.py; hqq 0.2.8, core/quantize.py and core/bitpack.py.
        """
        if self.spec.backend == "fp8":
            return None
        try:
            groups = model_shape(config.to_dict()).layer_groups
        except (UnknownModelStructureError, InputError):
            return None  # the backend will say it for itself
        options = UPSTREAM_DEFAULTS | self.spec.options
        sizes = {(as_transformers(g).kv_heads, dim) for g in groups for dim in (g.key_head_dim, g.value_head_dim)}
        for tokens, (kv_heads, head_dim) in product(
            quantized_lengths(workload, options["residual_length"]), sorted(sizes)
        ):
            rows = workload.batch_size * kv_heads * tokens
            refusal = self._indivisible(rows, head_dim, workload.batch_size, options)
            if refusal is not None:
                return f"{refusal}, when {tokens} tokens are quantized"
        return None

    def _indivisible(self, rows: int, head_dim: int, batch_size: int, options: dict[str, int]) -> str | None:
        group_size = options["q_group_size"]
        for axis in {self.spec.axis_key or 0, self.spec.axis_value or 0}:
            values = self._grouped_values(axis, rows, head_dim, batch_size)
            if values % group_size:
                return f"{self.spec.backend} groups {group_size} values on axis {axis}, which do not divide {values:,}"
        groups_per_byte = _HQQ_GROUPS_PER_BYTE.get(options["nbits"], 1) if self.spec.backend == "hqq" else 1
        groups = rows * head_dim // group_size
        if groups % groups_per_byte:
            bits = options["nbits"]
            return f"hqq packs {groups_per_byte} groups of {bits} bits together, which do not divide {groups:,}"
        return None

    def _grouped_values(self, axis: int, rows: int, head_dim: int, batch_size: int) -> int:
        """The count that a group size must divide: quanto keeps the axis apart, hqq does not."""
        if self.spec.backend == "hqq":
            return rows * head_dim
        return rows * head_dim // batch_size if axis == 0 else rows


def quantized_lengths(workload: Workload, residual_length: int) -> Iterator[int]:
    """Cached tokens each time the cache is quantized: the prompt, then every flush."""
    yield workload.prompt_tokens
    yield from range(workload.prompt_tokens + residual_length, workload.cached_tokens + 1, residual_length)
