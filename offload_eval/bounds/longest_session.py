"""The longest session that fits alone."""

from dataclasses import replace
from typing import Final

import numpy as np

from offload_eval.bounds.cached_layers import Lengths
from offload_eval.bounds.grid import Mask, PlanStrategy
from offload_eval.bounds.kv_views import Counts
from offload_eval.bounds.plan_cells import plan_grids
from offload_eval.bounds.plan_request import PlanRequest
from offload_eval.core.plan import LimitedBy, LongestSession

_MOST_TOKENS: Final = 2**24
_POINTS: Final = 257


def longest_session(request: PlanRequest, strategy: PlanStrategy) -> LongestSession | None:
    """The longest prompt, without generation, of a session that is the only one.

    Returns:
        None without a budget, and where the strategy has no card for the model.
    """
    return None if request.budget is None else _search(request, strategy, 0)


def fitting_prompt_tokens(request: PlanRequest, strategy: PlanStrategy, output_tokens: int) -> int | None:
    """The longest prompt that is admitted with so much generation; None where none is short enough."""
    found = _search(request, strategy, output_tokens)
    return found.tokens if found is not None and found.tokens > 0 else None


def _search(request: PlanRequest, strategy: PlanStrategy, output_tokens: int) -> LongestSession | None:
    cap = _MOST_TOKENS if request.limit is None else min(request.limit.tokens - output_tokens, _MOST_TOKENS)
    low, high = 0, max(0, cap) + 1  # the first is taken to fit, the second not to
    limited_by: LimitedBy | None = None if request.limit is None else request.limit.limited_by
    while high - low > 1:
        tokens = np.unique(np.linspace(low, high, _POINTS).astype(np.int64)[1:-1])
        verdict = _fits(request, strategy, tokens, output_tokens)
        if verdict is None:
            return None
        fits, by_host = verdict
        first_failure = len(tokens) if fits.all() else int(np.argmin(fits))
        if first_failure < len(tokens):
            high = int(tokens[first_failure])
            limited_by = "host" if by_host[first_failure] else "device"
        if first_failure > 0:
            low = int(tokens[first_failure - 1])
    return LongestSession(strategy=strategy.label, tokens=low, limited_by=limited_by)


def _fits(
    request: PlanRequest, strategy: PlanStrategy, tokens: Counts, output_tokens: int
) -> tuple[Mask, Mask] | None:
    """Whether one session of each length fits, and whether the host ledger is the smaller one there."""
    lengths = Lengths(prompt_tokens=tokens, output_tokens=np.full_like(tokens, output_tokens))
    ((_, grid),) = plan_grids(replace(request, strategies=[strategy]), lengths, np.ones_like(tokens))
    if isinstance(grid, str):
        return None
    everywhere = np.ones(tokens.shape, np.bool_)
    fits = everywhere if grid.batch_fits is None else grid.batch_fits
    return fits, np.broadcast_to(grid.host_decides, tokens.shape)
