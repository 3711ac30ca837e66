"""transformers' QuantizedCache with the quanto, hqq and fp8 backends."""

from typing import Any, ClassVar

from offload_eval.core.experiment import DeviceName, QuantizedSpec
from offload_eval.strategies.backends import backend_refusal
from offload_eval.strategies.link import Link
from offload_eval.strategies.upstream import layer_types, quantized_cache


class Quantized:
    """The prompt is quantized after its own prefill; each step dequantizes every layer whole."""

    uses_link: ClassVar[bool] = False

    def __init__(self, spec: QuantizedSpec) -> None:
        self.spec = spec

    def refusal(self, device: DeviceName, config: Any) -> str | None:
        """Needs the backend's package, and a decoder whose every layer keeps full attention."""
        if config.is_encoder_decoder:
            return "transformers' quantized cache does not support encoder-decoder models"
        other = sorted(set(layer_types(config)) - {"full_attention", "DynamicLayer"})
        if other:
            return (
                f"transformers' quantized cache needs full attention in every layer; this model has {', '.join(other)}"
            )
        return backend_refusal(self.spec.backend, device=device)

    def build_cache(self, config: Any, _link: Link, _capacity_tokens: int) -> Any:
        """Upstream's cache; options that the spec leaves unset keep upstream's defaults."""
        return quantized_cache(self.spec.backend, config.get_text_config(decoder=True), self.spec.options)
