"""Counts the live tensor storages of this thread to the byte, and refuses to pass a cap.

A dispatch mode sees every storage an operator returns; a weak reference on the storage sees it die. What an
operator allocates and frees inside its own kernel is not seen.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload_eval.units import format_bytes


class StorageLedger:
    """Live bytes by storage, with the highest value since `restart_peak`."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self._entries: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._entries

    def keys(self) -> frozenset[int]:
        """The live storages, each by the address of its C++ object."""
        return frozenset(self._entries)

    def add(self, storage: torch.UntypedStorage) -> None:
        """Enters a storage until it dies; a storage that is known already is not entered twice."""
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._entries:
            return
        self._entries[key] = (weakref.ref(storage, lambda _: self._remove(key)), num_bytes)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def restart_peak(self) -> None:
        """Lets the peak start again from what is live now."""
        self.peak_bytes = self.live_bytes

    def _remove(self, key: int) -> None:
        _, num_bytes = self._entries.pop(key)
        self.live_bytes -= num_bytes


class TieredMemory:
    """A CPU's memory, split into a device tier and a host tier.

    Storages made inside `host_allocation` belong to the host tier for life; all others that `LiveStorageTracker`
    sees, and those adopted, belong to the device tier.
    """

    def __init__(self) -> None:
        self.device = StorageLedger()
        self.host = StorageLedger()
        self.cap_bytes: int | None = None
        """What the device tier may hold."""
        self.host_cap_bytes: int | None = None
        """What the host tier may hold; held by whoever allocates there."""
        self._allocating_host = False

    @contextmanager
    def host_allocation(self) -> Iterator[None]:
        """Enters what is allocated inside the block into the host tier."""
        self._allocating_host = True
        try:
            yield
        finally:
            self._allocating_host = False

    def enter(self, tensor: torch.Tensor) -> None:
        """Enters a tensor's storage, or a wrapper's inner ones, into the tier it was allocated in.

        Raises:
            torch.OutOfMemoryError: The device tier would pass its cap.
        """
        if hasattr(tensor, "__tensor_flatten__"):
            for name in tensor.__tensor_flatten__()[0]:
                self.enter(getattr(tensor, name))
            return
        storage = tensor.untyped_storage()
        if storage in self.host:
            return
        if self._allocating_host:
            self.host.add(storage)
            return
        self.device.add(storage)
        if self.cap_bytes is not None and self.device.live_bytes > self.cap_bytes:
            raise torch.OutOfMemoryError(
                f"the device tier holds {format_bytes(self.device.live_bytes)}, over its cap of "
                f"{format_bytes(self.cap_bytes)}, after allocating {format_bytes(storage.nbytes())}"
            )


class LiveStorageTracker(TorchDispatchMode):
    """Enters the storage of every operator's result into a `TieredMemory` while the mode is on."""

    def __init__(self, memory: TieredMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped upstream
        self.memory = memory

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operator, then enters what it returned."""
        if any(hasattr(tensor_class, "__tensor_flatten__") for tensor_class in types):
            # A wrapper subclass runs its inner operators itself; with the mode on, those come here one by one.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.memory.enter(result)
        else:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.memory.enter(leaf)
        return result
