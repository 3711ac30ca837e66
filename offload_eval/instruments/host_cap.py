"""The cap on host memory that buffers of the link may take.

It holds what is allocated by the link's `empty_host`, and nothing else: transformers' own offloading allocates its
host memory by itself and is not held to it, nor are the model, the interpreter and libraries.
"""

from offload_eval.errors import HostCapError
from offload_eval.units import KIB, format_bytes


def refuse_past_host_cap(asked_bytes: int, held_bytes: int, cap_bytes: int | None) -> None:
    """Refuses a buffer before it is allocated.

    Args:
        asked_bytes: What it takes, as its allocator rounds it.
        held_bytes: What the buffers that are alive take.
        cap_bytes: What all of them may take; None: there is no cap.

    Raises:
        HostCapError: It would not fit. A MemoryError, so that it counts as the host's ledger.
    """
    if cap_bytes is not None and held_bytes + asked_bytes > cap_bytes:
        raise HostCapError(
            f"a host buffer of {_exactly(asked_bytes)} was asked for, the link's buffers hold {_exactly(held_bytes)}, "
            f"and the cap is {_exactly(cap_bytes)}"
        )


def pinned_block_bytes(asked_bytes: int) -> int:
    """What torch's pinned allocator takes for one buffer: the next power of two; nothing for nothing.

    Source: torch 2.13, ATen/core/CachingHostAllocator.h (PowerOf2Ceil).
    """
    return 1 << (asked_bytes - 1).bit_length() if asked_bytes else 0


def _exactly(size_bytes: int) -> str:
    shown = format_bytes(size_bytes)
    return shown if size_bytes < KIB else f"{shown} ({size_bytes:,} bytes)"
