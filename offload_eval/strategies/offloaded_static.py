"""transformers' offloading of its StaticCache, metered from outside and otherwise untouched."""

from typing import Any, ClassVar, Final

from offload_eval.core.experiment import DeviceName, OffloadedStaticSpec, Workload
from offload_eval.strategies.link import Link
from offload_eval.strategies.offloaded import MeteredOffloading, device_refusal, with_meters
from offload_eval.strategies.upstream import StaticCache, require_methods, static_refusal

_NOT_COMPILED: Final = (
    "its copies run on a stream of their own inside Cache.update and are counted there, in Python that a compiled "
    "graph would leave out; compile static instead, or leave compile out"
)


class OffloadedStatic:
    """Every full-attention layer's whole buffer crosses the link both ways for each token; others stay."""

    uses_link: ClassVar[bool] = True

    def __init__(self, spec: OffloadedStaticSpec) -> None:
        self.spec = spec

    def refusal(self, device: DeviceName, config: Any, _workload: Workload) -> str | None:
        """Needs CUDA, as `offloaded` does, and a layer that upstream would offload; it is never compiled."""
        refusal = device_refusal(device) or static_refusal(config)
        if refusal is not None:
            return refusal
        if self.spec.compile is not None:
            return _NOT_COMPILED
        cache = StaticCache(config=config, max_cache_len=1)
        kinds = zip(cache.is_sliding, cache.is_linear, cache.is_dummy, strict=True)
        if all(any(kind) for kind in kinds):
            return "transformers' static offloading moves layers of full attention only, and this model has none"
        return None

    def prepare(self, _device: DeviceName) -> None:
        """Nothing to load."""

    def build_cache(self, config: Any, link: Link, capacity_tokens: int) -> Any:
        """The cache of generate(cache_implementation="offloaded_static"), with meters on its copies."""
        require_methods(StaticCache, "update", "offload", "prefetch")
        text = config.get_text_config(decoder=True)
        return with_meters(MeteredStaticCache(config=text, max_cache_len=capacity_tokens, offloading=True), link)


class MeteredStaticCache(MeteredOffloading, StaticCache):  # type: ignore[misc]  # untyped upstream
    """Upstream's offloading StaticCache, metered."""
