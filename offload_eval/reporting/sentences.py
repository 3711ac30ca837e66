"""What each strategy buys, what a token then costs and what comes out, in plain English: one text a cell.

A clause whose number is missing is left out; a ratio is never formed without both of its sides. Nothing beyond the
numbers is said. The text is plain: whoever puts it into Markdown or on a terminal escapes it there.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from offload_eval.analysis.capacity import admitted_by_peak, analytic_bound, analytic_sessions, sessions_by_peak
from offload_eval.analysis.cells import (
    bytes_moved_per_token,
    exposed_s_per_token,
    latest_records,
    mean_kl_nats,
    merged_sample,
    noise_floor_nats,
    ran_on_own_tokens,
)
from offload_eval.analysis.comparison import compare_with_baseline
from offload_eval.analysis.grid import Cell, experiment_cells
from offload_eval.analysis.rules_outcomes import failure_reason, out_of_memory_words
from offload_eval.analysis.statistics import median_of, summarize_tpot
from offload_eval.analysis.swap import is_swapped
from offload_eval.core.experiment import Experiment
from offload_eval.core.judgement import Comparison, Ledger
from offload_eval.core.records import Evidence, RunRecord
from offload_eval.reporting.display import mark_swapped, one_line, show_ms, show_number, show_percent, show_sessions_of
from offload_eval.reporting.markdown import bullets, section
from offload_eval.reporting.sourced import Source, Sourced, markdown, telling_characters
from offload_eval.units import format_bytes

EVIDENCE_WORDS: Final[dict[Evidence, str]] = {
    "analytic": "by arithmetic alone",
    "traced": "traced on tensors without data",
    "emulated": "emulated on a CPU: the link and the device are this CPU's",
    "measured": "measured on the device",
}
REASON_CHARACTERS: Final = 300
"""Of a failure's text; the record has all of it."""
_DIGITS: Final = 3


def cell_texts(experiment: Experiment, records: Sequence[RunRecord]) -> dict[str, tuple[Sourced, ...]]:
    """Says for each workload what every strategy buys against the baseline and what each token then costs.

    Returns:
        Workload label to one text a cell, of at most three sentences with their records behind them, both in the
        experiment's order.
    """
    by_run = {record.run_id: record for record in latest_records(records)}
    comparisons = {comparison.run_id: comparison for comparison in compare_with_baseline(records)}
    said: dict[str, tuple[Sourced, ...]] = {}
    for cell in experiment_cells(experiment, records):
        comparison = comparisons.get(cell.record.run_id) if cell.record else None
        baseline = by_run[comparison.baseline_run_id] if comparison else None
        text = (_cell_text(cell, comparison, baseline), _source(cell, baseline))
        said[cell.workload] = (*said.get(cell.workload, ()), text)
    return said


def render_cell_texts(experiment: Experiment, records: Sequence[RunRecord]) -> str:
    """The same as lists, one for each workload, each text with the run_ids it comes from."""
    characters = telling_characters(records)
    return "\n\n".join(
        section(f"Workload: {workload}", bullets([markdown(text, characters) for text in texts]), level=4)
        for workload, texts in cell_texts(experiment, records).items()
    )


def _source(cell: Cell, baseline: RunRecord | None) -> Source:
    return Source(tuple(record.run_id for record in (cell.record, baseline) if record is not None))


def _cell_text(cell: Cell, comparison: Comparison | None, baseline: RunRecord | None) -> str:
    record = cell.record
    if record is None:
        return f"{cell.strategy} was not run: there is no record of it."
    if record.status != "ok":
        return _without_result(record)
    if comparison is not None and baseline is not None:
        return _compared(record, comparison, baseline)
    return _baseline(record) if record.spec.is_baseline else _alone(record)


def _compared(record: RunRecord, comparison: Comparison, baseline: RunRecord) -> str:
    said = [
        (first, later, words)
        for first, later, words in (
            (" buys", "It buys", _joined((_sessions(record, baseline), _peaks_saved(comparison)))),
            (" costs", "It costs", _joined((_tpot(record, baseline, comparison), _transfers(record)))),
            (", its output", "Its output", _output(record, comparison.noise_floor_nats)),
        )
        if words
    ]
    openings = [_named(record) + said[0][0], *(later for _, later, _ in said[1:])] if said else []
    sentences = [f"{opening}: {words}." for opening, (_, _, words) in zip(openings, said, strict=True)]
    return " ".join(sentences) or f"{_named(record)}: nothing was measured."


def _baseline(record: RunRecord) -> str:
    floor_nats = noise_floor_nats(record)
    floor = None if floor_nats is None else f"noise floor {show_number(floor_nats, _DIGITS)} nats"
    return f"{_named(record)}, the baseline: {_joined((*_figures(record), floor)) or 'nothing was measured'}."


def _alone(record: RunRecord) -> str:
    """A strategy that has no baseline to be held against."""
    own = "it ran on its own tokens"
    none = f"no ok record of {record.spec.baseline.label} differs from it in the strategy alone"
    output = _output(record, None)
    sentences = (
        f"{_named(record)}: {_joined(_figures(record)) or 'nothing was measured'}.",
        f"Its output: {output}." if output else None,
        f"It is compared with nothing: {own if ran_on_own_tokens(record) else none}.",
    )
    return " ".join(sentence for sentence in sentences if sentence)


def _figures(record: RunRecord) -> tuple[str | None, ...]:
    return _sessions(record), _peaks(record), _tpot(record), _transfers(record)


def _named(record: RunRecord) -> str:
    return f"{record.spec.strategy.label} ({record.evidence})"


def _without_result(record: RunRecord) -> str:
    name = record.spec.strategy.label
    if record.status == "unsupported":
        return f"{name} cannot run here: {_shortened(failure_reason(record))}."
    if record.status == "oom":
        return f"{_named(record)} {_shortened(out_of_memory_words(record))}."
    if record.status == "timeout":
        limit_s = record.spec.measurement.cell_timeout_s
        return f"{_named(record)} was given up after {limit_s:,.0f} s, {_shortened(failure_reason(record))}."
    return f"{name} failed {_shortened(failure_reason(record))}."


def _shortened(text: str) -> str:
    return one_line(text, REASON_CHARACTERS).rstrip(".")


def _sessions(record: RunRecord, baseline: RunRecord | None = None) -> str | None:
    """Sessions by peak and, in brackets, by arithmetic; the one that is known where the other is not."""
    by_peak, by_arithmetic = sessions_by_peak(record), analytic_sessions(record)
    host = " (host memory decides)" if _ledger(record) == "host" else ""
    other, other_by_peak, other_by_arithmetic = "", None, None
    if baseline is not None:
        other = f"{baseline.spec.strategy.label}'s "
        other_by_peak, other_by_arithmetic = sessions_by_peak(baseline), analytic_sessions(baseline)
    if by_peak is None:
        return _against(by_arithmetic, other_by_arithmetic, f"by arithmetic{host}", other)
    said = _against(by_peak, other_by_peak, f"by peak{host}", other)
    against = "" if other_by_arithmetic is None else f" against {other_by_arithmetic:,}"
    return said if by_arithmetic is None else f"{said} ({by_arithmetic:,}{against} by arithmetic)"


def _ledger(record: RunRecord) -> Ledger | None:
    """The ledger that decides the sessions by peak, or by arithmetic where the peak is not known."""
    admitted, bound = admitted_by_peak(record), analytic_bound(record)
    if admitted is not None:
        return admitted.ledger
    return None if bound is None else bound.limiting_ledger


def _against(count: int | None, other_count: int | None, how: str, other: str) -> str | None:
    if count is None:
        return None
    own = f"{show_sessions_of(count)} {how}"
    return own if other_count is None else f"{own} against {other}{other_count:,}"


def _peaks(record: RunRecord) -> str | None:
    sample = merged_sample(record)
    seen = (("prefill", sample.prefill.peak_allocated_bytes), ("decode", sample.decode.peak_allocated_bytes))
    return _by_phase([f"{format_bytes(peak)} in {phase}" for phase, peak in seen if peak is not None])


def _peaks_saved(comparison: Comparison) -> str | None:
    saved = (("prefill", comparison.prefill_peak_saved_bytes), ("decode", comparison.decode_peak_saved_bytes))
    return _by_phase([f"{_less_or_more(size)} in {phase}" for phase, size in saved if size is not None])


def _by_phase(known: Sequence[str]) -> str | None:
    return f"device peak {', '.join(known)}" if known else None


def _less_or_more(saved_bytes: int) -> str:
    if saved_bytes == 0:
        return "the same"
    return f"{format_bytes(abs(saved_bytes))} {'lower' if saved_bytes > 0 else 'higher'}"


def _tpot(record: RunRecord, baseline: RunRecord | None = None, comparison: Comparison | None = None) -> str | None:
    tpot_s = median_of(summarize_tpot(record))
    if tpot_s is None:
        return None
    own = mark_swapped(f"TPOT {show_ms(tpot_s, _DIGITS)} ms", is_swapped(record))
    if baseline is None or comparison is None or comparison.tpot_ratio is None:
        return own
    baseline_ms = show_ms(median_of(summarize_tpot(baseline)), _DIGITS)
    theirs = mark_swapped(f"{baseline.spec.strategy.label}'s {baseline_ms} ms", is_swapped(baseline))
    return f"{own}, {show_number(comparison.tpot_ratio, _DIGITS)}x {theirs}"


def _transfers(record: RunRecord) -> str | None:
    """Of a strategy that uses the link."""
    moved_bytes, exposed_s = bytes_moved_per_token(record), exposed_s_per_token(record)
    known = [
        *([] if moved_bytes is None else [f"{format_bytes(moved_bytes)} across the link"]),
        *([] if exposed_s is None else [f"{show_ms(exposed_s, _DIGITS)} ms of waiting"]),
    ]
    return f"{' and '.join(known)} a token" if known else None


def _output(record: RunRecord, floor_nats: float | None) -> str | None:
    fidelity, mean_nats = record.fidelity, mean_kl_nats(record)
    if fidelity is None or mean_nats is None:
        return None
    if fidelity.bit_equal:
        return f"bit-equal to {record.spec.baseline.label}"
    floor = "" if floor_nats is None else f", noise floor {show_number(floor_nats, _DIGITS)} nats"
    top1 = f"top-1 agrees on {show_percent(fidelity.top1_agreement_ratio)} of positions"
    return f"mean KL {show_number(mean_nats, _DIGITS)} nats{floor}; {top1}"


def _joined(clauses: Iterable[str | None]) -> str:
    return "; ".join(clause for clause in clauses if clause)
