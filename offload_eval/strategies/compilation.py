"""Whether generate() can have a static cache's decode step compiled here, found out without compiling anything."""

import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from transformers import CompileConfig

from offload_eval.core.experiment import CompileMode, DeviceName

GRAPH_MODES: Final[tuple[CompileMode, ...]] = ("reduce-overhead", "max-autotune")
"""Modes in which torch replays CUDA graphs. Source: torch 2.13, _inductor.list_mode_options."""
_ANY_DEVICE: Final = "_compile_all_devices"
"""What makes generate() compile on a CPU. Source: transformers 5.24, generation.CompileConfig."""
_LEAST_CUDA: Final = (7, 0)
"""Source: torch 2.13, _inductor.exc.GPUTooOldForTriton."""
_NEVER_COMPILED: Final = ("llama4",)
"""Model types, or parts of them. Source: transformers 5.24, PreTrainedModel.get_compiled_call."""


def compile_refusal(mode: CompileMode | None, device: DeviceName, model_type: str) -> str | None:
    """Says what keeps torch.compile from compiling a decode step.

    Args:
        mode: torch.compile's mode; None: nothing is compiled, and nothing is needed.
        device: Where the model runs.
        model_type: Of its config.

    Returns:
        None where it can be tried; otherwise one sentence with the missing piece, and the command that adds it.
    """
    if mode is None:
        return None
    checks = (_model_refusal(model_type), *(_cpu_refusals(mode) if device == "cpu" else _cuda_refusals()))
    return next((refusal for refusal in (_torch_refusal(), *checks) if refusal is not None), None)


def compile_config(mode: CompileMode) -> CompileConfig:
    """What generate() takes for a mode: compiled on whatever device the model is on."""
    config = CompileConfig(mode=mode)
    setattr(config, _ANY_DEVICE, True)
    return config


def initialize_early(model: Any, cache: Any, batch_size: int) -> None:
    """Allocates a static cache's buffers before a chunked prefill, which is compiled, as generate() does with its own.

    Compiled code cannot mark what it allocates as lying still, and CUDA graphs copy what does not; without graphs
    there is no need. A model for whose layers upstream knows no shape is left to allocate as it goes.
    Source: transformers 5.24, GenerationMixin._prepare_static_cache.
    """
    shape = getattr(model, "_get_static_cache_init_shape", lambda: None)()
    if shape is not None:
        num_heads, head_dim = shape
        cache.early_initialization(
            batch_size=batch_size, num_heads=num_heads, head_dim=head_dim, dtype=model.dtype, device=model.device
        )


def _torch_refusal() -> str | None:
    from torch._dynamo.eval_frame import is_dynamo_supported  # takes seconds

    if not is_dynamo_supported():
        return f"torch {torch.__version__} does not compile under Python {sys.version.split()[0]}"
    return None


def _model_refusal(model_type: str) -> str | None:
    if any(name in model_type for name in _NEVER_COMPILED):
        return f"transformers never compiles {model_type}: generate() runs it as it is"
    return None


def _cpu_refusals(mode: CompileMode) -> Iterator[str | None]:
    if mode in GRAPH_MODES:
        yield f"compile mode {mode} replays CUDA graphs, and cannot run on cpu; use default, or --device cuda"
    if not hasattr(CompileConfig, _ANY_DEVICE):
        yield "this transformers compiles on accelerators alone, and cannot on cpu: pip install -U transformers"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        yield "torch.compile builds C++ for a CPU and finds no compiler: apt-get install g++"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        yield "torch.compile builds C++ for a CPU and finds no Python.h: apt-get install python3-dev"


def _cuda_refusals() -> Iterator[str | None]:
    if torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() < _LEAST_CUDA:
        yield f"triton needs compute capability {_LEAST_CUDA[0]}.{_LEAST_CUDA[1]}, which this GPU does not have"
    if find_spec("triton") is None:
        yield "torch.compile builds GPU kernels with triton, which is not installed: pip install triton"
    if shutil.which(os.environ.get("CC", "gcc")) is None and shutil.which("clang") is None:
        yield "triton builds its launchers with a C compiler and finds none: apt-get install gcc"
