"""The baseline: transformers' DynamicCache, all of it on the device."""

from typing import Any, ClassVar

from offload_eval.core.experiment import DeviceName, DynamicSpec, Workload
from offload_eval.strategies.link import Link
from offload_eval.strategies.upstream import DynamicCache


class Dynamic:
    """Keys and values grow by concatenation on the device."""

    uses_link: ClassVar[bool] = False

    def __init__(self, spec: DynamicSpec) -> None:
        self.spec = spec

    def refusal(self, _device: DeviceName, config: Any, _workload: Workload) -> str | None:
        """Runs everywhere, on a model that keeps keys and values at all."""
        layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
        if layers and not any(hasattr(layer, "get_seq_length") for layer in layers):
            return "the model has no attention layer: it keeps a state and no KV cache"
        return None

    def prepare(self, _device: DeviceName) -> None:
        """Nothing to load."""

    def build_cache(self, config: Any, _link: Link, _capacity_tokens: int) -> Any:
        """The cache generate() builds by default: sliding and hybrid layers as the config says."""
        return DynamicCache(config=config.get_text_config(decoder=True))
