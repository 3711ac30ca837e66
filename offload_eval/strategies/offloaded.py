"""transformers' own CPU offloading, metered from outside and otherwise untouched.

Per layer and step, upstream waits for the layer prefetched on its side stream, prefetches the next one there,
and copies the updated layer back to the host on the compute stream (transformers 5.24, Cache.update).
"""

from functools import cache, partial
from typing import Any, ClassVar

import torch

from offload_eval.core.experiment import DeviceName, OffloadedSpec, Workload
from offload_eval.strategies.link import Link
from offload_eval.strategies.upstream import DynamicCache, require_methods


class Offloaded:
    """Every layer's whole KV crosses the link both ways for each token."""

    uses_link: ClassVar[bool] = True

    def __init__(self, spec: OffloadedSpec) -> None:
        self.spec = spec

    def refusal(self, device: DeviceName, config: Any, _workload: Workload) -> str | None:
        """Needs CUDA, and a decoder without an encoder."""
        refusal = device_refusal(device)
        if refusal is None and config.is_encoder_decoder:
            return "transformers' offloading leaves cross-attention KV on the host for encoder-decoder models"
        return refusal

    def prepare(self, _device: DeviceName) -> None:
        """Nothing to load."""

    def build_cache(self, config: Any, link: Link, _capacity_tokens: int) -> Any:
        """The cache of generate(cache_implementation="offloaded"), with meters on its copies."""
        require_methods(DynamicCache, "update", "offload", "prefetch")
        return with_meters(
            MeteredDynamicCache(config=config.get_text_config(decoder=True), offloading=True),
            link,
        )


def device_refusal(device: DeviceName) -> str | None:
    """Upstream drives torch.cuda streams by name, so only CUDA and ROCm builds can run it."""
    if device != "cuda":
        return f"transformers' offloading is written for torch.cuda streams and cannot run on {device}"
    return None


def with_meters(cache: Any, link: Link) -> Any:
    """Puts meters on the copies of a `MeteredOffloading` cache."""
    cache.link = link
    for layer in cache.layers:
        layer.__class__ = metered(type(layer))  # type: ignore[arg-type]  # mypy: a class is hashable
        layer.link = link
    return cache


class MeteredOffloading:
    """Mixed into one of upstream's offloading caches: its wait for the prefetched layer is timed.

    The wait happens once more inside `update`, where it then costs nothing.
    """

    link: Link
    prefetch_stream: Any

    def update(self, key_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Waits for the prefetch stream, then does what upstream does."""
        with self.link.meter_wait(key_states.device):
            torch.cuda.default_stream(key_states.device).wait_stream(self.prefetch_stream)
        return super().update(key_states, *args, **kwargs)  # type: ignore[misc]  # upstream's comes next


class MeteredDynamicCache(MeteredOffloading, DynamicCache):  # type: ignore[misc]  # untyped upstream
    """Upstream's offloading DynamicCache, metered."""


@cache
def metered(layer_class: type[Any]) -> type[Any]:
    """A subclass that accounts for a layer's copies as upstream makes them.

    The copy back runs on the compute stream and is exposed in full, so it counts as a wait as well. `_layer_type`
    is cleared because upstream registers a subclass that has one as its own.
    """

    def prefetch(self: Any) -> None:
        sizes_bytes = [tensor.nbytes for tensor in _on_host(self)]
        if not sizes_bytes:  # a layer that has seen no token yet knows no device
            layer_class.prefetch(self)
            return
        with self.link.meter_copies("h2d", sizes_bytes, partial(_on_host, self), self.device):
            layer_class.prefetch(self)

    def offload(self: Any) -> None:
        sizes_bytes = [tensor.nbytes for tensor in _held(self) if tensor.device.type != "cpu"]
        if not sizes_bytes:
            layer_class.offload(self)
            return
        with (
            self.link.meter_wait(self.device),
            self.link.meter_copies("d2h", sizes_bytes, partial(_on_host, self), self.device),
        ):
            layer_class.offload(self)

    members = {"_layer_type": None, "prefetch": prefetch, "offload": offload}
    return type(f"Metered{layer_class.__name__}", (layer_class,), members)


def _held(layer: Any) -> list[torch.Tensor]:
    """What offloading moves: keys, values and, where there is one, the indexer's keys."""
    held = (getattr(layer, name, None) for name in ("keys", "values", "indexer_keys"))
    return [tensor for tensor in held if tensor is not None]


def _on_host(layer: Any) -> list[torch.Tensor]:
    return [tensor for tensor in _held(layer) if tensor.device.type == "cpu"]
