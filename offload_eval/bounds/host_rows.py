"""What the streamed cache keeps where: its resident layers, and the form of a row on the host.

A row is one token's keys and values of one KV head in one layer.
"""

from typing import Final

from offload_eval.core.experiment import HostDtype, StreamedSpec

GROUP_VALUES: Final = 64
"""Values that share a scale, where they divide a head's; else the whole head does."""
_ROUNDING: Final = 1e-9
"""A share of 0.29 of 100 layers is 29, not the 28.999... of floating point."""
_CODE_BITS: Final = {"fp8": 8, "int8": 8, "int4": 4}


def group_size(head_dim: int) -> int:
    """Values of one group in a head of keys or of values."""
    return GROUP_VALUES if head_dim % GROUP_VALUES == 0 else max(head_dim, 1)


def numbers_a_group(host_dtype: HostDtype) -> int:
    """A scale; of integers also an offset."""
    return 1 if host_dtype == "fp8" else 2


def codes_bytes(host_dtype: HostDtype, head_dim: int, value_bytes: int) -> int:
    """Bytes of the codes of one head's key or value, padded so that the numbers after them are aligned."""
    used = -(-head_dim * _CODE_BITS[host_dtype] // 8)
    return -(-used // value_bytes) * value_bytes


def host_head_bytes(host_dtype: HostDtype, head_dim: int, value_bytes: int) -> int:
    """Bytes of one head's key or value on the host: its codes, and each group's numbers in the model's dtype.

    Args:
        host_dtype: How it is kept.
        head_dim: Its values.
        value_bytes: Of the model's dtype.
    """
    if host_dtype == "native":
        return head_dim * value_bytes
    groups = head_dim // group_size(head_dim)
    return codes_bytes(host_dtype, head_dim, value_bytes) + groups * numbers_a_group(host_dtype) * value_bytes


def num_slots(spec: StreamedSpec, num_streamed: int) -> int:
    """Scratch slots of a ring.

    Native rows are read by attention where they were fetched to, so that the layer in use takes a slot too.
    Quantized rows are read into a layer of its own, and their slot is free at once.
    """
    return min(num_streamed, spec.prefetch_layers + (spec.host_dtype == "native"))


def num_resident(spec: StreamedSpec, num_layers: int, layer_bytes: int) -> int:
    """Layers whose KV stays on the device.

    Args:
        spec: With a share, or bytes; `auto` has been replaced.
        num_layers: Layers that could be streamed.
        layer_bytes: Device bytes of one of them, for the whole batch at full length.
    """
    assert spec.resident_share != "auto", "auto is replaced by a share before any cache is built"
    if spec.resident_bytes is not None:
        return min(num_layers, spec.resident_bytes // layer_bytes)
    return 0 if spec.resident_share is None else int(spec.resident_share * num_layers + _ROUNDING)


def is_resident(index: int, resident: int, num_layers: int) -> bool:
    """Whether a layer is resident: `resident` of them lie evenly among the others, the last one first."""
    return (index + 1) * resident // num_layers > index * resident // num_layers
