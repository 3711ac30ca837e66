"""What the reader must know before trusting a number: every rule over every record."""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from offload_eval.analysis import (
    rules_bounds,
    rules_compilation,
    rules_conditions,
    rules_exposure,
    rules_fidelity,
    rules_outcomes,
    rules_recovery,
    rules_traces,
    rules_transfers,
)
from offload_eval.analysis.cells import cell_records, latest_records, latest_traces, probe_records
from offload_eval.analysis.recovery import recovery_records
from offload_eval.core.hardware import HardwareProfile
from offload_eval.core.judgement import Finding
from offload_eval.core.records import RunRecord

CELL_RULES: Final[tuple[Callable[[RunRecord], Finding | None], ...]] = (
    rules_outcomes.check_outcome,
    rules_bounds.check_kv_payload,
    rules_bounds.check_sessions_by_peak,
    rules_bounds.check_peak_holds_weights,
    rules_bounds.check_bound_exists,
    rules_transfers.check_transfer_card,
    rules_transfers.check_pageable,
    rules_fidelity.check_forced_tokens,
    rules_fidelity.check_reference,
    rules_fidelity.check_flush,
    rules_fidelity.check_offload_race,
    rules_conditions.check_contention,
    rules_conditions.check_tpot_spread,
    rules_conditions.check_leak,
    rules_conditions.check_swap,
    rules_conditions.check_cgroup_swap,
    rules_conditions.check_major_faults,
    rules_conditions.check_alloc_retries,
    rules_conditions.check_trials,
    rules_conditions.check_memory_pass,
    rules_compilation.check_compiled_while_timed,
    rules_compilation.check_compiled_memory,
)
"""Rules that need one record."""

PROBE_RULES: Final[tuple[Callable[[RunRecord], Finding | None], ...]] = (
    rules_conditions.check_contention,
    rules_conditions.check_tpot_spread,
    rules_conditions.check_leak,
    rules_conditions.check_swap,
    rules_conditions.check_cgroup_swap,
    rules_conditions.check_major_faults,
    rules_conditions.check_alloc_retries,
)
"""Those of them that speak of a probe too: that a batch runs out of memory is what a probe is for."""

DIRECTORY_RULES: Final[tuple[Callable[[Sequence[RunRecord]], list[Finding]], ...]] = (
    rules_fidelity.check_lossless,
    rules_bounds.check_peaks_against_baseline,
    rules_outcomes.check_evidence,
    rules_outcomes.check_machines,
    rules_outcomes.check_specs,
)
"""Rules that need all of them."""

TRACE_RULES: Final[tuple[Callable[[Sequence[RunRecord]], list[Finding]], ...]] = (
    rules_traces.check_missing_traces,
    rules_traces.check_traced_payloads,
    rules_traces.check_unexplained,
    rules_transfers.check_traced_transfers,
)
"""Rules that need the traced records as well."""

HARDWARE_RULES: Final[tuple[Callable[[Sequence[RunRecord], HardwareProfile | None], list[Finding]], ...]] = (
    rules_exposure.check_transfer_times,
)
"""Rules that need the traced records and the calibrated hardware as well."""

RECORD_RULES: Final[tuple[Callable[[Sequence[RunRecord]], list[Finding]], ...]] = (rules_recovery.check_recovery,)
"""Rules that need more than cells and traces, and choose from all records themselves."""

_SEVERITY_ORDER: Final = {"error": 0, "warning": 1, "note": 2}
_MOST_LABELS: Final = 3


def find(records: Sequence[RunRecord], hardware: HardwareProfile | None = None) -> tuple[Finding, ...]:
    """Applies every rule to the last record of each cell, and of each trace.

    A finding that several cells share word for word is given once, with all their run_ids. Each message
    begins with the cells it speaks of.

    Args:
        records: Of runs and of traces.
        hardware: What the run's machine was calibrated to; None: only an emulated link's pace is known.

    Returns:
        Findings, errors first; none for a directory without records.
    """
    of_cells, probes = cell_records(records), latest_records(probe_records(records))
    cells, traces = latest_records(of_cells), latest_traces(of_cells)
    found = [finding for rule in CELL_RULES for record in cells if (finding := rule(record)) is not None]
    found += [finding for rule in DIRECTORY_RULES if cells for finding in rule(cells)]
    found += [finding for rule in TRACE_RULES for finding in rule((*cells, *traces))]
    found += [finding for rule in HARDWARE_RULES for finding in rule((*cells, *traces), hardware)]
    found += [finding for rule in PROBE_RULES for record in probes if (finding := rule(record)) is not None]
    found += [finding for rule in RECORD_RULES for finding in rule(records)]
    labelled = (*cells, *traces, *probes, *recovery_records(records))
    labels = {record.run_id: record.spec.label for record in labelled}
    wholes = [{record.run_id for record in whole} for whole in (cells, traces)]
    named = [_with_labels(finding, labels, wholes) for finding in _merged(found)]
    return tuple(sorted(named, key=lambda finding: _SEVERITY_ORDER[finding.severity]))


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    shared: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        key = (finding.code, finding.severity, finding.message)
        run_ids = (*shared[key].run_ids, *finding.run_ids) if key in shared else finding.run_ids
        shared[key] = msgspec.structs.replace(finding, run_ids=tuple(dict.fromkeys(run_ids)))
    return list(shared.values())


def _with_labels(finding: Finding, labels: dict[str, str], wholes: Sequence[set[str]]) -> Finding:
    return msgspec.structs.replace(finding, message=f"{_named(finding.run_ids, labels, wholes)}: {finding.message}")


def _named(run_ids: Sequence[str], labels: dict[str, str], wholes: Sequence[set[str]]) -> str:
    if len(run_ids) > 1 and set(run_ids) in wholes:
        return f"all {len(run_ids)} cells"
    if len(run_ids) > _MOST_LABELS:
        return f"{len(run_ids)} cells"
    return ", ".join(dict.fromkeys(labels[run_id] for run_id in run_ids))
