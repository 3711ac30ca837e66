"""A ledger that remembers every allocation, so that a peak can be taken apart afterwards."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, Literal, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from offload_eval.core.experiment import DeviceName
from offload_eval.core.trace import Contributor
from offload_eval.instruments.live_storage import StorageLedger, TieredMemory

TIMELINE_PARTS: Final = 100
PROMPT: Final = "prompt"
"""Stands for the module of what generate() makes before the model first runs: tokens, mask, positions."""
_LAYER_NUMBER: Final = re.compile(r"\.\d+(?=\.|$)")


class Label(NamedTuple):
    """Who allocated."""

    module: str
    operator: str


class RecordedLedger(StorageLedger):
    """Live bytes by storage, with what was allocated and freed since `restart_peak`, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.label = Label("weights", "")
        """Whom the next allocation is for."""
        self._labels: dict[int, Label] = {}
        self._events: list[tuple[Label, int]] = []
        self._at_start: defaultdict[Label, int] = defaultdict(int)

    def add(self, storage: torch.UntypedStorage) -> None:
        """Enters a storage under the current label."""
        if storage in self:
            return
        self._labels[storage._cdata] = self.label
        self._events.append((self.label, storage.nbytes()))
        super().add(storage)

    def restart_peak(self) -> None:
        """Starts a phase: earlier events are summed up."""
        super().restart_peak()
        for label, num_bytes in self._events:
            self._at_start[label] += num_bytes
        self._events.clear()

    def contributors(self) -> tuple[Contributor, ...]:
        """What lived at the peak, by module and operator, largest first."""
        live, at_peak_bytes = sum(self._at_start.values()), self.peak_bytes
        held = defaultdict(int, self._at_start)
        for label, num_bytes in self._events if live < at_peak_bytes else ():
            held[label] += num_bytes
            live += num_bytes
            if live == at_peak_bytes:
                break
        totals: defaultdict[Label, int] = defaultdict(int)
        for label, num_bytes in held.items():
            totals[Label(_LAYER_NUMBER.sub(".*", label.module), label.operator)] += num_bytes
        return tuple(
            Contributor(module=label.module, operator=label.operator, bytes=num_bytes)
            for label, num_bytes in sorted(totals.items(), key=lambda item: (-item[1], item[0]))
            if num_bytes
        )

    def held(self, module: str) -> Counter[Label]:
        """Live bytes of a module, by label."""
        held: Counter[Label] = Counter()
        for key, label in self._labels.items():
            if label.module == module:
                held[label] += self._entries[key][1]
        return held

    def correct(self, excess: Mapping[Label, int]) -> None:
        """Takes bytes out of what lives at the start of a phase."""
        for label, num_bytes in excess.items():
            self._at_start[label] -= num_bytes
            self.live_bytes -= num_bytes
        super().restart_peak()

    def timeline_bytes(self) -> tuple[int, ...]:
        """Highest live bytes in up to `TIMELINE_PARTS` equal parts of the phase."""
        live = sum(self._at_start.values())
        highest = [live] * min(TIMELINE_PARTS, max(len(self._events), 1))
        for index, (_, num_bytes) in enumerate(self._events):
            live += num_bytes
            part = index * len(highest) // len(self._events)
            highest[part] = max(highest[part], live)
        return tuple(highest)

    def _remove(self, key: int) -> None:
        _, num_bytes = self._entries[key]
        self._events.append((self._labels.pop(key), -num_bytes))
        super()._remove(key)


class TracedMemory(TieredMemory):
    """Memory of a run without data.

    On `cpu` the device tier is fake CPU tensors, and the host tier is what the link allocates, as on the emulated
    device. On `cuda` the device tier is tensors on `meta`, whose operators cost least, and fake CPU tensors are the
    host tier.
    """

    device: RecordedLedger

    def __init__(self, device: DeviceName, fakes: FakeTensorMode) -> None:
        super().__init__()
        self.device = RecordedLedger()
        self.fakes = fakes
        self.has_two_devices = device != "cpu"
        self.torch_device = torch.device("meta" if self.has_two_devices else "cpu")

    def without_data(self, device: torch.device) -> AbstractContextManager[Any]:
        """Lets operators make tensors of `device` without data while the context is open."""
        return self.fakes if device.type == "cpu" else nullcontext()

    def empty_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocates in the host tier."""
        with self.host_allocation():
            return torch.empty(shape, dtype=dtype)

    def tier_of(self, tensor: torch.Tensor) -> Literal["device", "host"]:
        """The tier of a tensor that was entered."""
        return "host" if tensor.untyped_storage() in self.host else "device"

    def enter(self, tensor: torch.Tensor) -> None:
        """Enters a tensor's storage into the tier of its device."""
        if self.has_two_devices and tensor.device.type == "cpu" and not hasattr(tensor, "__tensor_flatten__"):
            self.host.add(tensor.untyped_storage())
        else:
            super().enter(tensor)
