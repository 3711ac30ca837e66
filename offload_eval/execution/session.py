"""Runs every cell of an experiment, one worker process a strategy, and keeps a record of each."""

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final

import msgspec

from offload_eval.core.experiment import Experiment
from offload_eval.core.factors import expand_workloads
from offload_eval.core.records import RunRecord, record_id
from offload_eval.core.run_spec import RunSpec, content_hash
from offload_eval.errors import UnableError
from offload_eval.execution.cell_runner import CellRunner, SessionObserver, is_finished
from offload_eval.execution.messages import (
    CellResult,
    Preflight,
    ReferenceTask,
)
from offload_eval.execution.traces import CellTracer
from offload_eval.store.run_directory import RunDirectory
from offload_eval.units import format_bytes

TRACE_LOG: Final = "_trace.log"
"""No strategy's label begins like that."""
_FLOAT32_BYTES: Final = 4


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
        self._runner = CellRunner(preflight, directory, observer, experiment.measurement.cell_timeout_s)

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
            for _ in self._traces(cells, records):
                pass
        try:
            self._restore_references(missing)
            for _, strategy_cells in groupby(cells, key=lambda spec: spec.strategy.label):
                for spec in strategy_cells:
                    if self._must_run(spec, records):
                        self._keep(spec, self._runner.run_cell(spec, self._refusal(spec)))
                self._runner.drop_worker()
        finally:
            self._runner.drop_worker()
        if {content_hash(spec) for spec in cells} <= self._directory.finished_run_ids():
            for spec in _one_a_reference(cells):
                self._runner.files(spec).drop_logits()

    def trace(self, cells: Sequence[RunSpec]) -> None:
        """Traces the cells that are not traced yet, and runs none; their records are those that `run` begins with."""
        for spec, record in self._traces(cells, {record.run_id: record for record in self._directory.records()}):
            self._observer.cell_started(spec)
            self._observer.cell_finished(record)

    def _traces(
        self, cells: Sequence[RunSpec], records: Mapping[str, RunRecord]
    ) -> Iterator[tuple[RunSpec, RunRecord]]:
        """Traces come first: they are cheap, and what is killed later has them already."""
        missing = [spec for spec in cells if not is_finished(records.get(record_id(spec, "traced")))]
        with CellTracer(self._experiment.model, self._directory.logs_dir / TRACE_LOG) as tracer:
            for index, spec in enumerate(missing):
                self._observer.trace_started(spec, index, len(missing))
                yield spec, self._runner.keep(spec, tracer.trace(spec), "traced")

    def _must_run(self, spec: RunSpec, records: Mapping[str, RunRecord]) -> bool:
        """A cell that ran without the baseline's tokens runs again once there are some."""
        record = records.get(content_hash(spec))
        if record is None or not is_finished(record):
            return True
        return record.conditions.forced_tokens is False and self._runner.has_reference(spec)

    def _restore_references(self, missing: Sequence[RunSpec]) -> None:
        """Has the baseline leave its tokens and logits again where its own cell is finished and they are gone."""
        comes_by_itself = {spec.reference_key for spec in missing if spec.is_baseline}
        for spec in _one_a_reference(missing):
            if self._runner.has_reference(spec):
                continue
            baseline = msgspec.structs.replace(spec, strategy=spec.baseline)
            if spec.reference_key not in comes_by_itself and self._refusal(baseline) is None:
                self._observer.cell_started(baseline)
                self._runner.ask(ReferenceTask(baseline), self._observer.pass_started)
        self._runner.drop_worker()

    def _require_disk(self, missing: Sequence[RunSpec]) -> None:
        """Checks that the logits still to be recorded will fit.

        Raises:
            UnableError: They will not.
        """
        wanted = [spec.workload for spec in _one_a_reference(missing) if not self._runner.has_reference(spec)]
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
        self._observer.cell_finished(self._runner.keep(spec, result, self._preflight.evidence))

    def _refusal(self, spec: RunSpec) -> str | None:
        return self._preflight.refusals[spec.workload.label, spec.strategy.label]

    def _write_prompts(self, cells: Sequence[RunSpec]) -> None:
        for spec in _one_a_reference(cells):
            self._runner.files(spec).save_prompt(self._preflight.prompts[spec.workload.label])


def _one_a_reference(cells: Sequence[RunSpec]) -> list[RunSpec]:
    """One cell for each prompt and reference that the cells share."""
    return list({spec.reference_key: spec for spec in cells}.values())
