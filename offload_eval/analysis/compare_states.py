"""What became of cells and limits: which are on one side only, and which end otherwise than they did."""

from collections.abc import Sequence
from typing import Final

import msgspec

from offload_eval.analysis.compare_metrics import ValueMetric
from offload_eval.analysis.compare_pairs import RunSide, cells_of
from offload_eval.analysis.compare_values import make_change
from offload_eval.analysis.limits import find_limits
from offload_eval.analysis.rules_outcomes import failure_reason
from offload_eval.core.comparison import STATUS, Change, Verdict
from offload_eval.core.limits import CapacityLimit
from offload_eval.core.records import RunRecord

MEASURED: Final = "searched"
TRACED: Final = "traced"
REFUSED: Final = "refused"
"""States of a limit: a search that came to a number, 0 included, the same by traces alone, and one that could not be
made."""
LIMIT_METRICS: Final = (
    ValueMetric("limit_sessions", "limit, as it ran", "sessions", lambda _: None, lower_is_better=False),
    ValueMetric("limit_traced_sessions", "limit by trace", "sessions", lambda _: None, lower_is_better=False),
    ValueMetric("limit_analytic_sessions", "limit by arithmetic", "sessions", lambda _: None, lower_is_better=False),
)
_LIMIT_FIELDS: Final = ("measured", "traced", "analytic")
LimitKey = tuple[str, str, str]


def paired_cells(baseline: RunSide, candidate: RunSide) -> list[tuple[RunRecord, RunRecord]]:
    """The cells of both sides that ask the same, in the baseline's order."""
    before, after = cells_of(baseline), cells_of(candidate)
    return [(record, after[key]) for key, record in before.items() if key in after]


def compare_states(baseline: RunSide, candidate: RunSide) -> list[Change]:
    """Every cell whose state is another one, or that is on one side only."""
    before, after = cells_of(baseline), cells_of(candidate)
    changes = [_state(before.get(key), after.get(key)) for key in dict.fromkeys([*before, *after])]
    return [change for change in changes if change is not None]


def _state(old: RunRecord | None, new: RunRecord | None) -> Change | None:
    record = old or new
    if record is None or (old and new and old.status == new.status):
        return None
    reasons = [failure_reason(each) for each in (new, old) if each is not None and each.status != "ok"]
    return Change(
        metric=STATUS,
        title="state",
        unit="state",
        workload=record.spec.workload.label,
        strategy=record.spec.strategy.label,
        baseline=old.status if old else None,
        candidate=new.status if new else None,
        verdict=_state_verdict(old.status if old else None, new.status if new else None),
        test="status",
        note=reasons[0] if reasons else "",
        baseline_run_id=old.run_id if old else None,
        candidate_run_id=new.run_id if new else None,
    )


def _state_verdict(old: str | None, new: str | None, good: str = "ok") -> Verdict:
    if old is None or new is None:
        return "new" if old is None else "missing"
    if good not in (old, new):
        return "changed"
    return "better" if new == good else "worse"


def limits_of(side: RunSide) -> dict[LimitKey, CapacityLimit]:
    """The limits of a capacity search, by lengths and strategy."""
    limits = find_limits(side.experiment, side.records)
    return {(_lengths(limit), limit.label, msgspec.json.encode(limit.strategy).decode()): limit for limit in limits}


def compare_limits(baseline: RunSide, candidate: RunSide) -> tuple[list[Change], list[Change], int]:
    """Holds the limits of both sides side by side.

    Returns:
        Changes of state, figures in sessions, and how many limits are on both sides.
    """
    before, after = limits_of(baseline), limits_of(candidate)
    states = [_limit_state(before.get(key), after.get(key)) for key in dict.fromkeys([*before, *after])]
    pairs = [(limit, after[key]) for key, limit in before.items() if key in after]
    figures = [change for old, new in pairs for change in _limit_figures(old, new)]
    return [state for state in states if state is not None], figures, len(pairs)


def _limit_state(old: CapacityLimit | None, new: CapacityLimit | None) -> Change | None:
    states = [None if each is None else _search_state(each) for each in (old, new)]
    limit = old or new
    if limit is None or states[0] == states[1]:
        return None
    refusals = [each.refusal for each in (new, old) if each is not None and each.refusal]
    return Change(
        metric=STATUS,
        title="search for the limit",
        unit="state",
        workload=_lengths(limit),
        strategy=limit.label,
        baseline=states[0],
        candidate=states[1],
        verdict=_state_verdict(states[0], states[1], MEASURED),
        test="status",
        note=refusals[0] if refusals else "",
        baseline_run_id=_run_id(old),
        candidate_run_id=_run_id(new),
    )


def _search_state(limit: CapacityLimit) -> str:
    if limit.sessions is None:
        return REFUSED
    return TRACED if limit.evidence == "traced" else MEASURED


def _limit_figures(old: CapacityLimit, new: CapacityLimit) -> Sequence[Change]:
    changes: list[Change] = []
    for metric, field in zip(LIMIT_METRICS, _LIMIT_FIELDS, strict=True):
        before, after = getattr(old, field), getattr(new, field)
        if (before is None and after is None) or (field == "measured" and (before is None or after is None)):
            continue  # a limit that is not there on one side is a change of state
        change = make_change(metric, before, after, _lengths(old), old.label)
        note = _why(old, new) if field == "measured" and before != after else change.note
        named = {"baseline_run_id": _run_id(old), "candidate_run_id": _run_id(new), "note": note}
        changes.append(msgspec.structs.replace(change, **named))
    return changes


def _why(old: CapacityLimit, new: CapacityLimit) -> str:
    ranges = [name for name, each in (("baseline", old), ("candidate", new)) if not each.is_exact]
    said = [
        f"the {' and the '.join(ranges)} did not see the next batch fail: at least as many" if ranges else "",
        f"stops at {new.limited_by}" if new.limited_by else "",
    ]
    return "; ".join(each for each in said if each)


def _lengths(limit: CapacityLimit) -> str:
    return f"limit {limit.lengths.label}"


def _run_id(limit: CapacityLimit | None) -> str | None:
    run_ids = () if limit is None else limit.run_ids or limit.traced_run_ids
    return run_ids[-1] if run_ids else None
