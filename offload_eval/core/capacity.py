"""How the largest batches are searched for."""

from typing import Annotated

from msgspec import Meta

from offload_eval.core.base import PositiveNumber, Strict


class CapacitySpec(Strict, frozen=True, kw_only=True):
    """The search for the largest batch of each strategy at each combination of lengths."""

    most_sessions: Annotated[int, Meta(ge=1, le=65_536)] = 4096
    """The largest batch that is tried."""
    max_probes: Annotated[int, Meta(ge=2, le=100)] = 6
    """Batches tried for one limit; where they do not suffice, the limit is a range."""
    repeats: Annotated[int, Meta(ge=1, le=1000)] = 3
    """Runs that the limit has to pass, all of them."""
    search_timeout_s: PositiveNumber = 3600.0
    """For one limit; what is known then is what is reported."""
    timing_trials: Annotated[int, Meta(ge=0, le=10_000)] = 3
    """Timed runs at each limit, and at the in-GPU limit; 0: capacity without its price."""
    ttft_limit_s: PositiveNumber | None = None
    """Median TTFT that a session may have, for the capacity under service-level objectives."""
    tpot_limit_s: PositiveNumber | None = None
    """Median TPOT that a session may have."""
    drills: bool = True
    """Bring every kind of failure about once for each strategy, and see how the worker comes back."""

    @property
    def has_objectives(self) -> bool:
        """Whether a TTFT or a TPOT is stated that must not be passed."""
        return (self.ttft_limit_s, self.tpot_limit_s) != (None, None)

    def objectives_ratio(self, ttft_s: float, tpot_s: float) -> float:
        """The worse of TTFT and TPOT over its limit; up to 1.0 both are kept."""
        stated = ((ttft_s, self.ttft_limit_s), (tpot_s, self.tpot_limit_s))
        return max((seconds / limit for seconds, limit in stated if limit is not None), default=0.0)
