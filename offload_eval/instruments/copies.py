"""What a calibration of the link asks of a device: to time raw copies, with nothing of a strategy around them."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from offload_eval.core.link import HostMemory
from offload_eval.core.records import Direction


class Copy(NamedTuple):
    """One copy; equal shapes and dtypes, and a contiguous target."""

    target: torch.Tensor
    source: torch.Tensor


class CopyTimes(NamedTuple):
    """Seconds from the moment both directions were let go."""

    measured_s: float
    """To the end of the last copy that is measured."""
    opposing_s: float | None
    """To the end of the last copy the other way; None where there was none."""


class CopyBench(Protocol):
    """Times copies over a device's link. Closed by its context manager."""

    host_memories: tuple[HostMemory, ...]
    opposable_memories: tuple[HostMemory, ...]
    """Host memory whose copies can be queued, and so run both ways at once."""

    @property
    def pci_address(self) -> str | None:
        """Of the device, as `/sys/bus/pci/devices` writes it; None where there is none."""

    def __enter__(self) -> "CopyBench":
        """Opens the bench."""

    def __exit__(self, *exc_info: object) -> None:
        """Waits for every copy and gives back what the bench held."""

    def empty_host(self, num_bytes: int, memory: HostMemory) -> torch.Tensor:
        """Allocates uninitialized bytes in the host tier."""

    def empty_device(self, num_bytes: int) -> torch.Tensor:
        """Allocates uninitialized bytes in the device tier."""

    def free_device_bytes(self) -> int | None:
        """What can be allocated in a device tier of its own; None where both tiers are host memory."""

    def time_copies(
        self, direction: Direction, memory: HostMemory, measured: Sequence[Copy], opposing: Sequence[Copy] = ()
    ) -> CopyTimes:
        """Times copies of one direction, while others run the other way.

        Copies that can be queued are held until all of them are. Returns when all of them are done.
        """
