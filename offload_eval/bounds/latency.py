"""Lower bounds of a phase's time: what it computes and moves, over what a device can do at most.

ideal = max(least FLOPs / peak, least bytes / bandwidth, H2D, D2H, both / the link's total).
scheduled = what the strategy's streams let overlap. serial = the sum. Source: Williams et al., Roofline (2009), with
the link as one more roof.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from offload_eval.bounds.session_card import session_card, workload_lengths
from offload_eval.core.experiment import BITS_PER_VALUE, DynamicSpec, QuantizedSpec
from offload_eval.core.hardware import HardwareProfile, LinkProfile, SourcedValue
from offload_eval.core.latency import LatencyBounds, PhaseLatency, Resource, TimeBound
from offload_eval.core.shape import ModelShape
from offload_eval.core.trace import PhaseTrace, Trace
from offload_eval.errors import InputError

COPIES_ON_THE_COMPUTE_STREAM: Final = ("offloaded", "offloaded_static")
"""Strategies whose write-back waits in line with computation. Source: transformers 5.24, cache_utils.Cache.offload."""
OVERLAP_ASSUMPTIONS: Final[Mapping[str, str]] = {
    "ideal": "ideal: computing, memory and both directions of the link overlap; weights and cache are read once.",
    "scheduled": (
        "scheduled: transfers overlap computing as the strategy's streams allow: transformers' write-back waits in "
        "line with computing, ours has a stream of its own; operators run one by one, at the traffic of each."
    ),
    "serial": "serial: nothing overlaps.",
}


@dataclass(frozen=True, kw_only=True)
class PhaseWork:
    """What one phase of the whole batch does."""

    least_flops: int
    """Without what a causal mask hides."""
    flops: int
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
    cache_bytes = 0 if shape is None else _cache_bytes(trace, shape, BITS_PER_VALUE[dtype])
    kind = trace.strategy.kind
    return LatencyBounds(
        hardware=hardware.name,
        calibrated=hardware.calibrated,
        ttft=bound_phase(_phase_work(trace.prefill, 0, windows), hardware, dtype, kind),
        tpot=bound_phase(_phase_work(trace.decode, cache_bytes, windows), hardware, dtype, kind),
        assumptions=(*OVERLAP_ASSUMPTIONS.values(), NOT_A_PREDICTION),
    )


def _phase_work(phase: PhaseTrace, cache_bytes: int, has_windows: bool) -> PhaseWork:
    """Windows hide more scores than a causal mask does, so that of their attention nothing is certain."""
    hidden_flops = phase.attention_flops if has_windows else phase.hidden_flops
    return PhaseWork(
        least_flops=phase.matmul_flops - hidden_flops,
        flops=phase.matmul_flops,
        least_bytes=phase.weights_read_bytes + cache_bytes,
        touched_bytes=max(phase.touched_bytes, phase.weights_read_bytes + cache_bytes),
        h2d_bytes=phase.h2d_bytes,
        d2h_bytes=phase.d2h_bytes,
    )


def _cache_bytes(trace: Trace, shape: ModelShape, bits: int) -> int:
    """Payload that the last decode step's attention reads once, of the whole batch, wherever it lies."""
    strategy = trace.strategy if isinstance(trace.strategy, QuantizedSpec) else DynamicSpec()
    card = session_card(shape, bits, workload_lengths(trace.workload), strategy)
    return 0 if isinstance(card, str) else trace.workload.batch_size * int(card.device_bytes)


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
    least: dict[Resource, float] = {
        "compute": work.least_flops / peak,
        "memory": work.least_bytes / bandwidth,
        "h2d": max(alone[0], _both_s(work, hardware)) if work.h2d_bytes else 0.0,
        "d2h": alone[1],
    }
    return PhaseLatency(
        compute_s=compute_s,
        memory_s=memory_s,
        h2d_s=alone[0],
        d2h_s=alone[1],
        ideal=_largest(least),
        scheduled=_scheduled(compute_s, memory_s, contended, kind),
        serial=_sum({"compute": compute_s, "memory": memory_s, "h2d": alone[0], "d2h": alone[1]}),
    )


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
    """Seconds of both directions alone, and contended; equal where only one is used, or nothing is known."""
    if not work.h2d_bytes and not work.d2h_bytes:
        return (0.0, 0.0), (0.0, 0.0)
    link = _link(hardware)
    h2d = _figure(hardware, "link.h2d_bytes_per_s", link.h2d_bytes_per_s) if work.h2d_bytes else 1.0
    d2h = _figure(hardware, "link.d2h_bytes_per_s", link.d2h_bytes_per_s) if work.d2h_bytes else 1.0
    alone = (work.h2d_bytes / h2d, work.d2h_bytes / d2h)
    if not work.h2d_bytes or not work.d2h_bytes:
        return alone, alone
    with_d2h, with_h2d = link.h2d_with_d2h_bytes_per_s, link.d2h_with_h2d_bytes_per_s
    # The shorter transfer contends with the longer one for as long as it lasts, and no longer.
    if with_d2h is None or with_h2d is None:
        return alone, alone
    return alone, _contended(work, (h2d, d2h), (with_d2h.value, with_h2d.value))


def _contended(work: PhaseWork, alone: tuple[float, float], both: tuple[float, float]) -> tuple[float, float]:
    h2d_s, d2h_s = work.h2d_bytes / both[0], work.d2h_bytes / both[1]
    if h2d_s >= d2h_s:
        return d2h_s + (work.h2d_bytes - d2h_s * both[0]) / alone[0], d2h_s
    return h2d_s, h2d_s + (work.d2h_bytes - h2d_s * both[1]) / alone[1]


def _both_s(work: PhaseWork, hardware: HardwareProfile) -> float:
    """All of the link's bytes at the most it moves in both directions together."""
    link = _link(hardware)
    if link.h2d_with_d2h_bytes_per_s is None or link.d2h_with_h2d_bytes_per_s is None or not work.d2h_bytes:
        return 0.0
    total = link.h2d_with_d2h_bytes_per_s.value + link.d2h_with_h2d_bytes_per_s.value
    return (work.h2d_bytes + work.d2h_bytes) / total


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
