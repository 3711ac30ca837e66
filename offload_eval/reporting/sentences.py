"""What each strategy buys and what a token then costs, in plain English. Nothing beyond the numbers is said.

A clause whose number is missing is left out or says so; a ratio is never formed without both of its sides.
The text is plain: whoever puts it into Markdown or on a terminal escapes it there.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from offload_eval.analysis.capacity import analytic_bound, measured_sessions
from offload_eval.analysis.cells import (
    bytes_moved_per_token,
    exposed_s_per_token,
    latest_records,
    mean_kl_nats,
    merged_sample,
)
from offload_eval.analysis.comparison import compare_with_baseline
from offload_eval.analysis.rules_outcomes import failure_reason
from offload_eval.analysis.statistics import median_of, summarize_tpot, summarize_ttft
from offload_eval.core.experiment import Experiment
from offload_eval.core.judgement import Comparison
from offload_eval.core.records import Evidence, RunRecord
from offload_eval.reporting.display import one_line, show_ms, show_number
from offload_eval.reporting.grid import Cell, experiment_cells
from offload_eval.units import format_bytes

EVIDENCE_WORDS: Final[dict[Evidence, str]] = {
    "analytic": "by arithmetic alone",
    "traced": "traced on tensors without data",
    "emulated": "emulated on a CPU: the link and the device are this CPU's",
    "measured": "measured on the device",
}
REASON_CHARACTERS: Final = 300
"""Of a failure's text; the record has all of it."""


def workload_sentences(experiment: Experiment, records: Sequence[RunRecord]) -> dict[str, tuple[str, ...]]:
    """Says for each workload what every strategy buys against the baseline and what each token then costs.

    Returns:
        Workload label to sentences, both in the experiment's order.
    """
    by_run = {record.run_id: record for record in latest_records(records)}
    comparisons = {comparison.run_id: comparison for comparison in compare_with_baseline(records)}
    said: dict[str, tuple[str, ...]] = {}
    for cell in experiment_cells(experiment, records):
        comparison = comparisons.get(cell.record.run_id) if cell.record else None
        baseline = by_run[comparison.baseline_run_id] if comparison else None
        said[cell.workload] = (*said.get(cell.workload, ()), *_cell_sentences(cell, comparison, baseline))
    return said


def _cell_sentences(cell: Cell, comparison: Comparison | None, baseline: RunRecord | None) -> tuple[str, ...]:
    record = cell.record
    if record is None:
        return (f"{cell.strategy} was not run: there is no record of it.",)
    if record.status != "ok":
        return (_without_result(record),)
    if comparison is None or baseline is None:
        return _alone(record)
    name, other, rung = cell.strategy, baseline.spec.strategy.label, record.evidence
    buys = (_sessions(record, baseline), _peaks_saved(comparison), _kv_saved(comparison, record))
    costs = (
        _tpot(record, baseline, comparison),
        *_transfers(record),
        _fidelity(comparison.mean_kl_nats, comparison.noise_floor_nats),
    )
    return (
        f"What {name} buys against {other} ({rung}): {_joined(buys)}.",
        f"What each token then costs with {name} ({rung}): {_joined(costs)}.",
    )


def _alone(record: RunRecord) -> tuple[str, ...]:
    """A baseline, or a strategy that has none to be held against."""
    name, rung = record.spec.strategy.label, record.evidence
    figures = (_sessions(record), _peaks(record), _kv_held(record), _ttft(record), _tpot(record))
    own_kl_nats = mean_kl_nats(record)
    if record.spec.is_baseline:
        floor = "noise floor " + ("unknown" if own_kl_nats is None else f"{show_number(own_kl_nats, 3)} nats")
        return (f"{name}, the baseline ({rung}): {_joined((*figures, *_transfers(record), floor))}.",)
    return (
        f"{name} ({rung}): {_joined((*figures, *_transfers(record), _fidelity(own_kl_nats, None)))}.",
        f"{name} is compared with nothing: no ok record of {record.spec.baseline.label} differs from it in "
        "the strategy alone.",
    )


def _without_result(record: RunRecord) -> str:
    name, reason = record.spec.strategy.label, one_line(failure_reason(record), REASON_CHARACTERS).rstrip(".")
    rung = record.evidence
    if record.status == "unsupported":
        return f"{name} cannot run here: {reason}."
    if record.status == "oom":
        cap_bytes = record.conditions.cap_bytes
        limit = "" if cap_bytes is None else f" under a cap of {format_bytes(cap_bytes)}"
        return f"{name} does not fit ({rung}): it ran out of memory{limit}, {reason}."
    if record.status == "timeout":
        limit_s = record.spec.measurement.cell_timeout_s
        return f"{name} has no result ({rung}): it was given up after {limit_s:,.0f} s, {reason}."
    return f"{name} has no result: it failed {reason}."


def _sessions(record: RunRecord, baseline: RunRecord | None = None) -> str:
    other = "" if baseline is None else baseline.spec.strategy.label
    measured = _against(measured_sessions(record), None if baseline is None else measured_sessions(baseline), other)
    bound, other_bound = analytic_bound(record), None if baseline is None else analytic_bound(baseline)
    analytic = _against(
        None if bound is None else bound.sessions,
        None if other_bound is None else other_bound.sessions,
        other,
    )
    batch_size = record.spec.workload.batch_size
    source = f"extrapolated linearly from the worse peak of a batch of {batch_size}"
    peak = "sessions from the peak unknown" if measured is None else f"{measured}, {source}"
    card = "sessions by arithmetic unknown" if analytic is None else f"at most {analytic} by arithmetic"
    return f"{card}; {peak}"


def _against(count: int | None, other_count: int | None, other: str) -> str | None:
    if count is None:
        return None
    own = f"{count:,} session{'' if count == 1 else 's'}"
    return own if other_count is None else f"{own} (against {other_count:,} with {other})"


def _peaks(record: RunRecord) -> str:
    sample = merged_sample(record)
    seen = (("prefill", sample.prefill.peak_allocated_bytes), ("decode", sample.decode.peak_allocated_bytes))
    known = [f"{format_bytes(peak)} in {phase}" for phase, peak in seen if peak is not None]
    return f"device peak {' and '.join(known)}" if known else "device peaks not measured"


def _peaks_saved(comparison: Comparison) -> str:
    saved = (("prefill", comparison.prefill_peak_saved_bytes), ("decode", comparison.decode_peak_saved_bytes))
    known = [f"{_less_or_more(saved_bytes)} in {phase}" for phase, saved_bytes in saved if saved_bytes is not None]
    return f"device peak {' and '.join(known)}" if known else "device peaks not compared"


def _less_or_more(saved_bytes: int) -> str:
    if saved_bytes == 0:
        return "the same"
    return f"{format_bytes(abs(saved_bytes))} {'lower' if saved_bytes > 0 else 'higher'}"


def _kv_saved(comparison: Comparison, record: RunRecord) -> str | None:
    held = _kv_held(record)
    if comparison.kv_device_saved_bytes is None:
        return held
    return f"{held} ({_less_or_more(comparison.kv_device_saved_bytes)} on the device)"


def _kv_held(record: RunRecord) -> str | None:
    sample, batch_size = merged_sample(record), record.spec.workload.batch_size
    held = (("device", sample.kv_cache_device_bytes), ("host", sample.kv_cache_host_bytes))
    known = [f"{format_bytes(size)} on the {tier}" for tier, size in held if size is not None]
    return f"KV of the batch of {batch_size}: {' and '.join(known)}" if known else None


def _ttft(record: RunRecord) -> str | None:
    ttft_s = median_of(summarize_ttft(record))
    return None if ttft_s is None else f"TTFT {show_ms(ttft_s)} ms"


def _tpot(record: RunRecord, baseline: RunRecord | None = None, comparison: Comparison | None = None) -> str:
    tpot_s = median_of(summarize_tpot(record))
    if tpot_s is None:
        return "TPOT not measured"
    own = f"TPOT {show_ms(tpot_s)} ms"
    if baseline is None or comparison is None or comparison.tpot_ratio is None:
        return own
    theirs = f"{baseline.spec.strategy.label}'s {show_ms(median_of(summarize_tpot(baseline)))} ms"
    return f"{own}, {show_number(comparison.tpot_ratio, 3)} times {theirs}"


def _transfers(record: RunRecord) -> tuple[str | None, str | None]:
    moved_bytes, exposed_s = bytes_moved_per_token(record), exposed_s_per_token(record)
    return (
        None if moved_bytes is None else f"{format_bytes(moved_bytes)} across the link",
        None if exposed_s is None else f"{show_ms(exposed_s)} ms of waiting for copies",
    )


def _fidelity(mean_nats: float | None, floor_nats: float | None) -> str:
    if mean_nats is None:
        return "KL not measured"
    floor = "no noise floor known" if floor_nats is None else f"noise floor {show_number(floor_nats, 3)} nats"
    return f"mean KL {show_number(mean_nats, 3)} nats ({floor})"


def _joined(clauses: Iterable[str | None]) -> str:
    return "; ".join(clause for clause in clauses if clause)
