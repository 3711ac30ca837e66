"""The accelerator as the driver sees it, through NVML.

A device is always found by UUID: CUDA's indexes follow CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, NVML's
follow neither. What NVML does not support on a device is None. Nothing here initializes CUDA.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, Final

from offload_eval.core.machine import Accelerator
from offload_eval.instruments.host_memory import read_host_memory

_UUID_PREFIXES: Final = ("GPU-", "MIG-")


def read_accelerator(uuid: str | None = None) -> Accelerator | None:
    """Describes the accelerator that CUDA's device 0 of this environment would be.

    The link's generation and width are the most that card and slot reach together: the current ones drop
    while a card idles. Memory of a MIG instance is the instance's. A card that shares the host's memory and
    reports none of its own is given the host's.

    Args:
        uuid: The device's UUID where the caller knows it; a UUID in CUDA_VISIBLE_DEVICES goes first.

    Returns:
        None where there is no NVIDIA driver, no device, or no way to tell which of several it is.
    """
    with _open_device(uuid) as (nvml, device):
        if nvml is None:
            return None
        memory = _optional(nvml.nvmlDeviceGetMemoryInfo, device)
        card = _card_of(nvml, device)
        return Accelerator(
            name=_optional(nvml.nvmlDeviceGetName, device) or "unknown",
            uuid=nvml.nvmlDeviceGetUUID(device),
            memory_bytes=read_host_memory().total_bytes if memory is None else memory.total,
            driver=nvml.nvmlSystemGetDriverVersion(),
            pcie_generation=_optional(nvml.nvmlDeviceGetMaxPcieLinkGeneration, card),
            pcie_width=_optional(nvml.nvmlDeviceGetMaxPcieLinkWidth, card),
        )


def read_used_bytes(uuid: str | None = None) -> int | None:
    """Device memory in use by everybody, the driver's own reserve included; None where NVML cannot say."""
    with _open_device(uuid) as (nvml, device):
        memory = None if nvml is None else _optional(nvml.nvmlDeviceGetMemoryInfo, device)
        return None if memory is None else int(memory.used)


@contextmanager
def _open_device(uuid: str | None) -> Iterator[tuple[ModuleType | None, Any]]:
    with _open_nvml() as nvml:
        device = None if nvml is None else _find_device(nvml, uuid)
        yield (None, None) if device is None else (nvml, device)


@contextmanager
def _open_nvml() -> Iterator[ModuleType | None]:
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _find_device(nvml: ModuleType, uuid: str | None) -> Any:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = None if visible is None else visible.split(",")[0].strip()
    if first is not None and first.startswith(_UUID_PREFIXES):
        uuid = first
    if uuid is None:
        uuid = _uuid_at(_card_uuids(nvml), first, nvml)
    device = None if uuid is None else _device_of(nvml, uuid)
    return None if device is None else _first_instance(nvml, device)


def _uuid_at(uuids: list[str], first: str | None, nvml: ModuleType) -> str | None:
    """The UUID of CUDA's first visible device, where its index can be told from the outside.

    CUDA orders by speed unless CUDA_DEVICE_ORDER is PCI_BUS_ID. NVML lists by bus: the two orders agree when
    it is, or when all cards are of one model.
    """
    index = 0 if first is None else int(first) if first.isdigit() else -1
    if not 0 <= index < len(uuids):
        return None
    by_bus = os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    names = {_optional(nvml.nvmlDeviceGetName, _device_of(nvml, uuid)) for uuid in uuids}
    return uuids[index] if by_bus or len(names) == 1 else None


def _card_uuids(nvml: ModuleType) -> list[str]:
    handles = (nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount()))
    return [nvml.nvmlDeviceGetUUID(handle) for handle in handles]


def _device_of(nvml: ModuleType, uuid: str) -> Any:
    """The device of a UUID; CUDA_VISIBLE_DEVICES may abbreviate a card's, as long as it stays unambiguous."""
    device = _optional(nvml.nvmlDeviceGetHandleByUUID, uuid)
    if device is not None:
        return device
    matches = [known for known in _card_uuids(nvml) if known.startswith(uuid)]
    return _optional(nvml.nvmlDeviceGetHandleByUUID, matches[0]) if len(matches) == 1 else None


def _first_instance(nvml: ModuleType, device: Any) -> Any:
    """CUDA uses a partitioned card's first MIG instance; every other device is itself."""
    mode = _optional(nvml.nvmlDeviceGetMigMode, device)
    if mode is None or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
        return device
    return _optional(nvml.nvmlDeviceGetMigDeviceHandleByIndex, device, 0) or device


def _card_of(nvml: ModuleType, device: Any) -> Any:
    """The card a MIG instance is on: only the card has a link."""
    if not _optional(nvml.nvmlDeviceIsMigDeviceHandle, device):
        return device
    return _optional(nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, device)


def _optional(query: Callable[..., Any], *args: Any) -> Any:
    """The answer, or None where the device, the driver or the permissions do not have one."""
    import pynvml

    try:
        return query(*args)
    except pynvml.NVMLError:
        return None
