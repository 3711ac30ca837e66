"""A cell compiles for itself: it finds nothing that another cell has compiled, and leaves nothing behind."""

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from offload_eval.core.experiment import CompileMode

_KEPT_ON_MODEL: Final = ("_compiled_call", "_last_compile_config")
"""Where transformers keeps a compiled forward. Source: transformers 5.24, PreTrainedModel.get_compiled_call."""

_LACKS: Final = ("TritonMissing", "GPUTooOldForTriton", "InvalidCxxCompiler")
"""Source: torch 2.13, _inductor.exc."""


@contextmanager
def compiling_afresh(model: Any, mode: CompileMode | None) -> Iterator[None]:
    """Lets nothing that is compiled in the block be used outside of it, nor the other way round.

    torch keeps compiled code by the function it belongs to, transformers on the model, and torch's code generator in
    a folder that other processes use too. All three are dropped; the folder is replaced by an empty one.

    Args:
        model: The loaded model.
        mode: None: nothing is compiled, and nothing of the compiler is imported.
    """
    if mode is None:
        yield
        return
    from torch._inductor.utils import fresh_cache  # takes seconds

    _forget(model)
    # torch leaves its folder behind where the block fails; the one around it takes it along.
    with TemporaryDirectory(prefix="offload-eval-", ignore_cleanup_errors=True) as folder, fresh_cache(dir=folder):
        try:
            yield
        finally:
            _forget(model)


def missing_compiler(error: BaseException) -> str | None:
    """What a compiler lacks here, in torch's words; None where that is not why it failed."""
    cause: BaseException | None = error
    while cause is not None:
        if type(cause).__name__ in _LACKS:
            return " ".join(str(cause).split())
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    return None


def count_compilations() -> int:
    """Graphs that this process has compiled since `compiling_afresh` began: a new one is a first use, or a new shape.

    Source: torch 2.13, _dynamo.utils.counters.
    """
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def _forget(model: Any) -> None:
    for name in _KEPT_ON_MODEL:
        vars(model).pop(name, None)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
