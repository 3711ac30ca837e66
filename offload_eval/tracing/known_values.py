"""The values of small integer tensors, computed beside tensors that have no data.

generate() and the mask functions ask for a few values: is the attention mask all ones, is every session finished, how
long is a static cache. All of them follow from lengths, never from weights. Each integer or boolean tensor without
data therefore carries a real one, as long as every tensor it was computed from carries one too. Of a large one only
the value that all its elements share is kept, where they share one.
"""

from typing import Any, Final

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

MOST_ELEMENTS: Final = 2**22
"""Of larger tensors, element by element; they are masks, or the prompts of many sessions."""
_ATEN: Final = torch.ops.aten
_PICKS: Final = (
    _ATEN.slice.Tensor,
    _ATEN.select.int,
    _ATEN.view.default,
    _ATEN.unsqueeze.default,
    _ATEN.expand.default,
    _ATEN.clone.default,
    _ATEN._to_copy.default,
)
"""Operators whose result has the elements of their first argument."""
_AGREES: Final = (_ATEN.all.default, _ATEN.any.default)
_FILLS: Final = {
    _ATEN.ones_like.default: 1,
    _ATEN.zeros_like.default: 0,
    _ATEN.ones.default: 1,
    _ATEN.zeros.default: 0,
}
_ATTRIBUTE: Final = "_known_value"
_IS_OVERWRITTEN: Final = "_is_overwritten"
"""Set on the storage of a value into which, or into a view of which, something unknown was written."""


def assume_ones(tensor: torch.Tensor) -> torch.Tensor:
    """States that every element of a tensor without data is one: tokens may be any, so each is token 1."""
    with _disable_current_modes():
        _share(tensor, torch.ones(()))
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
    if not any(_is_whole(output) for output in outputs):
        return
    if all(_is_real(tensor) for tensor in (*inputs, *outputs)):
        return  # computed in earnest
    if func is _ATEN.index.Tensor and (shared := _shared(args[0])) is not None:
        _share(outputs[0], shared)  # whatever is picked, by an index that may have no values
        return
    if any(_known(tensor) is None for tensor in inputs) or not _is_deterministic(func):
        for output in outputs:
            _forget(output)
        return
    if any(tensor.numel() > MOST_ELEMENTS for tensor in (*inputs, *outputs)):
        _follow_shared(func, args, inputs, outputs[0])
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


def _follow_shared(func: Any, args: tuple[Any, ...], inputs: list[torch.Tensor], output: torch.Tensor) -> None:
    shared = _shared(args[0]) if len(inputs) == 1 else None
    with _disable_current_modes():
        if func in _FILLS:
            _share(output, torch.tensor(_FILLS[func]))
        elif shared is not None and func in _PICKS:
            _share(output, shared)
        elif shared is not None and _maps(func):
            _share(output, func(shared, *args[1:]))
        else:
            _forget(output)


def _maps(func: Any) -> bool:
    """Whether an operator makes of equal elements equal ones, whatever their number."""
    return func in _AGREES or (torch.Tag.pointwise in func.tags and not func._schema.is_mutable)


def _shared(tensor: torch.Tensor) -> torch.Tensor | None:
    """The value of all elements, where they share one."""
    value = _known(tensor)
    with _disable_current_modes():
        if value is None or value.numel() == 0:
            return None
        first = value[(0,) * value.dim()]
        is_expanded = all(stride == 0 for stride in value.stride())
        return first if is_expanded or bool((value == first).all()) else None


def _share(tensor: torch.Tensor, shared: torch.Tensor) -> None:
    with _disable_current_modes():
        value = shared.to(tensor.dtype).expand(tensor.shape)
        _know(tensor, value.clone() if value.numel() <= MOST_ELEMENTS else value)


def _is_whole(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _is_deterministic(func: Any) -> bool:
    name = str(func)
    return "empty" not in name and "rand" not in name


def _real(arguments: Any) -> Any:
    values = tree_map_only(torch.Tensor, _known, arguments)
    return tree_map_only(torch.device, lambda _: torch.device("cpu"), values)
