"""Remembers what an operator returned for arguments of the same form: a model repeats its layers."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class _Form(NamedTuple):
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class Repeats:
    """Results of operators on the device tier, by the forms of their arguments.

    Only operators that return one new tensor are remembered: no views, nothing that writes in place.

    Args:
        fakes: Makes the tensors of a device tier of fake CPU tensors; None where the tier is on `meta`.
    """

    def __init__(self, fakes: FakeTensorMode | None) -> None:
        self._fakes = fakes
        self._forms: dict[Any, _Form] = {}
        self._is_new: dict[Any, bool] = {}
        """Whether an operator always returns one new tensor."""

    def recall(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Makes a tensor like the one an operator returned before; None where it has not run on such arguments."""
        if func not in self._is_new:
            self._is_new[func] = _returns_one_new_tensor(func)
        form = self._forms.get(_key(func, args, kwargs)) if self._is_new[func] else None
        if form is None:
            return None
        tensor = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")
        return tensor if self._fakes is None else FakeTensor(self._fakes, tensor, torch.device("cpu"))

    def remember(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Keeps the form of what an operator has returned, if it is one new tensor of the device tier."""
        if not self._is_new[func] or not self._is_on_device(result):
            return
        storages = {tensor.untyped_storage()._cdata for tensor in tensors_in(args, kwargs)}
        if result.untyped_storage()._cdata in storages:
            self._is_new[func] = False  # a view by another name
        else:
            self._forms[_key(func, args, kwargs)] = _Form(result.shape, result.stride(), result.dtype)

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "meta" if self._fakes is None else isinstance(tensor, FakeTensor)


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors among an operator's arguments, those in lists included."""
    found = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found.extend(item for item in value if isinstance(item, torch.Tensor))
    return found


def _returns_one_new_tensor(func: Any) -> bool:
    schema = func._schema
    returns = schema.returns
    return (
        not schema.is_mutable
        and len(returns) == 1
        and returns[0].alias_info is None
        and isinstance(returns[0].type, torch.TensorType)
    )


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return (func, *_forms(args), *_forms(kwargs.values()), *kwargs)


def _forms(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value.shape, value.stride(), value.dtype, value.device
        elif isinstance(value, list | tuple):
            yield tuple(_forms(value))
        else:
            yield type(value), value
