"""Finds the largest batch that fits in few tries: memory is piecewise linear in the batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

MOST_SESSIONS: Final = 4096
_FIRST_STEP_SHARE: Final = 64
"""Where a believed first batch fails, the next one is this part of it smaller."""


def next_batch(
    seen: Mapping[int, int | None],
    available_bytes: int,
    *,
    start: int,
    most: int,
    slope_bytes: float | None = None,
    base_bytes: int = 0,
    host_sessions: int | None = None,
) -> int | None:
    """Which batch to run next, to learn most about the largest one that ends well.

    Unlike `largest_that_fits`, a batch that fails tells nothing but that: it has no peak.

    Args:
        seen: Peak of each batch that ended well, in bytes; None of one that did not.
        available_bytes: What the peak may reach.
        start: Where to begin: the best guess there is.
        most: The largest batch that is asked for.
        slope_bytes: Bytes that one more session is believed to take; None: by what has been seen, and then `start` is
            no more than a guess.
        base_bytes: What is held without any session.
        host_sessions: Where another ledger, which these peaks know nothing of, is believed to end.

    Returns:
        None once the limit is known: the next larger batch failed, or there is none to ask for.
    """
    low = max((batch for batch, peak in seen.items() if peak is not None), default=0)
    high = min((batch for batch, peak in seen.items() if peak is None), default=most + 1)
    if high - low <= 1:
        return None
    if not seen:
        return min(max(start, 1), most)
    failures = sum(peak is None for peak in seen.values())
    if low == 0:
        return max(1, min(high - 1, _lower(start, failures, is_guess=slope_bytes is None)))
    fitting = sorted(batch for batch, peak in seen.items() if peak is not None)
    met = _met(seen, fitting, available_bytes, slope_bytes, base_bytes)
    if met is None:
        return min(2 * low, most) if failures == 0 else (low + high) // 2
    met = met if host_sessions is None else min(met, host_sessions)
    surprises = _surprises(seen, fitting, available_bytes, slope_bytes, base_bytes)
    if failures == 0:
        return min(max(met, low + (1 << surprises)), most)
    if surprises + (failures if met >= high else 0) > 1:  # the line has been wrong twice
        return (low + high) // 2
    return min(max(met, low + 1), high - 1)


def _lower(start: int, failures: int, *, is_guess: bool) -> int:
    """Where to go down to after failures: near by where the start is believed, and soon by factors of four."""
    if is_guess or failures > 2:
        return start >> 2 * (failures if is_guess else failures - 2)
    return start - max(1, start // _FIRST_STEP_SHARE) * (1 if failures == 1 else 4)


def _surprises(
    seen: Mapping[int, int | None],
    fitting: Sequence[int],
    available_bytes: int,
    slope_bytes: float | None,
    base_bytes: int,
) -> int:
    """How many batches fit although the line through the one before them said that they would not."""
    mets = [
        _met(seen, fitting[: place + 1], available_bytes, slope_bytes, base_bytes) for place in range(len(fitting) - 1)
    ]
    return sum(met is not None and met < batch for met, batch in zip(mets, fitting[1:], strict=True))


def _met(
    seen: Mapping[int, int | None],
    fitting: Sequence[int],
    available_bytes: int,
    slope_bytes: float | None,
    base_bytes: int,
) -> int | None:
    """Where the line through the largest of some batches that fit meets what is available."""
    low = fitting[-1]
    peak_bytes = seen[low] or 0
    if slope_bytes is None:
        below = fitting[-2] if len(fitting) > 1 else 0
        slope_bytes = (peak_bytes - ((seen[below] or 0) if below else base_bytes)) / (low - below)
    if slope_bytes <= 0:
        return None
    return low + int((available_bytes - peak_bytes) // slope_bytes)


def largest_that_fits(
    peak_bytes: Callable[[int], int],
    available_bytes: int,
    start: int,
    most: int = MOST_SESSIONS,
    max_tries: int | None = None,
) -> int:
    """The largest count whose peak fits, of a peak that grows with it; 0 where not even 1 does.

    Args:
        peak_bytes: The peak at a count; asked once for each.
        available_bytes: What has to suffice.
        start: Where to begin.
        most: The largest count that is asked for.
        max_tries: Counts asked for at most; None: as many as it takes.

    Returns:
        At most `most`; where the tries do not suffice, the largest count that was seen to fit.
    """
    low, high = 0, most + 1
    guess, seen = start, dict[int, int]()
    while high - low > 1 and len(seen) != max_tries:
        seen[guess] = peak_bytes(guess)
        if seen[guess] <= available_bytes:
            low = guess
        else:
            high = guess
        guess = _next_guess(seen, available_bytes, low, high, most)
    return low


def _next_guess(seen: dict[int, int], available_bytes: int, low: int, high: int, most: int) -> int:
    """Between what fits and what does not: where a line through two counts of one side meets the limit, or the middle.

    Two counts of one side mostly lie on one straight piece; a line across a bend would creep.
    """
    fitting = sorted((count for count in seen if count <= low), reverse=True)[:2]
    failing = sorted(count for count in seen if count >= high)[:2]
    for pair in (failing, fitting):
        if len(pair) == 2 and (met := _meets(seen, available_bytes, *pair)) is not None:
            # A line that comes out at a known count is exact to one step.
            for guess in (met, met + 1):
                if low < guess < high:
                    return guess
    if not failing:
        return most if len(fitting) == 2 else min(2 * max(seen), most)
    return (low + high) // 2


def _meets(seen: dict[int, int], available_bytes: int, one: int, other: int) -> int | None:
    slope = (seen[one] - seen[other]) / (one - other)
    return None if slope <= 0 else one + int((available_bytes - seen[one]) // slope)
