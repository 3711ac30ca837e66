"""How many sessions a budget admits."""

from offload_eval.bounds.kv import require_int


def admission_limit(budget: int, weights: int, runtime: int, reserve: int, per_session: int) -> int:
    """Whole sessions that fit what the budget leaves: an upper bound, not a promise.

    Args:
        budget: Bytes of device memory in all.
        weights: Bytes of weights.
        runtime: Bytes outside the allocator.
        reserve: Bytes kept free.
        per_session: Bytes one session needs.

    Returns:
        (budget - weights - runtime - reserve) // per_session, never below 0. All in the same unit.

    Raises:
        ValueError: A part is not an int or is negative, or `per_session` is not positive.
    """
    parts = {"budget": budget, "weights": weights, "runtime": runtime, "reserve": reserve}
    for name, value in parts.items():
        require_int(name, value, minimum=0)
    require_int("per_session", per_session, minimum=1)
    return max(0, (budget - weights - runtime - reserve) // per_session)
