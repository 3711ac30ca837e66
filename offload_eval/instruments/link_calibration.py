"""Times verified copies over a device's link: each direction alone and opposed, each host memory, size and layout.

Shape suffixes: H kv_heads, T tokens, D head_dim.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import torch

from offload_eval.core.link import CopySeries, HostMemory, Layout
from offload_eval.core.records import Direction
from offload_eval.errors import UnableError
from offload_eval.instruments.copies import Copy, CopyBench
from offload_eval.instruments.host_memory import read_cgroup_memory, read_host_memory
from offload_eval.units import KIB, MIB, format_bytes

LEAST_BYTES: Final = 4 * KIB
WINDOW_HEADS: Final = 8
WINDOW_HEAD_DIM: Final = 128
"""Of the strided copies' window, of two bytes a value: the KV layout of one layer of an 8B model."""
_TOKEN_BYTES: Final = WINDOW_HEADS * WINDOW_HEAD_DIM * 2
_SAMPLE_BYTES: Final = 4 * MIB
_MOST_COPIES: Final = 16
_MOST_OPPOSING_SHARE: Final = 64
_WARM_UP_S: Final = 0.2
_MEMORY_SHARE: Final = 0.5
"""Of the free memory that buffers may take."""


class CopyKind(NamedTuple):
    """What one series times."""

    memory: HostMemory
    size_bytes: int
    direction: Direction
    layout: Layout = "contiguous"
    opposed: bool = False

    @property
    def words(self) -> str:
        """For a message."""
        opposed = ", opposed" if self.opposed else ""
        return f"{self.direction} copies of {format_bytes(self.size_bytes)} ({self.memory}, {self.layout}{opposed})"


def copy_sizes(most_bytes: int) -> list[int]:
    """Powers of two bytes from 4 KiB up to `most_bytes`."""
    return [2**power for power in range(LEAST_BYTES.bit_length() - 1, most_bytes.bit_length())]


def fitting_bytes(bench: CopyBench) -> int:
    """The largest copy for whose buffers memory is free: two in each tier, and one more to gather a window in."""
    device_bytes = bench.free_device_bytes()
    memory, group = read_host_memory(), read_cgroup_memory()
    host_bytes = memory.available_bytes
    if group.limit_bytes is not None:
        host_bytes = min(host_bytes, group.limit_bytes - (group.usage_bytes or 0))
    if device_bytes is None:
        return int(_MEMORY_SHARE * host_bytes / 5)
    return int(_MEMORY_SHARE * min(host_bytes / 2, device_bytes / 3))


def planned_copies(bench: CopyBench, sizes_bytes: Sequence[int]) -> list[CopyKind]:
    """Lists every series, with the directions of one size side by side, so that a drift touches them alike.

    Strided copies go one way, as upstream's do: a window leaves the device as a view, is contiguous on the host, and
    comes back so. The largest size has none: a view is of a larger buffer.
    """
    most_bytes = max(sizes_bytes)
    return [
        kind
        for memory in bench.host_memories
        for size_bytes in sizes_bytes
        for kind in _kinds(bench, memory, size_bytes, most_bytes)
    ]


def measure_link(
    bench: CopyBench,
    sizes_bytes: Sequence[int],
    repeats: int,
    on_series: Callable[[CopyKind], None] = lambda _: None,
) -> tuple[CopySeries, ...]:
    """Times every planned series; each target is cleared before, and compared with its source after, every sample.

    Args:
        bench: The device's copies.
        sizes_bytes: Of the copies, each a power of two from 4 KiB.
        repeats: Samples of each series, after one that only warms up.
        on_series: Called as each series starts.

    Raises:
        UnableError: A copy brought other bytes than its source's, or could not be opposed for as long as it ran.
    """
    planned = planned_copies(bench, sizes_bytes)
    series = []
    for memory in bench.host_memories:
        buffers = _Buffers(bench, memory, max(sizes_bytes))
        _warm_up(bench, buffers, CopyKind(memory, min(sizes_bytes), "h2d"))
        for kind in (each for each in planned if each.memory == memory):
            on_series(kind)
            series.append(_measure_series(bench, buffers, kind, repeats))
        del buffers
    return tuple(series)


def _warm_up(bench: CopyBench, buffers: "_Buffers", kind: CopyKind) -> None:
    """The first copies find a sleeping clock, an idle link and caches full of other things."""
    copies = buffers.copies(kind.direction, kind.layout, kind.size_bytes)
    deadline = time.perf_counter() + _WARM_UP_S
    while time.perf_counter() < deadline:
        _measure_sample(bench, kind, copies, ())


def _kinds(bench: CopyBench, memory: HostMemory, size_bytes: int, most_bytes: int) -> Iterator[CopyKind]:
    directions: tuple[Direction, Direction] = ("h2d", "d2h")
    for direction in directions:
        yield CopyKind(memory, size_bytes, direction)
    if size_bytes + _TOKEN_BYTES <= most_bytes:
        yield CopyKind(memory, size_bytes, "d2h", layout="strided")
    if memory in bench.opposable_memories:
        for direction in directions:
            yield CopyKind(memory, size_bytes, direction, opposed=True)


class _Checked(NamedTuple):
    copy: Copy
    expected: torch.Tensor
    """The source's bytes in the target's tier, so that checking a copy needs no other copy."""


class _Buffers:
    """A source and a target in each tier; both sources hold the same random bytes."""

    def __init__(self, bench: CopyBench, memory: HostMemory, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._host_source = bench.empty_host(most_bytes, memory)
        self._host_target = bench.empty_host(most_bytes, memory)
        self._device_source = bench.empty_device(most_bytes)
        self._device_target = bench.empty_device(most_bytes)
        self._host_source.view(torch.int64).random_(generator=torch.Generator().manual_seed(0))
        bench.time_copies("h2d", memory, [Copy(self._device_source, self._host_source)])

    def copies(self, direction: Direction, layout: Layout, size_bytes: int) -> list[_Checked]:
        """As many copies, each of its own bytes, as one sample times."""
        if direction == "h2d":
            target, source, expected = self._device_target, self._host_source, self._device_source
        else:
            target, source, expected = self._host_target, self._device_source, self._host_source
        span_bytes = size_bytes + (_TOKEN_BYTES if layout == "strided" else 0)
        num_copies = max(1, min(_MOST_COPIES, _SAMPLE_BYTES // size_bytes, self.most_bytes // span_bytes))
        slices = (slice(index * span_bytes, (index + 1) * span_bytes) for index in range(num_copies))
        if layout == "contiguous":
            return [_Checked(Copy(target[each], source[each]), expected[each]) for each in slices]
        return [
            _Checked(
                Copy(_window(target[index * size_bytes :][:size_bytes], skip=0), _window(source[each], skip=1)),
                _window(expected[each], skip=1),
            )
            for index, each in enumerate(slices)
        ]


def _window(span: torch.Tensor, *, skip: int) -> torch.Tensor:
    """The bytes as `[kv_heads, tokens, head_dim]` of two-byte values, without the first `skip` tokens of each head."""
    all_HTD = span.view(torch.int16).view(WINDOW_HEADS, -1, WINDOW_HEAD_DIM)
    return all_HTD[:, skip:]


def _measure_series(bench: CopyBench, buffers: _Buffers, kind: CopyKind, repeats: int) -> CopySeries:
    other: Direction = "d2h" if kind.direction == "h2d" else "h2d"
    measured = buffers.copies(kind.direction, kind.layout, kind.size_bytes)
    opposing = buffers.copies(other, "contiguous", kind.size_bytes) if kind.opposed else []
    samples_s = [_measure_sample(bench, kind, measured, opposing) for _ in range(repeats + 1)]
    return CopySeries(
        direction=kind.direction,
        opposed=kind.opposed,
        memory=kind.memory,
        layout=kind.layout,
        size_bytes=kind.size_bytes,
        copies_per_sample=len(measured),
        samples_s=tuple(samples_s[1:]),
    )


def _measure_sample(
    bench: CopyBench, kind: CopyKind, measured: Sequence[_Checked], opposing: Sequence[_Checked]
) -> float:
    """Seconds of all measured copies; the other direction starts with them and is busy until after their end."""
    times_opposing = 2
    while times_opposing <= _MOST_OPPOSING_SHARE:
        for each in (*measured, *opposing):
            each.copy.target.zero_()
        others = [each.copy for each in opposing] * times_opposing
        times = bench.time_copies(kind.direction, kind.memory, [each.copy for each in measured], others)
        _check_data(kind, (*measured, *opposing))
        if times.opposing_s is None or times.opposing_s >= times.measured_s:
            return times.measured_s
        times_opposing *= 2
    raise UnableError(
        f"{kind.words}: {_MOST_OPPOSING_SHARE} times as many copies the other way ended first; the directions cannot "
        "be compared on this machine"
    )


def _check_data(kind: CopyKind, copies: Sequence[_Checked]) -> None:
    for each in copies:
        if torch.equal(each.copy.target, each.expected):
            continue
        num_wrong = int((each.copy.target != each.expected).sum())
        raise UnableError(
            f"{kind.words}: {num_wrong:,} of {each.expected.numel():,} values differ from what was sent; the link, "
            "its driver or the memory is at fault, and no figure of it can be trusted: see the system's log (dmesg)"
        )
