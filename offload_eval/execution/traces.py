"""Traces cells in a process of its own; whatever becomes of it, no measured cell is lost."""

import time
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from offload_eval.core.experiment import ModelSpec
from offload_eval.core.records import Failure
from offload_eval.core.run_spec import RunSpec
from offload_eval.errors import UnableError
from offload_eval.execution.launcher import Died, TimedOut, WorkerProcess
from offload_eval.execution.messages import CellResult, TraceTask, ended
from offload_eval.execution.worker import become_worker

TRACE_TIMEOUT_S: Final = 600.0
"""For one trace, which takes seconds, and for building the model before the first."""
_STAGE: Final = "trace"
_MESSAGE_CHARACTERS: Final = 2000


class CellTracer:
    """One process for all cells, started when the first one comes, and again after it died or hung."""

    def __init__(self, model: ModelSpec, log_path: Path) -> None:
        self._model = model
        self._log_path = log_path
        self._process: WorkerProcess | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drop()

    def trace(self, spec: RunSpec) -> CellResult:
        """Traces a cell for the device that it runs on. Never raises for what became of it."""
        started = datetime.now(UTC)
        if self._process is None:
            self._process = WorkerProcess(tracer_main, (self._model, self._log_path), self._log_path)
        self._process.send(TraceTask(spec))
        timeout_s = min(TRACE_TIMEOUT_S, spec.measurement.cell_timeout_s)
        answer = self._process.answer(timeout_s, on_pass=lambda _: None)
        if isinstance(answer, CellResult):
            return answer
        self._drop()
        if isinstance(answer, TimedOut):
            message = f"no result within {answer.after_s:g} s; the process was killed"
            return ended("timeout", Failure(type="Timeout", message=message, stage=_STAGE), started)
        assert isinstance(answer, Died)
        return ended("failed", Failure(type="WorkerDied", message=answer.message, stage=_STAGE), started)

    def _drop(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._process = None


def tracer_main(connection: Connection, model: ModelSpec, log_path: Path) -> None:
    """Body of the process; answers every task until the connection closes."""
    become_worker(log_path)
    import torch

    from offload_eval.execution.attention import TraceableModels

    torch.set_num_threads(1)  # there is nothing to compute
    models = TraceableModels(model)
    while True:
        try:
            task: TraceTask = connection.recv()
        except EOFError:
            return
        started_at, started = datetime.now(UTC), time.perf_counter()
        try:
            traceable = models.with_attention(task.spec.workload.attn_implementation)
            result = _traced(task.spec, traceable, started_at, started)
        except UnableError as error:
            result = ended("unsupported", _failure(error), started_at)
        except Exception as error:  # whatever upstream raises is this trace's result, and the run goes on
            result = ended("failed", _failure(error), started_at)
        connection.send(result)


def _traced(spec: RunSpec, model: Any, started_at: datetime, started: float) -> CellResult:
    from offload_eval.tracing.trace import trace_strategy

    trace = trace_strategy(model, spec.strategy, spec.workload, device=spec.device)
    return CellResult(
        status="ok",
        started_at_utc=started_at.isoformat(timespec="seconds"),
        duration_s=time.perf_counter() - started,
        trace=trace,
    )


def _failure(error: Exception) -> Failure:
    """The words of an exception, and none of its frames."""
    message = str(error).strip()[:_MESSAGE_CHARACTERS] or type(error).__name__
    return Failure(type=type(error).__name__, message=message, stage=_STAGE)
