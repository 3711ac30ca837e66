"""How a cached row is stored: bits a value, what a group of values adds, the newest tokens that stay unquantized."""

from dataclasses import dataclass
from typing import Final

from offload_eval.core.experiment import BITS_PER_VALUE
from offload_eval.core.plan import PagingSpec

_INTEGER_BITS: Final = {"int8": 8, "int4": 4, "int2": 2}
FP8_SCALE_BYTES_PER_LAYER: Final = 8
"""One float32 scale for keys, one for values."""


@dataclass(frozen=True, kw_only=True)
class KvFormat:
    """Storage of the rows of attention layers. States, and an indexer's keys, stay at `unquantized_bits`."""

    bits: int
    """Of one stored value."""
    group_values: int | None = None
    """Values that share one scale and one zero point; None: there are no groups."""
    group_bits: int = 0
    """A group's scale and zero point together."""
    residual_tokens: int = 0
    """Newest tokens of a layer that stay unquantized."""
    unquantized_bits: int = 16
    layer_bytes: int = 0
    """What a layer adds, whatever its tokens and sessions."""


def plain_format(bits: int) -> KvFormat:
    """Rows in a floating-point dtype of so many bits."""
    return KvFormat(bits=bits, unquantized_bits=bits)


def kv_format(paging: PagingSpec, model_bits: int) -> KvFormat:
    """The format that an engine's settings name.

    `auto` is the model's dtype. fp8 is one byte a value, and two float32 scales a layer. int8, int4 and int2 come in
    groups with a scale and a zero point in the model's dtype, beside a residual window in that dtype.

    Args:
        paging: The engine's settings.
        model_bits: Bits of the model's dtype.
    """
    dtype = paging.kv_cache_dtype
    if dtype == "fp8":
        return KvFormat(bits=8, unquantized_bits=model_bits, layer_bytes=FP8_SCALE_BYTES_PER_LAYER)
    if dtype in _INTEGER_BITS:
        return KvFormat(
            bits=_INTEGER_BITS[dtype],
            group_values=paging.q_group_size,
            group_bits=2 * model_bits,
            residual_tokens=paging.residual_length,
            unquantized_bits=model_bits,
        )
    return plain_format(BITS_PER_VALUE.get(dtype, model_bits))
