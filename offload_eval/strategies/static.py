"""transformers' StaticCache: one buffer a layer, as long as the workload, allocated at the first token."""

from typing import Any, ClassVar

from offload_eval.core.experiment import DeviceName, StaticSpec, Workload
from offload_eval.strategies.compilation import compile_refusal
from offload_eval.strategies.link import Link
from offload_eval.strategies.upstream import StaticCache, static_refusal


class Static:
    """Keys and values are written into buffers of fixed length; attention reads all of them, masked."""

    uses_link: ClassVar[bool] = False

    def __init__(self, spec: StaticSpec) -> None:
        self.spec = spec

    def refusal(self, device: DeviceName, config: Any, _workload: Workload) -> str | None:
        """Runs everywhere, on a decoder whose layers upstream has static caches for; compiled, where torch can."""
        return static_refusal(config) or compile_refusal(self.spec.compile, device, config.model_type)

    def prepare(self, _device: DeviceName) -> None:
        """Nothing to load."""

    def build_cache(self, config: Any, _link: Link, capacity_tokens: int) -> Any:
        """The cache of generate(cache_implementation="static")."""
        return StaticCache(config=config.get_text_config(decoder=True), max_cache_len=capacity_tokens)
