"""The two ledgers of admission: device memory and pinned host memory. Swap is in neither."""

from collections.abc import Sequence
from typing import Final

import numpy as np

from offload_eval.bounds.kv_views import Counts
from offload_eval.bounds.session_card import HostBuffers
from offload_eval.errors import InputError

UNLIMITED: Final = 2**62
"""Sessions where nothing grows with them."""


MOST_BYTES: Final = 2**61
"""Rounding up may double bytes, which have to stay below 2**63."""


def refuse_overflow(num_bytes: float, what: str) -> None:
    """Refuses bytes that no machine has, and no 64-bit integer.

    Raises:
        InputError: The message says what takes so many.
    """
    if num_bytes >= MOST_BYTES:
        raise InputError(f"{what} needs {num_bytes:.1e} bytes of KV cache; allowed: less than {MOST_BYTES:.1e}")


def sessions_that_fit(available_bytes: Counts | int, bytes_per_session: Counts) -> Counts:
    """Whole sessions in what is available; `UNLIMITED` where a session takes nothing."""
    sessions = np.maximum(available_bytes, 0) // np.maximum(bytes_per_session, 1)
    return np.where(bytes_per_session > 0, sessions, UNLIMITED)


def pinned_bytes(buffers: Sequence[HostBuffers], sessions: Counts) -> Counts:
    """Host memory that the buffers of a batch take.

    torch's pinned allocator rounds each buffer up to a power of two. Source: torch 2.13,
    ATen/core/CachingHostAllocator.h (PowerOf2Ceil); its threshold, pinned_max_round_threshold, is unset.
    """
    sizes = (each.count * _power_of_two(sessions * each.bytes) for each in buffers)
    return sum(sizes, start=np.zeros_like(sessions))


def _power_of_two(size: Counts) -> Counts:
    """The next power of two; 0 stays 0."""
    filled = np.maximum(size - 1, 0)
    for shift in (1, 2, 4, 8, 16, 32):
        filled = filled | (filled >> shift)
    return np.where(size > 0, filled + 1, 0)


def pinned_sessions(buffers: Sequence[HostBuffers], available_bytes: int) -> Counts:
    """The most sessions whose pinned buffers fit, together in one batch; `UNLIMITED` where they pin nothing."""
    per_session = sum((each.count * each.bytes for each in buffers), start=np.asarray(0, np.int64))
    # Rounding never lowers: unrounded sessions are the most there can be.
    low, high = np.zeros_like(per_session), sessions_that_fit(available_bytes, per_session)
    unlimited = high == UNLIMITED
    high = np.where(unlimited, 0, high)
    while np.any(low < high):
        middle = (low + high + 1) // 2
        fits = pinned_bytes(buffers, middle) <= available_bytes
        low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
    return np.where(unlimited, UNLIMITED, low)
