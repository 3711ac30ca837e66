"""The emulated link's raw copies: one copy thread, held until everything is queued."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from threading import Event

import torch

from offload_eval.core.link import HostMemory
from offload_eval.core.records import Direction
from offload_eval.instruments.copies import Copy, CopyTimes

CopyFunction = Callable[[torch.Tensor, torch.Tensor, float], object]


class CpuCopyBench:
    """Copies between the tiers of the cpu device.

    The one thread serves both directions in turn, as the link's does, so opposed copies share its bandwidth.

    Args:
        copy: Copies into the first tensor from the second at the link's pace, as if submitted at the third.
    """

    host_memories: tuple[HostMemory, ...] = ("pageable",)
    opposable_memories: tuple[HostMemory, ...] = ("pageable",)
    pci_address: str | None = None

    def __init__(self, copy: CopyFunction) -> None:
        self._copy = copy
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="copies")

    def __enter__(self) -> "CpuCopyBench":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=exc_info[0] is not None)

    def empty_host(self, num_bytes: int, memory: HostMemory) -> torch.Tensor:
        """Allocates uninitialized bytes; a CPU pins nothing."""
        assert memory == "pageable"
        return torch.empty(num_bytes, dtype=torch.uint8)

    def empty_device(self, num_bytes: int) -> torch.Tensor:
        """Allocates uninitialized bytes."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def free_device_bytes(self) -> int | None:
        """None: the device tier is host memory."""
        return None

    def time_copies(
        self,
        direction: Direction,  # noqa: ARG002
        memory: HostMemory,  # noqa: ARG002
        measured: Sequence[Copy],
        opposing: Sequence[Copy] = (),
    ) -> CopyTimes:
        """Queues copies of both directions in turn, the other direction first, and then lets the thread go."""
        released = Event()
        held = self._thread.submit(released.wait)
        started = self._thread.submit(time.perf_counter)
        ends: dict[bool, float] = {}
        try:
            done = [
                self._thread.submit(self._run, copy, is_measured, started, ends)
                for pair in zip_longest(opposing, measured)
                for is_measured, copy in enumerate(pair)
                if copy is not None
            ]
        finally:  # an interrupt in between would leave the thread waiting
            released.set()
        held.result()
        for each in done:
            each.result()
        started_s = started.result()
        return CopyTimes(ends[True] - started_s, ends[False] - started_s if opposing else None)

    def _run(self, copy: Copy, is_measured: int, started: "Future[float]", ends: dict[bool, float]) -> None:
        self._copy(copy.target, copy.source, started.result())  # that ran first, on this very thread
        ends[bool(is_measured)] = time.perf_counter()
