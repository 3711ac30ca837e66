"""Runs every cell of an experiment, one worker process a strategy, and keeps a record of each."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from offload_eval.core.experiment import Experiment, RunSpec, content_hash
from offload_eval.core.records import Failure, RunRecord
from offload_eval.execution.launcher import Died, TimedOut, Worker
from offload_eval.execution.messages import CellResult, LoadFailed, PassStarted, Preflight, WorkerSetup
from offload_eval.execution.reference import ReferenceFiles
from offload_eval.store.run_directory import FINISHED, RunDirectory


class SessionObserver(Protocol):
    """Told how the session goes on."""

    def cell_started(self, spec: RunSpec) -> None:
        """A cell begins."""

    def pass_started(self, event: PassStarted) -> None:
        """A pass of the current cell begins."""

    def cell_finished(self, record: RunRecord) -> None:
        """A cell's record is on disk."""


def expand_cells(experiment: Experiment, preflight: Preflight) -> list[RunSpec]:
    """Every cell, the baseline's first, since the others are given its tokens; then strategy by strategy."""
    baseline = experiment.baseline_strategy
    strategies = sorted(experiment.strategies, key=lambda strategy: strategy != baseline)
    return [
        RunSpec(
            experiment=experiment.name,
            model=experiment.model,
            model_fingerprint=preflight.model.fingerprint,
            device=preflight.device,
            cpu=experiment.cpu,
            budget=experiment.budget,
            workload=workload,
            strategy=strategy,
            baseline=baseline,
            measurement=experiment.measurement,
        )
        for strategy in strategies
        for workload in experiment.workloads
    ]


class Session:
    """One run over the cells that a run directory does not hold yet."""

    def __init__(
        self, experiment: Experiment, preflight: Preflight, directory: RunDirectory, observer: SessionObserver
    ) -> None:
        self._experiment = experiment
        self._preflight = preflight
        self._directory = directory
        self._observer = observer
        self._worker: Worker | None = None
        self._new_references: set[str] = set()
        """Labels of the workloads whose baseline has run in this session."""

    def run(self, cells: Sequence[RunSpec]) -> None:
        """Runs the cells that are not finished, and appends a record as each one ends.

        A baseline that had failed and runs again may leave tokens that were not there before: cells that ran
        without them then run once more.
        """
        records = {record.run_id: record for record in self._directory.records()}
        self._write_prompts()
        try:
            for _, strategy_cells in groupby(cells, key=lambda spec: spec.strategy):
                missing = [spec for spec in strategy_cells if self._must_run(spec, records.get(content_hash(spec)))]
                self._run_strategy(missing)
        finally:
            self._drop_worker(kill=True)
        if all(content_hash(spec) in self._directory.finished_run_ids() for spec in cells):
            for workload in self._experiment.workloads:
                self._reference(workload.label).drop_logits()

    def _must_run(self, spec: RunSpec, record: RunRecord | None) -> bool:
        if record is None or record.status not in FINISHED:
            return True
        ran_without_tokens = record.status != "unsupported" and record.fidelity is None
        return ran_without_tokens and spec.workload.label in self._new_references

    def _run_strategy(self, cells: Sequence[RunSpec]) -> None:
        for spec in cells:
            self._observer.cell_started(spec)
            result = self._run_cell(spec)
            record = self._record(spec, result)
            self._directory.append(record)
            self._observer.cell_finished(record)
            if spec.is_baseline and self._reference(spec.workload.label).tokens.exists():
                self._new_references.add(spec.workload.label)
        self._drop_worker(kill=False)

    def _run_cell(self, spec: RunSpec) -> CellResult:
        refusal = self._preflight.refusals[spec.strategy.label]
        if refusal is not None:
            return _ended("unsupported", Failure(type="Unsupported", message=refusal, phase="support"))
        watch = _PassWatch(self._observer.pass_started)
        started = datetime.now(UTC)
        self._worker = self._worker or Worker(self._setup(spec), spec.measurement.cell_timeout_s)
        answer = self._worker.measure(spec, watch)
        if isinstance(answer, CellResult):
            return answer
        self._drop_worker(kill=True)
        return _failed_result(answer, watch.pass_name, started)

    def _setup(self, spec: RunSpec) -> WorkerSetup:
        cores = self._preflight.machine.cpu_cores
        default_threads = max(1, cores - 1) if spec.device == "cpu" else cores
        return WorkerSetup(
            model=spec.model,
            device=spec.device,
            cpu=spec.cpu,
            compute_threads=spec.cpu.compute_threads or default_threads,
            reference_dir=self._directory.reference_dir,
            log_path=self._directory.logs_dir / f"{spec.strategy.label}.log",
        )

    def _drop_worker(self, *, kill: bool) -> None:
        if self._worker is not None:
            if kill:
                self._worker.kill()
            else:
                self._worker.close()
        self._worker = None

    def _record(self, spec: RunSpec, result: CellResult) -> RunRecord:
        return RunRecord(
            run_id=content_hash(spec),
            spec=spec,
            machine=self._preflight.machine,
            model=self._preflight.model,
            evidence=self._preflight.evidence,
            status=result.status,
            failure=result.failure,
            trials=result.trials,
            fidelity=result.fidelity,
            conditions=result.conditions,
            started_at_utc=result.started_at_utc,
            duration_s=result.duration_s,
        )

    def _reference(self, workload_label: str) -> ReferenceFiles:
        return ReferenceFiles(self._directory.reference_dir, workload_label)

    def _write_prompts(self) -> None:
        for label, tokens in self._preflight.prompts.items():
            path = self._reference(label).prompt
            if not path.exists():
                np.save(path, tokens)


class _PassWatch:
    """Remembers the pass a cell was in, for the record of a worker that cannot tell any more."""

    def __init__(self, forward: Callable[[PassStarted], None]) -> None:
        self.pass_name = "load"
        self._forward = forward

    def __call__(self, event: PassStarted) -> None:
        self.pass_name = event.name
        self._forward(event)


def _failed_result(answer: Any, pass_name: str, started: datetime) -> CellResult:
    match answer:
        case LoadFailed(type=kind, message=message, out_of_memory=out_of_memory):
            failure = Failure(type=kind, message=message, phase="load")
            return _ended("oom" if out_of_memory else "failed", failure, started)
        case TimedOut(after_s=after_s):
            message = f"no result within cell_timeout_s = {after_s:g}; the worker was killed"
            return _ended("timeout", Failure(type="Timeout", message=message, phase=pass_name), started)
        case Died() as died:
            return _ended("failed", Failure(type="WorkerDied", message=died.message, phase=pass_name), started)
        case _:
            raise AssertionError(answer)


def _ended(status: Any, failure: Failure, started: datetime | None = None) -> CellResult:
    now = datetime.now(UTC)
    began = started or now
    return CellResult(
        status=status,
        failure=failure,
        started_at_utc=began.isoformat(timespec="seconds"),
        duration_s=(now - began).total_seconds(),
    )
