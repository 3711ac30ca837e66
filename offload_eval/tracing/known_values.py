"""The values of small integer tensors, computed beside tensors that have no data.

generate() and the mask functions ask for a few values: is the attention mask all ones, is every session finished, how
long is a static cache. All of them follow from lengths, never from weights. Each integer or boolean tensor without
data therefore carries a real one, as long as every tensor it was computed from carries one too.
"""

from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

MOST_ELEMENTS: Final = 2**22
"""Larger tensors are masks; nobody asks for their values."""
_ATTRIBUTE: Final = "_known_value"
_IS_OVERWRITTEN: Final = "_is_overwritten"
"""Set on the storage of a value into which, or into a view of which, something unknown was written."""


def assume_ones(tensor: torch.Tensor) -> torch.Tensor:
    """States that every element of a tensor without data is one: tokens may be any, so each is token 1."""
    with _disable_current_modes():
        _know(tensor, torch.ones(tensor.shape, dtype=tensor.dtype))
    return tensor


def scalar(tensor: torch.Tensor) -> int | float | bool | None:
    """The value of a tensor with one element, None where it is not known."""
    value = _known(tensor)
    if value is None:
        return None
    with _disable_current_modes():
        return value.item()


def follow(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
) -> None:
    """Computes what an operator's integer results are, where all its inputs are known.

    Args:
        func: The operator.
        args: Its arguments, already run once without data.
        kwargs: Likewise.
        inputs: The tensors among them.
        outputs: The tensors it returned.
    """
    if not any(_has_values(output) for output in outputs):
        return
    if all(_is_real(tensor) for tensor in (*inputs, *outputs)):
        return  # computed in earnest
    if func is torch.ops.aten.index.Tensor and _is_uniform(args[0]):
        _know(outputs[0], _alike(outputs[0], args[0]))  # whatever is picked, by an index that may have no values
        return
    if any(_known(tensor) is None for tensor in inputs) or not _is_deterministic(func):
        for output in outputs:
            _forget(output)
        return
    with _disable_current_modes():
        values = func(*_real(args), **_real(kwargs))
    for output, value in zip(outputs, tree_leaves(values), strict=True):
        _know(output, value)


def _know(tensor: torch.Tensor, value: torch.Tensor) -> None:
    setattr(tensor, _ATTRIBUTE, value)


def _known(tensor: torch.Tensor) -> torch.Tensor | None:
    value: torch.Tensor | None = getattr(tensor, _ATTRIBUTE, None)
    if value is None and _is_real(tensor):
        value = tensor  # made from numbers, such as a window's length, by code that always makes it on the CPU
    if value is None or getattr(value.untyped_storage(), _IS_OVERWRITTEN, False):
        return None
    return value


def _forget(tensor: torch.Tensor) -> None:
    value = _known(tensor)
    if value is not None:
        setattr(value.untyped_storage(), _IS_OVERWRITTEN, True)


def _is_real(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu"


def _is_uniform(tensor: torch.Tensor) -> bool:
    value = _known(tensor)
    with _disable_current_modes():
        return value is not None and value.numel() > 0 and bool((value == value.flatten()[0]).all())


def _alike(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    value = _known(source)
    assert value is not None
    with _disable_current_modes():
        return value.flatten()[:1].expand(tensor.shape)


def _has_values(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() <= MOST_ELEMENTS


def _is_deterministic(func: Any) -> bool:
    name = str(func)
    return "empty" not in name and "rand" not in name


def _real(arguments: Any) -> Any:
    values = tree_map_only(torch.Tensor, _known, arguments)
    return tree_map_only(torch.device, lambda _: torch.device("cpu"), values)
