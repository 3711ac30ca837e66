"""Runs every cell of an experiment, one worker process a strategy, and keeps a record of each."""

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, Final, Protocol

import msgspec

from offload_eval.core.experiment import Experiment
from offload_eval.core.factors import expand_workloads
from offload_eval.core.records import Evidence, Failure, RunRecord, record_id
from offload_eval.core.run_spec import RunSpec, content_hash
from offload_eval.errors import UnableError
from offload_eval.execution.launcher import Died, TimedOut, Worker
from offload_eval.execution.messages import (
    CellResult,
    CellTask,
    LoadFailed,
    PassStarted,
    Preflight,
    ReferenceDone,
    ReferenceTask,
    WorkerSetup,
    ended,
)
from offload_eval.execution.reference import ReferenceFiles
from offload_eval.execution.traces import CellTracer
from offload_eval.store.run_directory import FINISHED, RunDirectory
from offload_eval.units import format_bytes

TRACE_LOG: Final = "_trace.log"
"""No strategy's label begins like that."""
_FLOAT32_BYTES: Final = 4


class SessionObserver(Protocol):
    """Told how the session goes on."""

    def trace_started(self, spec: RunSpec, index: int, total: int) -> None:
        """The trace of a cell begins; `index` of `total` are done."""

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
            prompt_fingerprint=hashlib.sha256(preflight.prompts[workload.label].tobytes()).hexdigest()[:16],
            device=preflight.device,
            cpu=experiment.cpu,
            budget=experiment.budget,
            workload=workload,
            strategy=preflight.strategy(workload, strategy),
            baseline=preflight.strategy(workload, baseline),
            measurement=experiment.measurement,
        )
        for strategy in strategies
        for workload in expand_workloads(experiment)
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

    def run(self, cells: Sequence[RunSpec]) -> None:
        """Traces and runs the cells that are not finished, and appends a record as each one ends.

        Raises:
            UnableError: The disk cannot hold the baseline's logits.
        """
        records = {record.run_id: record for record in self._directory.records()}
        missing = [spec for spec in cells if self._must_run(spec, records)]
        self._write_prompts(missing)
        self._require_disk(missing)
        if self._experiment.trace:
            self._trace(cells, records)
        try:
            self._restore_references(missing)
            for _, strategy_cells in groupby(cells, key=lambda spec: spec.strategy.label):
                for spec in strategy_cells:
                    if self._must_run(spec, records):
                        self._keep(spec, self._run_cell(spec))
                self._drop_worker()
        finally:
            self._drop_worker()
        if {content_hash(spec) for spec in cells} <= self._directory.finished_run_ids():
            for spec in _one_a_reference(cells):
                self._files(spec).drop_logits()

    def _trace(self, cells: Sequence[RunSpec], records: Mapping[str, RunRecord]) -> None:
        """Traces come first: they are cheap, and what is killed later has them already."""
        missing = [spec for spec in cells if not _is_finished(records.get(record_id(spec, "traced")))]
        with CellTracer(self._experiment.model, self._directory.logs_dir / TRACE_LOG) as tracer:
            for index, spec in enumerate(missing):
                self._observer.trace_started(spec, index, len(missing))
                self._directory.append(self._record(spec, tracer.trace(spec), "traced"))

    def _must_run(self, spec: RunSpec, records: Mapping[str, RunRecord]) -> bool:
        """A cell that ran without the baseline's tokens runs again once there are some."""
        record = records.get(content_hash(spec))
        if record is None or not _is_finished(record):
            return True
        return record.conditions.forced_tokens is False and self._has_reference(spec)

    def _restore_references(self, missing: Sequence[RunSpec]) -> None:
        """Has the baseline leave its tokens and logits again where its own cell is finished and they are gone."""
        comes_by_itself = {spec.reference_key for spec in missing if spec.is_baseline}
        for spec in _one_a_reference(missing):
            if self._has_reference(spec):
                continue
            baseline = msgspec.structs.replace(spec, strategy=spec.baseline)
            if spec.reference_key not in comes_by_itself and self._refusal(baseline) is None:
                self._observer.cell_started(baseline)
                self._ask(ReferenceTask(baseline), self._observer.pass_started)
        self._drop_worker()

    def _has_reference(self, spec: RunSpec) -> bool:
        return self._files(spec).is_complete(spec.workload, with_logits=spec.measurement.fidelity)

    def _require_disk(self, missing: Sequence[RunSpec]) -> None:
        """Checks that the logits still to be recorded will fit.

        Raises:
            UnableError: They will not.
        """
        wanted = [spec.workload for spec in _one_a_reference(missing) if not self._has_reference(spec)]
        logits = sum(workload.output_tokens * workload.batch_size for workload in wanted)
        needed_bytes = logits * self._preflight.model.vocab_size * _FLOAT32_BYTES
        free_bytes = shutil.disk_usage(self._directory.path).free
        if self._experiment.measurement.fidelity and needed_bytes > free_bytes:
            raise UnableError(
                f"{self._directory.path}: the baseline's logits need {format_bytes(needed_bytes)}, and "
                f"{format_bytes(free_bytes)} are free; choose another --out, shorter outputs, or "
                "measurement.fidelity: false"
            )

    def _keep(self, spec: RunSpec, result: CellResult) -> None:
        record = self._record(spec, result, self._preflight.evidence)
        self._directory.append(record)
        self._observer.cell_finished(record)

    def _run_cell(self, spec: RunSpec) -> CellResult:
        self._observer.cell_started(spec)
        if (refusal := self._refusal(spec)) is not None:
            return ended("unsupported", Failure(type="Unsupported", message=refusal, stage="support"))
        watch = _StageWatch(self._observer.pass_started)
        started = datetime.now(UTC)
        reference_s = 0.0
        if spec.is_baseline and not self._has_reference(spec):
            answer = self._ask(ReferenceTask(spec), watch)
            if not isinstance(answer, ReferenceDone):
                return _failed_result(answer, watch.stage, started)
            reference_s = answer.generate_s
        answer = self._ask(CellTask(spec), watch)
        if not isinstance(answer, CellResult):
            return _failed_result(answer, watch.stage, started)
        return _charged(answer, reference_s)

    def _ask(self, task: CellTask | ReferenceTask, on_pass: Callable[[PassStarted], None]) -> Any:
        """Asks the strategy's worker, which is started for its first task; one that cannot go on is dropped."""
        spec = task.spec
        self._worker = self._worker or Worker(self._setup(spec), spec.measurement.cell_timeout_s)
        answer = self._worker.ask(task, on_pass)
        if not isinstance(answer, CellResult | ReferenceDone):
            self._drop_worker()
        return answer

    def _refusal(self, spec: RunSpec) -> str | None:
        return self._preflight.refusals[spec.workload.label, spec.strategy.label]

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

    def _drop_worker(self) -> None:
        """Ends the worker; its answers are here already."""
        if self._worker is not None:
            self._worker.kill()
        self._worker = None

    def _record(self, spec: RunSpec, result: CellResult, evidence: Evidence) -> RunRecord:
        return RunRecord(
            run_id=record_id(spec, evidence),
            spec=spec,
            machine=self._preflight.machine,
            model=self._preflight.model,
            evidence=evidence,
            status=result.status,
            failure=result.failure,
            trials=result.trials,
            fidelity=result.fidelity,
            conditions=result.conditions,
            trace=result.trace,
            started_at_utc=result.started_at_utc,
            duration_s=result.duration_s,
        )

    def _files(self, spec: RunSpec) -> ReferenceFiles:
        return ReferenceFiles(self._directory.reference_dir, spec.reference_key)

    def _write_prompts(self, cells: Sequence[RunSpec]) -> None:
        for spec in _one_a_reference(cells):
            self._files(spec).save_prompt(self._preflight.prompts[spec.workload.label])


def _is_finished(record: RunRecord | None) -> bool:
    return record is not None and record.status in FINISHED


def _one_a_reference(cells: Sequence[RunSpec]) -> list[RunSpec]:
    """One cell for each prompt and reference that the cells share."""
    return list({spec.reference_key: spec for spec in cells}.values())


class _StageWatch:
    """Remembers where a cell was, for the record of a worker that cannot tell any more."""

    def __init__(self, forward: Callable[[PassStarted], None]) -> None:
        self.stage = "load"
        self._forward = forward

    def __call__(self, event: PassStarted) -> None:
        self.stage = event.name
        self._forward(event)


def _charged(result: CellResult, reference_s: float) -> CellResult:
    """Adds to a baseline's account the time inside generate() that recording its reference took."""
    generate_s = result.conditions.generate_s
    if generate_s is None:
        return result
    conditions = msgspec.structs.replace(result.conditions, generate_s=generate_s + reference_s)
    return replace(result, conditions=conditions)


def _failed_result(answer: Any, stage: str, started: datetime) -> CellResult:
    match answer:
        case LoadFailed(failure=failure):
            return ended("failed" if failure.ledger is None else "oom", failure, started)
        case TimedOut(after_s=after_s):
            message = f"no result within cell_timeout_s = {after_s:g}; the worker was killed"
            return ended("timeout", Failure(type="Timeout", message=message, stage=stage), started)
        case Died() as died:
            return ended("failed", Failure(type="WorkerDied", message=died.message, stage=stage), started)
        case _:
            raise AssertionError(answer)
