"""Lower bounds of a phase's time: what it computes and moves, over what a device can do at most.

ideal = max(FLOPs / peak, least bytes / bandwidth, the link, both directions contending where they do).
scheduled = what the strategy's streams let overlap. serial = the sum. Source: Williams et al., Roofline (2009), with
the link as one more roof. Of a prefill's link only what must be over before its first token counts in the first two.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

from offload_eval.bounds.cached_layers import workload_lengths
from offload_eval.bounds.link_time import (
    COPIES_ON_THE_COMPUTE_STREAM,
    COPYING,
    LinkTimes,
    link_assumptions,
    link_times,
    needed_figure,
)
from offload_eval.bounds.session_card import session_card
from offload_eval.core.experiment import BITS_PER_VALUE, DynamicSpec, QuantizedSpec
from offload_eval.core.hardware import HardwareProfile
from offload_eval.core.latency import LatencyBounds, PhaseLatency, Resource, TimeBound
from offload_eval.core.records import Phase
from offload_eval.core.shape import ModelShape
from offload_eval.core.trace import PhaseTrace, StepTrace, Trace

NO_CACHE_TRAFFIC: Final = "ideal leaves out reading the cache, whose layout the arithmetic does not know."
WINDOWS_LEFT_OUT: Final = (
    "Attention is left out of compute where layers have windows: how much of it a kernel skips is not known."
)
OVERLAP_ASSUMPTIONS: Final[Mapping[str, str]] = {
    "ideal": (
        "ideal: computing, memory and both directions of the link overlap; weights (of experts one token's) and cache "
        "are read once; the matrix products are those of the attention that was traced, eager or fused."
    ),
    "scheduled": (
        "scheduled: transfers overlap computing as the strategy's streams allow: transformers' write-back waits in "
        "line with computing, ours has a stream of its own; operators run one by one, at the traffic of each."
    ),
    "serial": "serial: nothing overlaps.",
}
WRITE_BACK_BEFORE_THE_TOKEN: Final = (
    "ideal and scheduled of TTFT have transformers' write-back in them, which is in line before the logits, and leave "
    "out its prefetches, of which the last is for the next step."
)
LINK_AFTER_THE_TOKEN: Final = (
    "ideal and scheduled of TTFT leave the link out: the prompt's write-back, and fetches for the next step, may be "
    "under way when the first token is out."
)


@dataclass(frozen=True, kw_only=True)
class PhaseWork:
    """What one phase of the whole batch does."""

    flops: int
    """Without what a causal kernel skips."""
    least_bytes: int
    """Weights that the tokens reach, and the cache, once each."""
    touched_bytes: int
    """Inputs and outputs of every operator."""
    h2d_bytes: int = 0
    d2h_bytes: int = 0


NOT_A_PREDICTION: Final = (
    "Times are bounds, not predictions: no launch overhead, no allocator, no part of a peak lost to a shape."
)


def bound_latency(trace: Trace, shape: ModelShape | None, hardware: HardwareProfile, dtype: str) -> LatencyBounds:
    """Bounds time to first token and time per output token of a traced strategy.

    Args:
        trace: What its prefill and its last decode step compute and move.
        shape: The model's cache layout; None: the cache's own traffic is left out of the ideal bound.
        hardware: The device and its link.
        dtype: dtype of the model.

    Raises:
        InputError: The profile lacks a figure that is needed.
    """
    windows = shape is None or any(group.window_tokens is not None for group in shape.layer_groups)
    cache_bytes = None if shape is None else _cache_bytes(trace, shape, BITS_PER_VALUE[dtype])
    kind, step = trace.strategy.kind, trace.busiest_step
    return LatencyBounds(
        hardware=hardware.name,
        calibrated=hardware.calibrated,
        ttft=bound_phase(_phase_work(trace.prefill, 0, windows, kind), hardware, dtype, kind, "prefill"),
        tpot=bound_phase(_phase_work(step, cache_bytes or 0, windows, kind), hardware, dtype, kind),
        assumptions=(
            *OVERLAP_ASSUMPTIONS.values(),
            NOT_A_PREDICTION,
            *((NO_CACHE_TRAFFIC,) if cache_bytes is None else ()),
            *((WINDOWS_LEFT_OUT,) if windows else ()),
            *_link_assumptions(hardware, kind),
        ),
    )


def bound_step(
    trace: Trace, step: StepTrace, shape: ModelShape | None, hardware: HardwareProfile, dtype: str
) -> PhaseLatency:
    """Bounds one traced decode step, at the cache that it reads; `bound_latency` has the one that moves most.

    Args:
        trace: As for `bound_latency`.
        step: One of its steps.
        shape: As for `bound_latency`.
        hardware: The device and its link.
        dtype: dtype of the model.

    Raises:
        InputError: The profile lacks a figure that is needed.
    """
    until = msgspec.structs.replace(trace.workload, output_tokens=step.step + 1)
    alone = msgspec.structs.replace(trace, steps=(step,), workload=until)
    return bound_latency(alone, shape, hardware, dtype).tpot


def _phase_work(phase: PhaseTrace, cache_bytes: int, has_windows: bool, kind: str) -> PhaseWork:
    copies = kind in COPYING  # others at most send scalars
    return PhaseWork(
        flops=phase.matmul_flops - (phase.attention_flops if has_windows else phase.hidden_flops),
        least_bytes=phase.weights_read_bytes + cache_bytes,
        touched_bytes=max(phase.touched_bytes, phase.weights_read_bytes + cache_bytes),
        h2d_bytes=phase.h2d_bytes if copies else 0,
        d2h_bytes=phase.d2h_bytes if copies else 0,
    )


def _link_assumptions(hardware: HardwareProfile, kind: str) -> tuple[str, ...]:
    if kind not in COPYING or hardware.link is None:
        return ()
    first_token = WRITE_BACK_BEFORE_THE_TOKEN if kind in COPIES_ON_THE_COMPUTE_STREAM else LINK_AFTER_THE_TOKEN
    return (first_token, *link_assumptions(hardware.link))


def _cache_bytes(trace: Trace, shape: ModelShape, bits: int) -> int | None:
    """Payload that the last decode step's attention reads once, of the whole batch, wherever it lies."""
    strategy = trace.strategy if isinstance(trace.strategy, QuantizedSpec) else DynamicSpec()
    card = session_card(shape, bits, workload_lengths(trace.workload), strategy)
    return None if isinstance(card, str) else trace.workload.batch_size * int(card.device_bytes)


def check_hardware(hardware: HardwareProfile, dtype: str, kinds: Collection[str]) -> None:
    """Refuses a profile that cannot bound these strategies, before anything is traced.

    Raises:
        InputError: The message names the figure that is missing.
    """
    for kind in kinds:
        moved = int(kind in COPYING)
        work = PhaseWork(flops=1, least_bytes=1, touched_bytes=1, h2d_bytes=moved, d2h_bytes=moved)
        bound_phase(work, hardware, dtype, kind)


def bound_phase(
    work: PhaseWork, hardware: HardwareProfile, dtype: str, kind: str, phase: Phase = "decode"
) -> PhaseLatency:
    """Computes the bounds of one phase.

    Args:
        work: What the phase does.
        hardware: The device and its link.
        dtype: dtype of the model: which of the peaks counts.
        kind: The strategy's kind: what it lets overlap.
        phase: A prefill is over with its first token, a decode step with all that it moves: in a steady state what it
            leaves to the next one it was left by the last.

    Raises:
        InputError: The profile lacks a figure that is needed; the message names it.
    """
    peak = needed_figure(hardware, f"peak_flops_per_s.{dtype}", getattr(hardware.peak_flops_per_s, dtype, None))
    bandwidth = needed_figure(hardware, "memory_bytes_per_s", hardware.memory_bytes_per_s)
    link = link_times(work.h2d_bytes, work.d2h_bytes, hardware)
    awaited = link if phase == "decode" else _before_first_token(work, hardware, kind)
    compute_s, memory_s = work.flops / peak, work.touched_bytes / bandwidth
    h2d_s, d2h_s = float(link.h2d_s), float(link.d2h_s)
    serial = _sum({"compute": compute_s, "memory": memory_s, "h2d": h2d_s, "d2h": d2h_s})
    scheduled = _scheduled(compute_s, memory_s, awaited, kind)
    return PhaseLatency(
        compute_s=compute_s,
        memory_s=memory_s,
        h2d_s=h2d_s,
        d2h_s=d2h_s,
        ideal=_largest({"compute": compute_s, "memory": work.least_bytes / bandwidth, **_both_ways(awaited)}),
        scheduled=min(scheduled, serial, key=lambda bound: bound.seconds),
        serial=serial,
    )


def _before_first_token(work: PhaseWork, hardware: HardwareProfile, kind: str) -> LinkTimes:
    """The part of a prefill's link that no order of streams can leave for later.

    transformers queues each layer's write-back on the compute stream, before that layer's attention, and so before
    the logits (transformers 5.24, Cache.update, Cache.offload). Its prefetches run on a stream of their own, and in a
    prompt prefilled at once what they bring is for the next step; for later chunks they bring more, left out too.
    """
    return link_times(0, work.d2h_bytes if kind in COPIES_ON_THE_COMPUTE_STREAM else 0, hardware)


def _both_ways(link: LinkTimes) -> dict[Resource, float]:
    """The direction that takes longer stands for the whole link."""
    return {"h2d" if link.h2d_s >= link.d2h_s else "d2h": float(link.both_s)}


def _scheduled(compute_s: float, memory_s: float, link: LinkTimes, kind: str) -> TimeBound:
    """On the device an operator computes while it reads; the link's directions contend where both are used."""
    h2d_s, d2h_s = float(link.contended_h2d_s), float(link.contended_d2h_s)
    on_device: dict[Resource, float] = {"compute": compute_s, "memory": memory_s}
    device = _largest(on_device)
    if kind not in COPIES_ON_THE_COMPUTE_STREAM:
        return _largest({device.limited_by: device.seconds, "h2d": h2d_s, "d2h": d2h_s})
    in_line = _sum({device.limited_by: device.seconds, "d2h": d2h_s})
    return in_line if in_line.seconds >= h2d_s else TimeBound(seconds=h2d_s, limited_by="h2d")


def _largest(times: Mapping[Resource, float]) -> TimeBound:
    limit = max(times, key=lambda resource: times[resource])
    return TimeBound(seconds=times[limit], limited_by=limit)


def _sum(times: Mapping[Resource, float]) -> TimeBound:
    return TimeBound(seconds=sum(times.values()), limited_by=_largest(times).limited_by)
