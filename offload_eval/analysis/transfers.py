"""Transfers of every cell, phase by phase: what moved, how fast, what computation waited, what the bounds allow."""

from collections.abc import Sequence

import msgspec

from offload_eval.analysis.calibrated_link import bandwidth_of, fitting_hardware, fitting_link, latency_of
from offload_eval.analysis.cells import latest_records, latest_traces, merged_sample, ran_on_own_tokens
from offload_eval.analysis.comparison import Counterparts
from offload_eval.analysis.exposure import difference_noise_s, end_latency_s, step_difference_s
from offload_eval.analysis.statistics import median_of, summarize_ttft
from offload_eval.bounds.latency import bound_latency
from offload_eval.core.experiment import StrategySpec, StreamedSpec
from offload_eval.core.hardware import HardwareProfile, LinkProfile
from offload_eval.core.judgement import LinkUse, PhaseTransfer
from offload_eval.core.latency import PhaseLatency
from offload_eval.core.records import PHASES, Direction, Phase, PhaseSample, RunRecord
from offload_eval.core.trace import Trace
from offload_eval.errors import InputError


def explain_transfers(
    records: Sequence[RunRecord], hardware: HardwareProfile | None = None
) -> tuple[PhaseTransfer, ...]:
    """Lays out what crossed the link in each cell that uses it.

    Args:
        records: Of runs and of traces; a traced cell has bounds beside its times.
        hardware: The calibrated machine; None: an emulated link is held against its pace, if it has one.

    Returns:
        Prefill and decode of each such cell, in the order the cells first appear.
    """
    runs = latest_records(records)
    traces = {record.spec: record.trace for record in latest_traces(records)}
    references = Counterparts(run for run in runs if _is_comparable(run))
    return tuple(
        _explained(phase, run, sample, references, traces.get(run.spec), hardware)
        for run in runs
        for phase, sample in zip(PHASES, _phases(run), strict=True)
        if sample.h2d_bytes is not None and sample.d2h_bytes is not None
    )


def transfer_reference(record: RunRecord, candidates: Counterparts) -> RunRecord | None:
    """The cell that a strategy's time is held against: one that does the same without the transfers.

    Of `streamed` it is a cell with every layer resident, if there is one; else the baseline. With every layer resident
    nothing is fetched ahead and nothing quantized, so that one such cell is as good as another.
    """
    if not _is_comparable(record):
        return None
    for strategy in _resident(record.spec.strategy, candidates.strategies):
        found = candidates.find(record, strategy)
        if found is not None:
            return found
    return None if record.spec.is_baseline else candidates.find(record, record.spec.baseline)


def _is_comparable(record: RunRecord) -> bool:
    return record.status == "ok" and not ran_on_own_tokens(record)


def _resident(strategy: StrategySpec, others: Sequence[StrategySpec]) -> list[StrategySpec]:
    """The streamed cache with every layer on the device, as other cells ran it."""
    if not isinstance(strategy, StreamedSpec) or is_all_resident(strategy):
        return []
    return [other for other in others if is_all_resident(other)]


def is_all_resident(strategy: StrategySpec) -> bool:
    """Whether a streamed cache keeps every layer on the device, by its share."""
    return isinstance(strategy, StreamedSpec) and strategy.resident_share == 1


def _phases(record: RunRecord) -> tuple[PhaseSample, PhaseSample]:
    sample = merged_sample(record)
    return sample.prefill, sample.decode


def _explained(
    phase: Phase,
    run: RunRecord,
    sample: PhaseSample,
    references: Counterparts,
    trace: Trace | None,
    hardware: HardwareProfile | None,
) -> PhaseTransfer:
    link = fitting_link(run, hardware)
    steps = 1 if phase == "prefill" else run.spec.workload.output_tokens - 1
    exposed_s, reference = sample.exposed_transfer_s, transfer_reference(run, references)
    bounds, floor_s = _bounds(phase, run, trace, fitting_hardware(run, hardware))
    return PhaseTransfer(
        workload=run.spec.workload.label,
        strategy=run.spec.strategy.label,
        phase=phase,
        run_id=run.run_id,
        evidence=run.evidence,
        steps=steps,
        h2d=_use("h2d", sample, link),
        d2h=_use("d2h", sample, link),
        num_pageable_copies=sample.num_pageable_copies,
        link=None if link is None else link.name,
        exposed_by_waits_s=None if exposed_s is None else exposed_s / steps,
        exposed_by_difference_s=None if reference is None else _difference_s(phase, run, reference),
        difference_noise_s=None if reference is None else difference_noise_s(phase, run, reference),
        reference=None if reference is None else reference.spec.strategy.label,
        hidden_ratio=_hidden(sample),
        end_latency_s=end_latency_s(run) if phase == "decode" else median_of(summarize_ttft(run)),
        ideal_s=None if bounds is None else bounds.ideal.seconds,
        scheduled_s=None if bounds is None else bounds.scheduled.seconds,
        serial_s=None if bounds is None else bounds.serial.seconds,
        floor_s=floor_s,
    )


def _use(direction: Direction, sample: PhaseSample, link: LinkProfile | None) -> LinkUse:
    busy_s, other_s = sample.h2d_busy_s, sample.d2h_busy_s
    moved, copies = sample.h2d_bytes or 0, sample.num_h2d_copies
    if direction == "d2h":
        busy_s, other_s = other_s, busy_s
        moved, copies = sample.d2h_bytes or 0, sample.num_d2h_copies
    use = LinkUse(bytes=moved, num_copies=copies, busy_s=busy_s, bytes_per_s=moved / busy_s if busy_s else None)
    if link is None or not busy_s:
        return use
    bandwidth = bandwidth_of(link, direction, min(1.0, (other_s or 0.0) / busy_s))
    if bandwidth is None or copies is None:
        return msgspec.structs.replace(use, calibrated_bytes_per_s=bandwidth)
    latency_s = latency_of(link)
    expected_s = copies * latency_s + moved / bandwidth
    return msgspec.structs.replace(
        use,
        calibrated_bytes_per_s=bandwidth,
        expected_s=expected_s,
        latency_s=latency_s,
        of_link_ratio=expected_s / busy_s,
    )


def _hidden(sample: PhaseSample) -> float | None:
    if sample.exposed_transfer_s is None or sample.h2d_busy_s is None or sample.d2h_busy_s is None:
        return None
    busy_s = sample.h2d_busy_s + sample.d2h_busy_s
    return max(0.0, 1 - sample.exposed_transfer_s / busy_s) if busy_s else None


def _difference_s(phase: Phase, run: RunRecord, reference: RunRecord) -> float | None:
    if phase == "decode":
        return step_difference_s(run, reference)
    mine_s, theirs_s = median_of(summarize_ttft(run)), median_of(summarize_ttft(reference))
    return None if mine_s is None or theirs_s is None else mine_s - theirs_s


def _bounds(
    phase: Phase, run: RunRecord, trace: Trace | None, hardware: HardwareProfile | None
) -> tuple[PhaseLatency | None, float | None]:
    """Bounds of the prefill, or of the last decode steps, and the lowest ideal one: its own, or of any traced step."""
    if trace is None or hardware is None:
        return None, None
    shortest = msgspec.structs.replace(trace.workload, output_tokens=2)
    alone = [msgspec.structs.replace(trace, steps=(step,), workload=shortest) for step in trace.steps]
    try:
        whole, *each = (bound_latency(one, run.model.shape, hardware, run.spec.model.dtype) for one in (trace, *alone))
    except InputError:  # the profile lacks a figure that is needed
        return None, None
    if phase == "prefill":
        return whole.ttft, whole.ttft.ideal.seconds
    return whole.tpot, min(bounds.tpot.ideal.seconds for bounds in each)
