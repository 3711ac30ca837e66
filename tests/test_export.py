"""`export` and the Python API: one tidy table, with the same columns for every run, that no spreadsheet runs."""

import csv
import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
import pytest
from factories import (
    STREAMED,
    make_experiment,
    make_failure,
    make_machine,
    make_quantized,
    make_record,
    make_spec,
    make_streamed,
    make_traced,
)
from typer.testing import CliRunner

import offload_eval
from offload_eval.cli.app import app
from offload_eval.cli.export_options import TableChoice
from offload_eval.core.experiment import CpuSpec, JsonlPrompt, ModelSpec, StreamedSpec
from offload_eval.core.machine import Accelerator
from offload_eval.core.records import RunRecord
from offload_eval.core.run_spec import RunSpec
from offload_eval.errors import InputError
from offload_eval.loaded_run import What
from offload_eval.reporting.export_cells import CELL_COLUMNS, cells_frame
from offload_eval.reporting.export_tables import TABLES
from offload_eval.reporting.flat import flat_columns, flat_values
from offload_eval.reporting.table_text import csv_text, plain_rows
from offload_eval.reporting.tables import typed_frame
from offload_eval.store.run_directory import RunDirectory

GOLDEN = Path(__file__).parent / "data" / "records"
HAS_PYARROW = importlib.util.find_spec("pyarrow") is not None


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments])


def write_run(path: Path, *records: RunRecord) -> Path:
    with RunDirectory.create(path, make_experiment(), make_machine()) as directory:
        for record in records:
            directory.append(record)
    return path


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    records = (make_traced(), make_record(), make_streamed(), make_quantized(), make_failure("oom", StreamedSpec()))
    return write_run(tmp_path / "run", *records)


def read_csv(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


class TestFlat:
    def test_every_scalar_of_a_spec_has_a_column(self) -> None:
        columns = flat_columns(RunSpec)
        assert columns["workload_batch_size"] == "Int64"
        assert columns["measurement_cell_timeout_s"] == "Float64"
        assert columns["budget_enforce"] == "boolean"
        assert columns["workload_prompt_kind"] == columns["strategy_kind"] == "string"
        assert columns["strategy_resident_share"] == "string", "a number or `auto`"
        strategies = make_experiment().strategies
        for spec in [make_spec(each) for each in strategies]:
            assert set(flat_values(spec)) <= set(columns)

    def test_values_are_those_of_the_record(self) -> None:
        prompt = JsonlPrompt(path="a.jsonl", field="body")
        workload = msgspec.structs.replace(make_spec().workload, prompt=prompt)
        row = flat_values(make_spec(STREAMED, workload=workload, cpu=CpuSpec(link_bytes_per_s=7)))
        assert row["workload_prompt_kind"] == "jsonl"
        assert (row["workload_prompt_path"], row["workload_prompt_field"]) == ("a.jsonl", "body")
        assert (row["strategy_kind"], row["strategy_prefetch_layers"], row["baseline_kind"]) == (
            "streamed",
            1,
            "dynamic",
        )
        assert (row["cpu_link_bytes_per_s"], row["budget_device_bytes"], row["role"]) == (7, 2_000_000, "cell")


class TestCells:
    def row(self, record: RunRecord, *others: RunRecord) -> dict[str, Any]:
        rows = plain_rows(cells_frame([record, *others]))
        return next(row for row in rows if row["run_id"] == record.run_id)

    def test_a_clean_cell(self) -> None:
        """TPOT 10 ms; 2 * 157 tokens in 0.5 + 1.56 = 2.06 s; by peak (900,000 - 0) // 20,000 = 45 sessions."""
        row = self.row(make_record())
        assert (row["workload"], row["strategy"], row["status"], row["evidence"]) == (
            "small",
            "dynamic",
            "ok",
            "emulated",
        )
        assert (row["ttft_s"], row["tpot_s"], row["e2e_latency_s"]) == (0.5, pytest.approx(0.010), pytest.approx(2.06))
        assert row["tokens_per_s"] == pytest.approx(314 / 2.06)
        assert (row["itl_p50_s"], row["itl_p99_s"], row["num_trials"]) == (0.010, 0.010, 3)
        assert (row["prefill_peak_bytes"], row["decode_peak_bytes"], row["kv_device_bytes"]) == (
            1_040_000,
            1_036_000,
            32_768,
        )
        assert (row["analytic_sessions"], row["sessions_by_peak"], row["sessions_by_trace"]) == (54, 45, None)
        assert (row["noise_floor_nats"], row["mean_kl_nats"], row["bytes_moved_per_token"]) == (0.001, None, None)
        assert (row["model_parameters"], row["model_weights_bytes"], row["model_type"]) == (
            500_000,
            1_000_000,
            "llama",
        )
        assert (row["version_torch"], row["machine_cpu"], row["machine_accelerator_name"]) == (
            "2.13.0",
            "Test CPU",
            None,
        )
        assert (row["conditions_baseline_bytes"], row["started_at_utc"]) == (1_000_000, "2026-01-02T03:04:05Z")

    def test_a_cell_that_moves_its_cache(self) -> None:
        row = self.row(make_streamed(), make_record())
        assert (row["bytes_moved_per_token"], row["exposed_s_per_token"]) == (50_000, pytest.approx(0.005))
        assert (row["bit_equal"], row["mean_kl_nats"], row["strategy_prefetch_layers"]) == (True, 0, 1)

    def test_fidelity_beside_its_noise_floor(self) -> None:
        row = self.row(make_quantized(), make_record())
        assert (row["mean_kl_nats"], row["noise_floor_nats"]) == (pytest.approx(0.02), 0.001)
        assert (row["top1_agreement_ratio"], row["strategy_backend"]) == (0.95, "hqq")

    def test_times_have_the_range_that_holds_the_true_one(self) -> None:
        record = make_record()
        slower = msgspec.structs.replace(record.trials[1], ttft_s=0.7)
        row = self.row(msgspec.structs.replace(record, trials=(record.trials[0], slower)))
        assert (row["ttft_low_s"], row["ttft_s"], row["ttft_high_s"]) == (0.5, 0.6, 0.7)

    def test_a_failed_cell_says_how_and_has_no_figure(self) -> None:
        row = self.row(make_failure("oom"))
        assert (row["status"], row["failure_message"], row["failure_ledger"]) == ("oom", "no memory", "device")
        assert (row["failure_stage"], row["failure_phase"]) == ("memory", "prefill")
        assert [row[name] for name in ("ttft_s", "tpot_s", "prefill_peak_bytes", "itl_p99_s")] == [None] * 4
        assert row["num_trials"] == 0

    def test_a_trace_gives_its_sessions_and_is_no_row(self) -> None:
        """Traced peak: 37,488 above the weights for 2 sessions: 900,000 // 18,744 = 48."""
        rows = plain_rows(cells_frame([make_traced(), make_record()]))
        assert [(row["evidence"], row["sessions_by_trace"]) for row in rows] == [("emulated", 48)]

    def test_columns_are_the_same_for_every_run_but_for_versions(self) -> None:
        accelerator = Accelerator(name="H200", uuid="GPU-1", memory_bytes=1, driver="580.1")
        machine = make_machine(accelerator=accelerator, versions={"torch": "2", "optimum-quanto": "0.2.7"})
        one, other = cells_frame([make_record(machine=machine)]), cells_frame([make_failure("failed")])
        assert list(one.columns) == [*CELL_COLUMNS, "version_optimum_quanto", "version_torch"]
        assert list(other.columns) == [*CELL_COLUMNS, "version_torch", "version_transformers"]
        assert list(one.dtypes[: len(CELL_COLUMNS)]) == list(other.dtypes[: len(CELL_COLUMNS)])
        assert one["machine_accelerator_driver"].tolist() == ["580.1"]

    def test_no_column_is_named_twice(self) -> None:
        frame = cells_frame([make_record()])
        assert frame.columns.is_unique

    @pytest.mark.parametrize(("share", "shown"), [(0.5, "0.5"), ("auto", "auto"), (None, None)])
    def test_a_share_is_text_beside_auto(self, share: Any, shown: str | None) -> None:
        row = self.row(make_record(StreamedSpec(resident_share=share, resident_bytes=None if share else 7)))
        assert row["strategy_resident_share"] == shown
        assert row["strategy_resident_bytes"] == (None if share else 7)


class TestCsv:
    @pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1"])
    def test_no_text_becomes_a_formula(self, text: str) -> None:
        frame = typed_frame([{"name": text, "change": -1.5}], {"name": "string", "change": "Float64"})
        (row,) = read_csv(csv_text(frame))
        assert row["name"] == f"'{text}".replace("\r", "\n")
        assert row["change"] == "-1.5", "a number is none"

    def test_other_text_is_as_it_is(self) -> None:
        frame = typed_frame([{"name": 'a=1,"b"'}, {"name": "'quoted"}, {}], {"name": "string"})
        assert [row["name"] for row in read_csv(csv_text(frame) + "\n")][:2] == ['a=1,"b"', "'quoted"]

    def test_hostile_records_are_tame_in_csv_and_themselves_in_json(self, tmp_path: Path) -> None:
        hostile = '=HYPERLINK("http://x")'
        spec = make_spec(model=ModelSpec(source=hostile))
        failed = make_failure("failed", message="@evil", spec=make_spec(STREAMED))
        path = write_run(tmp_path / "run", make_record(spec=spec), failed)
        rows = read_csv(invoke("export", path).stdout)
        assert [row["model_source"] for row in rows] == [f"'{hostile}", "tests/tiny"]
        assert rows[1]["failure_message"] == "'@evil"
        assert not [value for row in rows for value in row.values() if value.startswith(("=", "+", "@"))]
        document = json.loads(invoke("export", path, "--json").stdout)
        assert document["rows"][0]["model_source"] == hostile

    def test_a_header_is_no_formula_either(self) -> None:
        assert csv_text(typed_frame([{"=1": "a"}], {"=1": "string"})).startswith("'=1\n")


class TestCommand:
    def test_csv_on_standard_output_by_default(self, run_dir: Path) -> None:
        result = invoke("export", run_dir)
        assert result.exit_code == 0
        rows = read_csv(result.stdout)
        assert [row["strategy"] for row in rows] == ["dynamic", "streamed", "streamed", "quantized-hqq-int4"]
        assert (rows[0]["sessions_by_trace"], rows[0]["prefill_peak_bytes"]) == ("48", "1040000")

    @pytest.mark.parametrize("options", [["--json"], ["--format", "json"], ["--json", "--format", "json"]])
    def test_json_on_standard_output(self, run_dir: Path, options: list[str]) -> None:
        document = json.loads(invoke("export", run_dir, *options).stdout)
        assert (document["run_dir"], document["what"]) == (str(run_dir), "cells")
        assert document["rows"][1]["kv_host_bytes"] == 32_768
        assert document["rows"][0]["mean_kl_nats"] is None

    @pytest.mark.parametrize(
        ("what", "rows", "key", "value"),
        [
            ("trials", 9, "trial", [1, 2, 3] * 3),
            ("limits", 0, "measured", []),
            ("memory", 8, "phase", ["prefill", "decode"] * 4),
            ("transfers", 1, "phase", ["decode"]),
            ("traces", 2, "peak_device_bytes", [1_037_488, 1_033_488]),
        ],
    )
    def test_every_table(self, run_dir: Path, what: str, rows: int, key: str, value: list[Any]) -> None:
        document = json.loads(invoke("export", run_dir, "--what", what, "--json").stdout)
        assert len(document["rows"]) == rows
        assert [row[key] for row in document["rows"]] == value

    def test_an_empty_table_still_has_its_header(self, run_dir: Path) -> None:
        assert invoke("export", run_dir, "--what", "limits").stdout.startswith("prompt_tokens,output_tokens,")

    def test_a_trace_that_was_refused_has_its_reason(self, tmp_path: Path) -> None:
        refused = make_failure("unsupported", message="asks for values")
        refused = msgspec.structs.replace(refused, evidence="traced", run_id="t")
        path = write_run(tmp_path / "run", refused)
        (row,) = json.loads(invoke("export", path, "--what", "traces", "--json").stdout)["rows"]
        assert (row["phase"], row["failure_message"], row["status"]) == (None, "asks for values", "unsupported")

    def test_a_file_gets_its_form_by_its_name(self, run_dir: Path, tmp_path: Path) -> None:
        for name in ("a.csv", "a.json", "a.txt"):
            result = invoke("export", run_dir, "--out", tmp_path / name)
            assert (result.exit_code, result.stdout) == (0, "")
            assert "4 rows" in result.stderr
        assert json.loads((tmp_path / "a.json").read_text())["what"] == "cells"
        assert (tmp_path / "a.csv").read_text() == (tmp_path / "a.txt").read_text() == invoke("export", run_dir).stdout

    def test_a_directory_gets_a_file_named_for_its_table(self, run_dir: Path, tmp_path: Path) -> None:
        folder = tmp_path / "tables.json"
        folder.mkdir()
        result = invoke("export", run_dir, "--out", folder, "--what", "trials", "--json")
        said = json.loads(result.stdout)
        assert said["file"] == str(folder / "trials.csv")
        assert (said["what"], said["format"], said["num_rows"]) == ("trials", "csv", 9)
        assert len(read_csv((folder / "trials.csv").read_text())) == 9

    @pytest.mark.parametrize("name", ["records.jsonl", "experiment.yaml", "machine.json"])
    def test_what_it_is_made_from_is_never_replaced(self, run_dir: Path, name: str) -> None:
        before = (run_dir / name).read_bytes()
        result = invoke("export", run_dir, "--out", run_dir / name)
        assert result.exit_code == 2
        assert "the run's own" in result.stderr
        assert (run_dir / name).read_bytes() == before

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--json", "--format", "csv"], "two forms of one answer"),
            (["--format", "parquet"], "give --out FILE"),
            (["--format", "parquet", "--out", "-"], "give --out FILE"),
            (["--out", "/none/here.csv"], "there is no directory /none"),
        ],
    )
    def test_options_that_do_not_go_together(self, run_dir: Path, options: list[str], message: str) -> None:
        result = invoke("export", run_dir, *options)
        assert result.exit_code == 2
        assert message in " ".join(result.stderr.split())

    def test_not_a_run_directory(self, tmp_path: Path) -> None:
        result = invoke("export", tmp_path)
        assert result.exit_code == 2
        assert "not a run directory" in result.stderr

    @pytest.mark.parametrize("commit", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
    def test_records_of_earlier_commits_are_exported(self, commit: str) -> None:
        rows = read_csv(invoke("export", GOLDEN / commit).stdout)
        assert [row["status"] for row in rows] == ["ok", "ok", "ok", "unsupported", "oom"]
        assert {row["machine_git_commit"] for row in rows} == {commit}
        assert [row["tpot_s"][:6] for row in rows[:2]] == ["0.0100", "0.0150"]
        assert invoke("export", GOLDEN / commit, "--what", "trials").exit_code == 0


class TestParquet:
    def test_without_pyarrow_it_says_what_adds_it(
        self, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("offload_eval.cli.export.find_spec", lambda _: None)
        result = invoke("export", run_dir, "--out", tmp_path / "a.parquet")
        assert result.exit_code == 3
        assert 'pip install "offload-eval[parquet]"' in result.stderr
        assert not (tmp_path / "a.parquet").exists()

    def test_the_extra_is_declared(self) -> None:
        text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
        assert 'parquet = ["pyarrow' in text

    def test_the_file_is_whole_or_not_there(
        self, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def half_way(frame: pd.DataFrame, path: Path, *, index: bool) -> None:
            assert not index
            path.write_bytes(b"PAR1")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("offload_eval.cli.export.find_spec", lambda _: object())
        monkeypatch.setattr(pd.DataFrame, "to_parquet", half_way)
        result = invoke("export", run_dir, "--out", tmp_path / "a.parquet")
        assert result.exit_code == 3
        assert "No space left" in result.stderr
        assert not (tmp_path / "a.parquet").exists()

    @pytest.mark.skipif(not HAS_PYARROW, reason="pyarrow is not installed")
    def test_it_reads_back_with_its_types(self, run_dir: Path, tmp_path: Path) -> None:
        assert invoke("export", run_dir, "--out", tmp_path / "a.parquet").exit_code == 0
        frame = pd.read_parquet(tmp_path / "a.parquet", dtype_backend="numpy_nullable")
        assert frame["kv_host_bytes"].tolist()[1] == 32_768
        assert str(frame["budget_enforce"].dtype) == "boolean"


class TestApi:
    def test_a_run_is_what_its_directory_holds(self, run_dir: Path) -> None:
        run = offload_eval.load_run(str(run_dir))
        assert (run.experiment, run.machine) == (make_experiment(), make_machine())
        assert [record.evidence for record in run.records] == ["traced", *["emulated"] * 4]
        assert [record.spec.strategy.label for record in run.cells][:2] == ["dynamic", "streamed"]
        assert [record.run_id for record in run.traces] == [make_traced().run_id]
        assert run.limits == ()
        assert run.hardware is None
        assert repr(run) == f"Run({str(run_dir)!r}: does-it-pay, 4 cells, 1 traces)"

    def test_its_frame_is_the_export(self, run_dir: Path) -> None:
        run = offload_eval.load_run(run_dir)
        assert csv_text(run.frame()) == invoke("export", run_dir).stdout
        assert run.frame("trials").equals(run.trials())
        assert len(run.trials()) == 9

    def test_limits_are_those_of_the_search(self) -> None:
        run = offload_eval.load_run(GOLDEN / "e2a7227")
        assert [(limit.measured, limit.failed_at) for limit in run.limits] == [(30, 31)]
        assert run.frame("limits")["measured"].tolist() == [30]
        assert len(run.records) == len(run.cells) + len(run.traces) + 2

    def test_errors_are_input_errors(self, run_dir: Path, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="not a run directory"):
            offload_eval.load_run(tmp_path / "none")
        (run_dir / "records.jsonl").write_text("{}\n")
        with pytest.raises(InputError, match=r"line 1: not a record"):
            offload_eval.load_run(run_dir)

    def test_an_unknown_table_is_named(self, run_dir: Path) -> None:
        with pytest.raises(InputError, match="what: 'all' is not allowed; allowed: cells, trials"):
            offload_eval.load_run(run_dir).frame("all")  # type: ignore[arg-type]

    def test_the_tables_have_one_list_of_names(self) -> None:
        assert list(TABLES) == [choice.value for choice in TableChoice] == list(What.__args__)  # type: ignore[attr-defined]

    def test_pandas_is_imported_by_the_first_frame(self) -> None:
        code = (
            "import sys, offload_eval\n"
            f"run = offload_eval.load_run({str(GOLDEN / 'e2a7227')!r})\n"
            "run.cells, run.traces, run.limits\n"
            "assert 'pandas' not in sys.modules and 'torch' not in sys.modules\n"
            "run.frame()\n"
            "assert 'pandas' in sys.modules and 'torch' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

    def test_the_package_itself_reads_no_run_directory_code(self) -> None:
        code = "import sys, offload_eval; print('offload_eval.loaded_run' in sys.modules, 'yaml' in sys.modules)"
        result = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
        assert result.stdout.strip() == "False False"
