"""Starts worker processes from a fork server that has imported the frameworks and touched no device."""

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from offload_eval.core.experiment import Experiment, RunSpec
from offload_eval.errors import UnableError
from offload_eval.execution.messages import PassStarted, Preflight, Ready, Refused, WorkerSetup
from offload_eval.execution.worker import preflight_main, worker_main

_LOG_TAIL_LINES = 12
_KILL_WAIT_S = 30.0


@dataclass(frozen=True)
class Died:
    """The worker's process ended before it answered."""

    exit_code: int | None
    log_tail: str

    @property
    def message(self) -> str:
        """How it ended, with the last lines it wrote."""
        code = self.exit_code
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        hint = " (killed: the kernel does that when host memory runs out)" if code == -9 else ""
        return f"the worker ended with {how}{hint}" + (f"\n{self.log_tail}" if self.log_tail else "")


@dataclass(frozen=True)
class TimedOut:
    """The worker did not answer in time, and was killed."""

    after_s: float


class WorkerProcess:
    """One child of the fork server, and the connection to it."""

    def __init__(self, target: Callable[..., None], arguments: tuple[Any, ...], log_path: Path | None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["offload_eval.execution.preload"])
        self._connection, theirs = context.Pipe()
        self._log_path = log_path
        self._process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return self._process.pid

    def send(self, message: object) -> None:
        """Hands a message over; a dead child is noticed by the next `answer`."""
        try:
            self._connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            return

    def answer(self, timeout_s: float, on_pass: Callable[[PassStarted], None]) -> Any | Died | TimedOut:
        """Waits for the next message that is not a PassStarted, and hands those on as they come."""
        deadline = time.monotonic() + timeout_s
        while True:
            if not self._connection.poll(max(0.0, deadline - time.monotonic())):
                self.kill()
                return TimedOut(timeout_s)
            message = _receive(self._connection)
            if message is None:
                self._process.join(_KILL_WAIT_S)
                return Died(self._process.exitcode, _tail(self._log_path))
            if not isinstance(message, PassStarted):
                return message
            on_pass(message)

    def close(self) -> None:
        """Lets the child end by itself, and kills it when it does not."""
        self._connection.close()
        self._process.join(_KILL_WAIT_S)
        self.kill()

    def kill(self) -> None:
        """Ends the child now."""
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_KILL_WAIT_S)


def preflight(experiment: Experiment, timeout_s: float) -> Preflight:
    """Checks an experiment in a process of its own.

    Raises:
        OffloadEvalError: What the check refused, as it was raised there.
        UnableError: The process died or hung.
    """
    process = WorkerProcess(preflight_main, (experiment, None), None)
    try:
        answer = process.answer(timeout_s, on_pass=lambda _: None)
    finally:
        process.kill()
    if isinstance(answer, Refused):
        raise answer.error
    if isinstance(answer, Died | TimedOut):
        detail = answer.message if isinstance(answer, Died) else f"no answer within {answer.after_s:.0f} s"
        raise UnableError(f"the experiment could not be checked: {detail}; see `offload-eval doctor`")
    assert isinstance(answer, Preflight)
    return answer


class Worker:
    """A worker with its model, started when its first cell comes."""

    def __init__(self, setup: WorkerSetup, timeout_s: float) -> None:
        self._process = WorkerProcess(worker_main, (setup,), setup.log_path)
        self._timeout_s = timeout_s
        self._is_loaded = False

    @property
    def pid(self) -> int | None:
        """The worker's process id."""
        return self._process.pid

    def measure(self, spec: RunSpec, on_pass: Callable[[PassStarted], None]) -> Any | Died | TimedOut:
        """Runs one cell; after Died or TimedOut the worker is gone."""
        if not self._is_loaded:
            ready = self._process.answer(self._timeout_s, on_pass)
            if not isinstance(ready, Ready):
                return ready
            self._is_loaded = True
        self._process.send(spec)
        return self._process.answer(self._timeout_s, on_pass)

    def close(self) -> None:
        """Lets the worker end."""
        self._process.close()

    def kill(self) -> None:
        """Ends the worker now."""
        self._process.kill()


def _receive(connection: Connection) -> Any | None:
    try:
        return connection.recv()
    except (EOFError, ConnectionResetError):
        return None


def _tail(log_path: Path | None) -> str:
    if log_path is None or not log_path.exists():
        return ""
    return "\n".join(log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:])
