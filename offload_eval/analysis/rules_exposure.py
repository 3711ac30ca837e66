"""Rules about the time of transfers: a slow link, waits that do not add up, a bound that is beaten, a profiler."""

from collections.abc import Iterator, Sequence
from typing import Final

from offload_eval.analysis.calibrated_link import COPY_GAP_S, fitting_hardware
from offload_eval.analysis.statistics import median_of, summarize_tpot, summarize_ttft
from offload_eval.analysis.transfers import explain_transfers, is_all_resident
from offload_eval.core.experiment import StrategySpec, StreamedSpec
from offload_eval.core.hardware import HardwareProfile
from offload_eval.core.judgement import Finding, LinkUse, PhaseTransfer
from offload_eval.core.records import ProfiledCopies, ProfiledDirection, RunRecord

SLOW_LINK_RATIO: Final = 0.9
"""Of the calibrated link's speed; less is a finding."""
BANDWIDTH_SHARE: Final = 0.9
"""Of the expected time that bytes must take: else an uncertain latency is more than what may be lacking."""
EXPOSED_SHARE: Final = 0.05
"""Of TPOT that the two figures of exposed time may differ by at least, besides the noise."""
BOUND_MARGIN: Final = 0.03
"""Of the ideal bound that a latency may lie below it: a calibrated peak and a median each have a spread."""
PROFILED_TIME_RATIO: Final = 0.05
EVENT_GAP_S: Final = 5e-6
"""What two events around one copy may add to it."""
_TAKES_LONGER: Final = (
    "It can mean that the strategy's own computing takes longer than the reference's, or waits are missing from the "
    "account."
)
_TAKES_LESS: Final = (
    "It can mean that the strategy's own computing takes less than the reference's, or the transfer pass's clocks "
    "disturb it."
)
_DEQUANTIZES: Final = (
    "Expected cause: quantizing new rows and dequantizing fetched ones, which is no wait, and which the reference is "
    "spared."
)


def check_transfer_times(records: Sequence[RunRecord], hardware: HardwareProfile | None) -> list[Finding]:
    """Applies the rules of this module to every ok cell that uses the link."""
    runs = {record.run_id: record for record in records if record.evidence != "traced" and record.status == "ok"}
    found: list[Finding] = []
    for transfer in explain_transfers(records, hardware):
        run = runs.get(transfer.run_id)
        if run is not None:
            found += [*_slow_link(transfer), *_exposed(transfer, run), *_below_bound(transfer, run)]
    for run in runs.values():
        found += [*_unused_hardware(run, hardware), *_profiled(run)]
    return found


def _slow_link(transfer: PhaseTransfer) -> Iterator[Finding]:
    gap_s = COPY_GAP_S[transfer.evidence]
    for direction, use in (("h2d", transfer.h2d), ("d2h", transfer.d2h)):
        if use.of_link_ratio is None or not _is_slow(use, gap_s):
            continue
        assert use.bytes_per_s is not None
        assert use.calibrated_bytes_per_s is not None
        yield Finding(
            code="link_below_calibration",
            severity="warning",
            message=f"in {transfer.phase}, {direction} copies ran at {use.bytes_per_s / 1e9:,.3f} GB/s, "
            f"{use.of_link_ratio:.0%} of what {transfer.link} gives for them ({use.calibrated_bytes_per_s / 1e9:,.3f} "
            f"GB/s, latency counted; limit {SLOW_LINK_RATIO:.0%} with {gap_s * 1e6:.0f} µs more a copy). Suspected "
            "cause: something else uses the link or the memory behind it, host memory of another NUMA node, pageable "
            "buffers, or a link that came up slower.",
            remedy="Calibrate again with offload-eval link on this machine, and run the cell again when it is idle.",
            run_ids=(transfer.run_id,),
        )


def _is_slow(use: LinkUse, gap_s: float) -> bool:
    """Whether bytes, and not the number of copies, decide the expected time, and they took too long."""
    if not use.num_copies or not use.calibrated_bytes_per_s or not use.busy_s:
        return False
    bytes_s = use.bytes / use.calibrated_bytes_per_s
    allowed_s = bytes_s + use.num_copies * ((use.latency_s or 0.0) + gap_s)
    return bytes_s >= BANDWIDTH_SHARE * allowed_s and allowed_s < SLOW_LINK_RATIO * use.busy_s


def _exposed(transfer: PhaseTransfer, run: RunRecord) -> Iterator[Finding]:
    waits_s, difference_s = transfer.exposed_by_waits_s, transfer.exposed_by_difference_s
    noise_s, tpot_s = transfer.difference_noise_s, median_of(summarize_tpot(run))
    if transfer.phase != "decode" or None in (waits_s, difference_s, noise_s, tpot_s):
        return
    assert waits_s is not None
    assert difference_s is not None
    assert noise_s is not None
    assert tpot_s is not None
    limit_s = noise_s + EXPOSED_SHARE * tpot_s
    if abs(waits_s - difference_s) <= limit_s:
        return
    is_expected = difference_s > waits_s and _dequantizes(run.spec.strategy)
    yield Finding(
        code="exposed_time_disagrees",
        severity="note" if is_expected else "warning",
        message=f"computation waited {waits_s * 1000:.3f} ms a decode step for copies, and a step takes "
        f"{difference_s * 1000:.3f} ms longer than {transfer.reference}'s at the same length: further apart than "
        f"noise and {EXPOSED_SHARE:.0%} of TPOT explain ({limit_s * 1000:.3f} ms). "
        + (_DEQUANTIZES if is_expected else _TAKES_LONGER if difference_s > waits_s else _TAKES_LESS),
        remedy="Compare with the same cell at host_dtype native, which waits and does not dequantize."
        if is_expected
        else "Compare with a reference that computes the same, such as streamed with resident_share 1.0, and raise "
        "measurement.trials and transfer_trials.",
        run_ids=(transfer.run_id,),
    )


def _dequantizes(strategy: StrategySpec) -> bool:
    return isinstance(strategy, StreamedSpec) and strategy.host_dtype != "native" and not is_all_resident(strategy)


def _below_bound(transfer: PhaseTransfer, run: RunRecord) -> Iterator[Finding]:
    """TTFT is held against the prefill's bound, and the mean over all decode steps against the lowest bound of any.

    A latency below the bound by no more than the margin is none, or the calibration's.
    """
    name, summary = ("TTFT", summarize_ttft(run)) if transfer.phase == "prefill" else ("TPOT", summarize_tpot(run))
    latency_s, floor_s = median_of(summary), transfer.floor_s
    if latency_s is None or floor_s is None or latency_s >= (1 - BOUND_MARGIN) * floor_s:
        return
    yield Finding(
        code="below_ideal_bound",
        severity="error",
        message=f"{name} is {latency_s * 1000:.3f} ms where the ideal bound is {floor_s * 1000:.3f} ms, more "
        f"than the {BOUND_MARGIN:.0%} below it that the spread of a calibration and of a median explains: no code can "
        "be that fast. Suspected cause: the clock, a missing synchronization, or a profile of slower hardware.",
        remedy="Do not use the times of this cell; check the hardware profile, then the instrument.",
        run_ids=(transfer.run_id,),
    )


def _unused_hardware(run: RunRecord, hardware: HardwareProfile | None) -> Iterator[Finding]:
    if hardware is None or fitting_hardware(run, hardware) is not None:
        return
    link = (
        "has no link"
        if hardware.link is None
        else f"is of {'an emulated' if hardware.link.emulated else 'a real'} link"
    )
    yield Finding(
        code="hardware_not_used",
        severity="note",
        message=f"the hardware profile {hardware.name} {link}, and the run is {run.evidence}: nothing was held "
        "against it.",
        remedy="Give the profile that offload-eval link --out writes on this device.",
        run_ids=(run.run_id,),
    )


def _profiled(run: RunRecord) -> Iterator[Finding]:
    for trial in run.trials:
        profiled = trial.profiled_copies
        if profiled is None:
            continue
        if not any(seen.num_copies + seen.num_other_copies for seen in (profiled.h2d, profiled.d2h)):
            yield _nothing_profiled(run)
            continue
        for direction, seen in (("h2d", profiled.h2d), ("d2h", profiled.d2h)):
            yield from _profiled_direction(run, profiled, direction, seen)


def _nothing_profiled(run: RunRecord) -> Finding:
    return Finding(
        code="profiler_saw_nothing",
        severity="note",
        message="the device's profiler recorded no copy at all, so it checks nothing. Suspected cause: this user may "
        "not use it, as in most containers.",
        remedy="Allow profiling to all users of the driver, or run where it is allowed, to have the cross-check.",
        run_ids=(run.run_id,),
    )


def _profiled_direction(
    run: RunRecord, profiled: ProfiledCopies, direction: str, seen: ProfiledDirection
) -> Iterator[Finding]:
    where = f"in {profiled.output_tokens} tokens, {direction}"
    if (seen.bytes, seen.num_copies) != (seen.accounted_bytes, seen.num_accounted_copies):
        yield Finding(
            code="profiler_bytes_differ",
            severity="error",
            message=f"{where}: the device's profiler saw {seen.bytes:,} bytes in {seen.num_copies:,} copies where the "
            f"account has {seen.accounted_bytes:,} in {seen.num_accounted_copies:,}. Suspected cause: a copy that the "
            "account does not see, or a model's own copy of the size of a cache's.",
            remedy="Trust no figure of the link before they agree; look at the copies of that direction first.",
            run_ids=(run.run_id,),
        )
    apart_s = seen.accounted_busy_s - seen.copy_s
    allowed_s = PROFILED_TIME_RATIO * seen.copy_s
    gaps_s = EVENT_GAP_S * seen.num_accounted_copies
    if seen.num_copies and not -allowed_s <= apart_s <= allowed_s + gaps_s:
        yield Finding(
            code="profiler_time_differs",
            severity="warning",
            message=f"{where}: the copies took {seen.copy_s * 1000:.3f} ms by the device's profiler and "
            f"{seen.accounted_busy_s * 1000:.3f} ms by the account's events, further apart than "
            f"{PROFILED_TIME_RATIO:.0%} and {EVENT_GAP_S * 1e6:.0f} µs a copy. Suspected cause: copies that wait for "
            "one another on their stream, or for the other direction's, count as busy.",
            remedy="Take the link's speed from the profiler's time for this cell.",
            run_ids=(run.run_id,),
        )
