"""What a calibration of the link saw: raw times of verified copies."""

from typing import Annotated, Literal

from msgspec import Meta

from offload_eval.core.base import Date, NonNegativeInt, PositiveInt, PositiveNumber, Strict, Text
from offload_eval.core.experiment import DeviceName
from offload_eval.core.machine import Machine
from offload_eval.core.records import Direction

HostMemory = Literal["pinned", "pageable"]
Layout = Literal["contiguous", "strided"]
"""strided: a window's view, all tokens but the first of each head, as transformers' sliding layers offload it."""


class CopySeries(Strict, frozen=True, kw_only=True):
    """Copies of one kind and size, timed several times."""

    direction: Direction
    opposed: bool
    """Whether the other direction was busy with copies of the same size from start to end."""
    memory: HostMemory
    layout: Layout
    size_bytes: PositiveInt
    """Of one copy."""
    copies_per_sample: PositiveInt
    """Copies in a row, each of its own bytes, that one sample times together."""
    samples_s: Annotated[tuple[PositiveNumber, ...], Meta(min_length=1)]
    """From the start of the first copy to the end of the last one; warm-ups are not among them."""

    @property
    def copy_times_s(self) -> tuple[float, ...]:
        """Seconds a copy, of each sample."""
        return tuple(sample_s / self.copies_per_sample for sample_s in self.samples_s)


class LinkCalibration(Strict, frozen=True, kw_only=True):
    """Everything that one calibration saw. Every copy's data was compared with its source."""

    device: DeviceName
    evidence: Literal["emulated", "measured"]
    """emulated: memory copies between the tiers of the cpu device; no link to a device was measured."""
    device_model: Text
    """What the device calls itself; of the cpu device, the CPU."""
    link: Text
    """Such as `PCIe 5.0 x16`."""
    machine: Machine
    date: Date
    device_numa_node: NonNegativeInt | None = None
    """The node that the device's slot belongs to, where the system says."""
    host_numa_nodes: tuple[NonNegativeInt, ...] = ()
    """The nodes whose cores this process may run on, where the system says."""
    series: tuple[CopySeries, ...]


class LinkFit(Strict, frozen=True, kw_only=True):
    """The time of one copy as latency_s + bytes / bandwidth_bytes_per_s."""

    direction: Direction
    opposed: bool
    memory: HostMemory
    layout: Layout
    latency_s: float
    """At least 0."""
    bandwidth_bytes_per_s: float | None
    """None where the time does not grow with the size."""
    worst_error_ratio: float
    """The largest distance of a median from the fit, over the median."""
    num_sizes: int
