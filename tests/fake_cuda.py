"""Stand-ins for torch.cuda's streams and events: a device that runs late, in simulated time, on a CPU.

Submitted work is queued. `run` plays the streams: each in its own order, all side by side, every piece of work
as early as its waits allow; then its effects happen in the order in which it ended. So what is submitted without
a wait it needed sees, or leaves, the wrong data whenever the durations are chosen to tell.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offload_eval.instruments import cuda_link

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@dataclass(eq=False)
class Mark:
    """One recording of an event; `time_s` is None until the stream has come to it."""

    time_s: float | None = None


@dataclass(frozen=True)
class Wait:
    mark: Mark


@dataclass(frozen=True)
class Work:
    duration_s: float
    effect: Callable[[], object]


class FakeStream:
    def __init__(self, cuda: "FakeCuda", device: torch.device = FIRST) -> None:
        self.device = device
        self.queue: list[Mark | Wait | Work] = []
        self.now_s = 0.0
        self._cuda = cuda

    def wait_event(self, event: "FakeEvent") -> None:
        if self._cuda.makes_wait() and event.mark is not None:
            self.queue.append(Wait(event.mark))


class FakeEvent:
    def __init__(self, *, timed: bool) -> None:
        self.mark: Mark | None = None
        self.timed = timed

    def record(self, stream: FakeStream) -> None:
        self.mark = Mark()
        stream.queue.append(self.mark)

    def query(self) -> bool:
        return self.mark is None or self.mark.time_s is not None

    def elapsed_time(self, ended: "FakeEvent") -> float:
        assert self.timed, "CUDA refuses to read an event made without timing"
        assert ended.timed
        return (ended.mark.time_s - self.mark.time_s) * 1000


def _copy(target: torch.Tensor | None, source: torch.Tensor | None) -> None:
    """A queue holds no tensor, as CUDA's does not: whoever submits a copy keeps both alive."""
    assert target is not None, "the target was freed before the copy ran"
    assert source is not None, "the source was freed before the copy ran"
    target.copy_(source)


class FakeCuda(TorchDispatchMode):
    """While open, torch.cuda's streams and events are these, and `copy_` is queued on the current stream.

    Args:
        dropped_wait: Which wait, counted from 0, is silently not made: a planted fault.
    """

    def __init__(self, dropped_wait: int | None = None) -> None:
        super().__init__()
        self.compute_stream = FakeStream(self)
        self.second_compute_stream = FakeStream(self, SECOND)
        self.second_device_storages: set[int] = set()
        """Of tensors that stand for some on the second device; all others are on the first."""
        self.copy_s = 1.0
        self.bytes_per_s: float | None = None
        """Where set, a copy takes its bytes at this rate on top of `copy_s`."""
        self.enter_s = 0.0
        """What the host takes to make a stream the current one, through which the stream, if idle, stands still."""
        self.cycles_per_s = 1e9
        self.num_waits = 0
        self.num_events = 0
        self._dropped_wait = dropped_wait
        self._streams = [self.compute_stream, self.second_compute_stream]
        self._current = self.compute_stream
        self._playing = False

    def __enter__(self) -> "FakeCuda":
        names = {
            "Stream": self._new_stream,
            "Event": self._new_event,
            "current_stream": self._current_stream,
            "stream": self._on_stream,
            "synchronize": lambda _device: self.run(),
            "_sleep": lambda cycles: self._current.queue.append(Work(cycles / self.cycles_per_s, lambda: None)),
        }
        self._patches = [
            mock.patch.multiple(torch.cuda, **names),
            mock.patch.object(cuda_link, "device_of", self._device_of),
        ]
        for patch in self._patches:
            patch.start()
        return super().__enter__()

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        for patch in self._patches:
            patch.stop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default or self._playing:
            return func(*args, **(kwargs or {}))
        target, source, non_blocking = args
        assert non_blocking, "a blocking copy would stop the host"
        held = weakref.ref(target), weakref.ref(source)
        duration_s = self.copy_s + (target.nbytes / self.bytes_per_s if self.bytes_per_s else 0.0)
        self._current.queue.append(Work(duration_s, lambda: _copy(*(reference() for reference in held))))
        return target

    def compute(
        self, duration_s: float, effect: Callable[[], object] = lambda: None, device: torch.device = FIRST
    ) -> None:
        """Submits computation to a device's compute stream."""
        self._compute_stream_of(device).queue.append(Work(duration_s, effect))

    def on_second_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Lets a tensor stand for one on the second device."""
        self.second_device_storages.add(tensor.untyped_storage()._cdata)
        return tensor

    def run(self) -> None:
        """Plays everything submitted so far."""
        ended: list[tuple[float, Callable[[], object]]] = []
        while any(self._advance(stream, ended) for stream in self._streams):
            pass
        assert not any(stream.queue for stream in self._streams), "streams wait for each other"
        self._playing = True
        for _, effect in sorted(ended, key=lambda item: item[0]):
            effect()
        self._playing = False

    @staticmethod
    def _advance(stream: FakeStream, ended: list[tuple[float, Callable[[], object]]]) -> bool:
        moved = False
        while stream.queue:
            head = stream.queue[0]
            if isinstance(head, Wait):
                if head.mark.time_s is None:
                    break
                stream.now_s = max(stream.now_s, head.mark.time_s)
            elif isinstance(head, Mark):
                head.time_s = stream.now_s
            else:
                stream.now_s += head.duration_s
                ended.append((stream.now_s, head.effect))
            stream.queue.pop(0)
            moved = True
        return moved

    def makes_wait(self) -> bool:
        """Counts a wait, and says whether it is made."""
        self.num_waits += 1
        return self.num_waits - 1 != self._dropped_wait

    def _new_stream(self, device: torch.device) -> FakeStream:
        assert device.type == "cuda"
        self._streams.append(FakeStream(self, device))
        return self._streams[-1]

    def _device_of(self, tensor: torch.Tensor) -> torch.device:
        return SECOND if tensor.untyped_storage()._cdata in self.second_device_storages else FIRST

    def _compute_stream_of(self, device: torch.device) -> FakeStream:
        return {FIRST: self.compute_stream, SECOND: self.second_compute_stream}[device]

    def _current_stream(self, device: torch.device) -> FakeStream:
        """Entering a stream changes what is current on its own device alone."""
        entered = self._current
        return entered if entered.device == device else self._compute_stream_of(device)

    def _new_event(self, enable_timing: bool = False) -> FakeEvent:
        self.num_events += 1
        return FakeEvent(timed=enable_timing)

    @contextmanager
    def _on_stream(self, stream: FakeStream) -> Iterator[None]:
        previous, self._current = self._current, stream
        if self.enter_s:
            stream.queue.append(Work(self.enter_s, lambda: None))
        yield
        self._current = previous
