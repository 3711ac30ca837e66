"""What traced batches cost at least on a hardware profile that states enough."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final

from offload_eval.analysis.cells import cell_records, latest_records, latest_traces
from offload_eval.analysis.standings import family_of
from offload_eval.bounds.latency import bound_latency, bound_step
from offload_eval.core.hardware import HardwareProfile
from offload_eval.core.latency import PhaseLatency
from offload_eval.core.limits import CapacityLimit
from offload_eval.core.price import BoundedPrice, PriceBound
from offload_eval.core.records import RunRecord
from offload_eval.core.run_spec import content_hash
from offload_eval.core.trace import Trace
from offload_eval.errors import InputError

WAYS: Final = ("ideal", "scheduled", "serial")
"""Assumptions about what overlaps, from the shortest times to the longest."""
STEPS_ASSUMPTION: Final = (
    "TPOT is the mean over all decode steps. A step that was not traced counts as the least of the first step and of "
    "its traced neighbours: no later step has less cache to read."
)


def traced_alone(records: Sequence[RunRecord], limits: Sequence[CapacityLimit]) -> tuple[RunRecord, ...]:
    """Traces of what was not run: of traced limits, each at its limit, and of cells without a run.

    Args:
        records: Of cells, probes and traces.
        limits: What `find_limits` makes of them.
    """
    by_id = {record.run_id: record for record in records}
    at_limits = (
        by_id[run_id]
        for limit in limits
        if limit.evidence == "traced"
        for run_id in limit.traced_run_ids[:1]
        if by_id[run_id].spec.workload.batch_size == limit.traced
    )
    cells = cell_records(records)
    ran = {content_hash(record.spec) for record in latest_records(cells)}
    return (*at_limits, *(each for each in latest_traces(cells) if content_hash(each.spec) not in ran))


def bound_prices(records: Sequence[RunRecord], hardware: HardwareProfile | None) -> tuple[BoundedPrice, ...]:
    """Bounds TTFT, TPOT and tokens/s of traced batches.

    Args:
        records: Traced ones; others, and traces that were refused, have no price.
        hardware: The device and its link; None: nothing is known of it.

    Returns:
        In the order of the records. A trace for the cpu has a price only on the emulated link's profile, and one for
        cuda on a device's; a strategy that the profile lacks a figure for has none.
    """
    if hardware is None:
        return ()
    prices = (_price(record, record.trace, hardware) for record in records if record.trace is not None)
    return tuple(price for price in prices if price is not None)


def _price(record: RunRecord, trace: Trace, hardware: HardwareProfile) -> BoundedPrice | None:
    if hardware.link is not None and hardware.link.emulated != (trace.device == "cpu"):
        return None
    shape, dtype = record.model.shape, record.spec.model.dtype
    try:
        whole = bound_latency(trace, shape, hardware, dtype)
        steps = {step.step: bound_step(trace, step, shape, hardware, dtype) for step in trace.steps}
    except InputError:  # the profile lacks a figure that is needed
        return None
    moving = trace.busiest_step
    return BoundedPrice(
        run_id=record.run_id,
        workload=trace.workload,
        strategy=trace.strategy.label,
        family=family_of(trace.strategy),
        is_lossless=trace.strategy.lossless,
        hardware=hardware.name,
        calibrated=hardware.calibrated,
        h2d_bytes_per_step=moving.h2d_bytes,
        d2h_bytes_per_step=moving.d2h_bytes,
        limited_by=whole.tpot.ideal.limited_by,
        assumptions=(*whole.assumptions, STEPS_ASSUMPTION),
        ideal=_bound("ideal", trace, whole.ttft, steps),
        scheduled=_bound("scheduled", trace, whole.ttft, steps),
        serial=_bound("serial", trace, whole.ttft, steps),
    )


def _bound(way: str, trace: Trace, prefill: PhaseLatency, steps: Mapping[int, PhaseLatency]) -> PriceBound:
    workload, ttft_s = trace.workload, _seconds(prefill, way)
    decode_s = _decode_s({number: _seconds(step, way) for number, step in steps.items()})
    return PriceBound(
        ttft_s=ttft_s,
        tpot_s=decode_s / (workload.output_tokens - 1),
        tokens_per_s=workload.batch_size * workload.output_tokens / (ttft_s + decode_s),
    )


def _seconds(phase: PhaseLatency, way: str) -> float:
    seconds: float = getattr(phase, way).seconds
    return seconds


def _decode_s(traced: Mapping[int, float]) -> float:
    """All steps from the first to the last, both of which were traced."""
    numbers = sorted(traced)
    between = (
        (late - early - 1) * min(traced[numbers[0]], traced[early], traced[late]) for early, late in pairwise(numbers)
    )
    return sum(traced.values()) + sum(between)
