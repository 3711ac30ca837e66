"""`history`: the same cells across releases, held against one another only where that means something."""

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from factories import (
    DYNAMIC,
    STREAMED,
    make_budget,
    make_conditions,
    make_experiment,
    make_facts,
    make_failure,
    make_machine,
    make_phase,
    make_quantized,
    make_record,
    make_spec,
    make_streamed,
    make_traced,
    make_trial,
    make_trials,
    make_workload,
)
from markdown_it import MarkdownIt
from rich.console import Console
from typer.testing import CliRunner

from offload_eval.analysis.history import KeptRun, make_history
from offload_eval.analysis.history_setting import machine_kind, setting_of
from offload_eval.cli.app import app
from offload_eval.core.experiment import CpuSpec, ModelSpec, StreamedSpec
from offload_eval.core.history import HistoryRow, SkippedDirectory
from offload_eval.core.machine import Accelerator
from offload_eval.core.records import Conditions, RunRecord
from offload_eval.errors import InputError
from offload_eval.reporting.history_tables import history_frame, render_history
from offload_eval.reporting.history_terminal import render_history_terminal
from offload_eval.store.run_directory import RunDirectory
from offload_eval.store.run_search import find_run_directories

GOLDEN = Path(__file__).parent / "data" / "records"
NEWER = {"torch": "2.14.0", "transformers": "5.24.0"}
H100 = Accelerator(name="H100", uuid="GPU-1", memory_bytes=80 * 1024**3, driver="570.1")


def on(day: int) -> str:
    return f"2026-01-{day:02}T03:04:05Z"


def run(path: str, *records: RunRecord, day: int = 1, **changes: Any) -> KeptRun:
    made = [msgspec.structs.replace(record, started_at_utc=on(day), **changes) for record in records]
    return KeptRun(path, make_experiment(), made)


def measured(accelerator: Accelerator = H100, **changes: Any) -> RunRecord:
    """The baseline's cell as if a GPU had run it."""
    machine = make_machine(accelerator=accelerator, cuda="12.8")
    return make_record(spec=make_spec(device="cuda"), machine=machine, evidence="measured", **changes)


def of_spec(**changes: Any) -> RunRecord:
    return make_record(spec=make_spec(**changes))


class TestRows:
    def test_a_first_run_has_its_figures_and_nothing_to_compare(self) -> None:
        """See the factories: 54 by arithmetic, 48 by trace (37,488 above the weights for 2), 45 by peak."""
        (row,) = make_history([run("a", make_traced(), make_record())])
        figures = row.figures
        assert (figures.analytic_sessions, figures.sessions_by_trace, figures.sessions_by_peak) == (54, 48, 45)
        assert (figures.ttft_s, figures.tpot_s) == (0.5, pytest.approx(0.010))
        assert figures.tokens_per_s == pytest.approx(314 / 2.06)
        assert (figures.peak_bytes, figures.sessions_limit, figures.mean_kl_nats) == (1_040_000, None, None)
        assert (row.before, row.ratios, row.changes) == (None, None, ())
        assert (row.model, row.machine, row.evidence) == ("tests/tiny", "Test CPU, 2 cores", "emulated")

    def test_the_next_release_is_held_against_the_one_before(self) -> None:
        """TPOT 12 ms over 10 ms; a peak 20,000 higher halves the sessions: 60,000 / 2 = 30,000; 900,000 // it = 30."""
        slower = make_trials(0.012, prefill=make_phase(1_060_000))
        newer = make_record(trials=slower, machine=make_machine(versions=NEWER))
        _, row = make_history([run("a", make_record()), run("b", newer, day=2)])
        assert (row.before, row.changes) == ("a", ("torch: 2.13.0 -> 2.14.0",))
        assert row.ratios is not None
        assert row.ratios.tpot_s == pytest.approx(1.2)
        assert (row.ratios.ttft_s, row.ratios.sessions_by_peak) == (1.0, pytest.approx(30 / 45))
        assert row.ratios.peak_bytes == pytest.approx(1_060_000 / 1_040_000)
        assert row.ratios.sessions_by_trace is None, "neither was traced"

    def test_what_was_moved_and_how_far_it_strays(self) -> None:
        (row, lossy) = make_history([run("a", make_streamed(), make_quantized())])
        assert (row.figures.bytes_moved_per_token, row.figures.mean_kl_nats) == (50_000, 0)
        assert lossy.figures.mean_kl_nats == pytest.approx(0.02)

    def test_order_is_by_start_and_not_by_name(self) -> None:
        rows = make_history(
            [run("a", make_record(), day=3), run("b", make_record(), day=1), run("c", make_record(), day=2)]
        )
        assert [(row.run_dir, row.before) for row in rows] == [("b", None), ("c", "b"), ("a", "c")]

    def test_a_new_model_is_the_next_release_of_the_same_cell(self) -> None:
        facts = make_facts(fingerprint="0" * 16)
        spec = make_spec(model=ModelSpec(source="org/model", revision="v2"), model_fingerprint="0" * 16)
        _, row = make_history([run("a", make_record()), run("b", make_record(spec=spec, model=facts), day=2)])
        assert row.ratios is not None
        assert row.changes == (
            "model: tests/tiny -> org/model",
            "revision: none -> v2",
            "model fingerprint: feedfacefeedface -> 0000000000000000",
        )
        assert (row.model, row.model_revision) == ("org/model", "v2")

    def test_where_a_local_model_lies_is_no_change(self) -> None:
        one, other = (of_spec(model=ModelSpec(source=f"{place}/tiny")) for place in ("/mnt/a", "/home/b"))
        _, row = make_history([run("a", one), run("b", other, day=2)])
        assert (row.model, row.changes) == ("tiny", ())

    def test_other_work_or_another_experiment_is_another_cell(self) -> None:
        longer = of_spec(workload=make_workload(prompt_tokens=101))
        renamed = of_spec(workload=make_workload(name="other-name"))
        rows = make_history([run("a", make_record(), longer, renamed, make_streamed(), of_spec(experiment="x"))])
        before = {(row.experiment, row.workload, row.strategy): row.before for row in rows}
        assert len({row.series for row in rows}) == 4, "a workload's name alone makes no other work"
        assert [label for label, each in before.items() if each] == [("does-it-pay", "other-name", "dynamic")]

    def test_other_options_under_one_label_are_a_change(self) -> None:
        older, newer = StreamedSpec(name="s", prefetch_layers=1), StreamedSpec(name="s", prefetch_layers=2)
        _, row = make_history([run("a", make_record(older)), run("b", make_record(newer), day=2)])
        assert row.changes == ("strategy.prefetch_layers: 1 -> 2",)

    def test_sessions_compare_under_one_budget_alone(self) -> None:
        larger = of_spec(budget=make_budget(device_bytes=3_000_000))
        _, row = make_history([run("a", make_record()), run("b", larger, day=2)])
        assert row.ratios is not None
        assert (row.ratios.sessions_by_peak, row.ratios.tpot_s) == (None, 1.0)
        assert row.changes == ("budget.device_bytes: 2000000 -> 3000000",)

    def test_a_limit_stands_beside_its_cell(self) -> None:
        directory = RunDirectory.read(GOLDEN / "e2a7227")
        rows = make_history([KeptRun("a", directory.experiment, directory.records())])
        assert [(row.strategy, row.figures.sessions_limit) for row in rows][:2] == [
            ("dynamic", 30),
            ("streamed", None),
        ]

    def test_a_limit_without_a_cell_has_a_row_of_its_own(self) -> None:
        directory = RunDirectory.read(GOLDEN / "e2a7227")
        probes = [record for record in directory.records() if record.spec.role == "fit"]
        later = [msgspec.structs.replace(each, started_at_utc="2027-01-02T03:04:05Z") for each in probes]
        rows = make_history([KeptRun("a", directory.experiment, probes), KeptRun("b", directory.experiment, later)])
        assert [(row.workload, row.figures.sessions_limit) for row in rows] == [("p100-o5", 30)] * 2
        assert rows[1].ratios is not None
        assert (rows[1].ratios.sessions_limit, rows[1].figures.tpot_s) == (1.0, None)

    def test_records_that_two_directories_hold_count_once(self) -> None:
        rows = make_history([run("a", make_record()), run("copy", make_record(), make_streamed())])
        assert [(row.run_dir, row.strategy) for row in rows] == [("a", "dynamic"), ("copy", "streamed")]

    def test_two_machines_that_start_at_once_are_no_copies(self) -> None:
        other = make_record(machine=make_machine(cpu="Other CPU"))
        assert len(make_history([run("a", make_record()), run("b", other)])) == 2


class TestComparability:
    def test_another_cpu_is_no_comparison_and_says_so(self) -> None:
        other = make_record(machine=make_machine(cpu="Other CPU"))
        _, row = make_history([run("a", make_record()), run("b", other, day=2)])
        assert (row.before, row.ratios, row.changes) == ("a", None, ("cpu: Test CPU -> Other CPU",))

    def test_another_rung_is_no_comparison(self) -> None:
        emulated = make_record(spec=make_spec(device="cuda"), evidence="emulated")
        assert machine_kind(measured())["rung"] == "measured"
        _, row = make_history([run("a", emulated), run("b", measured(), day=2)])
        assert row.ratios is None
        assert "rung: emulated -> measured" in row.changes

    def test_another_accelerator_is_none_but_another_driver_is_a_change(self) -> None:
        driver = msgspec.structs.replace(H100, driver="580.2", uuid="GPU-2")
        h200 = msgspec.structs.replace(H100, name="H200", memory_bytes=141 * 1024**3)
        rows = make_history([run("a", measured()), run("b", measured(driver), day=2), run("c", measured(h200), day=3)])
        assert rows[1].ratios is not None
        assert (rows[1].changes, rows[1].driver) == (("driver: 570.1 -> 580.2",), "580.2")
        assert rows[2].ratios is None
        assert "accelerator: H100 -> H200" in rows[2].changes

    @pytest.mark.parametrize(
        "changed", [CpuSpec(link_bytes_per_s=1024**3), CpuSpec(compute_threads=3)], ids=["pace", "threads"]
    )
    def test_an_emulated_link_of_another_pace_or_other_threads_are_none(self, changed: CpuSpec) -> None:
        _, row = make_history([run("a", make_record()), run("b", of_spec(cpu=changed), day=2)])
        assert row.ratios is None

    def test_the_latest_run_on_the_same_machine_is_taken_past_others(self) -> None:
        other = make_record(machine=make_machine(cpu="Other CPU"), trials=make_trials(0.005))
        rows = make_history(
            [run("a", make_record(trials=make_trials(0.020))), run("b", other, day=2), run("c", make_record(), day=3)]
        )
        assert rows[2].before == "a"
        assert rows[2].ratios is not None
        assert rows[2].ratios.tpot_s == pytest.approx(0.5)

    def test_a_failure_in_between_is_no_standard(self) -> None:
        spec = make_spec(DYNAMIC)
        failed = make_failure("timeout", DYNAMIC, spec=spec)
        rows = make_history([run("a", make_record()), run("b", failed, day=2), run("c", make_record(), day=3)])
        assert [(row.before, row.status) for row in rows] == [(None, "ok"), ("a", "timeout"), ("a", "ok")]
        assert rows[1].ratios is not None
        assert (rows[1].ratios.tpot_s, rows[1].figures.tpot_s) == (None, None)

    def test_a_cell_that_was_refused_before_is_on_the_same_machine(self) -> None:
        refused = make_failure("unsupported", STREAMED, conditions=Conditions())
        ran = make_streamed(conditions=make_conditions(compute_threads=1))
        _, row = make_history([run("a", refused), run("b", ran, day=2)])
        assert (row.ratios is not None, row.changes) == (True, ())

    def test_nothing_is_divided_by_nothing(self) -> None:
        """No byte moved before: a ratio would have no meaning."""
        still = make_record(STREAMED, trials=make_trials(decode=make_phase(1_030_000, 0)))
        _, row = make_history([run("a", still), run("b", make_streamed(), day=2)])
        assert row.ratios is not None
        assert row.ratios.bytes_moved_per_token is None

    def test_the_commit_of_the_toolkit_is_no_change(self) -> None:
        record = make_record(machine=make_machine(git_commit="abc"))
        assert setting_of(record) == setting_of(make_record())


class TestShown:
    def rows(self) -> tuple[HistoryRow, ...]:
        """Two releases on one CPU, then one on another; the second run swapped."""
        swapped = (make_trial(0.012, swap_in_bytes=4096),)
        newer = make_record(trials=swapped, machine=make_machine(versions=NEWER))
        other = make_record(machine=make_machine(cpu="Other CPU"))
        return make_history([run("one", make_record()), run("two", newer, day=2), run("three", other, day=3)])

    def tables(self, text: str) -> list[list[list[str]]]:
        tokens = MarkdownIt().enable("table").parse(text)
        tables: list[list[list[str]]] = []
        for token, after in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
            if token.type == "table_open":
                tables.append([])
            elif token.type == "tr_open":
                tables[-1].append([])
            elif token.type in ("td_open", "th_open"):
                tables[-1][-1].append(after.content)
        return tables

    def test_markdown_has_each_figure_with_its_ratio(self) -> None:
        text = render_history(self.rows(), [])
        ((titles, *rows),) = self.tables(text)
        tpot = [row[titles.index("TPOT (ms)")] for row in rows]
        assert tpot == ["10.00", "12.00\\* (1.20x)", "10.00 (-)"]
        assert [row[titles.index("by peak")] for row in rows] == ["45", "45 (1.00x)", "45 (-)"]
        assert rows[0][titles.index("device peak")] == "1,016 KiB"
        assert "- two: against one: torch: 2.13.0 -&#62; 2.14.0." in text
        assert (
            "- three: not comparable, no earlier run on this kind of machine and this rung; against two: cpu:" in text
        )
        assert "limit that ran" not in titles, "no run has one"
        assert "swap was in use" in text

    def test_hostile_names_break_no_markdown(self) -> None:
        spec = make_spec(model=ModelSpec(source="a|b\n# c <script>"))
        skipped = [SkippedDirectory(path="x|`y", reason="# not <a> run")]
        text = render_history(make_history([run("r|s", make_record(spec=spec))]), skipped)
        ((titles, row),) = self.tables(text)
        assert len(titles) == len(row)
        assert "<script>" not in text
        assert "<a>" not in text
        headings = [line for line in text.splitlines() if line.startswith("#")]
        assert headings == ["# History", "## does-it-pay: small, dynamic", "## Left out"]

    @pytest.mark.parametrize("width", [100, 120])
    def test_the_terminal_fits(self, width: int) -> None:
        spec = make_spec(model=ModelSpec(source="organisation/a-model-with-a-long-name-70B-Instruct"))
        long = run("releases/2026/january/run-with-a-long-name", make_record(spec=spec), day=4)
        rows = make_history([run("one", make_record()), long])
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(render_history_terminal(rows, [SkippedDirectory(path="x", reason="[red]no[/]")]))
        text = console.export_text()
        assert max(map(len, text.splitlines())) <= width
        for figure in ("54/ -/ 45/ -", "500.0", "10.00", "152.4", "1,016 KiB", "1.00x"):
            assert figure in text
        assert "…" not in text
        assert "x: [red]no[/]" in text

    def test_a_frame_has_units_in_its_names_and_what_is_absent_is_na(self) -> None:
        frame = history_frame(self.rows())
        assert list(frame["tpot_s_ratio"].fillna(-1)) == [-1, pytest.approx(1.2), -1]
        changes = ["torch: 2.13.0 -> 2.14.0", "cpu: Test CPU -> Other CPU; torch: 2.14.0 -> 2.13.0"]
        assert list(frame["changes"].fillna("none")) == ["none", *changes]
        assert frame["versions"][1] == "torch 2.14.0; transformers 5.24.0"
        assert str(frame["peak_bytes"].dtype) == "Int64"


class TestCommand:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        """Two runs, a copy, an empty run, a broken one, another tool's folder, and what is not looked at."""
        root = tmp_path / "runs"
        machine = make_machine()
        for name, day in (("2026/a", 2), ("b", 1)):
            with RunDirectory.create(root / name, make_experiment(), machine) as directory:
                directory.append(msgspec.structs.replace(make_record(), started_at_utc=on(day)))
        shutil.copytree(root / "b", root / "b-copy")
        RunDirectory.create(root / "empty", make_experiment(), machine).close()
        shutil.copytree(root / "b", root / "broken")
        (root / "broken" / "records.jsonl").write_text('{"schema_version": 9}\n')
        (root / "foreign").mkdir()
        (root / "foreign" / "records.jsonl").write_text("{}\n")
        shutil.copytree(root / "b", root / ".hidden")
        (root / "loop").symlink_to(root, target_is_directory=True)
        (root / "notes").mkdir()
        return root

    def invoke(self, *arguments: object) -> Any:
        return CliRunner().invoke(app, ["history", *map(str, arguments)])

    def test_broken_and_foreign_directories_are_named_and_passed_over(self, root: Path) -> None:
        document = json.loads(self.invoke(root, "--json").stdout)
        assert [(row["run_dir"], row["before"]) for row in document["rows"]] == [("b", None), ("2026/a", "b")]
        reasons = {each["path"]: each["reason"] for each in document["skipped"]}
        assert sorted(reasons) == ["b-copy", "broken", "empty", "foreign"]
        assert reasons["b-copy"] == "a copy: b has all its records"
        assert reasons["empty"] == "no cell has finished"
        assert "schema_version 9 is newer" in reasons["broken"]
        assert "not a run directory" in reasons["foreign"]

    def test_the_terminal_names_them_too(self, root: Path) -> None:
        result = self.invoke(root)
        assert result.exit_code == 0
        assert "Left out:" in result.stdout
        assert "does-it-pay: small, dynamic" in result.stdout

    def test_files_are_written_beside(self, root: Path, tmp_path: Path) -> None:
        out = tmp_path / "new" / "place"
        assert self.invoke(root, "--out", out, "--json").exit_code == 0
        assert "## Left out" in (out / "history.md").read_text()
        rows = list(csv.DictReader(io.StringIO((out / "history.csv").read_text())))
        assert [(row["run_dir"], row["ttft_s"], row["ttft_s_ratio"]) for row in rows] == [
            ("b", "0.5", ""),
            ("2026/a", "0.5", "1.0"),
        ]

    def test_one_run_directory_is_a_history_of_one(self, root: Path) -> None:
        document = json.loads(self.invoke(root / "b", "--json").stdout)
        assert [row["run_dir"] for row in document["rows"]] == ["."]

    def test_no_run_at_all(self, root: Path, tmp_path: Path) -> None:
        result = self.invoke(root / "notes")
        assert result.exit_code == 2
        assert "no run with records" in result.stderr
        assert "not a run directory" in self.invoke(root / "foreign").stderr
        assert "is not a directory" in self.invoke(tmp_path / "none").stderr

    def test_a_place_that_cannot_be_written_ends_with_3(self, root: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        assert self.invoke(root, "--out", tmp_path / "file" / "x").exit_code == 3

    def test_links_are_not_followed(self, root: Path) -> None:
        assert not any("loop" in str(path) for path in find_run_directories(root))
        with pytest.raises(InputError, match="is not a directory"):
            find_run_directories(root / "none")

    def test_records_of_every_earlier_commit_are_one_history(self) -> None:
        document = json.loads(self.invoke(GOLDEN, "--json").stdout)
        assert document["skipped"] == []
        dynamic = [row for row in document["rows"] if row["strategy"] == "dynamic"]
        assert [row["run_dir"] for row in dynamic] == ["57391f3", "7e38014", "91cac13", "bf6b2e9", "e2a7227"]
        assert {row["figures"]["sessions_by_peak"] for row in dynamic} == {45}
