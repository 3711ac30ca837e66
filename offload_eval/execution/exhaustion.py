"""Which memory ran out, told from what torch, the driver and the interpreter raise."""

import traceback
from typing import Final

import torch

from offload_eval.core.judgement import Ledger

_OF_THE_DRIVER: Final = "CUDA error: out of memory"
_OF_LIBRARIES: Final = ("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED", "CUSOLVER_STATUS_ALLOC_FAILED")
_OFFLOADING: Final = frozenset({"offload", "prefetch"})
"""Methods of upstream's layers that copy to host memory which torch pins for them."""


def exhausted_ledger(error: BaseException) -> Ledger | None:
    """Which memory ran out; None where none did.

    Pinned memory that cannot be had is the driver's error, as is device memory that is asked for past the allocator:
    the link says itself that its buffers were refused, and upstream's offloading is known by where it raised.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return "device"
    words = str(error)
    if isinstance(error, MemoryError) or "can't allocate memory" in words:
        return "host"
    if _OF_THE_DRIVER in words:
        return "host" if _in_offloading(error) else "device"
    return "device" if any(name in words for name in _OF_LIBRARIES) else None


def _in_offloading(error: BaseException) -> bool:
    return any(frame.f_code.co_name in _OFFLOADING for frame, _ in traceback.walk_tb(error.__traceback__))
