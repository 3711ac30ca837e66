"""A link over which nothing moves: its copies are counted."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from offload_eval.core.records import Direction
from offload_eval.strategies.link import Transfer
from offload_eval.tracing.ledger import TracedMemory


class CopyAccount:
    """Bytes and copies by direction since `restart`."""

    def __init__(self) -> None:
        self._bytes: Counter[Direction] = Counter()
        self._copies: Counter[Direction] = Counter()

    def add(self, direction: Direction, num_bytes: int) -> None:
        """Counts one copy; one of nothing is none, as in a run's account."""
        if num_bytes:
            self._bytes[direction] += num_bytes
            self._copies[direction] += 1

    def counts(self) -> dict[str, int]:
        """The counts, under the names of `PhaseTrace`."""
        return {
            "h2d_bytes": self._bytes["h2d"],
            "d2h_bytes": self._bytes["d2h"],
            "num_h2d_copies": self._copies["h2d"],
            "num_d2h_copies": self._copies["d2h"],
        }

    def restart(self) -> None:
        """Starts again from zero."""
        self._bytes.clear()
        self._copies.clear()


class TracedTransfer:
    """A copy that is done as soon as it is counted."""

    def wait(self) -> None:
        """Nothing runs."""


class TracedLink:
    """Implements `strategies.link.Link`. What upstream copies by itself is counted at its operators instead."""

    def __init__(self, memory: TracedMemory, account: CopyAccount) -> None:
        self._memory = memory
        self._account = account

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocates a buffer without data that counts in the host tier alone."""
        return self._memory.empty_host(shape, dtype)

    def h2d(self, device: torch.Tensor, host: torch.Tensor, after: Sequence[Transfer] = ()) -> TracedTransfer:  # noqa: ARG002
        """Counts a copy into the device tier."""
        return self._count("h2d", device, host)

    def d2h(self, host: torch.Tensor, device: torch.Tensor, after: Sequence[Transfer] = ()) -> TracedTransfer:  # noqa: ARG002
        """Counts a copy into the host tier."""
        return self._count("d2h", host, device)

    def meter_copies(
        self,
        _direction: Direction,
        _sizes_bytes: Sequence[int],
        _host_tensors: Callable[[], Iterable[torch.Tensor]],
        _device: torch.device,
    ) -> AbstractContextManager[None]:
        """Counts nothing: the operators inside the block are seen themselves."""
        return nullcontext()

    def meter_wait(self, _device: torch.device) -> AbstractContextManager[None]:
        """Nothing waits."""
        return nullcontext()

    def _count(self, direction: Direction, target: torch.Tensor, source: torch.Tensor) -> TracedTransfer:
        if target.shape != source.shape or target.dtype != source.dtype:
            raise ValueError(f"copy from {source.shape} {source.dtype} to {target.shape} {target.dtype}")
        self._account.add(direction, target.nbytes)
        return TracedTransfer()
