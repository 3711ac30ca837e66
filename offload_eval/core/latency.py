"""Lower bounds of time, with the resource that sets each."""

from typing import Literal

from offload_eval.core.base import Strict

Resource = Literal["compute", "memory", "h2d", "d2h"]
"""compute: FLOP/s. memory: device memory bandwidth. h2d, d2h: the link, a direction each."""


class TimeBound(Strict, frozen=True, kw_only=True):
    """The least time of a phase under one assumption about what overlaps."""

    seconds: float
    limited_by: Resource
    """The resource that is busiest; of a sum, its largest part."""


class PhaseLatency(Strict, frozen=True, kw_only=True):
    """One phase of the whole batch."""

    compute_s: float
    """Matrix products and attention at the device's peak, as the code does them."""
    memory_s: float
    """Every operator's inputs and outputs at the memory's bandwidth, as the code moves them."""
    h2d_s: float
    """The link's bytes at its bandwidth, alone; all of the phase's, whether or not its token needs them."""
    d2h_s: float
    ideal: TimeBound
    """Everything overlaps, and weights and cache are read once: no code that does these matrix products is faster. Of
    a prefill's link only a write-back that waits in line with computing is part of it, and of `scheduled`."""
    scheduled: TimeBound
    """What the strategy's own order of streams lets overlap, at the traffic of its own code."""
    serial: TimeBound
    """Nothing overlaps: computing, reading and copying one after the other, at the traffic of its own code."""


class LatencyBounds(Strict, frozen=True, kw_only=True):
    """Bounds, not predictions, of one strategy on a hardware profile."""

    evidence: Literal["traced"] = "traced"
    """Of the work that the bounds are computed from."""
    hardware: str
    calibrated: bool
    """Whether the profile was measured on the machine in question."""
    ttft: PhaseLatency
    """The prefill, up to its token: copies that may be under way when it is out are not waited for."""
    tpot: PhaseLatency
    """The last decode step."""
    assumptions: tuple[str, ...]
