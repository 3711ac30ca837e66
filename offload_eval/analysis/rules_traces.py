"""Rules about traces: one that is missing, one that the arithmetic contradicts, one that does not explain its run."""

from collections.abc import Sequence
from typing import Final

from offload_eval.analysis.cells import latest_records, latest_traces
from offload_eval.analysis.memory import explain_memory
from offload_eval.analysis.rules_bounds import payload_difference
from offload_eval.core.judgement import Finding, PhaseMemory
from offload_eval.core.records import RunRecord

UNEXPLAINED_LIMIT_RATIO: Final = {"emulated": 0.0, "measured": 0.05}
"""Of what a run holds above what was live before it. The emulated device counts what a trace counts, to the byte; a
real allocator rounds each block up, and a kernel may take a workspace."""


def check_missing_traces(records: Sequence[RunRecord]) -> list[Finding]:
    """A trace was refused, or came to nothing; where the cell itself cannot run, that is said of the cell."""
    cannot_run = {run.spec for run in latest_records(records) if run.status == "unsupported"}
    return [
        _untraceable(traced) if traced.status == "unsupported" else _trace_failed(traced)
        for traced in latest_traces(records)
        if traced.status != "ok" and not (traced.status == "unsupported" and traced.spec in cannot_run)
    ]


def _untraceable(traced: RunRecord) -> Finding:
    return Finding(
        code="untraceable",
        severity="note",
        message=f"there is no trace: {_words(traced)}",
        run_ids=(traced.run_id,),
    )


def _trace_failed(traced: RunRecord) -> Finding:
    how = "was given up" if traced.status == "timeout" else "failed"
    return Finding(
        code="trace_failed",
        severity="warning",
        message=f"the trace {how}: {_words(traced)}",
        remedy="Resume the run to trace it again, or set trace: false; the measurement does not rest on it.",
        run_ids=(traced.run_id,),
    )


def _words(traced: RunRecord) -> str:
    return "no reason was recorded" if traced.failure is None else " ".join(traced.failure.message.split())


def check_traced_payloads(records: Sequence[RunRecord]) -> list[Finding]:
    """A traced cache holds other bytes than the arithmetic says it must."""
    found = []
    for traced in latest_traces(records):
        if traced.trace is None:
            continue
        decode = traced.trace.decode
        difference = payload_difference(traced, decode.kv_device_bytes, decode.kv_host_bytes)
        if difference is not None:
            found.append(
                Finding(
                    code="traced_kv_differs",
                    severity="error",
                    message=f"traced without data, {difference}. Suspected cause: the arithmetic does not describe "
                    "this cache, or the trace misses tensors.",
                    remedy="Trust neither figure until they agree; report the model and the strategy.",
                    run_ids=(traced.run_id,),
                )
            )
    return found


def check_unexplained(records: Sequence[RunRecord]) -> list[Finding]:
    """A run's peak is not what its trace and the named parts add up to."""
    resident = {run.run_id: run.conditions.baseline_bytes for run in latest_records(records)}
    return [
        finding
        for memory in explain_memory(records)
        if memory.run_id is not None and (finding := _unexplained(memory, resident[memory.run_id])) is not None
    ]


def _unexplained(memory: PhaseMemory, resident_bytes: int | None) -> Finding | None:
    peak_bytes, rest_bytes = memory.peak_allocated_bytes, memory.unexplained_bytes
    if peak_bytes is None or rest_bytes is None or resident_bytes is None or memory.run_evidence is None:
        return None
    limit_ratio, above_bytes = UNEXPLAINED_LIMIT_RATIO[memory.run_evidence], peak_bytes - resident_bytes
    if abs(rest_bytes) <= limit_ratio * above_bytes:
        return None
    more = "more" if rest_bytes > 0 else "less"
    share = f", {abs(rest_bytes) / above_bytes:.1%} of what lies above the weights" if above_bytes > 0 else ""
    return Finding(
        code="trace_unexplained",
        severity="warning",
        message=f"the {memory.phase} peak is {abs(rest_bytes):,} bytes {more} than the trace and the named parts add "
        f"up to{share} (limit {limit_ratio:.0%}). Suspected cause: another kernel or library path than was traced, "
        "blocks that the allocator rounds up, or memory that one of the two does not see.",
        remedy="Do not carry the trace over to other lengths of this cell before the difference is understood.",
        run_ids=() if memory.run_id is None else (memory.run_id,),
    )
