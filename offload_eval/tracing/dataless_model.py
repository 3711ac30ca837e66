"""A model whose weights have shapes and no bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from offload_eval.tracing.ledger import TracedMemory


@contextmanager
def without_data(model: torch.nn.Module, memory: TracedMemory) -> Iterator[list[torch.Tensor]]:
    """Gives a model tensors without data for its parameters and buffers, and puts its own back after.

    Args:
        model: Built on any device, `meta` for one that is too large to hold.
        memory: Where its tensors appear to be.

    Yields:
        The tensors without data; tied ones once.
    """
    replaced: dict[int, torch.Tensor] = {}
    originals = list(_tensors(model))
    with memory.without_data(memory.torch_device):
        for slots, name, tensor in originals:
            if id(tensor) not in replaced:
                replaced[id(tensor)] = _empty_like(tensor, memory.torch_device)
            slots[name] = replaced[id(tensor)]
    try:
        yield list(replaced.values())
    finally:
        for slots, name, tensor in originals:
            slots[name] = tensor


def _empty_like(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device == device and device.type == "meta":
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def _tensors(model: torch.nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    for module in model.modules():
        all_slots: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for slots in all_slots:
            for name, tensor in list(slots.items()):
                if tensor is not None:
                    yield slots, name, tensor
