"""transformers' own CPU offloading, metered from outside and otherwise untouched.

Per layer and step, upstream waits for the layer prefetched on its side stream, prefetches the next one there,
and copies the updated layer back to the host on the compute stream (transformers 5.24, Cache.update).
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from offload_eval.core.experiment import DeviceName, OffloadedSpec
from offload_eval.strategies.link import Link
from offload_eval.strategies.upstream import DynamicCache, require_methods


class Offloaded:
    """Every layer's whole KV crosses the link both ways for each token."""

    uses_link: ClassVar[bool] = True

    def __init__(self, spec: OffloadedSpec) -> None:
        self.spec = spec

    def refusal(self, device: DeviceName, config: Any) -> str | None:
        """Upstream drives torch.cuda streams by name, so only CUDA and ROCm builds can run it."""
        if device != "cuda":
            return f"transformers' offloading is written for torch.cuda streams and cannot run on {device}"
        if config.is_encoder_decoder:
            return "transformers' offloading leaves cross-attention KV on the host for encoder-decoder models"
        return None

    def build_cache(self, config: Any, link: Link, _capacity_tokens: int) -> Any:
        """The cache of generate(cache_implementation="offloaded"), with meters on its layers."""
        require_methods(DynamicCache, "update", "offload", "prefetch")
        cache = DynamicCache(config=config.get_text_config(decoder=True), offloading=True)
        meter(cache, link)
        return cache


def meter(cache: Any, link: Link) -> None:
    """Wraps the copies and the wait of upstream's offloading cache; what they do is left as it is.

    The wait on the prefetch stream happens once more inside `update`, where it then costs nothing; the copy back
    runs on the compute stream and is exposed in full, so it counts as a wait as well.
    """
    for layer in cache.layers:
        layer.prefetch = _metered_prefetch(layer, link)
        layer.offload = _metered_offload(layer, link)
    cache.update = _metered_update(cache, link)


def _metered_prefetch(layer: Any, link: Link) -> Callable[[], None]:
    prefetch = layer.prefetch

    def metered() -> None:
        with link.meter_copy("h2d", sum(tensor.nbytes for tensor in _held(layer) if tensor.device.type == "cpu")):
            prefetch()

    return metered


def _metered_offload(layer: Any, link: Link) -> Callable[[], None]:
    offload = layer.offload

    def metered() -> None:
        num_bytes = sum(tensor.nbytes for tensor in _held(layer) if tensor.device.type != "cpu")
        with link.meter_wait(), link.meter_copy("d2h", num_bytes):
            offload()

    return metered


def _metered_update(cache: Any, link: Link) -> Callable[..., Any]:
    update = cache.update

    def metered(key_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with link.meter_wait():
            torch.cuda.default_stream(key_states.device).wait_stream(cache.prefetch_stream)
        return update(key_states, *args, **kwargs)

    return metered


def _held(layer: Any) -> list[torch.Tensor]:
    """What offloading moves: keys, values and, where there is one, the indexer's keys."""
    held = (getattr(layer, name, None) for name in ("keys", "values", "indexer_keys"))
    return [tensor for tensor in held if tensor is not None]
