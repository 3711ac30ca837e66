"""Names the device tensors that a cell has left behind, and what holds them.

Only a leak is worth the walk over the heap: whoever measures compares live bytes first.
"""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any, Final

import torch

from offload_eval.instruments.device import Device

MOST_NAMED: Final = 4
"""The largest ones: a cache has two tensors a layer, and all of them have one holder."""
_MOST_HOPS: Final = 10
"""From a tensor to a name that a reader knows: cache layer, list of layers, cache, attribute."""


class LiveBefore:
    """What is live on a device before a cell, once everything else has been released."""

    def __init__(self, device: Device) -> None:
        device.release()
        self._device = device
        self.live_bytes = device.live_bytes()
        self._storages = device.live_storages()

    def leaked_bytes(self) -> int | None:
        """Bytes live now beyond those; None where the device counts none."""
        live_bytes = self._device.live_bytes()
        return None if live_bytes is None or self.live_bytes is None else live_bytes - self.live_bytes

    def leaked(self) -> tuple[str, ...]:
        """Names what is live now and was not then, the largest first; empty within the device's tolerance."""
        leaked_bytes = self.leaked_bytes()
        if leaked_bytes is None or leaked_bytes <= self._device.leak_tolerance_bytes:
            return ()
        tensors = _tensors_beyond(self._device, self._storages)
        sizes_bytes = [tensor.untyped_storage().nbytes() for tensor in tensors]
        with _thawed():
            named = _named(tensors)
        if len(tensors) > MOST_NAMED:
            named.append(f"{len(tensors) - MOST_NAMED} more, {sum(sizes_bytes[MOST_NAMED:]):,} bytes")
        unseen_bytes = leaked_bytes - sum(sizes_bytes)
        if unseen_bytes > self._device.leak_tolerance_bytes * max(1, len(tensors)):
            named.append(f"{unseen_bytes:,} bytes that no Python tensor holds")
        return tuple(named)


def _tensors_beyond(device: Device, known: frozenset[int]) -> list[torch.Tensor]:
    """One tensor of every device storage that is not known, the largest first.

    Frozen objects, such as the weights, are not looked at: they are older than any cell.
    """
    found: dict[int, torch.Tensor] = {}
    for each in gc.get_objects():
        # Not isinstance, which asks an object for its __class__: a lazy module would import itself.
        if not issubclass(type(each), torch.Tensor) or hasattr(each, "__tensor_flatten__"):
            continue
        key = device.storage_key(each)
        if key is not None and key not in known:
            found.setdefault(key, each)
    return sorted(found.values(), key=lambda tensor: -tensor.untyped_storage().nbytes())


@contextmanager
def _thawed() -> Iterator[None]:
    """Lets the collector see frozen objects too: a module or the model may be what holds a tensor."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    try:
        yield
    finally:
        if is_frozen:
            gc.collect()  # what is frozen as garbage is never collected
            gc.freeze()


def _named(tensors: list[torch.Tensor]) -> list[str]:
    """Describes the first few. The list is what holds each of them here: it is told apart from their holders."""
    named = []
    for index in range(min(MOST_NAMED, len(tensors))):
        try:
            holder = _holder(tensors[index], id(tensors))
        except Exception as error:  # any object of the process may refer to it, and answer as it likes
            holder = f"what cannot be described: {type(error).__name__}"
        named.append(f"{_form(tensors[index])}, held by {holder}")
    return named


def _form(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)}, {tensor.untyped_storage().nbytes():,} bytes"


def _holder(held: Any, own_list: int) -> str:
    """The way to an object from the nearest module, model, class, function or frame, as one would write it."""
    path, seen = "", {own_list}
    for _ in range(_MOST_HOPS):
        seen.add(id(held))
        owner, step = _step_up(held, seen)
        if owner is None:
            break
        held, path = owner, step + path
        if (name := _root_name(held)) is not None:
            return name + path
    return f"a {_type_name(held)}{path}" if path else "nothing that the garbage collector sees"


def _step_up(held: Any, seen: set[int]) -> tuple[Any, str]:
    """What holds an object, and how it is reached from there; something with a name rather than something without."""
    steps = []
    for owner in gc.get_referrers(held):  # no comprehension: its cell would be one more that refers to `held`
        if id(owner) not in seen:
            steps.append(_named_step(owner, held))  # noqa: PERF401
    return min(steps, key=lambda step: _rank(step[0]), default=(None, ""))


def _named_step(owner: Any, held: Any) -> tuple[Any, str]:
    if isinstance(owner, dict):
        key = _place(dict.items(owner), held)
        for holder in gc.get_referrers(owner):
            if getattr(holder, "__dict__", None) is owner:
                return holder, f".{key}"
        return owner, f"[{key!r}]"
    if isinstance(owner, list | tuple):
        return owner, f"[{_place(enumerate(owner), held)}]"
    if isinstance(owner, FrameType):
        return owner, f" as {_place(owner.f_locals.items(), held) or 'a temporary'}"
    if isinstance(owner, CellType | FunctionType):
        return owner, ""
    attributes = getattr(owner, "__dict__", None)
    name = _place(dict(attributes or {}).items(), held)
    return owner, "" if name is None else f".{name}"


def _place(items: Iterable[tuple[Any, Any]], held: Any) -> Any:
    """The key, index or name under which an object is held; None where it is under none."""
    for place, each in items:
        if each is held:
            return place
    return None


def _rank(owner: Any) -> int:
    """Places that keep things come before frames, which come before everything without a name of its own."""
    if isinstance(owner, ModuleType | type | torch.nn.Module):
        return 0
    return 1 if _root_name(owner) is None else 2


def _root_name(owner: Any) -> str | None:
    if isinstance(owner, ModuleType):
        return owner.__name__
    if isinstance(owner, FrameType):
        return f"a frame of {owner.f_code.co_qualname}"
    if isinstance(owner, type | FunctionType):
        return f"{owner.__module__}.{owner.__qualname__}"
    return type(owner).__name__ if isinstance(owner, torch.nn.Module) else None


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
