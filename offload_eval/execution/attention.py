"""The attention of one cell on a loaded model, and what keeps it from having it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from offload_eval.core.experiment import Attention, DeviceName, ModelSpec
from offload_eval.errors import CellUnsupportedError, InputError
from offload_eval.execution.model_loading import build_traceable, build_without_data, load_config


@contextmanager
def using_attention(model: Any, attention: Attention | None) -> Iterator[None]:
    """Has the model compute with an attention while the block is open, and with its own after that.

    Args:
        model: A loaded transformers model.
        attention: None: the model's own.

    Raises:
        CellUnsupportedError: transformers refuses the attention, or leaves the model as it was.
    """
    if attention is None:
        yield
        return
    own = model.config._attn_implementation
    try:
        try:
            model.set_attn_implementation(attention)
        except (ValueError, ImportError) as error:
            raise CellUnsupportedError(_refused(attention, error)) from error
        _check_is_set(model, attention)
        yield
    finally:
        model.set_attn_implementation(own)


class TraceableModels:
    """A model without data for each attention of the workloads, built, or refused, when it is first asked for."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._models: dict[Attention | None, Any] = {}
        self._refusals: dict[Attention, str] = {}

    def with_attention(self, attention: Attention | None) -> Any:
        """The model with a workload's attention; None: with its own.

        Raises:
            CellUnsupportedError: The model does not have the workload's attention.
            InputError: It does not have its own, or cannot be built at all.
        """
        if attention is not None and attention in self._refusals:
            raise CellUnsupportedError(self._refusals[attention])
        if attention not in self._models:
            self._models[attention] = self._build(attention)
        return self._models[attention]

    def _build(self, attention: Attention | None) -> Any:
        config = load_config(self._spec)
        if attention is None:
            return build_traceable(self._spec, config)
        try:
            return build_traceable(msgspec.structs.replace(self._spec, attn_implementation=attention), config)
        except InputError as error:  # the model is as it should be: a workload asks for what it does not have
            self._refusals[attention] = f"{attention}: {error.__cause__ or error}"
            raise CellUnsupportedError(self._refusals[attention]) from error


def attention_refusal(spec: ModelSpec, config: Any, device: DeviceName, attention: Attention | None) -> str | None:
    """Why a workload's attention cannot be had here, found out on a model without data.

    Returns:
        None where it can, and for None, the model's own: that one is refused as the model's.
    """
    if attention is None:
        return None
    if "flash" in attention and device == "cpu":
        return f"{attention} does not run on cpu; use sdpa or eager"
    try:
        model = build_without_data(msgspec.structs.replace(spec, attn_implementation=attention), config)
    except InputError as error:
        return f"{attention}: {error.__cause__ or error}"
    if not model._can_set_attn_implementation():
        return (
            f"transformers cannot change the attention of a loaded {type(model).__name__}: set "
            f"model.attn_implementation: {attention} in an experiment of its own"
        )
    return None


def _check_is_set(model: Any, attention: str) -> None:
    """A model that cannot change its attention is left as it was, with a warning alone.

    A flash attention package may be replaced by a kernel of another name, which is flash attention too.
    """
    configs = (model.config, model.config.get_text_config(decoder=True))
    for seen in (str(config._attn_implementation) for config in configs):
        if seen != attention and not ("flash" in attention and "flash" in seen):
            raise CellUnsupportedError(
                f"{attention} was asked of {type(model).__name__}, and transformers left it at {seen}"
            )


def _refused(attention: str, error: Exception) -> str:
    return f"{attention}: {' '.join(str(error).split())}"
