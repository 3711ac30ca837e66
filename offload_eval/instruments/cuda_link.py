"""The link of a CUDA or ROCm device: copies on streams beside computation, and the account of them."""

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Final

import torch

from offload_eval.core.records import Direction
from offload_eval.instruments.device import Transfer
from offload_eval.instruments.host_cap import pinned_block_bytes, refuse_past_host_cap
from offload_eval.instruments.transfers import TransferLog

_MS: Final = 1e-3


class CudaTransfer:
    """One submitted copy. `done` is None once the host has seen it complete: nothing is left to order."""

    def __init__(self, link: "CudaLink", device: torch.device, done: torch.cuda.Event) -> None:
        self.done: torch.cuda.Event | None = done
        self._link = link
        self._device = device

    def wait(self) -> None:
        """Makes the current stream of the copy's device wait for it; the host goes on."""
        if self.done is not None:
            with self._link.meter_wait(self._device):
                torch.cuda.current_stream(self._device).wait_event(self.done)


class CopyStream:
    """One direction's stream of one device, the copies in flight on it, and the events they use in turn.

    A copy in flight holds its tensors. `record_stream` would keep their memory from reuse as well, but the
    allocator would stop counting it as allocated, and peaks would come out too low.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device=device)
        self._submitted = torch.cuda.Event()
        self._idle_events: list[torch.cuda.Event] = []
        self._in_flight: deque[tuple[CudaTransfer, torch.Tensor, torch.Tensor]] = deque()

    def follow(self, after: Sequence[Transfer]) -> None:
        """Puts later copies behind all computation submitted to the device so far, and behind other copies.

        One event serves every submission: a wait is for what the event had recorded when it was enqueued.
        """
        self._submitted.record(torch.cuda.current_stream(self.device))
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
        transfer = CudaTransfer(link, self.device, done)
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
    """Two copy streams for each device, beside its compute stream, which is the one current at each call.

    A model may be spread over several devices: the device of a copy is that of its device-side tensor, and streams
    are made when a device's first copy is submitted.

    Busy time runs on a copy stream from the moment that the copy may start to its end, and counts for the
    phase that submitted it. Exposed time runs on the compute stream around a wait, and counts for the phase in
    which computation waited. A copy overlaps computation only if its host tensor is pinned, as `empty_host`'s.
    """

    def __init__(self, device: torch.device, pinned: "PinnedLedger", *, timed: bool) -> None:
        self.log = TransferLog(timed=timed)
        self._home = device
        self._pinned = pinned
        self._stopwatch = Stopwatch()
        self._copy_streams: dict[tuple[torch.device, Direction], CopyStream] = {}

    def __enter__(self) -> "CudaLink":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for device in dict.fromkeys((self._home, *(device for device, _ in self._copy_streams))):
            torch.cuda.synchronize(device)
        self._stopwatch.settle()
        for copies in self._copy_streams.values():
            copies.retire()

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocates an uninitialized pinned buffer; its allocator rounds up to a power of two bytes.

        Raises:
            HostCapError: The pinned buffers, as the allocator rounds them, would pass their cap.
            MemoryError: The driver cannot pin as much.
        """
        self._pinned.refuse_past_cap(math.prod(shape) * dtype.itemsize)
        try:
            buffer = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
        except RuntimeError as error:  # the driver's error has the words of one on the device
            if "out of memory" not in str(error):
                raise
            raise MemoryError(f"a pinned buffer of {list(shape)} {dtype} was refused: {error}") from error
        self._pinned.enter(buffer)
        return buffer

    def h2d(self, device: torch.Tensor, host: torch.Tensor, after: Sequence[Transfer] = ()) -> CudaTransfer:
        """Submits a copy into the device tier."""
        return self._submit("h2d", device, host, self._streams_of(device, "h2d"), host, after)

    def d2h(self, host: torch.Tensor, device: torch.Tensor, after: Sequence[Transfer] = ()) -> CudaTransfer:
        """Submits a copy into the host tier."""
        return self._submit("d2h", host, device, self._streams_of(device, "d2h"), host, after)

    @contextmanager
    def meter_copies(
        self,
        direction: Direction,
        sizes_bytes: Sequence[int],
        host_tensors: Callable[[], Iterable[torch.Tensor]],
        device: torch.device,
    ) -> Iterator[None]:
        """Accounts for copies that other code enqueues on the device's current stream inside the block."""
        for size_bytes in sizes_bytes:
            self.log.add_copy(direction, size_bytes)
        if direction == "h2d":
            self.log.add_pageable(map(self._is_pageable, host_tensors()))
        with self._timed(torch.cuda.current_stream(device), partial(self.log.add_busy, self.log.phase, direction)):
            yield
        if direction == "d2h":
            self.log.add_pageable(map(self._is_pageable, host_tensors()))

    def meter_wait(self, device: torch.device) -> AbstractContextManager[None]:
        """Accounts for the time the device's current stream stands still inside the block."""
        return self._timed(torch.cuda.current_stream(device), partial(self.log.add_exposed, self.log.phase))

    def _streams_of(self, tensor: torch.Tensor, direction: Direction) -> CopyStream:
        device = device_of(tensor)
        if (device, direction) not in self._copy_streams:
            self._copy_streams[device, direction] = CopyStream(device)
        return self._copy_streams[device, direction]

    def _submit(
        self,
        direction: Direction,
        target: torch.Tensor,
        source: torch.Tensor,
        copies: CopyStream,
        host: torch.Tensor,
        after: Sequence[Transfer],
    ) -> CudaTransfer:
        if target.shape != source.shape or target.dtype != source.dtype:
            raise ValueError(f"copy from {source.shape} {source.dtype} to {target.shape} {target.dtype}")
        if not (target.is_contiguous() and source.is_contiguous()):
            raise ValueError("a copy over the link needs contiguous tensors")
        copies.retire()
        copies.follow(after)
        self.log.add_copy(direction, target.nbytes)
        self.log.add_pageable([self._is_pageable(host)])
        busy = self._timed(copies.stream, partial(self.log.add_busy, self.log.phase, direction))
        # The clock starts inside the stream's context: an idle stream would stand still while the host enters it.
        with torch.cuda.stream(copies.stream), busy:
            target.copy_(source, non_blocking=True)
        return copies.track(self, target, source)

    def _is_pageable(self, host: torch.Tensor) -> bool:
        """Our own buffers are known; of others the driver is asked."""
        return bool(host.nbytes) and not self._pinned.holds(host) and not host.is_pinned()

    def _timed(self, stream: torch.cuda.Stream, add: Callable[[float], None]) -> AbstractContextManager[None]:
        return self._stopwatch.span(stream, add) if self.log.timed else nullcontext()


def device_of(tensor: torch.Tensor) -> torch.device:
    """The device that a copy's device side lies on."""
    return tensor.device


class PinnedLedger:
    """Bytes asked for by the pinned buffers of this device's links that are still alive, and what they may take."""

    cap_bytes: int | None = None
    """Of all buffers together, each as the pinned allocator rounds it; blocks that it keeps for later are outside."""

    def __init__(self) -> None:
        self._bytes: dict[int, int] = {}

    def enter(self, buffer: torch.Tensor) -> None:
        """Counts a buffer until its storage is gone; an empty one takes no block."""
        if buffer.nbytes:
            address = buffer.untyped_storage().data_ptr()
            self._bytes[address] = buffer.nbytes
            weakref.finalize(buffer.untyped_storage(), self._bytes.pop, address, None)

    def refuse_past_cap(self, asked_bytes: int) -> None:
        """Refuses a buffer that would not fit beside those that are alive.

        Raises:
            HostCapError: The buffers, as the allocator rounds them, would pass the cap.
        """
        held_bytes = sum(map(pinned_block_bytes, self._bytes.values()))
        refuse_past_host_cap(pinned_block_bytes(asked_bytes), held_bytes, self.cap_bytes)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in one of the buffers."""
        return tensor.untyped_storage().data_ptr() in self._bytes

    def requested_bytes(self, active_requests: int) -> int | None:
        """The sum, if our buffers are all that the allocator has handed out; other code's are not known."""
        return sum(self._bytes.values()) if len(self._bytes) == active_requests else None
