"""Starts worker processes from a fork server that has imported the frameworks and touched no device."""

import multiprocessing
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from offload_eval.core.experiment import Experiment, ModelSpec
from offload_eval.errors import UnableError
from offload_eval.execution.messages import (
    CellTask,
    CheckTask,
    PassStarted,
    Preflight,
    Ready,
    ReferenceTask,
    Refused,
    Surroundings,
    WorkerSetup,
)
from offload_eval.execution.worker import kill_descendants, preflight_main, surroundings_main, worker_main

_LOG_TAIL_LINES = 12
_KILL_WAIT_S = 30.0
_POLL_S = 3600.0
"""Longest single wait: the system call takes no more than 24 days, and a timeout may be longer."""


@dataclass(frozen=True)
class Died:
    """The worker's process ended before it answered."""

    exit_code: int | None
    log_tail: str

    @property
    def message(self) -> str:
        """How it ended, with the last lines it wrote."""
        code = self.exit_code
        how = f"exit code {code}" if code is None or code >= 0 else f"signal {-code} ({_signal_name(-code)})"
        hint = "; the kernel sends it when host memory runs out" if code == -signal.SIGKILL else ""
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
        self._log_start_bytes = log_path.stat().st_size if log_path is not None and log_path.exists() else 0
        self._process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        _start_fork_server()
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
            remaining_s = deadline - time.monotonic()
            if not self._connection.poll(min(max(0.0, remaining_s), _POLL_S)):
                if remaining_s > _POLL_S:
                    continue
                self.kill()
                return TimedOut(timeout_s)
            message = _receive(self._connection)
            if message is None:
                self._process.join(_KILL_WAIT_S)
                return Died(self._process.exitcode, _tail(self._log_path, self._log_start_bytes))
            if not isinstance(message, PassStarted):
                return message
            on_pass(message)

    def kill(self) -> None:
        """Ends the child now, and what it has started."""
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_KILL_WAIT_S)
        if self._process.pid is not None:
            kill_descendants(self._process.pid)


def preflight(experiment: Experiment, timeout_s: float, *, trace_only: bool = False) -> Preflight:
    """Checks an experiment in a process of its own.

    Args:
        experiment: What is asked.
        timeout_s: When the check is given up.
        trace_only: Nothing will be run.

    Raises:
        OffloadEvalError: What the check refused, as it was raised there.
        UnableError: The process died or hung.
    """
    answer = _ask_once(preflight_main, (experiment, trace_only, None), "the experiment", timeout_s)
    assert isinstance(answer, Preflight)
    return answer


def surroundings(model: ModelSpec, device: str, timeout_s: float) -> Surroundings:
    """Looks at the machine, the device and a model in a process of its own.

    Raises:
        OffloadEvalError: What was refused, as it was raised there.
        UnableError: The process died or hung.
    """
    answer = _ask_once(surroundings_main, (model, device), f"model {model.location}", timeout_s)
    assert isinstance(answer, Surroundings)
    return answer


def _ask_once(target: Callable[..., None], arguments: tuple[Any, ...], what: str, timeout_s: float) -> Any:
    process = WorkerProcess(target, arguments, None)
    try:
        answer = process.answer(timeout_s, on_pass=lambda _: None)
    finally:
        process.kill()
    if isinstance(answer, Refused):
        raise answer.error
    if isinstance(answer, Died | TimedOut):
        detail = answer.message if isinstance(answer, Died) else f"no answer within {answer.after_s:.0f} s"
        raise UnableError(f"{what} could not be checked: {detail}; see `offload-eval doctor`")
    return answer


class Worker:
    """A worker with its model, started when its first cell comes. No task takes longer than loading may."""

    def __init__(self, setup: WorkerSetup, timeout_s: float) -> None:
        self._process = WorkerProcess(worker_main, (setup,), setup.log_path)
        self._timeout_s = timeout_s
        self._is_loaded = False

    def ask(
        self, task: CellTask | ReferenceTask | CheckTask, on_pass: Callable[[PassStarted], None]
    ) -> Any | Died | TimedOut:
        """Hands over a task and waits for its answer, or LoadFailed; after Died or TimedOut the worker is gone."""
        if not self._is_loaded:
            ready = self._process.answer(self._timeout_s, on_pass)
            if not isinstance(ready, Ready):
                return ready
            self._is_loaded = True
        self._process.send(task)
        return self._process.answer(min(self._timeout_s, task.spec.measurement.cell_timeout_s), on_pass)

    def kill(self) -> None:
        """Ends the worker now."""
        self._process.kill()


def _start_fork_server() -> None:
    """Starts it with interrupts blocked, for good and for all its children: the session decides what Ctrl-C ends."""
    resource_tracker.ensure_running()  # or the fork server starts it, and unblocks SIGINT with that
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _receive(connection: Connection) -> Any | None:
    try:
        return connection.recv()
    except (EOFError, OSError):  # OSError: the child died in the middle of a message
        return None


def _tail(log_path: Path | None, start_bytes: int) -> str:
    """The last lines that this child wrote; what stands before them is another's."""
    if log_path is None or not log_path.exists():
        return ""
    text = log_path.read_bytes()[start_bytes:].decode(errors="replace")
    return "\n".join(text.splitlines()[-_LOG_TAIL_LINES:])
