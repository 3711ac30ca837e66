"""Raw copies on CUDA and ROCm: both copy streams held until everything is queued, then timed by device events."""

import time
from collections.abc import Sequence
from typing import Any, Final

import torch

from offload_eval.core.link import HostMemory
from offload_eval.core.records import Direction
from offload_eval.errors import UnableError
from offload_eval.instruments.copies import Copy, CopyTimes

_MS: Final = 1e-3
_FIRST_SPIN_CYCLES: Final = 2_000_000
"""About a millisecond of a GPU's clock."""
_MOST_SPIN_CYCLES: Final = 4_000_000_000


class CudaCopyBench:
    """Copies between a device and pinned or pageable host memory.

    A copy of pageable memory cannot be queued: the driver stages it through pinned memory of its own while the host
    waits. Such copies run one by one, timed by the host's clock.
    Source: CUDA C++ Programming Guide and Runtime API, "API synchronization behavior".
    """

    host_memories: tuple[HostMemory, ...] = ("pinned", "pageable")
    opposable_memories: tuple[HostMemory, ...] = ("pinned",)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._gate = torch.cuda.Stream(device=device)
        self._streams: dict[Direction, torch.cuda.Stream] = {
            "h2d": torch.cuda.Stream(device=device),
            "d2h": torch.cuda.Stream(device=device),
        }
        self._spin_cycles = _FIRST_SPIN_CYCLES

    def __enter__(self) -> "CudaCopyBench":
        return self

    def __exit__(self, *exc_info: object) -> None:
        torch.cuda.synchronize(self._device)

    @property
    def pci_address(self) -> str | None:
        """Of the device; None where this torch does not say."""
        properties: Any = torch.cuda.get_device_properties(self._device)
        if not hasattr(properties, "pci_bus_id"):
            return None
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"

    def empty_host(self, num_bytes: int, memory: HostMemory) -> torch.Tensor:
        """Allocates uninitialized bytes, pinned or not."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=memory == "pinned")

    def empty_device(self, num_bytes: int) -> torch.Tensor:
        """Allocates uninitialized bytes."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def free_device_bytes(self) -> int | None:
        """What the driver would still hand out."""
        free_bytes: int = torch.cuda.mem_get_info(self._device)[0]
        return free_bytes

    def time_copies(
        self, direction: Direction, memory: HostMemory, measured: Sequence[Copy], opposing: Sequence[Copy] = ()
    ) -> CopyTimes:
        """Queues copies behind a spinning kernel, and lets both directions go at once.

        Should the kernel end before everything is queued, it spins twice as long the next time.

        Raises:
            UnableError: The host never queued the copies in time.
        """
        if memory not in self.opposable_memories:
            assert not opposing, "the host waits for each pageable copy"
            return self._time_blocking(measured)
        while self._spin_cycles <= _MOST_SPIN_CYCLES:
            times = self._time_held(direction, measured, opposing)
            if times is not None:
                return times
            self._spin_cycles *= 2
        raise UnableError(
            f"{len(measured) + len(opposing)} copies could not be queued while {_MOST_SPIN_CYCLES:,} cycles of the "
            "device passed: the host is too busy to time its link; stop other processes, or free its cores"
        )

    def _time_held(self, direction: Direction, measured: Sequence[Copy], opposing: Sequence[Copy]) -> CopyTimes | None:
        """Times the copies; None where they began before all of them were queued."""
        torch.cuda.synchronize(self._device)
        released = torch.cuda.Event()
        with torch.cuda.stream(self._gate):
            # Private, as torch has no public kernel that waits. Its own tests and benchmarks hold streams with it.
            torch.cuda._sleep(self._spin_cycles)
        released.record(self._gate)
        other: Direction = "d2h" if direction == "h2d" else "h2d"
        for stream in self._streams.values():
            stream.wait_event(released)
        _, opposed = self._queue(other, opposing)
        started, ended = self._queue(direction, measured)
        was_held = not released.query()
        torch.cuda.synchronize(self._device)
        if not was_held:
            return None
        opposing_s = started.elapsed_time(opposed) * _MS if opposing else None
        return CopyTimes(started.elapsed_time(ended) * _MS, opposing_s)

    def _queue(self, direction: Direction, copies: Sequence[Copy]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = self._streams[direction]
        started.record(stream)
        with torch.cuda.stream(stream):
            for copy in copies:
                # A strided source is gathered on the device first, in this stream, as for upstream's sliding layers.
                copy.target.copy_(copy.source, non_blocking=True)
        ended.record(stream)
        return started, ended

    def _time_blocking(self, copies: Sequence[Copy]) -> CopyTimes:
        torch.cuda.synchronize(self._device)
        started_s = time.perf_counter()
        for copy in copies:
            copy.target.copy_(copy.source)
        # Host to device returns once the data is staged, before it has arrived.
        torch.cuda.synchronize(self._device)
        return CopyTimes(time.perf_counter() - started_s, None)
