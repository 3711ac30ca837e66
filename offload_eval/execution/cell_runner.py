"""Has one cell at a time run by a worker of its strategy, and makes the record of it."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec

from offload_eval.core.records import Evidence, Failure, RunRecord, record_id
from offload_eval.core.run_spec import RunSpec
from offload_eval.execution.launcher import Died, TimedOut, Worker
from offload_eval.execution.messages import (
    CellResult,
    CellTask,
    CheckDone,
    CheckTask,
    LoadFailed,
    PassStarted,
    Preflight,
    ReferenceDone,
    ReferenceTask,
    WorkerSetup,
    ended,
)
from offload_eval.execution.reference import ReferenceFiles
from offload_eval.store.run_directory import FINISHED, RunDirectory


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


class CellRunner:
    """One worker at a time: it is started for its strategy's first task, and dropped where it cannot go on."""

    def __init__(
        self, preflight: Preflight, directory: RunDirectory, observer: SessionObserver, load_timeout_s: float
    ) -> None:
        self._load_timeout_s = load_timeout_s
        self._preflight = preflight
        self._directory = directory
        self._observer = observer
        self._worker: Worker | None = None

    @property
    def has_worker(self) -> bool:
        """Whether a worker stands ready, or is loading its model."""
        return self._worker is not None

    def run_cell(self, spec: RunSpec, refusal: str | None) -> CellResult:
        """Runs a cell, or says why it is refused; a baseline leaves its reference first, where it has none yet."""
        self._observer.cell_started(spec)
        if refusal is not None:
            return ended("unsupported", Failure(type="Unsupported", message=refusal, stage="support"))
        watch = _StageWatch(self._observer.pass_started)
        started = datetime.now(UTC)
        reference_s = 0.0
        if spec.role == "cell" and spec.is_baseline and not self.has_reference(spec):
            answer = self.ask(ReferenceTask(spec), watch)
            if not isinstance(answer, ReferenceDone):
                return _failed_result(answer, watch.stage, started)
            reference_s = answer.generate_s
        answer = self.ask(CellTask(spec), watch)
        if not isinstance(answer, CellResult):
            return _failed_result(answer, watch.stage, started)
        return _charged(answer, reference_s)

    def ask(self, task: CellTask | ReferenceTask | CheckTask, on_pass: Callable[[PassStarted], None]) -> Any:
        """Asks the strategy's worker; one that cannot go on is dropped."""
        spec = task.spec
        self._worker = self._worker or Worker(self._setup(spec), self._load_timeout_s)
        answer = self._worker.ask(task, on_pass)
        if not isinstance(answer, CellResult | ReferenceDone | CheckDone):
            self.drop_worker()
        return answer

    def drop_worker(self) -> None:
        """Ends the worker; its answers are here already."""
        if self._worker is not None:
            self._worker.kill()
        self._worker = None

    def keep(self, spec: RunSpec, result: CellResult, evidence: Evidence) -> RunRecord:
        """Puts the record of a result on the disk."""
        record = self._record(spec, result, evidence)
        self._directory.append(record)
        recovery = record.conditions.recovery
        if recovery is not None and recovery.leaked:
            self.drop_worker()  # what comes next is not to start higher
        return record

    def files(self, spec: RunSpec) -> ReferenceFiles:
        """Where a cell's prompt lies, and its reference."""
        return ReferenceFiles(self._directory.reference_dir, spec.reference_key)

    def has_reference(self, spec: RunSpec) -> bool:
        """Whether the baseline has left what the cell needs of it."""
        return self.files(spec).is_complete(spec.workload, with_logits=spec.measurement.fidelity)

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


def is_finished(record: RunRecord | None) -> bool:
    """Whether a rerun would only repeat a record."""
    return record is not None and record.status in FINISHED


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


def failure_of(answer: Any, stage: str = "load") -> Failure:
    """What became of a worker that gave no result."""
    match answer:
        case LoadFailed(failure=failure):
            return failure
        case TimedOut(after_s=after_s):
            message = f"no result within cell_timeout_s = {after_s:g}; the worker was killed"
            return Failure(type="Timeout", message=message, stage=stage)
        case Died() as died:
            return Failure(type="WorkerDied", message=died.message, stage=stage)
        case _:
            raise AssertionError(answer)


def _failed_result(answer: Any, stage: str, started: datetime) -> CellResult:
    failure = failure_of(answer, stage)
    if isinstance(answer, TimedOut):
        return ended("timeout", failure, started)
    return ended("failed" if failure.ledger is None else "oom", failure, started)
