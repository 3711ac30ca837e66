"""`offload-eval doctor`: what this environment can measure, and the command that adds what is missing."""

import platform
import re
import tomllib
from collections.abc import Iterator
from importlib import metadata, resources
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

import msgspec
from rich.table import Table

from offload_eval.analysis.rules_conditions import CONTENDED_RATIO
from offload_eval.cli.console import print_json, result_console
from offload_eval.core.base import Strict
from offload_eval.core.experiment import DeviceName
from offload_eval.core.machine import Machine
from offload_eval.errors import ExitCode, UnableError, UpstreamChangedError
from offload_eval.instruments.contention import measure_contention
from offload_eval.instruments.environment import installed_versions, read_machine
from offload_eval.instruments.host_memory import read_cgroup_memory, read_host_memory
from offload_eval.instruments.nvml import read_used_bytes
from offload_eval.strategies.backends import backend_refusal
from offload_eval.units import format_bytes

Status = Literal["ok", "warn", "missing"]

_PROJECT_FILE: Final = Path(__file__).resolve().parents[2] / "pyproject.toml"
IDLE_USED_SHARE: Final = 0.05
"""Of a GPU's memory: the driver's own reserve stays below it, a process with a context does not."""
_STYLES: Final = {"ok": "green", "warn": "yellow", "missing": "red"}


class Check(Strict, frozen=True, kw_only=True):
    """One thing that was looked at."""

    name: str
    status: Status
    detail: str
    remedy: str = ""
    """The command or action that makes it ok; empty when it is."""
    required: bool = False
    """Whether nothing can be measured without it."""


class Diagnosis(Strict, frozen=True, kw_only=True):
    """Everything that was looked at."""

    usable_devices: tuple[DeviceName, ...]
    checks: tuple[Check, ...]
    machine: Machine

    @property
    def unable(self) -> bool:
        """Whether a required piece is missing."""
        return any(check.required and check.status == "missing" for check in self.checks)


def doctor_command(json_output: bool) -> int:
    """Prints the diagnosis.

    Args:
        json_output: One JSON object instead of the table.

    Returns:
        0 when at least the cpu device can run, 3 when a required piece is missing.
    """
    diagnosis = diagnose()
    if json_output:
        print_json(msgspec.json.encode(diagnosis).decode())
    else:
        _show(diagnosis)
    return ExitCode.ENVIRONMENT if diagnosis.unable else ExitCode.DONE


def diagnose() -> Diagnosis:
    """Looks at this environment; imports torch and transformers, and initializes no device."""
    contention = _contention_check()
    machine = read_machine(with_accelerator=True)
    packages = [_python_check(), *_package_checks()]
    devices = [_cpu_check(packages), _cuda_check(machine)]
    usable: list[DeviceName] = []
    if devices[0].status == "ok":
        usable = ["cpu", "cuda"] if devices[1].status == "ok" else ["cpu"]
    return Diagnosis(
        usable_devices=tuple(usable),
        checks=(
            *devices,
            *packages,
            *(_backend_check(backend, usable) for backend in ("quanto", "hqq", "fp8")),
            contention,
            *_memory_checks(),
            *_idle_accelerator_checks(machine),
        ),
        machine=machine,
    )


def _python_check() -> Check:
    wanted = _own_requirements()[0]
    bounds = dict(re.findall(r"(>=|<)\s*([\d.]+)", wanted))
    here = platform.python_version()
    if _numbers(bounds[">="]) <= _numbers(here) < _numbers(bounds["<"]):
        return Check(name="python", status="ok", detail=here, required=True)
    remedy = f"create an environment with Python {bounds['>=']} or later, below {bounds['<']}"
    return Check(name="python", status="missing", detail=f"{here}; needs {wanted}", remedy=remedy, required=True)


def _package_checks() -> Iterator[Check]:
    minimums = required_minimums()
    for name, tested in tested_versions().items():
        yield _package_check(name, tested, minimums.get(name))


def _package_check(name: str, tested: str, minimum: str | None) -> Check:
    required = minimum is not None
    installed = installed_versions((name,)).get(name)
    remedy = f"pip install {name}=={tested}"
    if installed is None:
        detail = f"not installed; tested with {tested}"
        return Check(name=name, status="missing", detail=detail, remedy=remedy, required=required)
    if minimum is not None and _numbers(installed) < _numbers(minimum):
        detail = f"{installed} is older than {minimum}"
        return Check(name=name, status="missing", detail=detail, remedy=remedy, required=True)
    if installed.partition("+")[0] != tested:
        detail = f"{installed}; tested with {tested}"
        return Check(name=name, status="warn", detail=detail, remedy=remedy, required=required)
    return Check(name=name, status="ok", detail=installed, required=required)


def tested_versions() -> dict[str, str]:
    """The versions this release was tested with, by package."""
    lines = resources.files("offload_eval").joinpath("tested_versions.txt").read_text().splitlines()
    pins = (line.partition("==") for line in lines if line and not line.startswith("#"))
    return {name: version for name, _, version in pins}


def required_minimums() -> dict[str, str]:
    """The lowest version of every package this one cannot run without, from its own metadata.

    Raises:
        UnableError: The package runs from a folder that is neither installed nor a checkout.
    """
    requirements = _own_requirements()[1]
    plain = (re.fullmatch(r"([\w.-]+)\s*>=\s*([\w.]+)", requirement) for requirement in requirements)
    return {match[1]: match[2] for match in plain if match}


def _own_requirements() -> tuple[str, list[str]]:
    """The versions of Python and the packages that this one asks for: as installed, else as the checkout says."""
    try:
        own = metadata.metadata("offload-eval")
        return own["Requires-Python"], metadata.requires("offload-eval") or []
    except metadata.PackageNotFoundError:
        pass
    try:
        project = tomllib.loads(_PROJECT_FILE.read_text(encoding="utf-8"))["project"]
    except OSError:
        raise UnableError("offload-eval is not installed in this environment: pip install -e .") from None
    return project["requires-python"], project["dependencies"]


def _cpu_check(packages: list[Check]) -> Check:
    lacking = [check for check in packages if check.required and check.status == "missing"]
    if lacking:
        detail = f"cannot run without {', '.join(check.name for check in lacking)}"
        remedy = " && ".join(check.remedy for check in lacking)
        return Check(name="device cpu", status="missing", detail=detail, remedy=remedy, required=True)
    return Check(name="device cpu", status="ok", detail="evidence: emulated", required=True)


def _cuda_check(machine: Machine) -> Check:
    def lacks(detail: str, remedy: str) -> Check:
        return Check(name="device cuda", status="missing", detail=detail, remedy=remedy)

    install_torch = f"pip install --force-reinstall torch=={tested_versions()['torch']}"
    if find_spec("torch") is None:
        return lacks("torch is not installed", install_torch)
    import torch

    if torch.cuda.is_available():
        name = machine.accelerator.name if machine.accelerator else "a ROCm device"
        return Check(name="device cuda", status="ok", detail=f"evidence: measured; {name}")
    if machine.cuda is None:
        return lacks(f"torch {torch.__version__} is built for CPUs only", install_torch)
    if machine.accelerator is None:
        return lacks("no GPU is visible to this process", "nvidia-smi; echo $CUDA_VISIBLE_DEVICES")
    detail = f"{machine.accelerator.name} is there, but torch for CUDA {machine.cuda} cannot use it"
    return lacks(detail, f"update driver {machine.accelerator.driver}, or install a torch for an older CUDA")


def _backend_check(backend: str, usable: list[DeviceName]) -> Check:
    name = f"quantizer {backend}"
    try:
        refusal = backend_refusal(backend, device="cuda" if "cuda" in usable else "cpu")
    except UpstreamChangedError as error:
        remedy = f"pip install transformers=={tested_versions()['transformers']}"
        return Check(name=name, status="missing", detail=str(error), remedy=remedy)
    if refusal is None:
        return Check(name=name, status="ok", detail="usable")
    detail, _, remedy = refusal.rpartition(": ")
    return Check(name=name, status="missing", detail=detail, remedy=remedy)


def _contention_check() -> Check:
    ratio = measure_contention()
    if ratio is None:
        return Check(name="contention", status="ok", detail="not measured: threads have no CPU clock here")
    detail = f"wall over CPU time {ratio:.2f}"
    if ratio <= CONTENDED_RATIO:
        return Check(name="contention", status="ok", detail=detail)
    remedy = "stop other processes (top -o %CPU), or set cpu.compute_threads below the free cores"
    return Check(name="contention", status="warn", detail=f"{detail}: others want these cores", remedy=remedy)


def _memory_checks() -> Iterator[Check]:
    memory, group = read_host_memory(), read_cgroup_memory()
    available = f"{format_bytes(memory.available_bytes)} of {format_bytes(memory.total_bytes)} available"
    yield Check(name="host memory", status="ok", detail=available)
    if memory.swap_used_bytes:
        detail = f"{format_bytes(memory.swap_used_bytes)} of {format_bytes(memory.swap_bytes)} in use"
        remedy = "swapoff -a && swapon -a, when memory is free"
        yield Check(name="swap", status="warn", detail=detail, remedy=remedy)
    else:
        yield Check(name="swap", status="ok", detail=f"{format_bytes(memory.swap_bytes)}, unused")
    used = f"{format_bytes(group.usage_bytes)} used"
    limit = "no limit" if group.limit_bytes is None else f"limit {format_bytes(group.limit_bytes)}, {used}"
    yield Check(name="control group memory", status="ok", detail=limit)


def _idle_accelerator_checks(machine: Machine) -> Iterator[Check]:
    if machine.accelerator is None:
        return
    used_bytes = read_used_bytes(machine.accelerator.uuid)
    if used_bytes is None:
        detail = "the driver does not say"
        yield Check(name="idle GPU memory", status="ok", detail=detail)
    elif used_bytes <= IDLE_USED_SHARE * machine.accelerator.memory_bytes:
        yield Check(name="idle GPU memory", status="ok", detail=f"{format_bytes(used_bytes)} used")
    else:
        detail = f"{format_bytes(used_bytes)} used by others"
        yield Check(name="idle GPU memory", status="warn", detail=detail, remedy="nvidia-smi; end those processes")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))


def _show(diagnosis: Diagnosis) -> None:
    console = result_console()
    table = Table("check", "status", "detail", box=None, pad_edge=False)
    for check in diagnosis.checks:
        table.add_row(check.name, f"[{_STYLES[check.status]}]{check.status}[/]", check.detail)
    console.print(table)
    for check in diagnosis.checks:
        if check.remedy:
            console.print(f"{check.name}: {check.remedy}", markup=False, highlight=False, soft_wrap=True)
    devices = ", ".join(diagnosis.usable_devices) or "none"
    console.print(f"usable devices: {devices}", markup=False, highlight=False)
