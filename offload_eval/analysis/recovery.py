"""How cells failed, on purpose or not, and how their workers came back: a view of each failure, and groups of them."""

from collections.abc import Sequence
from statistics import median
from typing import Final

from offload_eval.core.judgement import FailureGroup, FailureRecovery
from offload_eval.core.records import RunRecord, Status
from offload_eval.core.run_spec import DRILLS, Drill

_ENDED_BADLY: Final[tuple[Status, ...]] = ("oom", "failed", "timeout")
DRILL_WORDS: Final[dict[Drill, str]] = {
    "oom_prefill": "device full in prefill",
    "oom_decode": "device full in decode",
    "host_refused": "host memory refused",
    "killed": "worker killed in decode",
    "hung": "worker hangs in decode",
}


def recovery_records(records: Sequence[RunRecord]) -> tuple[RunRecord, ...]:
    """The last record of each drill, and of everything else that ended badly and says how its worker came back.

    Cells, probes and drills alike, in the order in which they first appear.
    """
    latest = {record.run_id: record for record in records if record.evidence != "traced"}
    return tuple(record for record in latest.values() if record.spec.role in DRILLS or _came_back(record))


def explain_recoveries(records: Sequence[RunRecord]) -> tuple[FailureRecovery, ...]:
    """One view of each of `recovery_records`."""
    return tuple(map(_explain, recovery_records(records)))


def group_recoveries(recoveries: Sequence[FailureRecovery]) -> tuple[FailureGroup, ...]:
    """Failures of one strategy that were alike, whatever the workload: a search for capacity runs out of memory often.

    Strategies in the order of their first failure; those brought about on purpose come first.
    """
    alike: dict[tuple[object, ...], list[FailureRecovery]] = {}
    for each in recoveries:
        alike.setdefault(_likeness(each), []).append(each)
    strategies = list(dict.fromkeys(each.strategy for each in recoveries))
    groups = [_group(members) for members in alike.values()]
    return tuple(sorted(groups, key=lambda group: (strategies.index(group.first.strategy), group.first.drill is None)))


def failure_words(recovery: FailureRecovery) -> str:
    """What failed, as the rest of a sentence that ends with it: the drill, or what was raised."""
    if recovery.drill is not None:
        return f"a drill ({DRILL_WORDS[recovery.drill]})"
    where = "" if recovery.phase is None else f" in {recovery.phase}"
    return f"{recovery.raised or recovery.status}{where}"


def _came_back(record: RunRecord) -> bool:
    return record.status in _ENDED_BADLY and record.conditions.recovery is not None


def _explain(record: RunRecord) -> FailureRecovery:
    failure, sample, spec = record.failure, record.conditions.recovery, record.spec
    return FailureRecovery(
        workload=spec.workload.label,
        strategy=spec.strategy.label,
        run_id=record.run_id,
        evidence=record.evidence,
        role=spec.role,
        drill=next((drill for drill in DRILLS if drill == spec.role), None),
        status=record.status,
        raised=None if failure is None else failure.type,
        message=None if failure is None else failure.message,
        stage=None if failure is None else failure.stage,
        phase=None if failure is None else failure.phase,
        ledger=None if failure is None else failure.ledger,
        in_new_worker=None if sample is None else sample.in_new_worker,
        recovery_s=None if sample is None else sample.recovery_s,
        check_s=None if sample is None else sample.check_s,
        tokens_equal=None if sample is None else sample.tokens_equal,
        logits_equal=None if sample is None else sample.logits_equal,
        leaked_bytes=None if sample is None else sample.leaked_bytes,
        leaked=() if sample is None else sample.leaked,
        unchecked="" if sample is None else sample.message,
    )


def _likeness(each: FailureRecovery) -> tuple[object, ...]:
    kind = (each.strategy, each.drill, each.status, each.raised, each.ledger, each.phase, each.in_new_worker)
    return kind if each.status != "unsupported" else (*kind, each.message)


def _group(members: Sequence[FailureRecovery]) -> FailureGroup:
    times_s = [each.recovery_s for each in members if each.recovery_s is not None]
    leaks_bytes = [each.leaked_bytes for each in members if each.leaked_bytes is not None]
    tokens = [each.tokens_equal for each in members if each.tokens_equal is not None]
    logits = [each.logits_equal for each in members if each.logits_equal is not None]
    return FailureGroup(
        first=members[0],
        times=len(members),
        median_recovery_s=median(times_s) if times_s else None,
        longest_recovery_s=max(times_s, default=None),
        most_leaked_bytes=max(leaks_bytes, default=None),
        num_compared=len(tokens),
        num_tokens_equal=sum(tokens),
        num_logits_equal=sum(logits),
    )
