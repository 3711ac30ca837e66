"""The process that runs one strategy's cells: it loads the model once and answers one cell at a time."""

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from offload_eval.core.experiment import Experiment, ModelSpec
from offload_eval.core.records import Conditions, Failure
from offload_eval.errors import OffloadEvalError, UnableError
from offload_eval.execution.messages import (
    CellTask,
    CheckTask,
    LoadFailed,
    PassStarted,
    Ready,
    ReferenceDone,
    ReferenceTask,
    Refused,
    WorkerSetup,
)

_PR_SET_PDEATHSIG = 1


def preflight_main(connection: Connection, experiment: Experiment, trace_only: bool, log_path: Path | None) -> None:
    """Body of the process that checks an experiment; sends a Preflight or a Refused."""
    become_worker(log_path)
    from offload_eval.execution.preflight import run_preflight

    try:
        connection.send(run_preflight(experiment, trace_only=trace_only))
    except OffloadEvalError as error:
        connection.send(Refused(error))
    except Exception as error:  # upstream's refusals come in every type; the user needs its words, not its frames
        connection.send(Refused(UnableError(f"model {experiment.model.location}: {type(error).__name__}: {error}")))


def surroundings_main(connection: Connection, model: ModelSpec, device: str) -> None:
    """Body of the process that looks at the machine and the model; sends Surroundings or a Refused."""
    become_worker(None)
    from offload_eval.execution.preflight import read_surroundings

    try:
        connection.send(read_surroundings(model, device))
    except OffloadEvalError as error:
        connection.send(Refused(error))
    except Exception as error:  # as above
        connection.send(Refused(UnableError(f"model {model.location}: {type(error).__name__}: {error}")))


def worker_main(connection: Connection, setup: WorkerSetup) -> None:
    """Body of a worker; answers every task until the connection closes."""
    become_worker(setup.log_path)
    import torch

    from offload_eval.execution.cell import measure_cell, record_reference
    from offload_eval.execution.devices import open_device
    from offload_eval.execution.exhaustion import exhausted_ledger
    from offload_eval.execution.model_loading import load_model
    from offload_eval.execution.recovery_check import check_generation
    from offload_eval.instruments.contention import measure_contention

    contention_ratio = measure_contention()
    torch.set_num_threads(setup.compute_threads)
    device = open_device(setup.device, setup.cpu)
    started = time.perf_counter()
    try:
        model = load_model(setup.model, device.torch_device)
        device.adopt((*model.parameters(), *model.buffers()))
        with torch.inference_mode():  # libraries take their workspaces now, not out of the first cell's memory
            model(torch.zeros(1, 2, dtype=torch.long, device=device.torch_device))
    except Exception as error:
        ledger = exhausted_ledger(error)
        failure = Failure(type=type(error).__name__, message=str(error).strip()[:2000], stage="load", ledger=ledger)
        connection.send(LoadFailed(failure))
        return
    conditions = Conditions(
        compute_threads=setup.compute_threads,
        contention_ratio=contention_ratio,
        load_s=time.perf_counter() - started,
    )
    gc.freeze()  # a collection would walk all of torch and transformers, in the middle of what is timed
    connection.send(Ready())

    def report(name: str, index: int, total: int) -> None:
        connection.send(PassStarted(name, index, total))

    while True:
        try:
            task: CellTask | CheckTask | ReferenceTask = connection.recv()
        except EOFError:
            return
        if isinstance(task, CellTask):
            connection.send(measure_cell(task.spec, model, device, setup.reference_dir, conditions, report))
            continue
        if isinstance(task, CheckTask):
            connection.send(check_generation(task.spec, model, device, setup.reference_dir))
            continue
        report("reference", 0, 1)
        try:
            generate_s = record_reference(task.spec, model, device, setup.reference_dir)
        except Exception:  # the baseline's own cell will meet it too, and record it
            traceback.print_exc()
            generate_s = 0.0
        connection.send(ReferenceDone(generate_s))


def kill_descendants(worker_pid: int) -> None:
    """Kills what a worker has started, such as the compilers of an extension, and what that started in turn.

    A worker leads a session of its own. Its process group would not do: ninja gives every compiler another one.
    """
    seen = {worker_pid}
    while new := _session_members(worker_pid) - seen:
        for pid in new:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        seen |= new


def _session_members(session_id: int) -> set[int]:
    entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return {int(entry.name) for entry in entries if _session_id(entry) == session_id}


def _session_id(process: Path) -> int | None:
    try:
        stat = (process / "stat").read_text(errors="replace")
    except OSError:  # it has ended since
        return None
    return int(stat.rpartition(")")[2].split()[3])


def become_worker(log_path: Path | None) -> None:
    """Ties this process's life to its parents', and keeps upstream's output out of the terminal."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)  # the fork server died before the line above took hold
    threading.Thread(target=_end_with_session, daemon=True).start()
    log = os.open(log_path or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import transformers

    transformers.utils.logging.disable_progress_bar()


def _end_with_session() -> None:
    """Waits for the process that runs the session to die: the fork server stays while it has children."""
    session = multiprocessing.parent_process()
    assert session is not None
    session.join()
    kill_descendants(os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)
