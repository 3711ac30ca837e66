"""How a cached row is stored: bits a value, what a group of values adds, the newest tokens that stay unquantized."""

from dataclasses import dataclass
from typing import Final, Literal

KvCacheDtype = Literal["auto", "bfloat16", "float16", "float32", "fp8", "int8", "int4", "int2"]

_INTEGER_BITS: Final = {"int8": 8, "int4": 4, "int2": 2}
_PLAIN_BITS: Final = {"bfloat16": 16, "float16": 16, "float32": 32}
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
    """What a layer adds, whatever its tokens."""


def plain_format(bits: int) -> KvFormat:
    """Rows in a floating-point dtype of so many bits."""
    return KvFormat(bits=bits, unquantized_bits=bits)


def kv_format(dtype: KvCacheDtype, model_bits: int, group_values: int, residual_tokens: int) -> KvFormat:
    """The format that a KV cache dtype names.

    Args:
        dtype: `auto` is the model's dtype. fp8: one byte a value, two float32 scales a layer. int8, int4, int2:
            groups with a scale and a zero point in the model's dtype, and a residual window in it.
        model_bits: Bits of the model's dtype.
        group_values: Values of a group; the integer formats'.
        residual_tokens: Newest tokens that stay unquantized; the integer formats'.
    """
    if dtype == "fp8":
        return KvFormat(bits=8, unquantized_bits=model_bits, layer_bytes=FP8_SCALE_BYTES_PER_LAYER)
    if dtype in _INTEGER_BITS:
        return KvFormat(
            bits=_INTEGER_BITS[dtype],
            group_values=group_values,
            group_bits=2 * model_bits,
            residual_tokens=residual_tokens,
            unquantized_bits=model_bits,
        )
    return plain_format(_PLAIN_BITS.get(dtype, model_bits))
