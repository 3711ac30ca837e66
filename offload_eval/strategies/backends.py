"""Whether a quantizer backend can run here, found out without quantizing anything."""

import fcntl
import importlib.util
import os
import re
import shutil
import sysconfig
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Final

from offload_eval.core.experiment import DeviceName

_QUANTIZERS_EXTRA: Final = 'pip install "offload-eval[quantizers]"'


def backend_refusal(backend: str, *, device: DeviceName = "cpu") -> str | None:
    """Says what a quantizer backend lacks.

    Loads no model and compiles nothing; only `fp8` imports transformers.

    Args:
        backend: `quanto`, `hqq` or `fp8`.
        device: Where the cache will be: quanto compiles another extension for a GPU.

    Returns:
        None where the backend is usable; otherwise one sentence that names the missing piece and the command
        that adds it.

    Raises:
        ValueError: The backend is none of those.
    """
    checks: dict[str, Callable[[], str | None]] = {
        "quanto": lambda: _quanto_refusal(device),
        "hqq": _hqq_refusal,
        "fp8": _fp8_refusal,
    }
    if backend not in checks:
        raise ValueError(f"{backend!r} is not a quantizer backend; allowed: {', '.join(checks)}")
    return checks[backend]()


def add_scripts_to_path() -> None:
    """Puts this environment's scripts folder on PATH, where torch looks for ninja; idempotent.

    An interpreter started by its path, without activating its environment, does not have it there.
    """
    scripts = sysconfig.get_path("scripts")
    folders = os.environ.get("PATH", "").split(os.pathsep)
    if scripts not in folders:
        os.environ["PATH"] = os.pathsep.join([scripts, *folders])


def load_backend(backend: str, device: DeviceName) -> None:
    """Builds and loads quanto's extension; the other backends have none.

    torch waits without end for the lock file of a build that was killed. One lock of our own, which dies with its
    process, keeps builds apart, so that a lock file found while holding it is stale.
    """
    if backend != "quanto":
        return
    add_scripts_to_path()
    from optimum.quanto.library.extensions.extension import get_extension

    extension = get_extension("quanto_cuda" if device == "cuda" else "quanto_cpp")
    build = Path(extension.build_directory)
    build.mkdir(parents=True, exist_ok=True)
    with (build.parent / f".{extension.name}.lock").open("w") as ours:
        fcntl.flock(ours, fcntl.LOCK_EX)
        (build / "lock").unlink(missing_ok=True)
        _ = extension.lib


def _quanto_refusal(device: DeviceName) -> str | None:
    """Quanto unpacks with an extension that torch builds at first use.

    Even to load an extension that is built already, torch asks for ninja; for a compiler, only to build one.
    Source: torch 2.13, utils/cpp_extension.py; optimum-quanto 0.2.7, library/extensions/extension.py.
    """
    if not _importable("optimum.quanto"):
        return f"the quanto backend needs the package optimum-quanto: {_QUANTIZERS_EXTRA}"
    if _find_program("ninja") is None:
        return "the quanto backend builds an extension with ninja, which is not on PATH: pip install ninja"
    if _extension_is_built("quanto_cuda" if device == "cuda" else "quanto_cpp"):
        return None
    return _compiler_refusal() or (_gpu_compiler_refusal() if device == "cuda" else None)


def _compiler_refusal() -> str | None:
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "the quanto backend compiles an extension and finds no C++ compiler: apt-get install g++"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "the quanto backend compiles an extension and finds no Python.h: apt-get install python3-dev"
    return None


def _gpu_compiler_refusal() -> str | None:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH", "ROCM_HOME") if os.environ.get(name)]
    homes += ["/usr/local/cuda", "/opt/rocm"]
    on_path = shutil.which("nvcc") or shutil.which("hipcc")
    in_home = any(Path(home, "bin", name).exists() for home in homes for name in ("nvcc", "hipcc"))
    if on_path or in_home:
        return None
    return (
        "the quanto backend compiles a GPU extension and finds neither nvcc nor hipcc: "
        "apt-get install nvidia-cuda-toolkit, or set CUDA_HOME"
    )


def _hqq_refusal() -> str | None:
    return None if _importable("hqq") else f"the hqq backend needs the package hqq: {_QUANTIZERS_EXTRA}"


def _fp8_refusal() -> str | None:
    if not _importable("transformers"):
        return 'the fp8 backend needs the package transformers: pip install "transformers>=5.21"'
    from offload_eval.strategies.upstream import has_fp8_backend

    if has_fp8_backend():
        return None
    return (
        f"the fp8 backend needs transformers 5.21 or later, this is {metadata.version('transformers')}: "
        'pip install "transformers>=5.21"'
    )


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _find_program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=sysconfig.get_path("scripts"))


def _extension_is_built(name: str) -> bool:
    """Quanto keeps a built extension while torch's version stays the one it was built with, to the letter."""
    package, torch = importlib.util.find_spec("optimum.quanto"), importlib.util.find_spec("torch")
    if package is None or package.origin is None or torch is None or torch.origin is None:
        return False
    folder = Path(package.origin).parent / "library/extensions" / name.removeprefix("quanto_") / "build"
    try:
        built_with = (folder / "pytorch_version.txt").read_text().strip()
        version_source = Path(torch.origin).with_name("version.py").read_text()
    except OSError:
        return False
    installed = re.search(r"^__version__ = ['\"](.+)['\"]", version_source, re.MULTILINE)
    return (folder / f"{name}.so").exists() and installed is not None and installed[1] == built_with
