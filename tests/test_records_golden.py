"""Records that earlier commits wrote are read, reported and exported; see tests/data/records/README.md."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from factories import make_record

from offload_eval.analysis.cells import latest_records, latest_traces
from offload_eval.analysis.limits import find_limits
from offload_eval.analysis.study import Study
from offload_eval.core.records import SCHEMA_VERSION, record_id
from offload_eval.errors import InputError
from offload_eval.reporting.report import write_report
from offload_eval.store import record_file
from offload_eval.store.record_file import read_records
from offload_eval.store.run_directory import RunDirectory

GOLDEN = Path(__file__).parent / "data" / "records"
COMMITS = sorted(path.name for path in GOLDEN.iterdir() if path.is_dir())
LABELS = ["dynamic", "streamed", "quantized-hqq-int4", "offloaded", "quantized-quanto-int4"]


def cells_of(commit: str) -> list[Any]:
    return [
        each for each in latest_records(read_records(GOLDEN / commit / "records.jsonl")) if each.spec.role == "cell"
    ]


def test_every_form_is_there() -> None:
    assert COMMITS == ["57391f3", "7e38014", "91cac13", "bf6b2e9", "e2a7227"]


@pytest.mark.parametrize("commit", COMMITS)
class TestEarlierRecords:
    def test_they_are_read_as_they_were(self, commit: str) -> None:
        dynamic, streamed, quantized, offloaded, oom = cells_of(commit)
        assert dynamic.machine.git_commit == commit
        assert [trial.ttft_s for trial in dynamic.trials] == [0.5, 0.5, 0.5]
        assert dynamic.trials[0].inter_token_latencies_s == (0.01, 0.01, 0.01, 0.01)
        assert dynamic.trials[0].prefill.peak_allocated_bytes == 1_040_000
        assert streamed.trials[0].decode.h2d_bytes == 7_800_000
        assert quantized.fidelity.kl_nats == (0.02,) * 5
        assert (offloaded.status, offloaded.failure.message) == ("unsupported", "offloading needs CUDA")
        assert (oom.status, oom.failure.phase) == ("oom", "prefill")
        assert oom.failure.ledger == (None if commit == "91cac13" else "device")

    def test_what_they_lack_is_absent_and_not_zero(self, commit: str) -> None:
        first = cells_of(commit)[0].trials[0]
        assert (first.num_compilations, first.num_minor_faults, first.profiled_copies) == (None, None, None)

    def test_names_of_cells_are_what_they_were(self, commit: str) -> None:
        records = cells_of(commit)
        equal = [record_id(record.spec, record.evidence) == record.run_id for record in records]
        # Without a prompt's fingerprint a spec is not what its name was made of; resuming runs such cells again.
        assert equal == [commit != "91cac13"] * 5

    def test_the_report_is_written(self, commit: str, tmp_path: Path) -> None:
        shutil.copytree(GOLDEN / commit, tmp_path / "run")
        directory = RunDirectory.read(tmp_path / "run")
        files = write_report(tmp_path / "run", Study(directory.experiment, directory.records(), directory.hardware))
        text = files[0].read_text()
        assert all(label in text for label in LABELS)
        assert "10.00" in text, "TPOT: (0.54 - 0.5) / 4 = 10 ms"


@pytest.mark.parametrize(
    ("place", "stage", "phase"),
    [("memory/prefill", "memory", "prefill"), ("load", "load", None), ("timing/decode", "timing", "decode")],
)
def test_the_place_of_a_first_failure_is_taken_apart(
    place: str, stage: str, phase: str | None, tmp_path: Path
) -> None:
    line = json.loads((GOLDEN / "91cac13" / "records.jsonl").read_text().splitlines()[3])
    line["failure"]["phase"] = place
    (tmp_path / "records.jsonl").write_text(json.dumps(line) + "\n")
    (record,) = read_records(tmp_path / "records.jsonl")
    assert record.failure is not None
    assert (record.failure.stage, record.failure.phase) == (stage, phase)


def test_traces_and_probes_are_read_where_a_commit_had_them() -> None:
    records = {commit: read_records(GOLDEN / commit / "records.jsonl") for commit in COMMITS}
    traced = {commit: len(latest_traces(each)) for commit, each in records.items()}
    assert traced == {"57391f3": 1, "7e38014": 1, "91cac13": 0, "bf6b2e9": 0, "e2a7227": 1}
    asked = {commit: RunDirectory.read(GOLDEN / commit).experiment for commit in COMMITS}
    limits = {
        commit: [limit.measured for limit in find_limits(asked[commit], each)] for commit, each in records.items()
    }
    assert limits == {"57391f3": [], "7e38014": [], "91cac13": [], "bf6b2e9": [], "e2a7227": [30]}


class TestVersions:
    def write(self, path: Path, **changes: Any) -> Path:
        line = json.loads((GOLDEN / "e2a7227" / "records.jsonl").read_text().splitlines()[1])
        path.write_text(json.dumps(line | changes) + "\n")
        return path

    def test_what_is_written_has_the_newest_version(self) -> None:
        assert make_record().schema_version == SCHEMA_VERSION == max(record_file.UPGRADES)

    def test_a_newer_version_is_refused_with_what_reads_it(self, tmp_path: Path) -> None:
        path = self.write(tmp_path / "records.jsonl", schema_version=7)
        message = "line 1: schema_version 7 is newer than 1, .*the release that wrote it, or a later one, reads it"
        with pytest.raises(InputError, match=message):
            read_records(path)

    @pytest.mark.parametrize("version", [0, -1])
    def test_a_version_that_never_was_is_refused(self, version: int, tmp_path: Path) -> None:
        path = self.write(tmp_path / "records.jsonl", schema_version=version)
        with pytest.raises(InputError, match=f"schema_version {version} is unknown; allowed: 1"):
            read_records(path)

    def test_a_record_is_taken_through_every_version_in_between(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As if the newest were 3: of 1 the duration was called seconds, and of 2 it was in ms."""
        steps: dict[int, Any] = {
            1: lambda raw: (
                {name: value for name, value in raw.items() if name != "seconds"}
                | {"duration_s": raw["seconds"] * 1000}
            ),
            2: lambda raw: raw | {"duration_s": raw["duration_s"] / 1000},
            3: lambda raw: raw,
        }
        line = json.loads((GOLDEN / "e2a7227" / "records.jsonl").read_text().splitlines()[1])
        seconds = line.pop("duration_s")
        path = tmp_path / "records.jsonl"
        path.write_text(json.dumps(line | {"seconds": seconds}) + "\n")
        monkeypatch.setattr(record_file, "SCHEMA_VERSION", 3)
        monkeypatch.setattr(record_file, "UPGRADES", steps)
        (record,) = read_records(path)
        assert (record.schema_version, record.duration_s) == (3, 12.5)

    def test_a_record_that_no_upgrade_mends_is_refused_for_what_it_lacks(self, tmp_path: Path) -> None:
        path = self.write(tmp_path / "records.jsonl", status="fine")
        with pytest.raises(InputError, match="not a record: Invalid enum value 'fine'"):
            read_records(path)

    @pytest.mark.parametrize("spec", [None, 3, []])
    def test_a_record_without_a_spec_is_refused(self, spec: Any, tmp_path: Path) -> None:
        path = self.write(tmp_path / "records.jsonl", spec=spec)
        with pytest.raises(InputError, match=r"not a record: Expected `object`.*spec"):
            read_records(path)
