"""The emulated device: a CPU whose memory is split into a capped device tier and a host tier.

Copies, times and running out of memory are real; the link and the device are this CPU's. Everything measured
here says `emulated`.
"""

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import torch

from offload_eval.core.experiment import DeviceName
from offload_eval.core.records import Direction, Evidence, Phase, PhaseSample
from offload_eval.instruments.copy_profile import ProfiledCopy
from offload_eval.instruments.cpu_copies import CpuCopyBench
from offload_eval.instruments.cpu_pace import PacedCopies
from offload_eval.instruments.device import Tier, Transfer
from offload_eval.instruments.host_cap import refuse_past_host_cap
from offload_eval.instruments.live_storage import LiveStorageTracker, TieredMemory
from offload_eval.instruments.transfers import TransferLog


class CpuTransfer:
    """A copy on the copy thread."""

    def __init__(self, copied: "Future[None]", log: TransferLog) -> None:
        self._copied = copied
        self._log = log

    def wait(self) -> None:
        """Blocks until the copy is done; computation on a CPU is this thread."""
        if not self._log.timed or self._copied.done():
            self._copied.result()
            return
        started = time.perf_counter()
        self._copied.result()
        self._log.add_exposed(self._log.phase, time.perf_counter() - started)


class CpuLink:
    """One copy thread that serves both directions in the order of submission.

    Computation is synchronous, so what was submitted before a copy has run already; and one queue puts every
    copy behind all earlier ones, which is what `after` asks for.
    """

    def __init__(self, memory: TieredMemory, *, timed: bool, bytes_per_s: int | None) -> None:
        self.log = TransferLog(timed=timed)
        self._memory = memory
        self._copies = PacedCopies(bytes_per_s)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="link")

    def __enter__(self) -> "CpuLink":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=exc_info[0] is not None)

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocates an uninitialized buffer that counts in the host tier alone.

        Raises:
            HostCapError: The host tier would pass its cap.
        """
        asked_bytes = math.prod(shape) * dtype.itemsize
        refuse_past_host_cap(asked_bytes, self._memory.host.live_bytes, self._memory.host_cap_bytes)
        with self._memory.host_allocation():
            buffer = torch.empty(shape, dtype=dtype)
            self._memory.enter(buffer)
        return buffer

    def h2d(self, device: torch.Tensor, host: torch.Tensor, after: Sequence[Transfer] = ()) -> CpuTransfer:  # noqa: ARG002
        """Submits a copy into the device tier."""
        return self._submit("h2d", device, host, host)

    def d2h(self, host: torch.Tensor, device: torch.Tensor, after: Sequence[Transfer] = ()) -> CpuTransfer:  # noqa: ARG002
        """Submits a copy into the host tier."""
        return self._submit("d2h", host, device, host)

    def meter_copies(
        self,
        direction: Direction,
        sizes_bytes: Sequence[int],
        _host_tensors: Callable[[], Iterable[torch.Tensor]],
        _device: torch.device,
    ) -> AbstractContextManager[None]:
        """Refuses: no strategy of upstream's that copies by itself runs on a CPU."""
        raise NotImplementedError(
            f"{direction} copies of {sum(sizes_bytes)} bytes outside the link cannot run on a CPU"
        )

    def meter_wait(self, _device: torch.device) -> AbstractContextManager[None]:
        """Refuses, as `meter_copies` does."""
        raise NotImplementedError("a wait outside the link cannot run on a CPU")

    def _submit(
        self, direction: Direction, target: torch.Tensor, source: torch.Tensor, host: torch.Tensor
    ) -> CpuTransfer:
        if target.shape != source.shape or target.dtype != source.dtype:
            raise ValueError(f"copy from {source.shape} {source.dtype} to {target.shape} {target.dtype}")
        if not (target.is_contiguous() and source.is_contiguous()):
            raise ValueError("a copy over the link needs contiguous tensors")
        self.log.add_copy(direction, target.nbytes)
        self.log.add_pageable([host.untyped_storage() not in self._memory.host])
        submitted_s = time.perf_counter()
        copied = self._thread.submit(self._copy, self.log.phase, direction, target, source, submitted_s)
        return CpuTransfer(copied, self.log)

    def _copy(
        self, phase: Phase, direction: Direction, target: torch.Tensor, source: torch.Tensor, submitted_s: float
    ) -> None:
        busy_s = self._copies.copy(target, source, submitted_s)
        if self.log.timed:
            self.log.add_busy(phase, direction, busy_s)


class CpuMemoryMeter:
    """Exact peaks of the device tier, from the live-storage tracker."""

    num_alloc_retries: int | None = None

    def __init__(self, memory: TieredMemory) -> None:
        self._memory = memory
        self._phase: Phase = "prefill"
        self._peaks_bytes: dict[Phase, int] = {}
        memory.device.restart_peak()

    def begin_decode(self) -> None:
        """Keeps the prefill peak and restarts the counter."""
        self.close()
        self._phase = "decode"
        self._memory.device.restart_peak()

    def observe(self) -> None:
        """Nothing to look at: the tracker sees every allocation."""

    def close(self) -> None:
        """Keeps the peak of the phase that was running."""
        self._peaks_bytes[self._phase] = self._memory.device.peak_bytes

    def sample(self, phase: Phase) -> PhaseSample:
        """The phase's peak, None where it was not reached; a CPU has no reserved or device-wide figure."""
        return PhaseSample(peak_allocated_bytes=self._peaks_bytes.get(phase))


class CpuDevice:
    """The emulated device."""

    name: DeviceName = "cpu"
    evidence: Evidence = "emulated"
    has_profiler: bool = False
    leak_tolerance_bytes: int = 0

    def __init__(self, link_bytes_per_s: int | None = None) -> None:
        self.torch_device = torch.device("cpu")
        self.memory = TieredMemory()
        self._link_bytes_per_s = link_bytes_per_s

    def synchronize(self) -> None:
        """Nothing to wait for: computation is synchronous."""

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Enters tensors into the device tier."""
        for tensor in tensors:
            self.memory.enter(tensor)

    def live_bytes(self) -> int:
        """Live bytes of the device tier, as far as the tracker was on when they were allocated."""
        return self.memory.device.live_bytes

    def live_storages(self) -> frozenset[int]:
        """What is in the device tier's ledger."""
        return self.memory.device.keys()

    def storage_key(self, tensor: torch.Tensor) -> int | None:
        """The storage's place in the ledger of the device tier."""
        storage = tensor.untyped_storage()
        return storage._cdata if storage in self.memory.device else None

    @contextmanager
    def measure_memory(self) -> Iterator[CpuMemoryMeter]:
        """Turns the live-storage tracker on."""
        meter = CpuMemoryMeter(self.memory)
        try:
            with LiveStorageTracker(self.memory):
                yield meter
        finally:
            meter.close()

    @contextmanager
    def capped(self, cap_bytes: int | None, host_cap_bytes: int | None = None) -> Iterator[None]:
        """Caps the device tier, which acts while `measure_memory` is open, and the host tier, which always acts.

        The host tier is the buffers of `empty_host`, in the bytes that were asked for.
        """
        self.memory.cap_bytes, self.memory.host_cap_bytes = cap_bytes, host_cap_bytes
        try:
            yield
        finally:
            self.memory.cap_bytes = self.memory.host_cap_bytes = None

    def open_link(self, *, timed: bool) -> CpuLink:
        """A copy thread with a fresh account."""
        return CpuLink(self.memory, timed=timed, bytes_per_s=self._link_bytes_per_s)

    def open_copy_bench(self) -> CpuCopyBench:
        """A copy thread for raw copies, at the pace of the link."""
        return CpuCopyBench(PacedCopies(self._link_bytes_per_s).copy)

    def profile_copies(self) -> AbstractContextManager[list[ProfiledCopy]]:
        """Refuses: to a CPU's profiler, a copy between the tiers is a copy like any other."""
        raise NotImplementedError("the cpu device has no profiler of copies")

    def tier_of(self, tensor: torch.Tensor) -> Tier:
        """Host for what `empty_host` made, device for everything else."""
        return "host" if tensor.untyped_storage() in self.memory.host else "device"

    def pinned_bytes(self) -> tuple[int | None, int | None]:
        """A CPU pins nothing."""
        return None, None

    def release(self) -> None:
        """Collects garbage."""
        gc.collect()
