"""Name of a device -> device."""

from importlib import import_module

import torch

from offload_eval.core.experiment import CpuSpec, DeviceName
from offload_eval.errors import UnableError
from offload_eval.instruments.device import Device


def resolve_device(asked: str, *, trace_only: bool = False) -> DeviceName:
    """Chooses the device: `auto` takes CUDA where there is one.

    Args:
        asked: auto, cuda or cpu.
        trace_only: The device is followed and not used: CUDA need not be there.

    Raises:
        UnableError: CUDA was asked for and this torch sees none.
    """
    has_cuda = torch.cuda.is_available()
    if asked == "cuda" and trace_only:
        return "cuda"
    if asked == "cuda" and not has_cuda:
        raise UnableError(
            f"device cuda: torch {torch.__version__} sees no CUDA or ROCm device; see `offload-eval doctor`, or use "
            "--device cpu"
        )
    return "cuda" if has_cuda and asked != "cpu" else "cpu"


def accelerator_uuid(name: DeviceName) -> str | None:
    """The UUID by which NVML knows the device that will be used; None on a CPU."""
    if name != "cuda":
        return None
    uuid: str | None = import_module("offload_eval.instruments.cuda").CudaDevice().uuid
    return uuid


def open_device(name: DeviceName, cpu: CpuSpec) -> Device:
    """Constructs the device; the other one's module is never imported."""
    if name == "cuda":
        device: Device = import_module("offload_eval.instruments.cuda").CudaDevice()
        return device
    from offload_eval.instruments.cpu import CpuDevice

    return CpuDevice(cpu.link_bytes_per_s)
