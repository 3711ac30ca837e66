"""The hardware profile of a run: refused early, kept with the run, in no cell's name, and in every later report."""

import json
from pathlib import Path

import pandas as pd
import pytest
from conftest import WriteExperiment
from factories import make_experiment, make_machine
from typer.testing import CliRunner

from offload_eval.cli.app import app
from offload_eval.core.hardware import HardwareProfile, LinkProfile, SourcedValue
from offload_eval.errors import InputError
from offload_eval.store.experiment_file import load_experiment
from offload_eval.store.hardware_file import dump_hardware, load_hardware
from offload_eval.store.run_directory import RunDirectory

STRATEGIES = [{"kind": "dynamic"}, {"kind": "streamed", "name": "streamed", "prefetch_layers": 1}]


def profile_of(bytes_per_s: float) -> HardwareProfile:
    rate = SourcedValue(value=bytes_per_s, source="test", date="2026-01-01")
    link = LinkProfile(name="copies of this test", emulated=True, h2d_bytes_per_s=rate, d2h_bytes_per_s=rate)
    return HardwareProfile(name="here", calibrated=True, machine="this one", link=link)


def call(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_a_run_keeps_its_profile_and_reports_against_it(tiny_experiment: WriteExperiment, tmp_path: Path) -> None:
    """The profile lies beside the experiment, and is gone when the report is made again."""
    path = tiny_experiment(
        tmp_path, strategies=STRATEGIES, hardware="here.yaml", measurement={"trials": 1, "fidelity": False}
    )
    (tmp_path / "here.yaml").write_text(dump_hardware(profile_of(1e6)))
    code, _, errors = call("run", path, "--out", tmp_path / "run")
    assert code == 0, errors
    (tmp_path / "here.yaml").unlink()
    assert load_hardware(tmp_path / "run" / "hardware.yaml") == profile_of(1e6)
    assert call("report", tmp_path / "run")[0] == 0
    assert "held against copies of this test" in (tmp_path / "run" / "report.md").read_text()
    table = pd.read_csv(tmp_path / "run" / "tables" / "transfers.csv")
    assert list(table["phase"]) == ["prefill", "decode"]
    assert list(table["strategy"].unique()) == ["streamed"]
    assert list(table["h2d_calibrated_bytes_per_s"]) == [1e6, 1e6]
    (tmp_path / "run" / "hardware.yaml").unlink()
    code, _, errors = call("report", tmp_path / "run")
    assert code == 2
    assert "hardware.yaml: is missing" in errors
    assert "--resume" in errors
    records = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    assert all("hardware" not in record["spec"] for record in records), "it decides no result"


def test_a_profile_that_is_none_is_refused_before_anything_is_run(
    tiny_experiment: WriteExperiment, tmp_path: Path
) -> None:
    path = tiny_experiment(tmp_path, hardware="h100-sxn")
    code, output, errors = call("run", path, "--out", tmp_path / "run")
    assert (code, output) == (2, "")
    assert f"{path}: hardware: h100-sxn: no such file, and no profile of that name; near: h100-sxm" in errors
    assert not (tmp_path / "run").exists()


def test_a_path_is_relative_to_the_experiment_and_a_name_stays(
    tiny_experiment: WriteExperiment, tmp_path: Path
) -> None:
    (tmp_path / "here.yaml").write_text(dump_hardware(profile_of(1e6)))
    assert load_experiment(tiny_experiment(tmp_path, hardware="here.yaml")).hardware == str(tmp_path / "here.yaml")
    assert load_experiment(tiny_experiment(tmp_path, hardware="h100-sxm")).hardware == "h100-sxm"
    assert load_experiment(tiny_experiment(tmp_path)).hardware is None


def test_another_profile_takes_its_place_and_the_first_is_kept(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", make_experiment(), make_machine()) as directory:
        assert directory.hardware is None
        directory.keep_hardware(profile_of(1e6))
        directory.keep_hardware(profile_of(1e6))
        directory.keep_hardware(profile_of(2e6))
        assert directory.hardware == profile_of(2e6)
    kept = sorted(file.name for file in (tmp_path / "run").glob("hardware*"))
    assert kept == ["hardware.1.yaml", "hardware.yaml"]
    assert load_hardware(tmp_path / "run" / "hardware.1.yaml") == profile_of(1e6)
    (tmp_path / "run" / "hardware.yaml").rename(tmp_path / "kept.yaml")
    (tmp_path / "run" / "hardware.yaml").mkdir()
    with (
        RunDirectory.resume(tmp_path / "run", make_experiment(), make_machine()) as directory,
        pytest.raises(InputError, match="not a regular file"),
    ):
        directory.keep_hardware(profile_of(3e6))
    (tmp_path / "run" / "hardware.yaml").rmdir()
    (tmp_path / "run" / "hardware.yaml").write_text("name: 3")
    with pytest.raises(InputError, match=r"hardware\.yaml"):
        _ = RunDirectory.read(tmp_path / "run").hardware
