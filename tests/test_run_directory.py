"""Run directories: what survives a crash, who may write, and what a resumed run accepts."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from factories import (
    DYNAMIC,
    QUANTIZED,
    STREAMED,
    make_experiment,
    make_failure,
    make_fidelity,
    make_machine,
    make_record,
    make_spec,
    make_streamed,
    make_traced,
    make_workload,
)
from msgspec.structs import replace

from offload_eval.core.experiment import StreamedSpec
from offload_eval.core.records import RunRecord, record_id
from offload_eval.core.run_spec import content_hash
from offload_eval.errors import InputError, UnableError
from offload_eval.store.run_directory import RunDirectory

EXPERIMENT = make_experiment()
MACHINE = make_machine()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory.create(tmp_path / "run", EXPERIMENT, MACHINE) as directory:
        yield directory


def written(path: Path, *records: RunRecord) -> Path:
    """A closed run directory that holds these records."""
    with RunDirectory.create(path, EXPERIMENT, MACHINE) as directory:
        for record in records:
            directory.append(record)
    return path


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (path / "records.jsonl").read_text().splitlines()]


class TestCreate:
    def test_parents_are_made_and_what_was_asked_is_kept(self, tmp_path: Path) -> None:
        path = written(tmp_path / "a" / "b" / "run")
        directory = RunDirectory.read(path)
        assert (directory.path, directory.experiment, directory.machine) == (path, EXPERIMENT, MACHINE)
        assert json.loads((path / "machine.json").read_text())["versions"]["torch"] == "2.13.0"
        assert "name: does-it-pay" in (path / "experiment.yaml").read_text()

    def test_an_empty_directory_is_taken(self, tmp_path: Path) -> None:
        assert RunDirectory.read(written(tmp_path)).records() == []

    @pytest.mark.parametrize(
        ("fsyncs", "left"),
        [
            (0, {".lock", ".machine.json.part"}),
            (1, {".lock", "machine.json"}),
            (2, {".lock", "machine.json", ".experiment.yaml.part"}),
        ],
    )
    def test_what_a_killed_create_leaves_is_taken(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fsyncs: int, left: set[str]
    ) -> None:
        calls = iter(range(fsyncs))

        def die_at_last(file: int) -> None:
            if next(calls, None) is None:
                raise KeyboardInterrupt

        monkeypatch.setattr(os, "fsync", die_at_last)
        with pytest.raises(KeyboardInterrupt):
            RunDirectory.create(tmp_path, make_experiment(name="first"), make_machine(cpu_cores=9))
        monkeypatch.undo()
        assert {entry.name for entry in tmp_path.iterdir()} == left
        directory = RunDirectory.read(written(tmp_path, make_record()))
        assert (directory.experiment, directory.machine) == (EXPERIMENT, MACHINE)
        assert {entry.name for entry in tmp_path.iterdir()} == {
            ".lock",
            "machine.json",
            "experiment.yaml",
            "records.jsonl",
        }

    def test_a_machine_that_create_did_not_write_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "machine.json").write_text("{}")
        with pytest.raises(InputError, match=r"machine\.json: not a machine"):
            RunDirectory.create(tmp_path, EXPERIMENT, MACHINE)
        assert (tmp_path / "machine.json").read_text() == "{}"

    def test_a_directory_with_anything_in_it_is_refused_and_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(InputError, match="not empty; continue the run in it with --resume"):
            RunDirectory.create(tmp_path, EXPERIMENT, MACHINE)
        assert [entry.name for entry in tmp_path.iterdir()] == ["notes.txt"]

    def test_a_finished_run_is_never_overwritten(self, tmp_path: Path) -> None:
        path = written(tmp_path / "run", make_record())
        before = (path / "records.jsonl").read_bytes()
        with pytest.raises(InputError, match="--resume"):
            RunDirectory.create(path, make_experiment(name="other"), MACHINE)
        assert (path / "records.jsonl").read_bytes() == before

    def test_a_file_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "run").write_text("")
        with pytest.raises(InputError, match="not a directory for a run: Not a directory"):
            RunDirectory.create(tmp_path / "run", EXPERIMENT, MACHINE)
        with pytest.raises(InputError, match="Not a directory"):
            RunDirectory.create(tmp_path / "run" / "below", EXPERIMENT, MACHINE)


class TestRecords:
    def test_the_documented_keys_stand_where_other_tools_look(self, run: RunDirectory) -> None:
        record = make_streamed()
        run.append(record)
        (line,) = lines(run.path)
        assert (line["schema_version"], line["status"], line["evidence"]) == (1, "ok", "emulated")
        assert line["run_id"] == record.run_id
        strategy = line["spec"]["strategy"]
        assert (strategy["kind"], strategy["prefetch_layers"], strategy["host_dtype"]) == ("streamed", 1, "native")
        workload = line["spec"]["workload"]
        lengths = {name: workload[name] for name in ("batch_size", "prompt_tokens", "output_tokens")}
        assert lengths == {"batch_size": 2, "prompt_tokens": 100, "output_tokens": 157}
        assert [trial["ttft_s"] for trial in line["trials"]] == [0.5, 0.5, 0.5]
        assert line["trials"][0]["decode"]["h2d_bytes"] == 7_800_000
        assert line["fidelity"]["bit_equal"] is True

    def test_a_record_of_a_release_without_traces_is_read(self, run: RunDirectory) -> None:
        run.append(make_record())
        file = run.path / "records.jsonl"
        older = json.loads(file.read_text())
        del older["trace"]
        file.write_text(json.dumps(older) + "\n")
        assert RunDirectory.read(run.path).records() == [make_record()]

    def test_a_trace_stands_beside_the_record_of_its_cell(self, run: RunDirectory) -> None:
        run.append(make_traced())
        run.append(make_record())
        assert [line["evidence"] for line in lines(run.path)] == ["traced", "emulated"]
        assert RunDirectory.read(run.path).records() == [make_traced(), make_record()]
        assert run.finished_run_ids() == {make_traced().run_id, make_record().run_id}
        assert lines(run.path)[0]["trace"]["prefill"]["peak_device_bytes"] == 1_037_488

    def test_names_of_cells_outlive_releases(self) -> None:
        """A directory of a release without traces can be resumed: the names of its cells are those of today."""
        ids = [
            record_id(make_spec(strategy), "emulated")
            for strategy in (DYNAMIC, StreamedSpec(prefetch_layers=1), QUANTIZED)
        ]
        assert ids == ["7613dee6a742422a", "cec6714d783d4cda", "42ab22481fb9cbad"]
        assert record_id(make_spec(), "measured") == content_hash(make_spec()) != record_id(make_spec(), "traced")

    def test_each_record_is_one_line_that_ends(self, run: RunDirectory) -> None:
        run.append(make_failure("failed", message="first\nsecond"))
        run.append(make_record())
        content = (run.path / "records.jsonl").read_bytes()
        assert content.count(b"\n") == 2
        assert content.endswith(b"\n")

    def test_an_appended_record_is_at_once_visible_to_a_reader(self, run: RunDirectory) -> None:
        record = make_record()
        run.append(record)
        assert RunDirectory.read(run.path).records() == [record] == run.records()

    def test_a_record_is_synced_before_append_returns(
        self, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced_bytes = []
        monkeypatch.setattr(os, "fsync", lambda file: synced_bytes.append(os.fstat(file).st_size))
        run.append(make_record())
        assert synced_bytes == [(run.path / "records.jsonl").stat().st_size]

    def test_the_directory_is_synced_when_files_appear_in_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names: list[set[str]] = []

        def fsync(file: int) -> None:
            if stat.S_ISDIR(os.fstat(file).st_mode):
                names.append({entry.name for entry in tmp_path.iterdir()})

        monkeypatch.setattr(os, "fsync", fsync)
        written(tmp_path)
        assert names[-1] >= {"experiment.yaml", "machine.json", "records.jsonl"}

    def test_a_later_record_of_a_cell_takes_the_place_of_an_earlier_one(self, run: RunDirectory) -> None:
        failed, other, done = make_failure("failed"), make_record(), make_streamed()
        assert failed.run_id == done.run_id != other.run_id
        for record in (failed, other, done):
            run.append(record)
        assert run.records() == [done, other]
        assert RunDirectory.read(run.path).records() == [done, other]
        assert len(lines(run.path)) == 3

    def test_what_a_rerun_would_repeat_is_finished(self, tmp_path: Path) -> None:
        statuses = ("ok", "oom", "unsupported", "timeout", "failed")
        records = [replace(make_record(), run_id=status, status=status) for status in statuses]
        path = written(tmp_path / "run", *records)
        with RunDirectory.resume(path, EXPERIMENT, MACHINE) as directory:
            assert directory.finished_run_ids() == {"ok", "oom", "unsupported"}
            directory.append(replace(records[0], status="failed"))
            assert directory.finished_run_ids() == {"oom", "unsupported"}

    def test_a_number_that_json_cannot_hold_is_refused_and_leaves_no_line(self, run: RunDirectory) -> None:
        with pytest.raises(ValueError, match="cannot be stored"):
            run.append(make_record(fidelity=make_fidelity(float("nan"))))
        assert lines(run.path) == [] == run.records()

    def test_a_full_disk_leaves_no_torn_line(self, run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
        run.append(make_record())
        write = os.write

        def half_then_full(file: int, content: bytes) -> int:
            if len(content) < 100:
                raise OSError(28, "No space left on device")
            return write(file, content[: len(content) // 2])

        monkeypatch.setattr(os, "write", half_then_full)
        with pytest.raises(UnableError, match=r"cannot be written: No space left on device; .* --resume"):
            run.append(make_streamed())
        monkeypatch.undo()
        run.append(make_streamed())
        assert [line["spec"]["strategy"]["kind"] for line in lines(run.path)] == ["dynamic", "streamed"]

    def test_a_short_write_is_completed(self, run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
        write = os.write
        monkeypatch.setattr(os, "write", lambda file, content: write(file, content[:7]))
        run.append(make_record())
        assert lines(run.path)[0]["run_id"] == make_record().run_id


class TestRead:
    def test_a_reader_writes_nothing(self, tmp_path: Path) -> None:
        path = written(tmp_path / "run", make_record())
        before = {entry.name for entry in path.iterdir()}
        directory = RunDirectory.read(path)
        with pytest.raises(RuntimeError, match="not open for writing"):
            directory.append(make_record())
        assert (directory.reference_dir, directory.logs_dir) == (path / "reference", path / "logs")
        assert {entry.name for entry in path.iterdir()} == before

    def test_a_torn_last_line_is_ignored_and_left(self, tmp_path: Path) -> None:
        path = written(tmp_path / "run", make_record(), make_streamed())
        file = path / "records.jsonl"
        torn = file.read_bytes()[:-20]
        file.write_bytes(torn)
        assert RunDirectory.read(path).records() == [make_record()]
        assert file.read_bytes() == torn

    @pytest.mark.parametrize(
        ("line", "fragment"),
        [
            (b'{"run_id": "a", "sch', "not a record"),
            (b"\x00\x00\x00", "not a record"),
            (b"\xff\xfe", "not a record"),
            (b"[" * 5000, "not a record"),
            (b"", "not a record"),
            (b'{"schema_version": 1}', "missing required field"),
            (
                b'{"schema_version": 2}',
                "schema_version 2 is newer than 1, the newest that this release of offload-eval",
            ),
            (b'{"schema_version": "1"}', "not a record"),
        ],
        ids=["cut", "zeros", "no text", "deep", "blank", "poor", "newer", "text version"],
    )
    def test_a_corrupt_line_in_the_middle_is_named(self, tmp_path: Path, line: bytes, fragment: str) -> None:
        path = written(tmp_path / "run", make_record(), make_streamed())
        file = path / "records.jsonl"
        first, second = file.read_bytes().splitlines()
        file.write_bytes(b"\n".join([first, line, second, b""]))
        with pytest.raises(InputError) as caught:
            RunDirectory.read(path)
        assert f"{file}: line 2: " in str(caught.value)
        assert fragment in str(caught.value)
        with pytest.raises(InputError, match="line 2"):
            RunDirectory.resume(path, EXPERIMENT, MACHINE)
        assert len(file.read_bytes().splitlines()) == 3

    def test_what_is_no_run_directory_is_refused(self, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "missing"):
            with pytest.raises(InputError, match=r"not a run directory: it has no experiment\.yaml"):
                RunDirectory.read(path)
            with pytest.raises(InputError, match="not a run directory"):
                RunDirectory.resume(path, EXPERIMENT, MACHINE)
        assert list(tmp_path.iterdir()) == []

    def test_a_corrupt_machine_or_experiment_is_named(self, tmp_path: Path) -> None:
        path = written(tmp_path / "run")
        (path / "machine.json").write_text("{}")
        with pytest.raises(InputError, match=r"machine\.json: not a machine"):
            RunDirectory.read(path)
        (path / "experiment.yaml").write_text("name: x")
        with pytest.raises(InputError, match=r"experiment\.yaml: model: required"):
            RunDirectory.read(path)


class TestResume:
    def test_a_torn_last_line_is_cut_and_the_rest_kept(self, tmp_path: Path) -> None:
        path = written(tmp_path / "run", make_record())
        with (path / "records.jsonl").open("ab") as file:
            file.write(b'{"schema_version": 1, "run')
        with RunDirectory.resume(path, EXPERIMENT, MACHINE) as directory:
            assert directory.records() == [make_record()]
            directory.append(make_streamed())
        assert RunDirectory.read(path).records() == [make_record(), make_streamed()]

    def test_another_experiment_is_refused_with_the_parts_that_differ(self, tmp_path: Path) -> None:
        path = written(tmp_path / "run")
        other = make_experiment(strategies=(*EXPERIMENT.strategies, replace(STREAMED, name="x")), name="y")
        with pytest.raises(InputError, match=r"different experiment \(name, strategies differ\).*--allow-mismatch"):
            RunDirectory.resume(path, other, MACHINE)

    def test_another_machine_is_refused_with_what_differs(self, tmp_path: Path) -> None:
        path = written(tmp_path / "run")
        other = make_machine(versions={"torch": "2.14.0", "transformers": "5.24.0"})
        with pytest.raises(InputError, match=r"different machine \(versions\.torch: 2\.13\.0 -> 2\.14\.0\)"):
            RunDirectory.resume(path, EXPERIMENT, other)

    def test_a_new_commit_is_the_same_machine(self, tmp_path: Path) -> None:
        path = written(tmp_path / "run")
        with RunDirectory.resume(path, EXPERIMENT, make_machine(git_commit="abc")) as directory:
            assert directory.machine.git_commit == "abc"

    def test_an_allowed_mismatch_keeps_what_it_replaces(self, tmp_path: Path) -> None:
        path = written(tmp_path / "run", make_record())
        before = (path / "experiment.yaml").read_bytes()
        second = make_experiment(workloads=(make_workload(name="long", prompt_tokens=200),))
        third = make_experiment(strategies=(QUANTIZED,), baseline=QUANTIZED.label)
        machine = make_machine(cpu_cores=4)
        for experiment in (second, third):
            RunDirectory.resume(path, experiment, machine, allow_mismatch=True).close()
        directory = RunDirectory.read(path)
        assert (directory.experiment, directory.machine) == (third, machine)
        assert directory.records() == [make_record()]
        assert (path / "experiment.1.yaml").read_bytes() == before
        assert "prompt_tokens: 200" in (path / "experiment.2.yaml").read_text()
        assert json.loads((path / "machine.1.json").read_text())["cpu_cores"] == 2
        assert not (path / "machine.2.json").exists()

    def test_a_writer_makes_its_folders_on_demand(self, run: RunDirectory) -> None:
        assert not (run.path / "reference").exists()
        assert run.reference_dir.is_dir()
        assert run.logs_dir.is_dir()


class TestLock:
    def test_a_second_writer_is_refused_until_the_first_is_done(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        with RunDirectory.create(path, EXPERIMENT, MACHINE):
            with pytest.raises(InputError, match="another run is using this directory"):
                RunDirectory.resume(path, EXPERIMENT, MACHINE)
            RunDirectory.read(path)
        RunDirectory.resume(path, EXPERIMENT, MACHINE).close()

    def test_a_refused_resume_leaves_no_lock_behind(self, tmp_path: Path) -> None:
        path = written(tmp_path / "run")
        with pytest.raises(InputError, match="different experiment"):
            RunDirectory.resume(path, make_experiment(name="other"), MACHINE)
        RunDirectory.resume(path, EXPERIMENT, MACHINE).close()

    def test_a_closed_directory_takes_no_record(self, tmp_path: Path) -> None:
        directory = RunDirectory.create(tmp_path / "run", EXPERIMENT, MACHINE)
        directory.close()
        with pytest.raises(RuntimeError, match="not open for writing"):
            directory.append(make_record())

    def test_another_process_is_refused(self, run: RunDirectory) -> None:
        code = (
            "import sys; from pathlib import Path; from factories import make_experiment, make_machine\n"
            "from offload_eval.store.run_directory import RunDirectory\n"
            "RunDirectory.resume(Path(sys.argv[1]), make_experiment(), make_machine())"
        )
        result = python(code, run.path)
        assert result.wait() == 1
        assert "another run is using this directory" in result.stderr.read().decode()


WRITER = """
import sys
from pathlib import Path
from msgspec.structs import replace
from factories import make_experiment, make_machine, make_record
from offload_eval.store.run_directory import RunDirectory

path = Path(sys.argv[1])
how = RunDirectory.resume if path.exists() else RunDirectory.create
with how(path, make_experiment(), make_machine()) as directory:
    for number in range(len(directory.records()), 100_000):
        directory.append(replace(make_record(), run_id=str(number)))
        print(number, flush=True)
"""


def python(code: str, path: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )


def test_killing_the_writer_again_and_again_loses_no_finished_record(tmp_path: Path) -> None:
    path = tmp_path / "run"
    stored: list[int] = []
    for attempt in range(6):
        with python(WRITER, path) as writer:
            first = int(writer.stdout.readline())
            time.sleep(0.013 * attempt)
            writer.send_signal(signal.SIGKILL)
            reported = [first, *map(int, writer.stdout.read().split(b"\n")[:-1])]
        assert first == len(stored)
        stored = [int(record.run_id) for record in RunDirectory.read(path).records()]
        assert stored == list(range(len(stored)))
        assert reported[-1] <= stored[-1]
