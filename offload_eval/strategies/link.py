"""The link as a strategy sees it. Instruments implement it; neither package imports the other."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from offload_eval.core.records import Direction


class Transfer(Protocol):
    """One submitted copy."""

    def wait(self) -> None:
        """Orders all later computation after the copy. On CUDA the host does not block."""


class Link(Protocol):
    """Copies between the host tier and the device tier, in the background of computation.

    A copy starts only after all computation submitted before it, and after every transfer in `after`. Copies of one
    direction on one device keep their order; the two directions keep none between them.
    Both tensors are contiguous, of equal shape and dtype, and are kept alive until the copy is done.
    """

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocates an uninitialized buffer in the host tier (pinned where the device has pinned memory)."""

    def h2d(self, device: torch.Tensor, host: torch.Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        """Submits a copy from `host` into `device`."""

    def d2h(self, host: torch.Tensor, device: torch.Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        """Submits a copy from `device` into `host`."""

    def meter_copies(
        self,
        direction: Direction,
        sizes_bytes: Sequence[int],
        host_tensors: Callable[[], Iterable[torch.Tensor]],
        device: torch.device,
    ) -> AbstractContextManager[None]:
        """Accounts for copies that other code enqueues on the device's current stream inside the block.

        `host_tensors` gives their host sides: asked at the block's start for h2d, and at its end for d2h.
        """

    def meter_wait(self, device: torch.device) -> AbstractContextManager[None]:
        """Accounts for the time the device's current stream stands still inside the block."""
