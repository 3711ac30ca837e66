"""The machine and the packages that results depend on, read without importing any of them."""

import importlib.util
import math
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Final

from offload_eval.core.machine import Machine
from offload_eval.instruments.host_memory import ROOT, cgroup_folders, read_cgroup_memory, read_host_memory
from offload_eval.instruments.nvml import read_accelerator

RECORDED_PACKAGES: Final = (
    "accelerate",
    "flash-attn",
    "hqq",
    "msgspec",
    "numpy",
    "nvidia-ml-py",
    "optimum-quanto",
    "torch",
    "transformers",
    "triton",
)
_ALLOCATOR_VARIABLES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_CHECKOUT: Final = Path(__file__).resolve().parents[2]


def read_machine(*, with_accelerator: bool, accelerator_uuid: str | None = None) -> Machine:
    """Describes this machine and process.

    Args:
        with_accelerator: Whether the run uses a GPU; if not, the record names none even where there is one.
        accelerator_uuid: The GPU's UUID where the caller knows it.

    Returns:
        The description; what cannot be read is None.
    """
    memory = read_host_memory()
    return Machine(
        platform=platform.platform(),
        python=platform.python_version(),
        cpu=_cpu_model(),
        cpu_cores=usable_cores(),
        host_memory_bytes=memory.total_bytes,
        swap_bytes=memory.swap_bytes,
        cgroup_memory_limit_bytes=read_cgroup_memory().limit_bytes,
        accelerator=read_accelerator(accelerator_uuid) if with_accelerator else None,
        cuda=_cuda_version(),
        versions=installed_versions(RECORDED_PACKAGES),
        allocator_config=_allocator_config(),
        git_commit=_git_commit(_CHECKOUT),
    )


def usable_cores(root: Path = ROOT) -> int:
    """Whole cores this process may keep busy: its affinity, cut by the CPU quota of its control groups."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in cgroup_folders("cpu", root) if (quota := _cpu_quota_cores(folder)) is not None]
    return max(1, min([affinity, *(math.floor(quota) for quota in quotas)]))


def installed_versions(packages: tuple[str, ...]) -> dict[str, str]:
    """The installed version of each package; those that are not installed are left out."""
    versions = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_quota_cores(folder: Path) -> float | None:
    """Cores' worth of CPU time a period allows; v2 writes `max` for no limit, v1 a negative quota."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text()
    except OSError:
        return None
    return None if quota == "max" or int(quota) < 0 else int(quota) / int(period)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def _cuda_version() -> str | None:
    """The CUDA that torch was built for, from its version file; `hip X` for a ROCm build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    found = dict(re.findall(r"^(cuda|hip)\b[^=\n]*= *['\"]([^'\"]+)['\"]", text, re.MULTILINE))
    return found.get("cuda") or (f"hip {found['hip']}" if "hip" in found else None)


def _allocator_config() -> str | None:
    set_here = (os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name))
    return next(set_here, None)


def _git_commit(checkout: Path) -> str | None:
    """The commit of the package's own checkout, with `-dirty` where tracked files differ."""
    if not (checkout / ".git").exists():
        return None
    describe = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(describe, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
