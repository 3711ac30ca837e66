"""Runs of many directories as the history of each cell; a pure function over records."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from offload_eval.analysis.capacity import admitted_by_trace
from offload_eval.analysis.cells import cell_records, latest_records, latest_traces
from offload_eval.analysis.history_figures import figures_of, limit_figures, ratios_of
from offload_eval.analysis.history_setting import changed, machine_kind, machine_words, model_name, setting_of
from offload_eval.analysis.limits import find_limits
from offload_eval.analysis.probes import lengths_of
from offload_eval.analysis.swap import is_swapped
from offload_eval.core.experiment import Experiment, Workload
from offload_eval.core.history import Figures, HistoryRow
from offload_eval.core.records import RunRecord
from offload_eval.core.run_spec import content_hash


class KeptRun(NamedTuple):
    """What a run directory holds."""

    path: str
    experiment: Experiment
    records: Sequence[RunRecord]


class _Entry(NamedTuple):
    """A row before it is held against another."""

    row: HistoryRow
    record: RunRecord


def make_history(runs: Sequence[KeptRun]) -> tuple[HistoryRow, ...]:
    """Lists every run of every cell by its start, each held against the latest earlier one that it compares with.

    A cell is the same where the experiment's name, the work and the strategy's label are; the model, the strategy's
    options, the machine, the versions and the budget may change, and are named where they do. An earlier run compares
    where it was made on the same kind of machine and the same rung; one that timed out or failed only where there is
    no other. Where none compares, changes are against the latest of any kind, and there are no ratios. A record that
    several directories hold counts once.
    """
    entries = sorted(
        _once(entry for run in runs for entry in _entries(run)),
        key=lambda entry: (entry.row.started_at_utc, entry.row.run_dir),
    )
    earlier: dict[str, list[_Entry]] = {}
    rows = []
    for entry in entries:
        series = earlier.setdefault(entry.row.series, [])
        rows.append(_held_against(entry, series))
        series.append(entry)
    return tuple(rows)


def record_digests(records: Sequence[RunRecord]) -> set[bytes]:
    """Hashes each record whole, so that a copy of a directory is known: two machines may start a cell at once."""
    return {_digest(record) for record in records}


def _digest(record: RunRecord) -> bytes:
    return hashlib.sha256(msgspec.json.encode(record)).digest()


def _once(entries: Iterator[_Entry]) -> list[_Entry]:
    unique: dict[tuple[str, bytes], _Entry] = {}
    for entry in entries:
        unique.setdefault((entry.row.series, _digest(entry.record)), entry)
    return list(unique.values())


def _entries(run: KeptRun) -> Iterator[_Entry]:
    """The run's cells, and after them the limits at whose lengths there is no cell."""
    found = find_limits(run.experiment, run.records)
    limits = {(limit.lengths, limit.label): limit for limit in found}
    by_id = {record.run_id: record for record in run.records}
    traces = {content_hash(each.spec): admitted_by_trace(each) for each in latest_traces(cell_records(run.records))}
    seen = set()
    for record in latest_records(cell_records(run.records)):
        spec = record.spec
        key = (lengths_of(spec.workload), spec.strategy.label)
        seen.add(key)
        figures = figures_of(record, traces.get(content_hash(spec)), limits.get(key))
        yield _entry(run.path, record, figures, workload=spec.workload.label, work=_unnamed(spec.workload))
    for key, limit in limits.items():
        if key not in seen:
            record, label = by_id[(limit.run_ids or limit.traced_run_ids)[0]], limit.lengths.label
            yield _entry(run.path, record, limit_figures(limit), workload=label, work=label)


def _entry(path: str, record: RunRecord, figures: Figures, *, workload: str, work: object) -> _Entry:
    spec, accelerator = record.spec, record.machine.accelerator
    row = HistoryRow(
        series=content_hash((spec.experiment, spec.device, work, spec.strategy.label)),
        started_at_utc=record.started_at_utc,
        run_dir=path,
        run_id=record.run_id,
        experiment=spec.experiment,
        workload=workload,
        strategy=spec.strategy.label,
        model=model_name(record),
        model_revision=spec.model.revision,
        model_fingerprint=record.model.fingerprint,
        machine=machine_words(record),
        driver=None if accelerator is None else accelerator.driver,
        versions=dict(sorted(record.machine.versions.items())),
        evidence=record.evidence,
        status=record.status,
        swapped=is_swapped(record),
        figures=figures,
    )
    return _Entry(row, record)


def _held_against(entry: _Entry, earlier: Sequence[_Entry]) -> HistoryRow:
    if not earlier:
        return entry.row
    kind = machine_kind(entry.record)
    alike = [each for each in earlier if machine_kind(each.record) == kind]
    before = _latest_answer(alike or earlier)
    same_budget = before.record.spec.budget == entry.record.spec.budget
    return msgspec.structs.replace(
        entry.row,
        before=before.row.run_dir,
        changes=changed(setting_of(before.record), setting_of(entry.record)),
        ratios=ratios_of(entry.row.figures, before.row.figures, same_budget=same_budget) if alike else None,
    )


def _latest_answer(entries: Sequence[_Entry]) -> _Entry:
    """The latest that says something of its cell, which a failure or a timeout does not; else the latest."""
    answers = [entry for entry in entries if entry.row.status not in ("failed", "timeout")]
    return (answers or entries)[-1]


def _unnamed(workload: Workload) -> Mapping[str, Any]:
    """Without its name: calling it otherwise does not make it other work."""
    held: dict[str, Any] = msgspec.to_builtins(workload)
    return {key: value for key, value in held.items() if key != "name"}
