"""A run from its command line to its records: what is kept, what a kill costs, and what is refused beforehand.

Shapes by hand: the tiny model has 3 layers, 2 kv_heads and head_dim 16, so a cached token takes
2 * 3 * 2 * 16 = 192 values; a session caches prompt_tokens + output_tokens - 1 tokens.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from conftest import TINY_CONFIG, WriteExperiment, tiny_workload
from factories import make_spec, make_workload
from typer.testing import CliRunner

from offload_eval.cli.app import app
from offload_eval.core.experiment import ModelSpec
from offload_eval.execution.launcher import Died, WorkerProcess
from offload_eval.execution.traces import CellTracer
from offload_eval.execution.worker import become_worker

VALUES_PER_TOKEN = 2 * 3 * 2 * 16
FLOAT32_BYTES = 4
WEIGHTS_BYTES = FLOAT32_BYTES * (
    2 * 128 * 64  # embedding and output head
    + 3 * (2 * 64 * 64 + 2 * 64 * 32)  # query and output, key and value projections
    + 3 * (3 * 64 * 128)  # MLP
    + (2 * 3 + 1) * 64  # norms
    + 2 * 8  # the rotary embedding's frequencies, kept twice
)
MARK = "OFFLOAD_EVAL_TEST_RUN"
"""Set in the environment of a run: whatever descends from it carries the mark."""
GONE_S = 20.0
"""A fork server that is still importing the frameworks notices the death of its parent when it is through."""


# Runs in processes of their own, and the processes they consist of.


@dataclass
class Run:
    """A run of the command line, in a process that can be killed."""

    process: subprocess.Popen[str]
    mark: str
    started: float

    def finish(self, timeout_s: float = 120) -> tuple[int, str, str]:
        stdout, stderr = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, stdout, stderr

    def fork_server(self) -> int | None:
        servers = [pid for pid in children(self.process.pid) if b"forkserver" in proc_file(pid, "cmdline")]
        return servers[0] if servers else None

    def worker(self) -> int | None:
        server = self.fork_server()
        workers = children(server) if server is not None else []
        return workers[0] if workers else None

    def survivors(self) -> list[int]:
        return [pid for pid in process_ids() if f"{MARK}={self.mark}".encode() in proc_file(pid, "environ")]

    def wait_until_gone(self) -> None:
        """Fails where something the run has started outlives it."""
        deadline = time.monotonic() + GONE_S
        while pids := self.survivors():
            if time.monotonic() > deadline:
                commands = [proc_file(pid, "cmdline").replace(b"\0", b" ") for pid in pids]
                pytest.fail(f"processes that outlived their run: {commands}")
            time.sleep(0.05)


def load_tokens(run_dir: Path, workload: str) -> Any:
    """The baseline's recorded tokens of a workload."""
    (path,) = (run_dir / "reference").glob(f"{workload}-*.tokens.npy")
    return np.load(path)


StartRun = Callable[..., Run]


@pytest.fixture
def start_run() -> Iterator[StartRun]:
    runs: list[Run] = []

    def start(*arguments: str | Path, **options: Any) -> Run:
        runs.append(start_command(*arguments, **options))
        return runs[-1]

    yield start
    for run in runs:
        for pid in run.survivors():
            os.kill(pid, signal.SIGKILL)
        run.process.communicate()


def start_command(*arguments: str | Path, program: tuple[str, ...] = ("-m", "offload_eval", "run")) -> Run:
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {MARK: mark},
        start_new_session=True,
    )
    return Run(process, mark, time.time())


def process_ids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def proc_file(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def children(parent: int) -> list[int]:
    """Living children; one that has ended and is not yet waited for has no state but Z."""
    found = []
    for pid in process_ids():
        state, ppid = proc_file(pid, "stat").rpartition(b")")[2].split()[:2] or (b"Z", b"0")
        if int(ppid) == parent and state != b"Z":
            found.append(pid)
    return found


def is_running(pid: int) -> bool:
    return proc_file(pid, "stat").rpartition(b")")[2].split()[:1] not in ([], [b"Z"])


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"no {what} within {timeout_s} s"
        time.sleep(0.01)
    return value


# Runs in this process, whose fork server is started once: quicker, and nothing of them can be killed.


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["run", *map(str, arguments)])


def assert_refused(result: Result, *words: str, code: int = 2) -> None:
    """One line on standard error, with these words in it, and nothing on standard output."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("error: ")
    for word in words:
        assert word in result.stderr


def complete_lines(run_dir: Path) -> list[bytes]:
    path = run_dir / "records.jsonl"
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in complete_lines(run_dir)]


def cell_name(record: dict[str, Any]) -> tuple[str, str]:
    strategy = record["spec"]["strategy"]
    return record["spec"]["workload"]["name"], strategy.get("backend", strategy["kind"])


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


WORKLOADS = [
    tiny_workload("small"),
    tiny_workload("wide", batch_size=3),
    tiny_workload("long", prompt_tokens=40),
    tiny_workload("chatty", output_tokens=11),
]
NUM_CELLS = 12


@dataclass
class FinishedRun:
    path: Path
    experiment: Path
    exit_code: int
    stdout: str
    stderr: str
    wall_s: float
    startup_s: float
    """Until the run directory stands: before that, there is nothing to lose."""
    cells_s: float


@pytest.fixture(scope="module")
def clean_run(tmp_path_factory: pytest.TempPathFactory, tiny_experiment: WriteExperiment) -> FinishedRun:
    folder = tmp_path_factory.mktemp("clean")
    experiment = tiny_experiment(folder, workloads=WORKLOADS)
    run = start_command(experiment, "--out", folder / "run", "--json")
    exit_code, stdout, stderr = run.finish()
    wall_s = time.time() - run.started
    began, ended = [(folder / "run" / name).stat().st_mtime for name in ("experiment.yaml", "records.jsonl")]
    return FinishedRun(
        folder / "run", experiment, exit_code, stdout, stderr, wall_s, began - run.started, ended - began
    )


@pytest.fixture
def copied_run(clean_run: FinishedRun, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clean_run.path, tmp_path / "copy"))


class TestFinishedRun:
    def test_it_ends_well_with_one_record_a_cell(self, clean_run: FinishedRun) -> None:
        assert clean_run.exit_code == 0, clean_run.stderr
        names = [cell_name(record) for record in read_records(clean_run.path)]
        # The baseline's cells first, then strategy by strategy.
        assert names == [(w["name"], s) for s in ("dynamic", "streamed", "fp8") for w in WORKLOADS]

    def test_every_record_has_the_fields_that_scripts_read(self, clean_run: FinishedRun) -> None:
        kinds = {"dynamic": "dynamic", "streamed": "streamed", "fp8": "quantized"}
        for record in read_records(clean_run.path):
            workload, strategy = cell_name(record)
            asked = next(entry for entry in WORKLOADS if entry["name"] == workload)
            assert record["schema_version"] == 1
            assert record["status"] == "ok"
            assert record["failure"] is None
            assert record["evidence"] == "emulated"
            assert record["spec"]["strategy"]["kind"] == kinds[strategy]
            for name in ("batch_size", "prompt_tokens", "output_tokens"):
                assert record["spec"]["workload"][name] == asked[name]
            (trial,) = record["trials"]
            assert trial["output_tokens"] == asked["output_tokens"]
            assert len(trial["inter_token_latencies_s"]) == asked["output_tokens"] - 1
            assert all(latency > 0 for latency in (trial["ttft_s"], *trial["inter_token_latencies_s"]))
            total_s = trial["ttft_s"] + sum(trial["inter_token_latencies_s"])
            assert trial["e2e_latency_s"] == pytest.approx(total_s, rel=1e-6)
            assert min(trial["num_major_faults"], trial["num_minor_faults"]) >= 0
            assert trial["peak_cgroup_bytes"] is None or trial["peak_cgroup_bytes"] > 0
            assert len(record["fidelity"]["kl_nats"]) == asked["output_tokens"]
            assert record["conditions"]["baseline_bytes"] == record["model"]["weights_bytes"] == WEIGHTS_BYTES
            assert record["conditions"]["leaked_bytes"] == 0
        assert len({record["run_id"] for record in read_records(clean_run.path)}) == NUM_CELLS

    def test_payloads_are_the_arithmetic_to_the_byte(self, clean_run: FinishedRun) -> None:
        for record in read_records(clean_run.path):
            workload, strategy = cell_name(record)
            # batch * (prompt + output - 1)
            tokens = {"small": 2 * 16, "wide": 3 * 16, "long": 2 * 44, "chatty": 2 * 22}[workload]
            whole_bytes = tokens * VALUES_PER_TOKEN * FLOAT32_BYTES
            device_bytes, host_bytes = {
                "dynamic": (whole_bytes, 0),
                "streamed": (whole_bytes * 2 // 3, whole_bytes),  # 2 scratch layers of 3
                "fp8": (tokens * VALUES_PER_TOKEN + 3 * 8, 0),  # a byte a value, two float32 scales a layer
            }[strategy]
            (trial,) = record["trials"]
            assert (trial["kv_cache_device_bytes"], trial["kv_cache_host_bytes"]) == (device_bytes, host_bytes)
            for phase in ("prefill", "decode"):
                # Weights, and at the phase's end the cache without its last row a session.
                held_bytes = device_bytes * (tokens - record["spec"]["workload"]["batch_size"]) // tokens
                least_bytes = WEIGHTS_BYTES + (held_bytes if phase == "decode" else 0)
                assert least_bytes < trial[phase]["peak_allocated_bytes"] < 8 * 1024**2

    def test_streamed_tokens_cross_the_link_once(self, clean_run: FinishedRun) -> None:
        row_bytes = VALUES_PER_TOKEN * FLOAT32_BYTES
        for record in read_records(clean_run.path):
            workload, strategy = cell_name(record)
            if strategy != "streamed" or workload != "small":
                continue
            (trial,) = record["trials"]
            assert trial["prefill"]["d2h_bytes"] == 2 * 12 * row_bytes
            assert trial["decode"]["d2h_bytes"] == 2 * 4 * row_bytes

    def test_streamed_logits_are_the_baselines_bit_by_bit(self, clean_run: FinishedRun) -> None:
        fidelity = {cell_name(record): record["fidelity"] for record in read_records(clean_run.path)}
        for workload in WORKLOADS:
            name = workload["name"]
            assert fidelity[name, "streamed"]["against"] == "baseline"
            assert fidelity[name, "streamed"]["bit_equal"]
            assert fidelity[name, "dynamic"]["against"] == "chunked_prefill"
            assert not fidelity[name, "fp8"]["bit_equal"]
            assert fidelity[name, "fp8"]["max_kl_nats"] > 0

    def test_recorded_tokens_are_the_models_own_greedy_ones(self, clean_run: FinishedRun) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        config = AutoConfig.for_model(**TINY_CONFIG)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        prompt = np.random.default_rng(0).integers(128, size=(3, 12), dtype=np.int64)
        sequence = torch.from_numpy(prompt)
        with torch.no_grad():
            for _ in range(5):
                logits = model(sequence, use_cache=False).logits[:, -1]
                sequence = torch.cat([sequence, logits.argmax(-1, keepdim=True)], dim=1)
        assert load_tokens(clean_run.path, "wide").tolist() == sequence[:, 12:].tolist()

    def test_json_is_all_of_standard_output(self, clean_run: FinishedRun) -> None:
        summary = json.loads(clean_run.stdout)
        assert [cell["status"] for cell in summary["cells"]] == ["ok"] * NUM_CELLS
        assert summary["run_dir"] == str(clean_run.path)
        assert all(Path(file).is_file() for file in summary["files"])

    def test_progress_is_silent_in_a_pipe(self, clean_run: FinishedRun) -> None:
        assert "\x1b" not in clean_run.stdout
        assert clean_run.stderr == ""


class TestKills:
    """SIGKILL at random instants, 20 in all."""

    def test_a_killed_worker_costs_its_cell_and_nothing_else(
        self, clean_run: FinishedRun, tmp_path: Path, start_run: StartRun
    ) -> None:
        rng = random.Random(20260)
        worker_life_s = clean_run.cells_s / 3
        num_kills = num_failed = 0
        for number in range(5):
            out = tmp_path / f"run-{number}"
            run = start_run(clean_run.experiment, "--out", out)
            # The first one at once: the baseline's worker is loading, and the others go on without its tokens.
            killed = kill_workers(run, [0.0, *(rng.uniform(0, worker_life_s) for _ in range(9 - num_kills))])
            code, _, stderr = run.finish()
            run.wait_until_gone()
            records = read_records(out)
            assert len(records) == len({record["run_id"] for record in records}) == NUM_CELLS
            failed = [record for record in records if record["status"] != "ok"]
            assert 1 <= len(failed) <= killed
            for record in failed:
                assert record["status"] == "failed"
                assert record["failure"]["type"] == "WorkerDied"
                assert "SIGKILL" in record["failure"]["message"].splitlines()[0]
            assert [cell_name(failed[0]), failed[0]["failure"]["stage"]] == [("small", "dynamic"), "load"]
            assert (code, stderr) == (1, "")
            assert_resume_completes(clean_run, out)
            num_kills += killed
            num_failed += len(failed)
            if num_kills == 10:
                break
        assert num_kills == 10
        # A worker killed after its last answer had nothing left to lose.
        assert num_failed >= 5

    def test_a_killed_parent_loses_at_most_the_cell_in_flight(
        self, clean_run: FinishedRun, tmp_path: Path, start_run: StartRun
    ) -> None:
        rng = random.Random(20261)
        num_kills = 0
        directories = [tmp_path / "run-0"]
        while num_kills < 10:
            assert len(directories) < 10, "the runs are too short for their kills"
            out = directories[-1]
            resumable = (out / "experiment.yaml").exists()
            before = complete_lines(out)
            run = start_run(clean_run.experiment, "--out", out, *(["--resume"] if resumable else []))
            # What a clean run takes, less what is finished.
            time.sleep(rng.uniform(0, clean_run.wall_s - clean_run.cells_s * len(before) / NUM_CELLS))
            finished = complete_lines(out)
            run.process.kill()
            code = run.process.wait()
            assert code in (0, -signal.SIGKILL)
            num_kills += code == -signal.SIGKILL
            run.wait_until_gone()
            lines = complete_lines(out)
            assert lines[: len(finished)] == finished
            assert lines[: len(before)] == before
            assert all(json.loads(line)["status"] == "ok" for line in lines)
            if len(lines) == NUM_CELLS:
                assert_resume_completes(clean_run, out)
                directories.append(tmp_path / f"run-{len(directories)}")
        if (directories[-1] / "experiment.yaml").exists():
            assert_resume_completes(clean_run, directories[-1])

    def test_a_worker_killed_in_the_check_beforehand_is_one_line(
        self, clean_run: FinishedRun, tmp_path: Path, start_run: StartRun
    ) -> None:
        run = start_run(clean_run.experiment, "--out", tmp_path / "run")
        os.kill(wait_for(run.worker, "process that checks the experiment"), signal.SIGKILL)
        code, stdout, stderr = run.finish()
        assert (code, stdout) == (3, "")
        assert "SIGKILL" in stderr
        assert len(stderr.splitlines()) == 1
        assert not (tmp_path / "run").exists()
        run.wait_until_gone()

    def test_a_workers_compiler_dies_with_the_worker(self) -> None:
        process = WorkerProcess(build_for_ever, (), None)
        compiler = process.answer(60, on_pass=lambda _: None)
        try:
            assert is_running(compiler)
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            assert isinstance(process.answer(60, on_pass=lambda _: None), Died)
            process.kill()
            wait_for(lambda: not is_running(compiler), "end of the compiler", 10)
        finally:
            if is_running(compiler):
                os.kill(compiler, signal.SIGKILL)

    def test_a_workers_compiler_dies_with_the_session(self, start_run: StartRun) -> None:
        script = "import sys; sys.path.insert(0, sys.argv[1]); from test_session import start_build; start_build()"
        run = start_run(Path(__file__).parent, program=("-c", script))
        assert run.process.stdout is not None
        compiler = int(run.process.stdout.readline())
        assert compiler in run.survivors()
        run.process.kill()
        run.process.wait()
        run.wait_until_gone()


def kill_workers(run: Run, delays_s: list[float]) -> int:
    """Kills one worker after the other, each a while after it was first seen, and returns how many."""
    last = wait_for(run.worker, "process that checks the experiment")
    for killed, delay_s in enumerate(delays_s):
        while run.worker() in (None, last):
            if run.process.poll() is not None:
                return killed
            time.sleep(0.01)
        time.sleep(delay_s)
        last = run.worker()  # which may be another one by now
        if last is None:
            return killed
        os.kill(last, signal.SIGKILL)
    return len(delays_s)


def latest(run_dir: Path) -> dict[str, dict[str, Any]]:
    """The last record of each cell."""
    return {record["run_id"]: record for record in read_records(run_dir)}


def assert_resume_completes(clean_run: FinishedRun, out: Path) -> None:
    before = complete_lines(out)
    unfinished = NUM_CELLS - sum(record["status"] == "ok" for record in latest(out).values())
    result = invoke(clean_run.experiment, "--out", out, "--resume")
    assert result.exit_code == 0, result.output
    assert complete_lines(out)[: len(before)] == before
    assert len(complete_lines(out)) >= len(before) + unfinished
    records = latest(out)
    assert records.keys() == latest(clean_run.path).keys()
    assert {record["status"] for record in records.values()} == {"ok"}
    # Every strategy was given the baseline's tokens, whatever became of the baseline's first try.
    assert all(record["fidelity"] is not None for record in records.values())
    assert all(record["fidelity"]["bit_equal"] for record in records.values() if cell_name(record)[1] == "streamed")
    for name in ("small", "wide", "long", "chatty"):
        tokens = [load_tokens(folder, name) for folder in (out, clean_run.path)]
        assert np.array_equal(*tokens)
    assert "\x1b" not in result.stdout
    assert result.stderr == ""


def build_for_ever(connection: Connection) -> None:
    """A worker in the middle of building an extension; ninja puts every compiler in a process group of its own."""
    become_worker(None)
    compiler = subprocess.Popen(["sleep", "600"], process_group=0)
    connection.send(compiler.pid)
    compiler.wait()


def start_build() -> None:
    """Body of a process that waits for such a worker."""
    process = WorkerProcess(build_for_ever, (), None)
    print(process.answer(60, on_pass=lambda _: None), flush=True)
    process.answer(600, on_pass=lambda _: None)


class TestInterrupt:
    def test_finished_records_are_kept_and_the_message_tells_how_to_go_on(
        self, clean_run: FinishedRun, tmp_path: Path, start_run: StartRun
    ) -> None:
        out = tmp_path / "run"
        run = start_run(clean_run.experiment, "--out", out)
        finished = wait_for(lambda: complete_lines(out), "record")
        os.killpg(run.process.pid, signal.SIGINT)
        code, stdout, stderr = run.finish(timeout_s=30)
        assert code == 130
        assert stdout == ""
        assert "Traceback" not in stderr
        assert f"--resume--out{out}" in "".join(stderr.split())
        run.wait_until_gone()
        lines = complete_lines(out)
        assert lines[: len(finished)] == finished
        assert len(finished) <= len(lines) < NUM_CELLS
        assert_resume_completes(clean_run, out)

    def test_before_the_first_cell_it_leaves_nothing(
        self, clean_run: FinishedRun, tmp_path: Path, start_run: StartRun
    ) -> None:
        run = start_run(clean_run.experiment, "--out", tmp_path / "run")
        wait_for(run.fork_server, "fork server")
        time.sleep(0.5)  # it is importing the frameworks now
        os.killpg(run.process.pid, signal.SIGINT)
        code, stdout, stderr = run.finish(timeout_s=30)
        assert (code, stdout, stderr) == (130, "", "")
        run.wait_until_gone()
        assert not (tmp_path / "run").exists()


class TestFallingShort:
    def test_a_cell_over_its_cap_is_oom_and_the_worker_goes_on(
        self, clean_run: FinishedRun, tmp_path: Path, tiny_experiment: WriteExperiment
    ) -> None:
        # 4 sessions of 260 tokens hold 798,720 bytes; 2 sessions of 16 tokens hold 24,576.
        big = tiny_workload("big", batch_size=4, prompt_tokens=256)
        experiment = tiny_experiment(
            tmp_path,
            workloads=[big, tiny_workload("small")],
            budget={"device_bytes": WEIGHTS_BYTES + 1000 + 262_144, "runtime_bytes": 1000, "enforce": True},
        )
        result = invoke(experiment, "--out", tmp_path / "run")
        assert result.exit_code == 0, result.output
        records = {cell_name(record): record for record in read_records(tmp_path / "run")}
        assert len(records) == 6
        oom, after = records["big", "dynamic"], records["small", "dynamic"]
        assert oom["status"] == "oom"
        assert oom["failure"]["type"] == "OutOfMemoryError"
        assert [oom["failure"][key] for key in ("stage", "phase", "ledger")] == ["memory", "prefill", "device"]
        assert oom["trials"] == []
        for record in records.values():
            assert record["conditions"]["cap_bytes"] == WEIGHTS_BYTES + 262_144
            assert record["conditions"]["leaked_bytes"] == 0
        assert after["status"] == "ok"
        assert after["trials"][0]["decode"]["peak_allocated_bytes"] <= WEIGHTS_BYTES + 262_144
        # One worker: the model was loaded once.
        assert after["conditions"]["load_s"] == oom["conditions"]["load_s"]
        tokens = [load_tokens(run, "small") for run in (tmp_path / "run", clean_run.path)]
        assert np.array_equal(*tokens)
        assert records["small", "streamed"]["fidelity"]["bit_equal"]

    def test_a_cell_over_its_host_cap_is_oom_of_the_host_and_the_run_goes_on(
        self, tmp_path: Path, tiny_experiment: WriteExperiment
    ) -> None:
        """Three layers are streamed, of which a token takes 2 * 2 * 16 * 4 = 256 bytes each.

        Of `small` 2 sessions of 16 tokens take 8,192 bytes a layer, of `long` 2 of 32 tokens 16,384. All three layers
        of `small` fit a cap of 24,576 to the byte; of `long` the second one does not.
        """
        experiment = tiny_experiment(
            tmp_path,
            workloads=[tiny_workload("long", prompt_tokens=28), tiny_workload("small")],
            budget={"device_bytes": "8 MiB", "host_bytes": 24_576, "enforce": True},
        )
        result = invoke(experiment, "--out", tmp_path / "run")
        assert result.exit_code == 0, result.output
        records = {cell_name(record): record for record in read_records(tmp_path / "run")}
        oom = records.pop(("long", "streamed"))
        assert (oom["status"], oom["failure"]["type"], oom["failure"]["ledger"]) == ("oom", "HostCapError", "host")
        assert "16.00 KiB (16,384 bytes) was asked for, the link's buffers hold 16.00 KiB" in oom["failure"]["message"]
        assert oom["conditions"]["leaked_bytes"] == 0
        assert {record["status"] for record in records.values()} == {"ok"}
        assert len(records) == 5
        assert records["small", "streamed"]["trials"][0]["kv_cache_host_bytes"] == 24_576
        for record in records.values():
            assert record["conditions"]["host_cap_bytes"] == 24_576

    def test_a_cell_that_takes_too_long_is_given_up_and_the_run_goes_on(
        self, tmp_path: Path, tiny_experiment: WriteExperiment
    ) -> None:
        # Some 200 times the work of the other one.
        endless = tiny_workload("endless", prompt_tokens=100, output_tokens=400)
        experiment = tiny_experiment(
            tmp_path,
            workloads=[endless, tiny_workload("small")],
            strategies=[{"kind": "dynamic"}],
            measurement={"trials": 100, "cell_timeout_s": 4},
        )
        result = invoke(experiment, "--out", tmp_path / "run")
        assert result.exit_code == 1, result.output
        late, after = read_records(tmp_path / "run")
        assert (late["status"], late["failure"]["type"]) == ("timeout", "Timeout")
        assert "cell_timeout_s = 4" in late["failure"]["message"]
        assert late["failure"]["stage"] in ("reference", "fidelity", "memory", "timing")
        assert 4 <= late["duration_s"] < 20
        assert after["status"] == "ok"
        assert not [worker for server in children(os.getpid()) for worker in children(server)]

    def test_a_corrupt_model_fails_each_cell_without_a_traceback(
        self, tiny_model_dir: Path, tmp_path: Path, tiny_experiment: WriteExperiment, start_run: StartRun
    ) -> None:
        model = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
        weights = model / "model.safetensors"
        os.truncate(weights, weights.stat().st_size // 2)
        experiment = tiny_experiment(tmp_path, model={"source": str(model), "dtype": "float32"})
        run = start_run(experiment, "--out", tmp_path / "run")
        code, stdout, stderr = run.finish()
        assert code == 1, stderr
        assert "Traceback" not in stdout + stderr
        records = read_records(tmp_path / "run")
        assert len(records) == 3
        for record in records:
            assert (record["status"], record["failure"]["stage"]) == ("failed", "load")
            assert record["failure"]["message"]
        run.wait_until_gone()


class TestResume:
    def test_finished_cells_are_neither_run_nor_rewritten(self, clean_run: FinishedRun, copied_run: Path) -> None:
        logs, records = snapshot(copied_run / "logs"), snapshot(copied_run)["records.jsonl"]
        result = invoke(clean_run.experiment, "--out", copied_run, "--resume")
        assert result.exit_code == 0, result.output
        assert snapshot(copied_run / "logs") == logs
        assert snapshot(copied_run)["records.jsonl"] == records

    def test_another_experiment_is_refused(
        self, copied_run: Path, tmp_path: Path, tiny_experiment: WriteExperiment
    ) -> None:
        before = snapshot(copied_run)
        other = tiny_experiment(tmp_path, workloads=WORKLOADS, measurement={"trials": 2})
        result = invoke(other, "--out", copied_run, "--resume")
        assert_refused(result, str(copied_run), "experiment", "measurement", "--allow-mismatch")
        assert snapshot(copied_run) == before

    def test_another_machine_is_refused_until_it_is_allowed(self, clean_run: FinishedRun, copied_run: Path) -> None:
        file = copied_run / "machine.json"
        machine = json.loads(file.read_text())
        file.write_text(json.dumps(machine | {"host_memory_bytes": machine["host_memory_bytes"] + 4096}))
        before = snapshot(copied_run)
        result = invoke(clean_run.experiment, "--out", copied_run, "--resume")
        assert_refused(result, "machine", "host_memory_bytes", "--allow-mismatch")
        assert snapshot(copied_run) == before
        result = invoke(clean_run.experiment, "--out", copied_run, "--resume", "--allow-mismatch")
        assert result.exit_code == 0, result.output
        assert snapshot(copied_run)["records.jsonl"] == before["records.jsonl"]
        # The commit is noted, and is no part of what makes a machine another one.
        assert json.loads(file.read_text()) | {"git_commit": None} == machine | {"git_commit": None}
        assert json.loads((copied_run / "machine.1.json").read_text()) != machine

    def test_a_strategy_added_to_a_finished_run_is_compared_like_the_others(
        self, copied_run: Path, tmp_path: Path, tiny_experiment: WriteExperiment
    ) -> None:
        """The baseline's logits are dropped when a run is finished: the baseline runs once more to leave them."""
        assert not list((copied_run / "reference").glob("*.logits.npy"))
        strategies = [{"kind": "dynamic"}, {"kind": "streamed", "prefetch_layers": 1}]
        wider = tiny_experiment(tmp_path, workloads=WORKLOADS[:1], strategies=strategies)
        before = complete_lines(copied_run)
        result = invoke(wider, "--out", copied_run, "--resume", "--allow-mismatch")
        assert result.exit_code == 0, result.output
        (added,) = [json.loads(line) for line in complete_lines(copied_run)[len(before) :]]
        assert (added["spec"]["strategy"]["kind"], added["spec"]["strategy"]["prefetch_layers"]) == ("streamed", 1)
        assert added["fidelity"]["bit_equal"]
        assert added["conditions"]["forced_tokens"]

    def test_reference_files_that_cannot_be_read_are_made_again(
        self, clean_run: FinishedRun, copied_run: Path
    ) -> None:
        (copied_run / "records.jsonl").write_text("")
        for file in (copied_run / "reference").iterdir():
            file.write_text("junk")
        result = invoke(clean_run.experiment, "--out", copied_run, "--resume")
        assert result.exit_code == 0, result.output
        assert all(record["fidelity"] is not None for record in read_records(copied_run))

    def test_a_workload_changed_under_its_name_gets_its_own_prompt(
        self, copied_run: Path, tmp_path: Path, tiny_experiment: WriteExperiment
    ) -> None:
        longer = tiny_experiment(tmp_path, workloads=[WORKLOADS[0] | {"prompt_tokens": 20}])
        before = complete_lines(copied_run)
        result = invoke(longer, "--out", copied_run, "--resume", "--allow-mismatch")
        assert result.exit_code == 0, result.output
        added = [json.loads(line) for line in complete_lines(copied_run)[len(before) :]]
        assert len(added) == 3
        # 20 + 5 - 1 cached tokens, batch 2, 3 layers, 2 kv heads, head_dim 16, float32.
        assert added[0]["trials"][0]["kv_cache_device_bytes"] == 24 * 2 * 3 * 2 * 2 * 16 * 4

    def test_a_directory_in_use_is_not_taken_without_resume(self, clean_run: FinishedRun, copied_run: Path) -> None:
        before = snapshot(copied_run)
        assert_refused(invoke(clean_run.experiment, "--out", copied_run), str(copied_run), "--resume")
        assert snapshot(copied_run) == before


class TestRepeatedPasses:
    """Several memory and transfer trials: each starts from the same memory, and all are kept."""

    @staticmethod
    @pytest.fixture(scope="class")
    def records(tmp_path_factory: pytest.TempPathFactory, tiny_experiment: WriteExperiment) -> list[Any]:
        folder = tmp_path_factory.mktemp("repeated")
        plan = {"trials": 3, "memory_trials": 3, "transfer_trials": 2}
        result = invoke(tiny_experiment(folder, measurement=plan), "--out", folder / "run")
        assert result.exit_code == 0, result.output
        return read_records(folder / "run")

    def test_no_pass_finds_the_cache_of_an_earlier_one(self, records: list[Any]) -> None:
        for record in records:
            for phase in ("prefill", "decode"):
                peaks = {trial[phase]["peak_allocated_bytes"] for trial in record["trials"]}
                assert len(peaks) == 1, (cell_name(record), phase)
            assert record["conditions"]["leaked_bytes"] == 0

    def test_only_strategies_that_use_the_link_report_transfers(self, records: list[Any]) -> None:
        """12 prompt tokens and 4 decode steps; a token is 2 sessions * 3 layers * 2 kv heads * 32 values * 4 bytes."""
        token_bytes = 2 * 3 * 2 * 32 * 4
        for record in records:
            first, second, third = record["trials"]
            if record["spec"]["strategy"]["kind"] != "streamed":
                assert first["decode"]["d2h_bytes"] is None
                assert first["decode"]["exposed_transfer_s"] is None
                continue
            for trial in (first, second):
                assert trial["prefill"]["d2h_bytes"] == 12 * token_bytes
                assert trial["decode"]["d2h_bytes"] == 4 * token_bytes
                fetched = trial["prefill"]["h2d_bytes"] + trial["decode"]["h2d_bytes"]
                assert fetched == (12 + 13 + 14 + 15) * token_bytes
                assert trial["decode"]["h2d_busy_s"] > 0
                assert trial["decode"]["exposed_transfer_s"] >= 0
            assert third["decode"]["h2d_busy_s"] is None


class TestTraces:
    """Every cell is traced as well, before anything is measured and in a process of its own."""

    @pytest.fixture(scope="class")
    @staticmethod
    def traced_run(tmp_path_factory: pytest.TempPathFactory, tiny_experiment: WriteExperiment) -> tuple[Path, Path]:
        """The experiment and its finished run: five strategies, of which one does not run on a CPU."""
        folder = tmp_path_factory.mktemp("traced")
        strategies = [{"kind": kind} for kind in ("dynamic", "static", "streamed", "offloaded")]
        experiment = tiny_experiment(
            folder,
            trace=True,
            workloads=[WORKLOADS[0], WORKLOADS[3]],
            strategies=[*strategies, {"kind": "quantized", "backend": "fp8"}],
        )
        result = invoke(experiment, "--out", folder / "run", "--json")
        assert result.exit_code == 0, result.output
        summary = json.loads(result.stdout)
        assert [(cell["evidence"], cell["status"]) for cell in summary["traces"]].count(("traced", "ok")) == 8
        assert {cell["evidence"] for cell in summary["cells"]} == {"emulated"}
        return experiment, folder / "run"

    def test_they_come_first_under_names_of_their_own(self, traced_run: tuple[Path, Path]) -> None:
        records = read_records(traced_run[1])
        assert [record["evidence"] for record in records] == ["traced"] * 10 + ["emulated"] * 10
        assert len({record["run_id"] for record in records}) == 20
        for traced, run in zip(records[:10], records[10:], strict=True):
            assert traced["spec"] == run["spec"]
            assert traced["status"] == run["status"]
            assert run["trace"] is None
            assert traced["trials"] == []
            assert (traced["trace"] is None) == (cell_name(traced)[1] == "offloaded")
        refused = next(record for record in records if cell_name(record)[1] == "offloaded")
        assert refused["status"] == "unsupported"
        assert "cannot run on cpu" in refused["failure"]["message"]

    def test_a_run_holds_what_its_trace_holds_and_the_tokens_it_is_given_to_the_byte(
        self, traced_run: tuple[Path, Path]
    ) -> None:
        """The forced tokens are 8 bytes for each of 2 sessions and 5 or 11 tokens: all that a trace has not."""
        records = read_records(traced_run[1])
        for traced, run in zip(records[:10], records[10:], strict=True):
            if run["status"] == "unsupported":
                continue
            (trial,), trace = run["trials"], traced["trace"]
            given_bytes = 8 * 2 * run["spec"]["workload"]["output_tokens"]
            decode_peak_bytes = max(step["peak_device_bytes"] for step in trace["steps"])
            assert trial["prefill"]["peak_allocated_bytes"] == trace["prefill"]["peak_device_bytes"] + given_bytes
            assert trial["decode"]["peak_allocated_bytes"] == decode_peak_bytes + given_bytes
            last = trace["steps"][-1]
            assert trial["kv_cache_device_bytes"] == last["kv_device_bytes"]
            assert trial["kv_cache_host_bytes"] == last["kv_host_bytes"]
            assert trace["weights_bytes"] == run["conditions"]["baseline_bytes"]

    def test_what_is_traced_is_not_traced_again(self, traced_run: tuple[Path, Path]) -> None:
        experiment, run_dir = traced_run
        before = complete_lines(run_dir)
        assert invoke(experiment, "--out", run_dir, "--resume").exit_code == 0
        assert complete_lines(run_dir) == before

    def test_a_directory_without_traces_gets_them_and_runs_no_cell_again(
        self, traced_run: tuple[Path, Path], tmp_path: Path
    ) -> None:
        run_dir = Path(shutil.copytree(traced_run[1], tmp_path / "copy"))
        lines = complete_lines(run_dir)
        (run_dir / "records.jsonl").write_bytes(b"".join(line + b"\n" for line in lines[10:]))
        assert invoke(traced_run[0], "--out", run_dir, "--resume").exit_code == 0
        records = read_records(run_dir)
        assert [record["evidence"] for record in records] == ["emulated"] * 10 + ["traced"] * 10
        assert [record["run_id"] for record in records[10:]] == [json.loads(line)["run_id"] for line in lines[:10]]

    def test_a_killed_tracer_costs_its_trace_and_no_cell(
        self, tmp_path: Path, tiny_experiment: WriteExperiment, start_run: StartRun
    ) -> None:
        experiment, out = tiny_experiment(tmp_path, trace=True), tmp_path / "run"
        run = start_run(experiment, "--out", out)
        kill_workers(run, [0.0])
        code, _, stderr = run.finish()
        run.wait_until_gone()
        assert (code, stderr) == (0, "")
        records = read_records(out)
        assert [record["status"] for record in records] == ["failed", *["ok"] * 5]
        assert "SIGKILL" in records[0]["failure"]["message"]
        assert records[0]["failure"]["stage"] == "trace"
        assert invoke(experiment, "--out", out, "--resume").exit_code == 0
        again = read_records(out)[6:]
        assert [(record["run_id"], record["status"]) for record in again] == [(records[0]["run_id"], "ok")]

    def test_an_interrupted_run_keeps_its_traces(
        self, traced_run: tuple[Path, Path], tmp_path: Path, start_run: StartRun
    ) -> None:
        out = tmp_path / "run"
        run = start_run(traced_run[0], "--out", out)
        finished = wait_for(lambda: complete_lines(out), "traced record")
        os.killpg(run.process.pid, signal.SIGINT)
        code, _, stderr = run.finish(timeout_s=30)
        run.wait_until_gone()
        assert (code, "Traceback" in stderr) == (130, False)
        assert complete_lines(out)[: len(finished)] == finished
        assert invoke(traced_run[0], "--out", out, "--resume").exit_code == 0
        assert sorted(latest(out)) == sorted(latest(traced_run[1]))
        assert len(read_records(out)) == 20

    def test_a_model_that_cannot_be_built_or_traced_gives_its_reason(self, tmp_path: Path) -> None:
        """longcat_flash asks its router which experts have tokens."""
        from test_real_caches import CONFIGS
        from transformers import AutoConfig

        AutoConfig.for_model("longcat_flash", **CONFIGS["longcat_flash"]).save_pretrained(tmp_path / "routed")
        ends = {}
        for name in ("nowhere", "routed"):
            model = ModelSpec(config=str(tmp_path / name), weights="random")
            with CellTracer(model, tmp_path / "log") as tracer:
                ends[name] = tracer.trace(make_spec(model=model, workload=make_workload(output_tokens=3)))
        failures = [result.failure for result in ends.values() if result.failure is not None]
        assert [result.status for result in ends.values()] == ["failed", "unsupported"]
        assert [failure.stage for failure in failures] == ["trace", "trace"]
        assert "no config" in failures[0].message
        assert "aten.nonzero" in failures[1].message

    def test_a_trace_that_hangs_costs_no_cell(
        self, tmp_path: Path, tiny_experiment: WriteExperiment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("offload_eval.execution.traces.TRACE_TIMEOUT_S", 0.01)
        result = invoke(tiny_experiment(tmp_path, trace=True), "--out", tmp_path / "run")
        assert result.exit_code == 0, result.output
        records = read_records(tmp_path / "run")
        assert [record["status"] for record in records] == ["timeout"] * 3 + ["ok"] * 3
        assert not [worker for server in children(os.getpid()) for worker in children(server)]


class TestRefusedBeforehand:
    """Exit code 2 and one line, and no directory is made."""

    def refuse(self, experiment: Path, *words: str) -> None:
        out = experiment.parent / "run"
        assert_refused(invoke(experiment, "--out", out), *words)
        assert not out.exists()

    def test_a_prompt_longer_than_the_context(self, tmp_path: Path, tiny_experiment: WriteExperiment) -> None:
        lengths = {"prompt_tokens": 510, "output_tokens": 3}
        long = tiny_experiment(tmp_path, workloads=[tiny_workload("small"), tiny_workload("long", **lengths)])
        self.refuse(long, "workloads[1]", "513", "512")

    def test_a_text_shorter_than_the_prompt(
        self, tiny_model_dir: Path, tmp_path: Path, tiny_experiment: WriteExperiment
    ) -> None:
        (tmp_path / "text.txt").write_text("word " * 23)
        experiment = self.text_experiment(tiny_model_dir, tmp_path, tiny_experiment, {"kind": "text"}, "text.txt")
        self.refuse(experiment, "workloads[0]", "24", "23")

    def test_a_line_that_is_not_json(
        self, tiny_model_dir: Path, tmp_path: Path, tiny_experiment: WriteExperiment
    ) -> None:
        (tmp_path / "lines.jsonl").write_text('{"text": "word"}\n\nnot json\n')
        experiment = self.text_experiment(tiny_model_dir, tmp_path, tiny_experiment, {"kind": "jsonl"}, "lines.jsonl")
        self.refuse(experiment, "lines.jsonl", "line 3")

    def text_experiment(
        self, model: Path, folder: Path, write: WriteExperiment, prompt: dict[str, str], file: str
    ) -> Path:
        workload = tiny_workload("text", prompt=prompt | {"path": file})
        return write(folder, model={"source": str(model), "dtype": "float32"}, workloads=[workload])

    def test_a_folder_that_is_not_there(self, tmp_path: Path, tiny_experiment: WriteExperiment) -> None:
        self.refuse(tiny_experiment(tmp_path, model={"source": "./nowhere"}), "model.source", "./nowhere")

    def test_a_hub_id_that_is_not_in_the_cache(self, tmp_path: Path, tiny_experiment: WriteExperiment) -> None:
        self.refuse(tiny_experiment(tmp_path, model={"source": "nobody/no-such-model"}), "nobody/no-such-model")


def test_dry_run_says_where_the_host_ledger_decides(
    tmp_path: Path, tiny_experiment: WriteExperiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three layers of 16 tokens of 256 bytes are 12,288 bytes a session on the host: ten in 122,880."""
    monkeypatch.setenv("COLUMNS", "80")
    experiment = tiny_experiment(tmp_path, budget={"device_bytes": "8 MiB", "host_bytes": 122_880})
    shown = invoke(experiment, "--dry-run").stdout
    sessions = {words[0]: words[9:] for line in shown.splitlines() if len(words := line.split()) > 9}
    assert sessions["streamed"] == ["10", "(host)"]
    assert sessions["dynamic"] == ["641"]
    assert max(map(len, shown.splitlines())) <= 80
    document = json.loads(invoke(experiment, "--dry-run", "--json").stdout)
    bounds = {cell["spec"]["strategy"]["kind"]: cell["bound"] for cell in document["cells"]}
    assert (bounds["streamed"]["sessions"], bounds["streamed"]["limiting_ledger"]) == (10, "host")
    assert (bounds["dynamic"]["sessions"], bounds["dynamic"]["limiting_ledger"]) == (641, "device")


def test_dry_run_lists_cells_with_bound_and_refusal_and_makes_no_directory(
    tmp_path: Path, tiny_experiment: WriteExperiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    experiment = tiny_experiment(tmp_path, strategies=[{"kind": "dynamic"}, {"kind": "offloaded"}])
    result = invoke(experiment, "--out", tmp_path / "run", "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    dynamic, offloaded = json.loads(result.stdout)["cells"]
    assert dynamic["spec"]["strategy"]["kind"] == "dynamic"
    # 16 tokens; the budget's 8 MiB without the weights hold 640 sessions of them.
    assert dynamic["bound"]["kv_device_bytes_per_session"] == 16 * VALUES_PER_TOKEN * FLOAT32_BYTES == 12_288
    assert dynamic["bound"]["sessions"] == 641
    assert dynamic["refusal"] is None
    assert "cpu" in offloaded["refusal"]
    assert [path.name for path in tmp_path.iterdir()] == ["experiment.yaml"]


@pytest.fixture(scope="module")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, saved with weights, and with a tokenizer that makes one token of every word."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-model")
    config = AutoConfig.for_model(**TINY_CONFIG)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "word": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return folder


class TestAuto:
    """`resident_share: auto` is a share for each workload, that its budget leaves room for by trace."""

    def test_each_workload_gets_its_own_share_under_one_label(
        self, tmp_path: Path, tiny_experiment: WriteExperiment
    ) -> None:
        """What the traced peak leaves of the budget is less than one more layer's buffer, or every layer is resident.

        A layer's buffer is batch * 2 kv heads * 32 values * 4 bytes a token: of 47 and of 16 tokens.
        """
        small = {
            "name": "short",
            "batch_size": 2,
            "prompt_tokens": 12,
            "output_tokens": 5,
            "prompt": {"kind": "random"},
        }
        large = small | {"name": "long", "batch_size": 16, "prompt_tokens": 45, "output_tokens": 3}
        auto = {"kind": "streamed", "prefetch_layers": 1, "resident_share": "auto"}
        budget_bytes = 2_950_000
        experiment = tiny_experiment(
            tmp_path,
            trace=True,
            budget={"device_bytes": budget_bytes},
            workloads=[small, large],
            strategies=[{"kind": "dynamic"}, auto],
        )
        result = invoke(experiment, "--out", tmp_path / "run", "--json")
        assert result.exit_code == 0, result.output
        records = [each for each in read_records(tmp_path / "run") if each["spec"]["strategy"]["kind"] == "streamed"]
        assert {each["spec"]["strategy"]["name"] for each in records} == {"streamed-ahead1-residentauto"}
        shares = {each["spec"]["workload"]["name"]: each["spec"]["strategy"]["resident_share"] for each in records}
        assert shares == {"short": 1.0, "long": 0.0}
        (long,) = [each for each in records if each["trace"] and each["spec"]["workload"]["name"] == "long"]
        peak_bytes = max(
            long["trace"]["prefill"]["peak_device_bytes"],
            *(step["peak_device_bytes"] for step in long["trace"]["steps"]),
        )
        assert budget_bytes - 16 * 2 * 32 * 4 * 47 < peak_bytes <= budget_bytes
        assert all(each["fidelity"]["bit_equal"] for each in records if each["evidence"] == "emulated")
        planned = invoke(experiment, "--dry-run")
        words = "by trace, the budget leaves room for {} of the full-attention layers"
        assert f"short / streamed-ahead1-residentauto: {words.format('100%')}" in planned.output
        assert f"long / streamed-ahead1-residentauto: {words.format('0%')}" in planned.output
        lines = complete_lines(tmp_path / "run")
        again = invoke(experiment, "--out", tmp_path / "run", "--resume")
        assert again.exit_code == 0, again.output
        assert complete_lines(tmp_path / "run") == lines, "the same shares are found again: nothing is left to run"
