"""How the largest batches are searched for."""

from typing import Annotated

from msgspec import Meta

from offload_eval.core.base import PositiveInt, PositiveNumber, Strict


class CapacitySpec(Strict, frozen=True, kw_only=True):
    """The search for the largest batch of each strategy at each combination of lengths."""

    most_sessions: Annotated[int, Meta(ge=1, le=65_536)] = 4096
    """The largest batch that is tried."""
    max_probes: Annotated[int, Meta(ge=2, le=100)] = 6
    """Batches tried for one limit; where they do not suffice, the limit is a range."""
    repeats: PositiveInt = 3
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
