"""Lower bounds of a phase's time: what it computes and moves, over what a device can do at most.

ideal = max(FLOPs / peak, least bytes / bandwidth, the link, both directions contending where they do).
scheduled = what the strategy's streams let overlap. serial = the sum. Source: Williams et al., Roofline (2009), with
the link as one more roof.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from offload_eval.bounds.cached_layers import workload_lengths
from offload_eval.bounds.session_card import session_card
from offload_eval.core.experiment import BITS_PER_VALUE, DynamicSpec, QuantizedSpec
from offload_eval.core.hardware import HardwareProfile, LinkProfile, SourcedValue
from offload_eval.core.latency import LatencyBounds, PhaseLatency, Resource, TimeBound
from offload_eval.core.shape import ModelShape
from offload_eval.core.trace import PhaseTrace, Trace
from offload_eval.errors import InputError

COPIES_ON_THE_COMPUTE_STREAM: Final = ("offloaded", "offloaded_static")
"""Strategies whose write-back waits in line with computation. Source: transformers 5.24, cache_utils.Cache.offload."""
COPYING: Final = (*COPIES_ON_THE_COMPUTE_STREAM, "streamed")
"""Strategies that move the cache over the link."""
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
        ttft=bound_phase(_phase_work(trace.prefill, 0, windows, kind), hardware, dtype, kind),
        tpot=bound_phase(_phase_work(step, cache_bytes or 0, windows, kind), hardware, dtype, kind),
        assumptions=(
            *OVERLAP_ASSUMPTIONS.values(),
            NOT_A_PREDICTION,
            *((NO_CACHE_TRAFFIC,) if cache_bytes is None else ()),
            *((WINDOWS_LEFT_OUT,) if windows else ()),
            *_contention_assumptions(hardware.link if kind in COPYING else None),
        ),
    )


def _phase_work(phase: PhaseTrace, cache_bytes: int, has_windows: bool, kind: str) -> PhaseWork:
    copies = kind in COPYING  # others at most send scalars
    return PhaseWork(
        flops=phase.matmul_flops - (phase.attention_flops if has_windows else phase.hidden_flops),
        least_bytes=phase.weights_read_bytes + cache_bytes,
        touched_bytes=max(phase.touched_bytes, phase.weights_read_bytes + cache_bytes),
        h2d_bytes=phase.h2d_bytes if copies else 0,
        d2h_bytes=phase.d2h_bytes if copies else 0,
    )


def _contention_assumptions(link: LinkProfile | None) -> Iterator[str]:
    if link is None:
        return
    if link.emulated:
        yield f"The link's figures are emulated, not measured on a device: {link.name}."
    rates = {"H2D": link.h2d_with_d2h_bytes_per_s, "D2H": link.d2h_with_h2d_bytes_per_s}
    unknown = [direction for direction, rate in rates.items() if rate is None]
    if unknown:
        yield f"What the other direction takes from {' and '.join(unknown)} is not stated for {link.name}: nothing."


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


def bound_phase(work: PhaseWork, hardware: HardwareProfile, dtype: str, kind: str) -> PhaseLatency:
    """Computes the bounds of one phase.

    Args:
        work: What the phase does.
        hardware: The device and its link.
        dtype: dtype of the model: which of the peaks counts.
        kind: The strategy's kind: what it lets overlap.

    Raises:
        InputError: The profile lacks a figure that is needed; the message names it.
    """
    peak = _figure(hardware, f"peak_flops_per_s.{dtype}", getattr(hardware.peak_flops_per_s, dtype, None))
    bandwidth = _figure(hardware, "memory_bytes_per_s", hardware.memory_bytes_per_s)
    alone, contended = _link_times(work, hardware)
    compute_s, memory_s = work.flops / peak, work.touched_bytes / bandwidth
    parts: dict[Resource, float] = {"compute": compute_s, "memory": memory_s, "h2d": alone[0], "d2h": alone[1]}
    serial = _sum(parts)
    scheduled = _scheduled(compute_s, memory_s, contended, kind)
    return PhaseLatency(
        compute_s=compute_s,
        memory_s=memory_s,
        h2d_s=alone[0],
        d2h_s=alone[1],
        ideal=_largest({**parts, "memory": work.least_bytes / bandwidth, **_both_ways(alone, contended)}),
        scheduled=min(scheduled, serial, key=lambda bound: bound.seconds),
        serial=serial,
    )


def _both_ways(alone: tuple[float, float], contended: tuple[float, float]) -> dict[Resource, float]:
    """Both directions are over when the slower one is, or, where they hinder each other more, one after the other."""
    link_s = min(sum(alone), max(contended))
    return {"h2d": max(alone[0], link_s)} if alone[0] >= alone[1] else {"d2h": max(alone[1], link_s)}


def _scheduled(compute_s: float, memory_s: float, link_s: tuple[float, float], kind: str) -> TimeBound:
    """On the device an operator computes while it reads; the link's directions contend where both are used."""
    h2d_s, d2h_s = link_s
    on_device: dict[Resource, float] = {"compute": compute_s, "memory": memory_s}
    device = _largest(on_device)
    if kind not in COPIES_ON_THE_COMPUTE_STREAM:
        return _largest({device.limited_by: device.seconds, "h2d": h2d_s, "d2h": d2h_s})
    in_line = _sum({device.limited_by: device.seconds, "d2h": d2h_s})
    return in_line if in_line.seconds >= h2d_s else TimeBound(seconds=h2d_s, limited_by="h2d")


def _link_times(work: PhaseWork, hardware: HardwareProfile) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of both directions alone, and contended; equal where only one is used."""
    if not work.h2d_bytes and not work.d2h_bytes:
        return (0.0, 0.0), (0.0, 0.0)
    link = _link(hardware)
    h2d = _figure(hardware, "link.h2d_bytes_per_s", link.h2d_bytes_per_s) if work.h2d_bytes else 1.0
    d2h = _figure(hardware, "link.d2h_bytes_per_s", link.d2h_bytes_per_s) if work.d2h_bytes else 1.0
    alone = (work.h2d_bytes / h2d, work.d2h_bytes / d2h)
    if not work.h2d_bytes or not work.d2h_bytes:
        return alone, alone
    with_d2h, with_h2d = link.h2d_with_d2h_bytes_per_s, link.d2h_with_h2d_bytes_per_s
    both = (h2d if with_d2h is None else with_d2h.value, d2h if with_h2d is None else with_h2d.value)
    return alone, _contended(work, (h2d, d2h), both)


def _contended(work: PhaseWork, alone: tuple[float, float], both: tuple[float, float]) -> tuple[float, float]:
    """The shorter transfer contends with the longer one for as long as it lasts, and no longer."""
    h2d_s, d2h_s = work.h2d_bytes / both[0], work.d2h_bytes / both[1]
    if h2d_s >= d2h_s:
        return d2h_s + (work.h2d_bytes - d2h_s * both[0]) / alone[0], d2h_s
    return h2d_s, h2d_s + (work.d2h_bytes - h2d_s * both[1]) / alone[1]


def _largest(times: Mapping[Resource, float]) -> TimeBound:
    limit = max(times, key=lambda resource: times[resource])
    return TimeBound(seconds=times[limit], limited_by=limit)


def _sum(times: Mapping[Resource, float]) -> TimeBound:
    return TimeBound(seconds=sum(times.values()), limited_by=_largest(times).limited_by)


def _link(hardware: HardwareProfile) -> LinkProfile:
    if hardware.link is None:
        raise InputError(f"hardware {hardware.name}: has no link; state it to bound a strategy that copies")
    return hardware.link


def _figure(hardware: HardwareProfile, name: str, figure: SourcedValue | None) -> float:
    if figure is None:
        raise InputError(f"hardware {hardware.name}: {name} is needed and not stated; give a profile that states it")
    return float(figure.value)
