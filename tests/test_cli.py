"""The command line: quick to answer, one line for a failure, and the documented exit codes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from factories import make_experiment, make_failure, make_machine, make_record, make_spec, make_streamed
from typer.testing import CliRunner

import offload_eval
from offload_eval.cli.app import app
from offload_eval.core.experiment import OffloadedSpec
from offload_eval.errors import InputError, OffloadEvalError, UnableError
from offload_eval.store.run_directory import RunDirectory

HEAVY = ("torch", "transformers", "pandas", "pynvml", "accelerate")
COMMAND = (sys.executable, "-m", "offload_eval")


def call(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False, **options)


def replace_command(monkeypatch: pytest.MonkeyPatch, name: str, body: Callable[..., int]) -> None:
    module = ModuleType(f"offload_eval.cli.{name}")
    setattr(module, f"{name}_command", body)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


class TestImports:
    def imported(self, code: str) -> list[str]:
        """Names of the heavy packages that a fresh interpreter holds after running the code."""
        report = f"\nimport sys; print([name for name in {HEAVY} if name in sys.modules])"
        result = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, check=True)
        return [name for name in HEAVY if repr(name) in result.stdout.splitlines()[-1]]

    def test_the_probe_sees_an_import(self) -> None:
        assert self.imported("import sys; sys.modules['torch'] = sys") == ["torch"]

    def test_the_package_imports_no_framework(self) -> None:
        assert self.imported("import offload_eval") == []

    def test_the_store_imports_no_framework(self) -> None:
        assert self.imported("import offload_eval.store.experiment_file, offload_eval.store.run_directory") == []

    @pytest.mark.parametrize(
        "command",
        [[], ["plan"], ["run"], ["report"], ["doctor"], ["link"], ["policy", "apply"], ["export"], ["history"]],
    )
    def test_help_imports_no_framework(self, command: list[str]) -> None:
        code = (
            "from offload_eval.cli.app import app\n"
            f"try: app({[*command, '--help']!r})\n"
            "except SystemExit as end: assert end.code == 0"
        )
        assert self.imported(code) == []

    def test_plan_imports_no_framework(self) -> None:
        code = (
            "from offload_eval.cli.app import app\n"
            "try: app(['plan', '--model', 'gpt2', '--prompt-tokens', '8', '--vram-gib', '1', '--json'])\n"
            "except SystemExit as end: assert end.code == 0"
        )
        assert self.imported(code) == []

    def test_policy_apply_imports_no_framework(self) -> None:
        code = (
            "from offload_eval.cli.app import app\n"
            "import offload_eval.cli.policy_apply, offload_eval.cli.policy_check\n"
            "try: app(['policy', 'apply', 'none.yaml', 'none.yaml'])\n"
            "except SystemExit as end: assert end.code == 2"
        )
        assert self.imported(code) == []

    def test_help_answers_within_400_ms(self) -> None:
        times_s = []
        for _ in range(5):
            start_s = time.perf_counter()
            assert call("--help").returncode == 0
            times_s.append(time.perf_counter() - start_s)
        assert min(times_s) < 0.4


class TestUsage:
    def test_version(self) -> None:
        result = call("--version")
        assert (result.returncode, result.stdout) == (0, f"offload-eval {offload_eval.__version__}\n")

    def test_help_names_every_command_and_exit_code(self) -> None:
        output = " ".join(call("--help").stdout.split())
        for text in ("plan", "run", "report", "doctor", "link", "policy", "0 done", "2 bad input", "130 interrupted"):
            assert text in output

    @pytest.mark.parametrize(
        "arguments", [["nope"], ["run"], ["run", "x.yaml", "--device", "tpu"], ["report"], ["doctor", "--all"]]
    )
    def test_a_usage_error_ends_with_2(self, arguments: list[str]) -> None:
        result = call(*arguments)
        assert (result.returncode, result.stdout) == (2, "")
        assert "Usage:" in result.stderr


class TestExitCodes:
    @pytest.mark.parametrize("code", [0, 1, 3])
    def test_the_commands_code_is_the_processs(self, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
        replace_command(monkeypatch, "doctor", lambda **_: code)
        assert invoke("doctor").exit_code == code

    @pytest.mark.parametrize(("error", "code"), [(OffloadEvalError, 1), (InputError, 2), (UnableError, 3)])
    @pytest.mark.parametrize("options", [[], ["--json"]])
    def test_a_failure_is_one_line_on_stderr(
        self, monkeypatch: pytest.MonkeyPatch, error: type[OffloadEvalError], code: int, options: list[str]
    ) -> None:
        message = f"demo.yaml: strategies[0].kind: '[bold]' is not allowed;\n {'long ' * 40}"

        def body(json_output: bool) -> int:
            raise error(message)

        replace_command(monkeypatch, "doctor", body)
        result = invoke("doctor", *options)
        assert (result.exit_code, result.stdout) == (code, "")
        assert result.stderr == f"error: {' '.join(message.split())}\n"

    def test_an_interrupt_ends_with_130(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def body(json_output: bool) -> int:
            raise KeyboardInterrupt

        replace_command(monkeypatch, "doctor", body)
        assert invoke("doctor").exit_code == 130

    def test_a_defect_is_not_dressed_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def body(json_output: bool) -> int:
            raise ZeroDivisionError

        replace_command(monkeypatch, "doctor", body)
        assert isinstance(invoke("doctor").exception, ZeroDivisionError)

    def test_a_closed_pipe_is_quiet(self) -> None:
        code = "from offload_eval.cli.console import print_json\nfor _ in range(9999): print_json('x' * 99)"
        reader, writer = os.pipe()
        os.close(reader)
        result = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, check=False)
        os.close(writer)
        assert (result.returncode, result.stderr) == (141, b"")


class TestRun:
    @pytest.mark.parametrize(("command", "limits_alone"), [("run", False), ("capacity", True)])
    def test_every_option_reaches_the_command(
        self, command: str, limits_alone: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: dict[str, Any] = {}
        replace_command(monkeypatch, "run", lambda **options: seen.update(options) or 0)
        arguments = ["demo.yaml", "--out", "runs/a", "--resume", "--dry-run", "--set", "a.b=1", "--set", "c=2"]
        flags = ("--json", "--allow-mismatch", "--trace-only")
        assert invoke(command, *arguments, "--device", "cpu", *flags).exit_code == 0
        assert seen == {
            "experiment": Path("demo.yaml"),
            "out": Path("runs/a"),
            "resume": True,
            "dry_run": True,
            "trace_only": True,
            "overrides": ["a.b=1", "c=2"],
            "device": "cpu",
            "json_output": True,
            "allow_mismatch": True,
            "limits_alone": limits_alone,
        }

    def test_options_that_are_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: dict[str, Any] = {}
        replace_command(monkeypatch, "run", lambda **options: seen.update(options) or 0)
        assert invoke("run", "demo.yaml").exit_code == 0
        absent = {"out": None, "overrides": [], "device": None}
        absent |= dict.fromkeys(
            ("resume", "dry_run", "trace_only", "json_output", "allow_mismatch", "limits_alone"), False
        )
        assert seen == {"experiment": Path("demo.yaml"), **absent}


class TestReport:
    def written(self, path: Path, *, num_records: int) -> Path:
        with RunDirectory.create(path, make_experiment(), make_machine()) as directory:
            for _ in range(num_records):
                directory.append(make_record())
        return path

    def test_the_table_and_the_reports_path_are_printed(self, tmp_path: Path) -> None:
        path = self.written(tmp_path / "run", num_records=1)
        result = invoke("report", str(path))
        assert result.exit_code == 0
        assert "dynamic" in result.stdout
        files = [path / "report.md", path / "report.html", path / "report.json"]
        assert result.stdout.splitlines()[-3:] == [f"report: {file}" for file in files]
        assert all(file.is_file() for file in files)

    def test_json_says_what_was_written_and_nothing_else(self, tmp_path: Path) -> None:
        path = self.written(tmp_path / "run", num_records=1)
        content = json.loads(invoke("report", str(path), "--json").stdout)
        assert content["files"][:2] == [f"{path}/report.md", f"{path}/report.html"]
        assert all(Path(file).is_file() for file in content["files"])
        assert [(cell["workload"], cell["strategy"], cell["status"]) for cell in content["cells"]] == [
            ("small", "dynamic", "ok")
        ]

    def test_the_last_record_of_every_cell_in_the_directory_is_reported(self, tmp_path: Path) -> None:
        """A cell that the experiment names no longer, as after a resume with another one, stays in the report."""
        stray = make_record(spec=make_spec(OffloadedSpec()))
        with RunDirectory.create(tmp_path / "run", make_experiment(), make_machine()) as directory:
            for record in (make_failure("failed"), stray, make_streamed()):
                directory.append(record)
        content = json.loads(invoke("report", str(tmp_path / "run"), "--json").stdout)
        assert [(cell["strategy"], cell["status"]) for cell in content["cells"]] == [
            ("streamed", "ok"),
            ("offloaded", "ok"),
        ]
        assert f"`{stray.run_id}`" in (tmp_path / "run" / "report.md").read_text()

    def test_a_run_without_a_finished_cell_is_refused(self, tmp_path: Path) -> None:
        result = invoke("report", str(self.written(tmp_path / "run", num_records=0)))
        assert result.exit_code == 2
        assert "no cell has finished" in result.stderr

    def test_what_is_no_run_directory_is_refused(self, tmp_path: Path) -> None:
        result = invoke("report", str(tmp_path))
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: {tmp_path}: not a run directory")

    def test_a_report_that_cannot_be_written_is_one_line(self, tmp_path: Path) -> None:
        path = self.written(tmp_path / "run", num_records=1)
        (path / "tables").write_text("in the way")
        result = invoke("report", str(path))
        assert result.exit_code == 3
        assert result.stderr.startswith(f"error: {path}: the report cannot be written: ")
