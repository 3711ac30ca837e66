"""Figures of a comparison as people read them: both values in one unit, which the label says."""

from typing import Final, NamedTuple

from offload_eval.core.comparison import BETTER, WORSE, Change, RunComparison, Verdict
from offload_eval.core.judgement import Interval
from offload_eval.reporting.display import MISSING, byte_scale, show_number

VERDICT_WORDS: Final[dict[Verdict, str]] = {
    "worse": "worse",
    "better": "better",
    "likely_worse": "likely worse",
    "likely_better": "likely better",
    "missing": "missing",
    "new": "new",
    "changed": "changed",
    "undecided": "undecided",
    "same": "same",
}
_DIGITS: Final = (4, 7, 16)
_ORDER: Final[tuple[Verdict, ...]] = (
    "worse",
    "missing",
    "likely_worse",
    "better",
    "likely_better",
    "new",
    "changed",
    "undecided",
    "same",
)


class Shown(NamedTuple):
    """Both values of a change, without their unit."""

    label: str
    """The metric and the unit of both values."""
    baseline: str
    candidate: str
    baseline_interval: str
    candidate_interval: str


def show_change(change: Change) -> Shown:
    """Shows both values in one unit: ms for seconds, the largest binary unit for bytes that tells them apart."""
    unit, divisor = _scale(change)
    ends = (change.baseline_interval, change.candidate_interval)
    return Shown(
        f"{change.title} ({unit})",
        *_show_both(change, divisor),
        *(_show_interval(interval, divisor) for interval in ends),
    )


def show_ratio(change: Change) -> str:
    """Candidate over baseline; with more digits where it is not 1 and would read so."""
    ratio = change.ratio
    if ratio is None:
        return MISSING
    return f"{ratio:.3f}x" if ratio == 1 or f"{ratio:.3f}" != "1.000" else f"{ratio:.6f}x"


def show_p(p: float | None) -> str:
    """Shows a p value; one that is very small by its bound."""
    return MISSING if p is None else "<0.0001" if p < 1e-4 else show_number(p, 2)


def by_weight(changes: tuple[Change, ...]) -> list[Change]:
    """Changes with what counts against the candidate first; equal ones in their own order."""
    return sorted(changes, key=lambda change: _ORDER.index(change.verdict))


def headline(comparison: RunComparison) -> str:
    """The verdict in one sentence."""
    verdicts = [change.verdict for change in comparison.changes]
    worse = sum(verdict in WORSE for verdict in verdicts)
    better = sum(verdict in BETTER for verdict in verdicts)
    opening = f"Nothing got worse or better in {comparison.candidate} against {comparison.baseline}"
    if worse and better:
        opening = f"{comparison.candidate} is worse than {comparison.baseline}, and better elsewhere"
    elif worse or better:
        opening = f"{comparison.candidate} is {'worse' if worse else 'better'} than {comparison.baseline}"
    if not comparison.num_pairs:
        opening = f"{comparison.candidate} and {comparison.baseline} have no cell or limit in common"
    counts = [f"{count:,} {VERDICT_WORDS[verdict]}" for verdict in _ORDER if (count := verdicts.count(verdict)) > 0]
    listed = ", ".join(counts) or "nothing was compared"
    return f"{opening}: {listed}; {comparison.num_pairs:,} cells and limits on both sides."


def undecided_words(comparison: RunComparison) -> str:
    """Why times are undecided, and what would decide them; empty where none is."""
    undecided = [change for change in comparison.changes if change.verdict == "undecided"]
    disturbed = sum(bool(change.disturbance) for change in undecided)
    few = len(undecided) - disturbed
    said = [
        f"{few:,} with too few trials, of which {comparison.trials_to_decide:,} on each side could decide"
        if few
        else "",
        f"{disturbed:,} with swap or busy cores in them" if disturbed else "",
    ]
    return f"Undecided times: {'; '.join(each for each in said if each)}." if undecided else ""


def sentence(change: Change) -> str:
    """One change in one line."""
    shown = show_change(change)
    ratio = "" if change.ratio is None else f", {show_ratio(change)}"
    note = f" ({change.note})" if change.note else ""
    values = f"was {shown.baseline}, is {shown.candidate}{ratio}"
    return f"{change.workload} / {change.strategy}: {shown.label} {values}: {VERDICT_WORDS[change.verdict]}{note}"


def _scale(change: Change) -> tuple[str, float]:
    if change.unit == "s":
        return "ms", 1e-3
    if change.unit != "bytes":
        return change.unit, 1
    sizes = [size for size in (change.baseline, change.candidate) if isinstance(size, int | float)]
    scale = byte_scale(sizes)
    texts = {show_number(size / scale.bytes) for size in sizes}
    # Sizes that differ must not read the same.
    return (scale.unit, scale.bytes) if len(texts) == len(set(sizes)) else ("B", 1)


def _show_both(change: Change, divisor: float) -> tuple[str, str]:
    """In as many digits as tell both values apart."""
    values = (change.baseline, change.candidate)
    for digits in _DIGITS:
        before, after = (_show(value, divisor, digits) for value in values)
        if values[0] == values[1] or not _read_the_same(before, after):
            break
    return before, after


def _read_the_same(before: str, after: str) -> bool:
    """1.000 and 1.0000 do."""
    try:
        return float(before.replace(",", "")) == float(after.replace(",", ""))
    except ValueError:
        return before == after


def _show(value: object, divisor: float, digits: int) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and divisor == 1:
        return f"{value:,}"
    if isinstance(value, int | float):
        return show_number(value / divisor, digits)
    return MISSING if value is None else str(value)


def _show_interval(interval: Interval | None, divisor: float) -> str:
    if interval is None:
        return MISSING
    ends = f"{show_number(interval.low / divisor)} to {show_number(interval.high / divisor)}"
    trials = f"{interval.samples} trial{'' if interval.samples == 1 else 's'}"
    sure = "" if interval.confidence is None else f" at {100 * interval.confidence:.1f} %"
    return f"{ends}{sure}, {trials}"
