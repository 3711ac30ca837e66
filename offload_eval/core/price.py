"""What a token costs at least, by the bounds of a hardware profile: nothing here was timed."""

from typing import Literal

from offload_eval.core.base import Strict
from offload_eval.core.experiment import Workload
from offload_eval.core.latency import Resource
from offload_eval.core.verdict import Family


class PriceBound(Strict, frozen=True, kw_only=True):
    """The price of a batch under one assumption about what overlaps. All its sessions start together."""

    ttft_s: float
    """At least: the whole batch's prefill, up to its token."""
    tpot_s: float
    """At least, as the mean over all decode steps: (end to end - TTFT) / (output tokens - 1)."""
    tokens_per_s: float
    """At most: output tokens of all sessions over `ttft_s` and all decode steps, prefill included."""


class BoundedPrice(Strict, frozen=True, kw_only=True):
    """The bounds of one traced batch of a strategy on a hardware profile."""

    evidence: Literal["traced"] = "traced"
    """Of the work; the times are that work over a profile's figures."""
    run_id: str
    """Of the trace."""
    workload: Workload
    """With its batch: the sessions."""
    strategy: str
    """Label."""
    family: Family
    is_lossless: bool
    """Whether its output has to equal the baseline's."""
    hardware: str
    calibrated: bool
    """Whether the profile was measured on the machine in question."""
    h2d_bytes_per_step: int
    """Of the whole batch, in the decode step that moves most."""
    d2h_bytes_per_step: int
    ideal: PriceBound
    """Everything overlaps perfectly."""
    scheduled: PriceBound
    """What the strategy's own order of streams lets overlap, at the traffic of its own code."""
    serial: PriceBound
    """Nothing overlaps."""
    limited_by: Resource
    """What the decode step that moves most waits for, where all overlaps perfectly."""
    assumptions: tuple[str, ...]

    @property
    def sessions(self) -> int:
        """The batch."""
        return self.workload.batch_size
