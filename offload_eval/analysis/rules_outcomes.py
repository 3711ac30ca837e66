"""Rules about cells without a result, and about records that do not belong side by side."""

from collections.abc import Callable, Sequence
from typing import Final

from offload_eval.core.judgement import Finding
from offload_eval.core.records import RunRecord
from offload_eval.errors import HostCapError
from offload_eval.units import format_bytes

UNCAPPED_STAGES: Final = ("support", "load", "prepare", "reference", "fidelity")
"""Stages that run before the cap is set: what they need is the tool's, not the strategy's."""
_PLACES: Final = {
    "support": "before the worker started",
    "load": "while the model was loaded",
    "prepare": "while the cell was prepared",
}
"""Stages that are no pass, in words."""


def check_outcome(record: RunRecord) -> Finding | None:
    """A cell ended without a result."""
    judge = _OUTCOMES.get(record.status)
    return None if judge is None else judge(record)


def failure_reason(record: RunRecord) -> str:
    """The failure in one line: where, which type and what it said; of an unsupported cell, what it said alone."""
    failure = record.failure
    if failure is None:
        return "for a reason that was not recorded"
    message = " ".join(failure.message.split()) or "no message"
    if record.status == "unsupported":
        return message
    place = _PLACES.get(failure.stage, f"during the {failure.stage} pass")
    where = place if failure.phase is None else f"{place}, in {failure.phase}"
    return f"{where}: {failure.type}: {message}"


def exceeds_cap(record: RunRecord) -> bool:
    """Whether a cell ran out of what the enforced cap let it have, and not of the machine's memory."""
    failure = record.failure
    if failure is None or record.status != "oom" or record.conditions.cap_bytes is None:
        return False
    return failure.ledger != "host" and failure.stage not in UNCAPPED_STAGES


def exceeds_host_cap(record: RunRecord) -> bool:
    """Whether a cell ran out of the host memory that the budget states, and not of the machine's."""
    failure = record.failure
    return failure is not None and record.status == "oom" and failure.type == HostCapError.__name__


def out_of_memory_words(record: RunRecord) -> str:
    """What ran out, where and why, as the rest of a sentence that begins with the cell."""
    if exceeds_host_cap(record):
        cap = format_bytes(record.conditions.host_cap_bytes)
        return f"does not fit the enforced host cap of {cap}: {failure_reason(record)}"
    if exceeds_cap(record):
        return (
            f"does not fit the enforced cap of {format_bytes(record.conditions.cap_bytes)}: {failure_reason(record)}"
        )
    return f"ran out of {_exhausted(record)} {failure_reason(record)}"


def _exhausted(record: RunRecord) -> str:
    ledger = None if record.failure is None else record.failure.ledger
    return "memory" if ledger is None else f"{ledger} memory"


def _unsupported(record: RunRecord) -> Finding:
    return Finding(
        code="unsupported",
        severity="note",
        message=f"this strategy cannot run here: {failure_reason(record)}",
        run_ids=(record.run_id,),
    )


def _out_of_memory(record: RunRecord) -> Finding:
    message = f"the cell {out_of_memory_words(record)}"
    if exceeds_cap(record) or exceeds_host_cap(record):
        return Finding(code="out_of_memory", severity="note", message=message, run_ids=(record.run_id,))
    return Finding(
        code="out_of_memory",
        severity="warning",
        message=f"{message}. Suspected cause: the machine has too little of it, or other processes hold it.",
        remedy=f"Free {_exhausted(record)}, or ask for a smaller batch or a shorter prompt.",
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
    """Cells differ in more than workload and strategy: the experiment, or a prompt's text, changed between them."""
    firsts = {record.spec.workload: record for record in reversed(records)}
    odd = [(record, _spec_differences(record, records[0], firsts[record.spec.workload])) for record in records]
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


def _spec_differences(record: RunRecord, first: RunRecord, first_of_workload: RunRecord) -> list[str]:
    """Fields that differ from the first record's; a prompt is held against the first of its own workload."""
    names = [name for name in record.spec.__struct_fields__ if name not in ("workload", "strategy")]
    others = dict.fromkeys(names, first) | {"prompt_fingerprint": first_of_workload}
    return [name for name in names if getattr(record.spec, name) != getattr(others[name].spec, name)]
