"""Runs whose memory the system limits: the cell that wants more has a recorded failure, and the run goes on.

`big` is 16,000 sessions of 500 tokens, whose embeddings alone take 16,000 * 500 * 64 * 4 = 2,048,000,000 bytes.
"""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import WriteExperiment, tiny_workload
from test_session import cell_name, read_records

LIMIT_BYTES = 1536 * 1024**2
CGROUP_PARENT = "OFFLOAD_EVAL_CGROUP_PARENT"
"""Names a folder of the memory controller, v1 or v2, in which a test may make a group of its own for a while."""


@pytest.fixture
def experiment(tmp_path: Path, tiny_experiment: WriteExperiment) -> Path:
    return tiny_experiment(
        tmp_path,
        workloads=[
            tiny_workload("big", batch_size=16_000, prompt_tokens=500, output_tokens=2),
            tiny_workload("small"),
        ],
        strategies=[{"kind": "dynamic"}, {"kind": "streamed", "name": "streamed", "prefetch_layers": 1}],
        measurement={"trials": 1, "fidelity": False, "warmups": 0},
    )


def run_limited(experiment: Path, limit: Callable[[], None]) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
    """Runs the command line in a process that `limit` has taken memory from; its exit code and its records."""
    out = experiment.parent / "run"
    command = [sys.executable, "-m", "offload_eval", "run", str(experiment), "--out", str(out)]
    run = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True, timeout=300, check=False)
    assert "Traceback" not in run.stderr
    return run.returncode, {cell_name(record): record for record in read_records(out)}


def test_what_an_address_space_refuses_is_an_oom_of_the_host(experiment: Path) -> None:
    """Limits pass from the process to the fork server and on to every worker."""

    def limit_data() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))

    code, records = run_limited(experiment, limit_data)
    assert code == 0, "running out of memory is an answer"
    assert len(records) == 4
    for strategy in ("dynamic", "streamed"):
        record = records["big", strategy]
        assert (record["status"], record["failure"]["ledger"]) == ("oom", "host")
        assert (record["failure"]["stage"], record["failure"]["phase"]) == ("memory", "prefill")
        assert "tried to allocate 2048000000 bytes" in record["failure"]["message"]
        assert record["conditions"]["leaked_bytes"] == 0
        assert records["small", strategy]["status"] == "ok"


@pytest.fixture
def memory_group() -> Iterator[Path]:
    parent = os.environ.get(CGROUP_PARENT)
    if parent is None:
        pytest.skip(f"{CGROUP_PARENT} names no folder of the memory controller in which a group may be made")
    group = Path(parent) / f"offload-eval-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no group can be made in {parent}: {error}")
    try:
        is_v1 = (group / "memory.limit_in_bytes").exists()
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(LIMIT_BYTES))
        if (group / "memory.swap.max").exists():
            (group / "memory.swap.max").write_text("0")
        yield group
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """Waits for the processes in it, which end with their run."""
    deadline = time.monotonic() + 20
    while pids := (group / "cgroup.procs").read_text().split():
        if time.monotonic() > deadline:
            for pid in pids:
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)
    group.rmdir()


def test_what_a_control_group_kills_is_a_recorded_failure(experiment: Path, memory_group: Path) -> None:
    """The kernel kills the process that holds the most, which is the worker: nothing in it can tell why."""

    def enter_group() -> None:
        (memory_group / "cgroup.procs").write_text(str(os.getpid()))

    code, records = run_limited(experiment, enter_group)
    assert code == 1
    assert len(records) == 4
    for strategy in ("dynamic", "streamed"):
        failure = records["big", strategy]["failure"]
        assert (records["big", strategy]["status"], failure["type"]) == ("failed", "WorkerDied")
        assert "signal 9 (SIGKILL); the kernel sends it when host memory runs out" in failure["message"]
        small = records["small", strategy]
        assert small["status"] == "ok"
        (trial,) = small["trials"]
        assert trial["cgroup_limit_bytes"] == LIMIT_BYTES
        assert 0 < trial["peak_cgroup_bytes"] <= LIMIT_BYTES
