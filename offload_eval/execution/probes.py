"""Runs the probes of a capacity search, one record each; what the run directory holds already is not run again."""

import hashlib
import time
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from offload_eval.analysis.probes import at_batch, was_killed
from offload_eval.core.experiment import Experiment, MeasurementPlan, StrategySpec, Workload
from offload_eval.core.records import RecoverySample, RunRecord, record_id
from offload_eval.core.run_spec import DRILLS, Role, RunSpec
from offload_eval.core.trace import Trace
from offload_eval.execution.cell_runner import CellRunner, SessionObserver, failure_of, is_finished
from offload_eval.execution.messages import CellResult, CheckDone, CheckTask, Preflight, PromptText
from offload_eval.execution.prompt_rows import random_rows, spread_rows
from offload_eval.execution.traces import CellTracer
from offload_eval.store.run_directory import RunDirectory

DRILL_TIMEOUT_S: Final = 15.0
"""When a drill that hangs is given up, model loading apart."""
_FAILED: Final = ("oom", "failed", "timeout")


@dataclass(frozen=True)
class Searched:
    """One strategy at one combination of lengths; the workload's batch means nothing."""

    workload: Workload
    strategy: StrategySpec
    baseline: StrategySpec
    refusal: str | None

    @property
    def is_baseline(self) -> bool:
        """Whether this is the cache that all others are held against."""
        return self.strategy == self.baseline


class Probes:
    """Makes each probe's spec and prompt, has it run, and sees that the worker comes back from those that fail."""

    def __init__(
        self,
        experiment: Experiment,
        preflight: Preflight,
        directory: RunDirectory,
        observer: SessionObserver,
        tracer: CellTracer,
    ) -> None:
        self._experiment = experiment
        self._preflight = preflight
        self._observer = observer
        self._runner = CellRunner(preflight, directory, observer, experiment.measurement.cell_timeout_s)
        self._tracer = tracer
        self._records = {record.run_id: record for record in directory.records()}
        self._first_check: tuple[RunSpec, CheckDone] | None = None
        self._traced_in_vain: list[RunSpec] = []

    def run(self, searched: Searched, sessions: int, role: Role) -> RunRecord:
        """The record of a batch under a role; it is run if there is no finished one."""
        spec = self._spec(searched, sessions, role)
        known = self._records.get(record_id(spec, self._preflight.evidence))
        if known is not None and (is_finished(known) or (role in DRILLS and known.status in _FAILED)):
            return known
        self._write_prompt(spec, self._preflight.texts[searched.workload.label])
        if searched.refusal is None:
            self._check_before(spec)
        result = self._runner.run_cell(spec, searched.refusal)
        if result.status in _FAILED:
            result = self._recovered(result)
        record = self._runner.keep(spec, result, self._preflight.evidence)
        self._drop_prompt(spec)
        self._records[record.run_id] = record
        self._observer.cell_finished(record)
        return record

    def trace(self, searched: Searched, sessions: int) -> Trace | None:
        """The trace of a batch; None where it cannot be traced."""
        spec = self._spec(searched, sessions, "fit")
        record = self._records.get(record_id(spec, "traced"))
        if not is_finished(record) and spec not in self._traced_in_vain:
            self._observer.trace_started(spec, 0, 1)
            record = self._runner.keep(spec, self._tracer.trace(spec), "traced")
            self._records[record.run_id] = record
            if was_killed(record):  # the process is a new one the next time
                record = self._runner.keep(spec, self._tracer.trace(spec), "traced")
                self._records[record.run_id] = record
            if not is_finished(record):
                self._traced_in_vain.append(spec)
        return None if record is None else record.trace

    def end_strategy(self) -> None:
        """Lets the worker go: the next strategy has its own."""
        self._runner.drop_worker()
        if self._first_check is not None:
            self._runner.files(self._first_check[0]).prompt.unlink(missing_ok=True)
        self._first_check = None

    def _spec(self, searched: Searched, sessions: int, role: Role) -> RunSpec:
        experiment, preflight = self._experiment, self._preflight
        workload = at_batch(searched.workload, sessions)
        return RunSpec(
            experiment=experiment.name,
            model=experiment.model,
            model_fingerprint=preflight.model.fingerprint,
            prompt_fingerprint=self._source_fingerprint(searched.workload),
            device=preflight.device,
            cpu=experiment.cpu,
            budget=experiment.budget,
            workload=workload,
            strategy=searched.strategy,
            baseline=searched.baseline,
            measurement=self._plan(role),
            role=role,
        )

    def _plan(self, role: Role) -> MeasurementPlan:
        """One memory run says whether a batch fits; only `time` has a clock."""
        asked, capacity = self._experiment.measurement, self._experiment.capacity
        assert capacity is not None
        memory_trials = {"verify": capacity.repeats - 1, "time": 0}.get(role, 1)
        return MeasurementPlan(
            warmups=asked.warmups if role == "time" else 0,
            trials=capacity.timing_trials if role == "time" else 0,
            memory_trials=memory_trials,
            transfer_trials=0,
            fidelity=False,
            cell_timeout_s=min(asked.cell_timeout_s, DRILL_TIMEOUT_S) if role == "hung" else asked.cell_timeout_s,
        )

    def _source_fingerprint(self, workload: Workload) -> str:
        """Of what every batch's prompts are cut from: a probe's name must not depend on its prompts being made."""
        text = self._preflight.texts[workload.label]
        if text is None:
            return f"random-{workload.seed}"
        return hashlib.sha256(text.opening.tobytes() + text.tokens.tobytes()).hexdigest()[:16]

    def _write_prompt(self, spec: RunSpec, text: PromptText | None) -> None:
        sessions, prompt_tokens = spec.workload.batch_size, spec.workload.prompt_tokens
        if text is None:
            rows = random_rows(sessions, prompt_tokens, self._preflight.model.vocab_size, spec.workload.seed)
        else:
            rows = spread_rows(text, sessions, prompt_tokens)
        self._runner.files(spec).save_prompt(rows)

    def _drop_prompt(self, spec: RunSpec) -> None:
        """Prompts of large batches are large, and are made again where they are wanted again."""
        if self._first_check is None or self._first_check[0].reference_key != spec.reference_key:
            self._runner.files(spec).prompt.unlink(missing_ok=True)

    def _check_before(self, spec: RunSpec) -> None:
        """Before anything of a strategy can fail, its worker leaves what it has to be able to do again."""
        if self._first_check is None:
            measurement = msgspec.structs.replace(
                spec.measurement, cell_timeout_s=self._experiment.measurement.cell_timeout_s
            )
            asked = msgspec.structs.replace(spec, measurement=measurement)  # a drill that hangs has less time
            self._first_check = (asked, self._check(asked))

    def _check(self, spec: RunSpec) -> CheckDone:
        answer = self._runner.ask(CheckTask(spec), self._observer.pass_started)
        if isinstance(answer, CheckDone):
            return answer
        return CheckDone(None, None, 0.0, f"no answer from a worker: {failure_of(answer).message}")

    def _recovered(self, result: CellResult) -> CellResult:
        """Adds how the worker came back: a new one, where the failure took it along."""
        assert self._first_check is not None
        spec, before = self._first_check
        in_new_worker = not self._runner.has_worker
        started = time.perf_counter()
        after = self._check(spec)
        waited_s = time.perf_counter() - started - after.seconds
        recovery = result.conditions.recovery or RecoverySample(in_new_worker=in_new_worker)
        if in_new_worker:
            recovery = msgspec.structs.replace(recovery, in_new_worker=True, recovery_s=waited_s)
        recovery = msgspec.structs.replace(recovery, check_s=after.seconds, **_compared(before, after))
        return replace(result, conditions=msgspec.structs.replace(result.conditions, recovery=recovery))


def _compared(before: CheckDone, after: CheckDone) -> dict[str, Any]:
    message = before.message or after.message
    if message:
        return {"message": message}
    return {
        "tokens_equal": after.tokens_digest == before.tokens_digest,
        "logits_equal": after.logits_digest == before.logits_digest,
    }
