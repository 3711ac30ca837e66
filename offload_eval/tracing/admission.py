"""The largest batch whose traced peak fits, by few traces: memory is piecewise linear in the batch."""

from typing import Any

from msgspec.structs import replace

from offload_eval.bounds.limit_search import MOST_SESSIONS, largest_that_fits
from offload_eval.core.experiment import DeviceName, StrategySpec, Workload
from offload_eval.core.trace import Trace, TracedAdmission
from offload_eval.tracing.trace import trace_strategy


def trace_admission(
    model: Any,
    strategy: StrategySpec,
    workload: Workload,
    available_bytes: int,
    *,
    device: DeviceName = "cuda",
    first: Trace | None = None,
) -> TracedAdmission:
    """Searches the limits of prefill and decode apart, by straight lines through what was traced.

    Args:
        model: As for `trace_strategy`.
        strategy: The cache strategy.
        workload: Its lengths; its batch is where the search starts.
        available_bytes: Device bytes for weights, cache and activations.
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
    return TracedAdmission(
        available_bytes=available_bytes,
        prefill_sessions=prefill,
        decode_sessions=decode,
        limit=min(prefill, decode),
        is_capped=min(prefill, decode) == MOST_SESSIONS,
        num_traces=len(traces),
    )
