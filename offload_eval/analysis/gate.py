"""Holds a comparison against a gate, limit by limit and cell by cell.

A value that a cell has once is past its limit by itself. A time is past it where the near ends of both intervals are:
for a time that grew, the candidate's low end against the baseline's high end. So no gate is broken by a difference
that the trials' own spread explains. With fewer than `LEAST_TRIALS` on either side, or with swap or busy cores in the
time, it stays undecided.
"""

from typing import Final, Literal, NamedTuple

from offload_eval.analysis.compare_metrics import as_number
from offload_eval.core.comparison import STATUS, Change, RunComparison, Value
from offload_eval.core.gate import GateLimits, GateLine, GateResult, GateSpec, MetricLimit, StrategyGate

LEAST_TRIALS: Final = 3
_ROUNDING: Final = 1e-9
"""Of a limit: a candidate that lies on it, but for the last digits of a float, keeps it."""
Outcome = Literal["kept", "broken", "undecided"]


class _Ends(NamedTuple):
    """The two values that a limit is held against."""

    before: float
    after: float


def check_gate(comparison: RunComparison, gate: GateSpec) -> GateResult:
    """Checks the state of every cell, and every limit of the gate on every figure that it speaks of.

    A strategy's own limits take the place of the general ones metric by metric; what it allows comes on top.
    """
    own = {each.strategy: each for each in gate.strategies}
    states = [_state_line(change, _allowed(gate, own)) for change in comparison.changes if change.metric == STATUS]
    figures = [
        line
        for change in comparison.changes
        if change.metric != STATUS
        for line in _lines(change, _limit(gate.limits, own.get(change.strategy), change.metric))
    ]
    return GateResult(lines=(*states, *figures, *_nothing_to_check(comparison, gate)))


def _nothing_to_check(comparison: RunComparison, gate: GateSpec) -> list[GateLine]:
    """A limit that no cell has a figure for would otherwise look kept."""
    seen = {(strategy, each.metric) for each in comparison.changes for strategy in (None, each.strategy)}
    sections = [(None, gate.limits), *((each.strategy, each.limits) for each in gate.strategies)]
    return [
        GateLine(
            workload="any workload",
            strategy=strategy or "any strategy",
            metric=metric,
            limit="stated",
            outcome="undecided",
            message="no cell or limit has this figure on both sides",
        )
        for strategy, limits in sections
        for metric in limits.__struct_fields__
        if getattr(limits, metric) is not None and (strategy, metric) not in seen
    ]


def _allowed(gate: GateSpec, own: dict[str, StrategyGate]) -> dict[str | None, set[str]]:
    return {None: set(gate.allow)} | {label: {*gate.allow, *each.allow} for label, each in own.items()}


def state_words(before: Value, after: Value) -> str:
    """A change of state as a gate file writes it."""
    return f"{before or 'new'} -> {after or 'missing'}"


def _state_line(change: Change, allowed: dict[str | None, set[str]]) -> GateLine:
    words = state_words(change.baseline, change.candidate)
    is_allowed = words in allowed.get(change.strategy, allowed[None])
    kept = is_allowed or change.verdict in ("better", "new")
    reason = f": {change.note}" if change.note else ""
    return GateLine(
        workload=change.workload,
        strategy=change.strategy,
        metric=STATUS,
        limit=f"{words} is allowed" if is_allowed else "no state gets worse",
        outcome="kept" if kept else "broken",
        message=f"{words}{reason}",
    )


def _limit(general: GateLimits, own: StrategyGate | None, metric: str) -> MetricLimit | None:
    limit: MetricLimit | None = getattr(own.limits, metric, None) if own is not None else None
    return limit if limit is not None else getattr(general, metric, None)


def _lines(change: Change, limit: MetricLimit | None) -> list[GateLine]:
    """One line for each part of a limit that is stated."""
    if limit is None:
        return []
    stated = [(name, getattr(limit, name)) for name in limit.__struct_fields__]
    return [_line(change, name, bound) for name, bound in stated if bound is not None]


def _line(change: Change, name: str, bound: float) -> GateLine:
    outcome, message = _outcome(change, name, bound)
    return GateLine(
        workload=change.workload,
        strategy=change.strategy,
        metric=change.metric,
        limit=_words(change, name, bound),
        outcome=outcome,
        message=message,
    )


def _words(change: Change, name: str, bound: float) -> str:
    if name == "worse_by_ratio":
        return f"at most {100 * bound:g} % worse than the baseline"
    if name == "worse_by":
        return f"at most {bound:g} {change.unit} worse than the baseline"
    return f"{name.replace('_', ' ')} {bound:g} {change.unit}"


def _outcome(change: Change, name: str, bound: float) -> tuple[Outcome, str]:
    values = f"baseline {change.baseline}, candidate {change.candidate} ({change.unit})"
    if change.candidate is None:
        return "broken", f"{values}: the candidate has no such figure"
    if name.startswith("worse_by") and (change.baseline is None or change.lower_is_better is None):
        return "undecided", f"{values}: there is nothing to be worse than"
    if change.test == "ranks" and not _is_sampled_enough(change, name):
        return "undecided", f"{values}: fewer than {LEAST_TRIALS} trials; noise is not known"
    if change.disturbance:
        return "undecided", f"{values}: {change.disturbance}"
    ends = _ends(change, name)
    if ends is None:
        return "undecided", f"{values}: no number"
    how = " by the near ends of the intervals" if change.test == "ranks" else ""
    return ("broken", f"{values}: past the limit{how}") if _is_past(change, name, bound, ends) else ("kept", values)


def _is_sampled_enough(change: Change, name: str) -> bool:
    needed = (
        [change.candidate_interval]
        if name.startswith("at_")
        else [change.candidate_interval, change.baseline_interval]
    )
    return all(interval is not None and interval.samples >= LEAST_TRIALS for interval in needed)


def _ends(change: Change, name: str) -> _Ends | None:
    """Of a timed figure the ends of both intervals that are nearest to keeping the limit."""
    before, after = as_number(change.baseline), as_number(change.candidate)
    if change.test == "ranks" and change.candidate_interval is not None:
        grows = name == "at_most" or (name != "at_least" and change.lower_is_better)
        old, new = change.baseline_interval, change.candidate_interval
        after = new.low if grows else new.high
        before = before if old is None else old.high if grows else old.low
    return None if after is None else _Ends(before if before is not None else after, after)


def _is_past(change: Change, name: str, bound: float, ends: _Ends) -> bool:
    slack = _ROUNDING * max(abs(bound), 1e-300)
    if name == "at_most":
        return ends.after > bound + slack
    if name == "at_least":
        return ends.after < bound - slack
    if ends.after == ends.before:
        return False  # also where both are infinite
    worse = ends.after - ends.before if change.lower_is_better else ends.before - ends.after
    room = bound * abs(ends.before) if name == "worse_by_ratio" else bound
    return worse > room + _ROUNDING * max(abs(room), abs(ends.before) if ends.before != float("inf") else 0)
