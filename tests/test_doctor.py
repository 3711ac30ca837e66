"""What the doctor says of an environment, with planted gaps."""

import ast
import importlib.util
import json
import os
import re
import shutil
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from factories import make_conditions, make_record
from typer.testing import CliRunner

from offload_eval.analysis.findings import find
from offload_eval.cli import doctor
from offload_eval.cli.doctor import doctor_command
from offload_eval.core.machine import Accelerator
from offload_eval.errors import UnableError
from offload_eval.strategies import backends
from offload_eval.strategies.backends import backend_refusal

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def diagnosed(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict, dict]:
    code = doctor_command(json_output=True)
    report = json.loads(capsys.readouterr().out)
    return code, report, {check["name"]: check for check in report["checks"]}


@pytest.fixture(autouse=True)
def no_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "measure_contention", lambda: 1.0)


def plant_versions(monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> None:
    """Installed versions as they are, except for some; None: not installed."""
    real = doctor.installed_versions

    def planted(names: tuple[str, ...]) -> dict[str, str]:
        versions = real(names) | {name: changes[name] for name in names if name in changes}
        return {name: version for name, version in versions.items() if version is not None}

    monkeypatch.setattr(doctor, "installed_versions", planted)


def test_the_shipped_versions_are_the_constraints() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    assert doctor.tested_versions().items() <= pinned.items()


def test_every_required_package_has_a_tested_version_and_a_minimum() -> None:
    declared = dict(requirement.split(">=") for requirement in PROJECT["dependencies"])
    assert doctor.required_minimums() == declared
    assert declared.keys() <= doctor.tested_versions().keys()


def test_a_checkout_that_was_never_installed_is_diagnosed_by_its_project_file(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = doctor.required_minimums()

    def nothing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "metadata", nothing)
    assert doctor.required_minimums() == installed
    monkeypatch.setattr(doctor, "_PROJECT_FILE", ROOT / "no such file")
    with pytest.raises(UnableError, match=r"pip install -e \."):
        doctor.required_minimums()


def test_every_package_that_a_test_imports_is_declared() -> None:
    extras = PROJECT["optional-dependencies"]
    requirements = [*PROJECT["dependencies"], *extras["quantizers"], *extras["dev"]]
    brought = {"numpy", "click", "tokenizers"}  # by pandas, typer and transformers
    declared = {re.split(r"[>=]", requirement)[0].lower() for requirement in requirements} | brought
    names = {path.stem for path in (ROOT / "tests").glob("*.py")} | {"offload_eval"} | sys.stdlib_module_names
    distributions = metadata.packages_distributions()
    for package in {name for path in (ROOT / "tests").glob("*.py") for name in imported_by(path)} - names:
        assert declared & {name.lower() for name in distributions[package]}, package


def imported_by(path: Path) -> set[str]:
    """Top-level names of the modules that a file imports, at any depth."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    named = [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in (*plain, *named)}


def test_this_environment_runs_the_cpu_device(capsys: pytest.CaptureFixture[str]) -> None:
    code, report, checks = diagnosed(capsys)
    assert code == 0
    assert "cpu" in report["usable_devices"]
    assert checks["device cpu"]["detail"] == "evidence: emulated"
    assert {"quantizer quanto", "quantizer hqq", "quantizer fp8", "swap", "contention", "torch"} <= checks.keys()
    assert all(check["remedy"] for check in checks.values() if check["status"] != "ok")


def test_a_missing_required_package_ends_with_3_and_names_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant_versions(monkeypatch, safetensors=None)
    code, report, checks = diagnosed(capsys)
    assert code == 3
    assert report["usable_devices"] == []
    assert checks["safetensors"]["status"] == "missing"
    assert checks["device cpu"]["remedy"] == f"pip install safetensors=={doctor.tested_versions()['safetensors']}"


@pytest.mark.parametrize(
    ("name", "version", "status", "code"),
    [
        ("torch", "2.10.1+cu128", "missing", 3),
        ("torch", "2.11.0", "warn", 0),
        ("torch", "2.13.0+cu130", "ok", 0),
        ("hqq", None, "missing", 0),
    ],
)
def test_versions_are_judged_by_the_minimum_and_the_tested_one(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    version: str | None,
    status: str,
    code: int,
) -> None:
    plant_versions(monkeypatch, **{name: version})
    ended_with, _, checks = diagnosed(capsys)
    assert (checks[name]["status"], ended_with) == (status, code)


@pytest.mark.parametrize(
    ("version", "status"),
    [("3.10.14", "missing"), ("3.11.0", "ok"), ("3.13.9", "ok"), ("3.14.0", "missing")],
)
def test_the_python_range_is_the_packages_own(monkeypatch: pytest.MonkeyPatch, version: str, status: str) -> None:
    assert PROJECT["requires-python"] == ">=3.11,<3.14"
    monkeypatch.setattr("platform.python_version", lambda: version)
    assert doctor._python_check().status == status


@pytest.mark.parametrize(("ratio", "status"), [(1.02, "ok"), (1.5, "ok"), (1.51, "warn"), (None, "ok")])
def test_contention_is_a_warning_where_it_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, ratio: float | None, status: str
) -> None:
    monkeypatch.setattr(doctor, "measure_contention", lambda: ratio)
    assert doctor._contention_check().status == status
    findings = find([make_record(conditions=make_conditions(contention_ratio=ratio))])
    assert [finding.code for finding in findings] == ["contended_machine"] * (status == "warn")


@pytest.mark.parametrize(("used_bytes", "status"), [(40, "ok"), (60, "warn"), (None, "ok")])
def test_a_gpu_that_others_use_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, used_bytes: int | None, status: str
) -> None:
    accelerator = Accelerator(name="card", uuid="GPU-1", memory_bytes=1000, driver="580")
    monkeypatch.setattr(doctor, "read_used_bytes", {"GPU-1": used_bytes}.get)
    (check,) = doctor._idle_accelerator_checks(SimpleNamespace(accelerator=accelerator))
    assert check.status == status


def test_people_get_a_table_and_the_remedies_uncut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the command itself, at any width: a command that wraps cannot be pasted."""
    from offload_eval.cli.app import app

    monkeypatch.setenv("COLUMNS", "30")
    plant_versions(monkeypatch, torch="2.11.0")
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert re.search(r"^torch +warn", result.stdout, re.MULTILINE)
    assert f"torch: pip install torch=={doctor.tested_versions()['torch']}\n" in result.stdout
    assert "usable devices: cpu" in result.stdout


@pytest.fixture
def bare_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH and a scripts folder with nothing in them, and no extension built."""
    (tmp_path / "bin").mkdir()
    real = sysconfig.get_path
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path) if name == "scripts" else real(name))
    monkeypatch.setattr(backends, "_extension_is_built", lambda _name: False)
    return tmp_path / "bin"


def add_program(folder: Path, name: str) -> None:
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)


def test_quanto_names_the_first_missing_piece(bare_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_importable", lambda _name: True)
    for name in ("CXX", "CUDA_HOME", "CUDA_PATH", "ROCM_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert backend_refusal("quanto").endswith("pip install ninja")
    add_program(bare_path, "ninja")
    assert backend_refusal("quanto").endswith("apt-get install g++")
    add_program(bare_path, "c++")
    (headers := bare_path / "include").mkdir()
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(headers))
    assert "Python.h" in backend_refusal("quanto")
    (headers / "Python.h").touch()
    assert backend_refusal("quanto") is None
    add_program(bare_path, "nvcc")
    assert backend_refusal("quanto", device="cuda") is None


def test_a_built_extension_needs_ninja_and_no_compiler(bare_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even a load makes torch ask for ninja."""
    monkeypatch.setattr(backends, "_importable", lambda _name: True)
    monkeypatch.setattr(backends, "_extension_is_built", {"quanto_cpp": True, "quanto_cuda": False}.get)
    assert "ninja" in backend_refusal("quanto")
    add_program(bare_path.parent, "ninja")
    assert backend_refusal("quanto") is None, "ninja in the environment's scripts folder is found"
    assert "C++ compiler" in backend_refusal("quanto", device="cuda")


def test_the_scripts_folder_comes_onto_the_path_once(bare_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_program(bare_path.parent, "ninja")
    assert shutil.which("ninja") is None
    backends.add_scripts_to_path()
    backends.add_scripts_to_path()
    assert shutil.which("ninja") == str(bare_path.parent / "ninja")
    assert os.environ["PATH"].split(":").count(str(bare_path.parent)) == 1


@pytest.mark.parametrize(
    ("built_with", "has_library", "expected"),
    [
        ("2.13.0+cpu", True, True),
        ("2.13.0", True, False),
        ("2.13.0+cpu", False, False),
        (None, True, False),
    ],
)
def test_an_extension_counts_as_built_for_exactly_this_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built_with: str | None, has_library: bool, expected: bool
) -> None:
    build = tmp_path / "quanto/library/extensions/cpp/build"
    build.mkdir(parents=True)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/version.py").write_text("__all__ = ['__version__']\n__version__ = '2.13.0+cpu'\n")
    if built_with:
        (build / "pytorch_version.txt").write_text(built_with)
    if has_library:
        (build / "quanto_cpp.so").touch()
    origins = {"optimum.quanto": tmp_path / "quanto/__init__.py", "torch": tmp_path / "torch/__init__.py"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(origins[name])))
    assert backends._extension_is_built("quanto_cpp") is expected


@pytest.mark.parametrize("backend", ["quanto", "hqq"])
def test_a_package_that_is_not_there_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    def find_nothing(name: str) -> None:
        if "." in name:
            raise ModuleNotFoundError(name.partition(".")[0])

    monkeypatch.setattr(importlib.util, "find_spec", find_nothing)
    assert backend_refusal(backend).endswith('pip install "offload-eval[quantizers]"')


def test_fp8_is_refused_where_transformers_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import cache_utils

    assert backend_refusal("fp8") is None
    monkeypatch.delattr(cache_utils, "Fp8QuantizedLayer")
    assert backend_refusal("fp8").endswith('pip install "transformers>=5.21"')


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="quanto, hqq, fp8"):
        backend_refusal("int3")
