"""Figures that a cell has once, beside their counterpart: they differ by value, and count beyond a least effect."""

import msgspec

from offload_eval.analysis.compare_metrics import ValueMetric, as_number, divergences
from offload_eval.core.comparison import Change, Value, Verdict
from offload_eval.core.records import RunRecord


def compare_value(metric: ValueMetric, baseline: RunRecord, candidate: RunRecord) -> Change | None:
    """Holds one figure of two records of a cell side by side; None where neither has it."""
    before, after = metric.value(baseline), metric.value(candidate)
    if before is None and after is None:
        return None
    change = make_change(metric, before, after, baseline.spec.workload.label, baseline.spec.strategy.label)
    named: dict[str, object] = {"baseline_run_id": baseline.run_id, "candidate_run_id": candidate.run_id}
    if metric.name == "first_divergence_tokens":
        named |= _divergence(divergences(baseline), divergences(candidate), change.verdict)
    return msgspec.structs.replace(change, **named)


def make_change(metric: ValueMetric, before: Value, after: Value, workload: str, strategy: str) -> Change:
    """Concludes from two values of a figure, at least one of which is there."""
    verdict, note = _verdict(metric, before, after)
    return Change(
        metric=metric.name,
        title=metric.title,
        unit=metric.unit,
        workload=workload,
        strategy=strategy,
        baseline=before,
        candidate=after,
        ratio=ratio_of(before, after),
        verdict=verdict,
        lower_is_better=metric.lower_is_better,
        test="sampled" if metric.is_sampled else "exact",
        note=note,
    )


def ratio_of(before: Value, after: Value) -> float | None:
    """Candidate / baseline; None where either is no finite number or the baseline is 0."""
    if isinstance(before, bool | str | None) or isinstance(after, bool | str | None) or not before:
        return None
    return after / before


def _verdict(metric: ValueMetric, before: Value, after: Value) -> tuple[Verdict, str]:
    if before is None or after is None:
        return ("new", "not looked at in the baseline") if before is None else ("missing", "not looked at any more")
    if before == after:
        return "same", ""
    old, new = as_number(before), as_number(after)
    if old is None or new is None or metric.lower_is_better is None:
        return "changed", ""
    least = max(metric.least, metric.least_ratio * abs(old))
    if abs(new - old) <= least:
        return ("same", "within what such readings vary by") if metric.is_sampled else ("changed", _below(metric))
    return ("worse" if (new > old) == metric.lower_is_better else "better"), ""


def _below(metric: ValueMetric) -> str:
    floor = f" or {metric.least:g} {metric.unit}" if metric.least else ""
    return f"at most {100 * metric.least_ratio:g} %{floor}, which is no verdict"


def _divergence(before: list[float] | None, after: list[float] | None, verdict: Verdict) -> dict[str, object]:
    """Session by session: one that diverges earlier counts, also where another one was the first."""
    if before is None or after is None or len(before) != len(after):
        return {"verdict": verdict}
    earlier = sum(new < old for old, new in zip(before, after, strict=True))
    later = sum(new > old for old, new in zip(before, after, strict=True))
    if not earlier and not later:
        return {"verdict": "same"}
    words = [
        f"{count} of {len(before)} sessions {how}" for count, how in ((earlier, "earlier"), (later, "later")) if count
    ]
    note = f"{', '.join(words)}; the value is the earliest of all"
    return {"verdict": "worse" if earlier else "better", "note": note, "ratio": None}
