"""The longest session that fits alone."""

from typing import Final

import numpy as np

from offload_eval.bounds.grid import PlanStrategy, replica_card, strategy_grid
from offload_eval.bounds.kv_views import Counts
from offload_eval.bounds.plan_ledgers import grid_ledgers
from offload_eval.bounds.plan_request import PlanRequest
from offload_eval.bounds.session_card import Lengths
from offload_eval.core.plan import LimitedBy, LongestSession

_MOST_TOKENS: Final = 2**24
_POINTS: Final = 257


def longest_session(request: PlanRequest, strategy: PlanStrategy) -> LongestSession | None:
    """Searches the longest prompt, without generation, that a session may have when it is the only one.

    Returns:
        None without a budget, and where the strategy has no card for the model.
    """
    if request.budget is None:
        return None
    cap = _MOST_TOKENS if request.limit is None else min(request.limit.tokens, _MOST_TOKENS)
    low, high = 0, cap + 1  # the first is taken to fit, the second not to
    limited_by: LimitedBy = "device" if request.limit is None else request.limit.limited_by
    while high - low > 1:
        tokens = np.unique(np.linspace(low, high, _POINTS).astype(np.int64)[1:-1])
        verdict = _fits(request, strategy, tokens)
        if verdict is None:
            return None
        fits, by_host = verdict
        first_failure = int(np.argmin(fits)) if not fits.all() else len(tokens)
        if first_failure < len(tokens):
            high = int(tokens[first_failure])
            limited_by = "host" if by_host[first_failure] else "device"
        if first_failure > 0:
            low = int(tokens[first_failure - 1])
    return LongestSession(strategy=strategy.label, tokens=low, limited_by=limited_by)


def _fits(request: PlanRequest, strategy: PlanStrategy, tokens: Counts) -> tuple[Counts, Counts] | None:
    """Whether one session of each length fits, and whether the host ledger is the smaller one there."""
    spec = request.spec
    lengths = Lengths(prompt_tokens=tokens, output_tokens=np.zeros_like(tokens))
    card = replica_card(request.model.shape, request.bits, lengths, strategy, spec.partition, spec.encoder_tokens)
    if isinstance(card, str):
        return None
    grid = strategy_grid(card, np.ones_like(tokens), grid_ledgers(request, tokens), spec.partition.data_parallel)
    assert grid.batch_fits is not None, "there is a budget"
    return grid.batch_fits.astype(np.int64), np.broadcast_to(grid.host_decides, tokens.shape).astype(np.int64)
