"""Rules about cells without a result, and about records that do not belong side by side."""

from collections.abc import Callable, Sequence

from offload_eval.core.judgement import Finding
from offload_eval.core.records import RunRecord
from offload_eval.units import format_bytes


def check_outcome(record: RunRecord) -> Finding | None:
    """A cell ended without a result."""
    judge = _OUTCOMES.get(record.status)
    return None if judge is None else judge(record)


def failure_reason(record: RunRecord) -> str:
    """The failure in one line: where, which type and what it said."""
    if record.failure is None:
        return "no reason was recorded"
    message = " ".join(record.failure.message.split()) or "no message"
    return f"in {record.failure.phase}: {record.failure.type}: {message}"


def _unsupported(record: RunRecord) -> Finding:
    return Finding(
        code="unsupported",
        severity="note",
        message=f"this strategy cannot run here, {failure_reason(record)}",
        run_ids=(record.run_id,),
    )


def _out_of_memory(record: RunRecord) -> Finding:
    if record.spec.budget.enforce:
        cap_bytes = record.conditions.cap_bytes
        limit = "the enforced budget" if cap_bytes is None else f"the enforced cap of {format_bytes(cap_bytes)}"
        return Finding(
            code="out_of_memory",
            severity="note",
            message=f"the cell does not fit {limit}, {failure_reason(record)}",
            run_ids=(record.run_id,),
        )
    return Finding(
        code="out_of_memory",
        severity="warning",
        message=f"the cell ran out of memory without an enforced cap, {failure_reason(record)}. Suspected "
        "cause: the machine itself is too small, or other processes hold its memory: this says nothing "
        "about the budget.",
        remedy="Free memory, or set budget.enforce so that the budget decides.",
        run_ids=(record.run_id,),
    )


def _timeout(record: RunRecord) -> Finding:
    return Finding(
        code="timeout",
        severity="warning",
        message=f"the cell was given up after {record.spec.measurement.cell_timeout_s:,.0f} s, "
        f"{failure_reason(record)}",
        remedy="Raise measurement.cell_timeout_s, or ask for fewer trials or tokens.",
        run_ids=(record.run_id,),
    )


def _failed(record: RunRecord) -> Finding:
    return Finding(
        code="failed",
        severity="error",
        message=f"the cell failed {failure_reason(record)}",
        remedy="Mend the cause and resume; the cells that are done stay as they are.",
        run_ids=(record.run_id,),
    )


_OUTCOMES: dict[str, Callable[[RunRecord], Finding]] = {
    "unsupported": _unsupported,
    "oom": _out_of_memory,
    "timeout": _timeout,
    "failed": _failed,
}


def check_evidence(records: Sequence[RunRecord]) -> list[Finding]:
    """Records of several rungs stand in one directory."""
    rungs = sorted({record.evidence for record in records})
    if len(rungs) < 2:
        return []
    return [
        Finding(
            code="mixed_evidence",
            severity="warning",
            message=f"records stand on different rungs ({', '.join(rungs)}): they are not compared with one another.",
            remedy="Keep one directory for each device.",
            run_ids=tuple(record.run_id for record in records),
        )
    ]


def check_machines(records: Sequence[RunRecord]) -> list[Finding]:
    """Records of several machines stand in one directory."""
    strangers = [(record, record.machine.differences(records[0].machine)) for record in records]
    return [
        Finding(
            code="mixed_machines",
            severity="warning",
            message="made on another machine or other versions than the first record "
            f"({'; '.join(differences)}): records are compared only within one machine.",
            remedy="Run the whole experiment again on one machine.",
            run_ids=(record.run_id,),
        )
        for record, differences in strangers
        if differences
    ]


def check_specs(records: Sequence[RunRecord]) -> list[Finding]:
    """Cells differ in more than workload and strategy: the experiment was changed between them."""
    odd = [(record, _spec_differences(record, records[0])) for record in records]
    return [
        Finding(
            code="mixed_specs",
            severity="warning",
            message=f"asked for with another {', '.join(parts)} than the first record: cells are compared "
            "only where nothing but the strategy differs.",
            remedy="Keep one directory for each experiment.",
            run_ids=(record.run_id,),
        )
        for record, parts in odd
        if parts
    ]


def _spec_differences(record: RunRecord, first: RunRecord) -> list[str]:
    names = [name for name in record.spec.__struct_fields__ if name not in ("workload", "strategy")]
    return [name for name in names if getattr(record.spec, name) != getattr(first.spec, name)]
