"""What a cache strategy is."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, Protocol

import torch

from offload_eval.core.experiment import DeviceName, Workload
from offload_eval.strategies.link import Link


class CacheStrategy(Protocol):
    """Builds one cache for one generate() call.

    A strategy is constructed with its spec, checked with `refusal` before any model is loaded, and given its
    link and its capacity when a cache is built.
    """

    uses_link: ClassVar[bool]
    """Whether the cache copies between the tiers; without it there is nothing to time on the link."""

    def __init__(self, spec: Any) -> None:
        """Takes the strategy's own spec."""

    def refusal(self, device: DeviceName, config: Any, workload: Workload) -> str | None:
        """Why this strategy cannot run the workload on `device` with this model config; None when it can."""

    def prepare(self, device: DeviceName) -> None:
        """Loads what the first cache would otherwise load in the middle of a pass."""

    def build_cache(self, config: Any, link: Link, capacity_tokens: int) -> Any:
        """Builds an upstream `Cache` for `capacity_tokens` cached tokens a session."""


def kv_payload_bytes(
    cache: Any, tier_of: Callable[[torch.Tensor], Literal["device", "host"]]
) -> dict[Literal["device", "host"], int]:
    """Sums the payload of a cache's tensors by tier.

    Counts every tensor that a cache layer holds: keys and values, or a quantizer's packed values, scales and
    zero points. A view counts its own elements, not the storage behind it. A tensor that several layers share
    counts once. Does not count a quantized tensor's logical size.

    Args:
        cache: An upstream Cache; a layer may name what it holds with `payload_tensors()`.
        tier_of: The ledger of a tensor.

    Returns:
        Bytes for `device` and `host`.
    """
    totals: dict[Literal["device", "host"], int] = {"device": 0, "host": 0}
    seen: set[tuple[int, ...]] = set()
    for layer in cache.layers:
        held = layer.payload_tensors() if hasattr(layer, "payload_tensors") else _tensors(vars(layer))
        for tensor in held:
            # Not its address: a tensor without data has none.
            key = (tensor.untyped_storage()._cdata, int(tensor.storage_offset()), *tensor.shape)
            if tensor.numel() and key not in seen:
                seen.add(key)
                totals[tier_of(tensor)] += tensor.numel() * tensor.element_size()
    return totals


_BOOKKEEPING = ("_sliding_window_tensor", "_pending_beam_idx", "cumulative_length")


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from _tensors(getattr(value, name))
        else:
            yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            if name not in _BOOKKEEPING:
                yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
