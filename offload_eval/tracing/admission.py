"""The largest batch whose traced peak fits, by few traces: memory is piecewise linear in the batch."""

from collections.abc import Callable
from typing import Any, Final

from msgspec.structs import replace

from offload_eval.core.experiment import DeviceName, StrategySpec, Workload
from offload_eval.core.trace import Trace, TracedAdmission
from offload_eval.tracing.trace import trace_strategy

MOST_SESSIONS: Final = 4096


def trace_admission(
    model: Any,
    strategy: StrategySpec,
    workload: Workload,
    available_bytes: int,
    *,
    host_available_bytes: int | None = None,
    device: DeviceName = "cuda",
    first: Trace | None = None,
) -> TracedAdmission:
    """Searches the limits of prefill, of decode and of host memory apart, by straight lines through what was traced.

    Args:
        model: As for `trace_strategy`.
        strategy: The cache strategy.
        workload: Its lengths; its batch is where the search starts.
        available_bytes: Device bytes for weights, cache and activations.
        host_available_bytes: Host bytes for the cache; None: host memory is not looked at.
        device: As for `trace_strategy`.
        first: A trace of the workload, where there is one already.

    Returns:
        Limits that were traced, as was the batch after each, unless that one passes `MOST_SESSIONS`.

    Raises:
        UnableError: As for `trace_strategy`.
    """
    traces: dict[int, Trace] = {} if first is None else {workload.batch_size: first}

    def trace_at(sessions: int) -> Trace:
        if sessions not in traces:
            asked = replace(workload, batch_size=sessions)
            traces[sessions] = trace_strategy(model, strategy, asked, device=device)
        return traces[sessions]

    start = min(workload.batch_size, MOST_SESSIONS)
    prefill = largest_that_fits(lambda each: trace_at(each).prefill.peak_device_bytes, available_bytes, start)
    decode = largest_that_fits(lambda each: trace_at(each).decode_peak_device_bytes, available_bytes, start)
    by_device, by_host = min(prefill, decode), None
    if host_available_bytes is not None and trace_at(start).kv_host_peak_bytes:
        by_host = largest_that_fits(lambda each: trace_at(each).kv_host_peak_bytes, host_available_bytes, start)
    limit = by_device if by_host is None else min(by_device, by_host)
    return TracedAdmission(
        available_bytes=available_bytes,
        prefill_sessions=prefill,
        decode_sessions=decode,
        limit=limit,
        host_available_bytes=host_available_bytes,
        host_sessions=by_host,
        limiting_ledger=None if host_available_bytes is None else "host" if limit < by_device else "device",
        is_capped=limit == MOST_SESSIONS,
        num_traces=len(traces),
    )


def largest_that_fits(
    peak_bytes: Callable[[int], int], available_bytes: int, start: int, most: int = MOST_SESSIONS
) -> int:
    """The largest count whose peak fits, of a peak that grows with it; 0 where not even 1 does.

    Args:
        peak_bytes: The peak at a count; asked once for each.
        available_bytes: What has to suffice.
        start: Where to begin.
        most: The largest count that is asked for.

    Returns:
        At most `most`.
    """
    low, high = 0, most + 1
    guess, seen = start, dict[int, int]()
    while high - low > 1:
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
