"""The measured device: CUDA and ROCm builds of torch.

Nothing here initializes CUDA before a CudaDevice is made.
"""

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Final, Literal

import torch

from offload_eval.core.experiment import DeviceName
from offload_eval.core.records import Direction, Evidence, PhaseSample
from offload_eval.errors import UnableError
from offload_eval.instruments.cuda_copies import CudaCopyBench
from offload_eval.instruments.device import Tier, Transfer
from offload_eval.instruments.transfers import TransferLog

_MS: Final = 1e-3


class CudaTransfer:
    """One submitted copy. `done` is None once the host has seen it complete: nothing is left to order."""

    def __init__(self, link: "CudaLink", done: torch.cuda.Event) -> None:
        self.done: torch.cuda.Event | None = done
        self._link = link

    def wait(self) -> None:
        """Makes the current stream wait for the copy; the host goes on."""
        if self.done is not None:
            with self._link.meter_wait():
                self._link.compute_stream.wait_event(self.done)


class CopyStream:
    """One direction's stream, the copies in flight on it, and the events they use in turn.

    A copy in flight holds its tensors. `record_stream` would keep their memory from reuse as well, but the
    allocator would stop counting it as allocated, and peaks would come out too low.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device=device)
        self._submitted = torch.cuda.Event()
        self._idle_events: list[torch.cuda.Event] = []
        self._in_flight: deque[tuple[CudaTransfer, torch.Tensor, torch.Tensor]] = deque()

    def follow(self, compute_stream: torch.cuda.Stream, after: Sequence[Transfer]) -> None:
        """Puts later copies behind all computation submitted so far, and behind other copies.

        One event serves every submission: a wait is for what the event had recorded when it was enqueued.
        """
        self._submitted.record(compute_stream)
        self.stream.wait_event(self._submitted)
        for transfer in after:
            if not isinstance(transfer, CudaTransfer):
                raise TypeError(f"a copy on this link cannot wait for a {type(transfer).__name__}")
            if transfer.done is not None:
                self.stream.wait_event(transfer.done)

    def track(self, link: "CudaLink", target: torch.Tensor, source: torch.Tensor) -> CudaTransfer:
        """Records the end of the copy just enqueued, and holds its tensors until then."""
        done = self._idle_events.pop() if self._idle_events else torch.cuda.Event()
        done.record(self.stream)
        transfer = CudaTransfer(link, done)
        self._in_flight.append((transfer, target, source))
        return transfer

    def retire(self) -> None:
        """Lets go of the copies that are complete; a stream completes in order."""
        while self._in_flight:
            transfer = self._in_flight[0][0]
            assert transfer.done is not None
            if not transfer.done.query():
                return
            self._idle_events.append(transfer.done)
            transfer.done = None
            self._in_flight.popleft()


class Stopwatch:
    """Spans between events on a stream, read when everything has run: the host never waits for one."""

    def __init__(self) -> None:
        self._spans: list[tuple[Callable[[float], None], torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def span(self, stream: torch.cuda.Stream, add: Callable[[float], None]) -> Iterator[None]:
        """Times what the block enqueues on `stream`, and with it the few µs between two adjacent events."""
        started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        started.record(stream)
        yield
        ended.record(stream)
        self._spans.append((add, started, ended))

    def settle(self) -> None:
        """Adds every span to its account, in seconds."""
        for add, started, ended in self._spans:
            add(started.elapsed_time(ended) * _MS)
        self._spans.clear()


class CudaLink:
    """One stream a direction beside the compute stream, which is the stream current at each call.

    Busy time runs on a copy stream from the moment that the copy may start to its end, and counts for the
    phase that submitted it. Exposed time runs on the compute stream around a wait, and counts for the phase in
    which computation waited. A copy overlaps computation only if its host tensor is pinned, as `empty_host`'s.
    """

    def __init__(self, device: torch.device, pinned: "PinnedLedger", *, timed: bool) -> None:
        self.log = TransferLog(timed=timed)
        self._device = device
        self._pinned = pinned
        self._stopwatch = Stopwatch()
        self._copy_streams: dict[Direction, CopyStream] = {
            "h2d": CopyStream(device),
            "d2h": CopyStream(device),
        }

    def __enter__(self) -> "CudaLink":
        return self

    def __exit__(self, *exc_info: object) -> None:
        torch.cuda.synchronize(self._device)
        self._stopwatch.settle()
        for copies in self._copy_streams.values():
            copies.retire()

    @property
    def compute_stream(self) -> torch.cuda.Stream:
        """The stream that computation is submitted to now."""
        return torch.cuda.current_stream(self._device)

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocates an uninitialized pinned buffer; its allocator rounds up to a power of two bytes."""
        buffer = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
        self._pinned.enter(buffer)
        return buffer

    def h2d(self, device: torch.Tensor, host: torch.Tensor, after: Sequence[Transfer] = ()) -> CudaTransfer:
        """Submits a copy into the device tier."""
        return self._submit("h2d", device, host, after)

    def d2h(self, host: torch.Tensor, device: torch.Tensor, after: Sequence[Transfer] = ()) -> CudaTransfer:
        """Submits a copy into the host tier."""
        return self._submit("d2h", host, device, after)

    @contextmanager
    def meter_copy(self, direction: Direction, num_bytes: int) -> Iterator[None]:
        """Accounts for copies that other code enqueues on the current stream inside the block."""
        self.log.add_bytes(direction, num_bytes)
        with self._timed(self.compute_stream, partial(self.log.add_busy, self.log.phase, direction)):
            yield

    def meter_wait(self) -> AbstractContextManager[None]:
        """Accounts for the time the current stream stands still inside the block."""
        return self._timed(self.compute_stream, partial(self.log.add_exposed, self.log.phase))

    def _submit(
        self, direction: Direction, target: torch.Tensor, source: torch.Tensor, after: Sequence[Transfer]
    ) -> CudaTransfer:
        if target.shape != source.shape or target.dtype != source.dtype:
            raise ValueError(f"copy from {source.shape} {source.dtype} to {target.shape} {target.dtype}")
        if not (target.is_contiguous() and source.is_contiguous()):
            raise ValueError("a copy over the link needs contiguous tensors")
        copies = self._copy_streams[direction]
        copies.retire()
        copies.follow(self.compute_stream, after)
        self.log.add_bytes(direction, target.nbytes)
        busy = self._timed(copies.stream, partial(self.log.add_busy, self.log.phase, direction))
        with busy, torch.cuda.stream(copies.stream):
            target.copy_(source, non_blocking=True)
        return copies.track(self, target, source)

    def _timed(self, stream: torch.cuda.Stream, add: Callable[[float], None]) -> AbstractContextManager[None]:
        return self._stopwatch.span(stream, add) if self.log.timed else nullcontext()


class PinnedLedger:
    """Bytes asked for by the pinned buffers of this device's links that are still alive."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}
        self._entered = 0

    def enter(self, buffer: torch.Tensor) -> None:
        """Counts a buffer until its storage is gone; an empty one takes no block."""
        if buffer.nbytes:
            self._entered += 1
            self._bytes[self._entered] = buffer.nbytes
            weakref.finalize(buffer.untyped_storage(), self._bytes.pop, self._entered, None)

    def requested_bytes(self, active_requests: int) -> int | None:
        """The sum, if our buffers are all that the allocator has handed out; other code's are not known."""
        return sum(self._bytes.values()) if len(self._bytes) == active_requests else None


class CudaMemoryMeter:
    """Peaks from the allocator's own counters; device-wide use from looks at the token boundaries.

    Allocated: tensors, rounded to the allocator's blocks. Reserved: what the allocator holds from the device;
    what it keeps from prefill counts in decode too. Device used: everybody's, context and libraries included.
    """

    num_alloc_retries: int | None = None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase: Literal["prefill", "decode"] = "prefill"
        self._samples = {"prefill": PhaseSample(), "decode": PhaseSample()}
        self._used_bytes = 0
        self._retries_before = _num_alloc_retries(device)
        self._begin_phase("prefill")

    def begin_decode(self) -> None:
        """Keeps the prefill peaks; the counters start again from what is live now."""
        self._end_phase()
        self._begin_phase("decode")

    def observe(self) -> None:
        """Looks at device-wide use; the driver answers without waiting for the device's work."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self._device)
        self._used_bytes = max(self._used_bytes, total_bytes - free_bytes)

    def close(self) -> None:
        """Keeps the peaks of the phase that was running, and counts the allocator's retries."""
        self._end_phase()
        after = _num_alloc_retries(self._device)
        if after is not None and self._retries_before is not None:
            self.num_alloc_retries = after - self._retries_before

    def sample(self, phase: Literal["prefill", "decode"]) -> PhaseSample:
        """The phase's peaks; all None for a phase that was not reached."""
        return self._samples[phase]

    def _begin_phase(self, phase: Literal["prefill", "decode"]) -> None:
        self._phase = phase
        self._used_bytes = 0
        torch.cuda.reset_peak_memory_stats(self._device)
        self.observe()

    def _end_phase(self) -> None:
        self.observe()
        self._samples[self._phase] = PhaseSample(
            peak_allocated_bytes=torch.cuda.max_memory_allocated(self._device),
            peak_reserved_bytes=torch.cuda.max_memory_reserved(self._device),
            peak_device_used_bytes=self._used_bytes,
        )


class CudaDevice:
    """The device that is current when this is made.

    Raises:
        UnableError: torch sees no CUDA or ROCm device.
    """

    name: DeviceName = "cuda"
    evidence: Evidence = "measured"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise UnableError(
                f"torch {torch.__version__} sees no CUDA or ROCm device; `offload-eval doctor` says what is "
                "missing, and `device: cpu` runs emulated"
            )
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self._pinned = PinnedLedger()

    @property
    def uuid(self) -> str | None:
        """The device's UUID in NVML's form; None on a ROCm build, whose UUIDs have another."""
        uuid = getattr(torch.cuda.get_device_properties(self.torch_device), "uuid", None)
        return None if uuid is None or torch.version.hip else f"GPU-{uuid}"

    def synchronize(self) -> None:
        """Returns once every stream of the device is idle."""
        torch.cuda.synchronize(self.torch_device)

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Nothing to do: the allocator counts them already."""

    def live_bytes(self) -> int:
        """Bytes the allocator has handed out to this process, in its blocks' sizes."""
        return torch.cuda.memory_allocated(self.torch_device)

    @contextmanager
    def measure_memory(self) -> Iterator[CudaMemoryMeter]:
        """Resets the allocator's peaks and follows them."""
        meter = CudaMemoryMeter(self.torch_device)
        try:
            yield meter
        finally:
            meter.close()

    @contextmanager
    def capped(self, cap_bytes: int | None) -> Iterator[None]:
        """Limits what the allocator may hold from the device.

        The cap is held against reserved bytes. At the cap the allocator gives its cached blocks back and
        tries again (`num_alloc_retries`), so what raises is live bytes plus what fragmentation strands, to
        within one segment (2 MiB, or 20 MiB for requests between 1 and 10 MiB). Context and libraries are
        outside it. Memory cached from before is given back first.
        """
        with ExitStack() as restore:
            if cap_bytes is not None:
                total_bytes = torch.cuda.get_device_properties(self.torch_device).total_memory
                torch.cuda.empty_cache()
                restore.callback(torch.cuda.set_per_process_memory_fraction, 1.0, self.torch_device)
                torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total_bytes), self.torch_device)
            yield

    def open_link(self, *, timed: bool) -> CudaLink:
        """Two copy streams with a fresh account."""
        return CudaLink(self.torch_device, self._pinned, timed=timed)

    def open_copy_bench(self) -> CudaCopyBench:
        """Two copy streams of its own, and one that holds them."""
        return CudaCopyBench(self.torch_device)

    def tier_of(self, tensor: torch.Tensor) -> Tier:
        """Device for tensors on a GPU, host for all others."""
        return "device" if tensor.device.type == "cuda" else "host"

    def pinned_bytes(self) -> tuple[int | None, int | None]:
        """Pinned bytes asked for, and the bytes the pinned allocator holds from the system for them.

        The allocator does not count requested bytes: they are known while every pinned block comes from this
        device's links, and None when other code, such as upstream's offloading, pins as well. The allocated
        bytes include freed blocks that the allocator keeps; `release` gives those back.
        Source: torch 2.13, ATen/core/CachingHostAllocator.h; `reserved_bytes` is the older name.
        """
        stats = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
        allocated_bytes = stats.get("reserved_bytes.current", stats.get("allocated_bytes.current"))
        active_requests = stats.get("active_requests.current")
        requested_bytes = None if active_requests is None else self._pinned.requested_bytes(active_requests)
        return requested_bytes, allocated_bytes

    def release(self) -> None:
        """Collects garbage and gives cached memory back, device and pinned."""
        gc.collect()
        self.synchronize()
        torch.cuda.empty_cache()
        # Private, as torch.cuda has no public name for it; without it pinned bytes add up over the cells.
        empty_host_cache: Callable[[], Any] | None = getattr(torch._C, "_host_emptyCache", None)
        if empty_host_cache is not None:
            empty_host_cache()


def _num_alloc_retries(device: torch.device) -> int | None:
    """The native allocator's count; cudaMallocAsync has none and reports zero."""
    if torch.cuda.get_allocator_backend() != "native":
        return None
    retries: int | None = torch.cuda.memory_stats(device).get("num_alloc_retries")
    return retries
