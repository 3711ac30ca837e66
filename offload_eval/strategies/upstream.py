"""Every seam this package has with transformers' caches, under one name each.

A changed upstream fails here, with a message that says what changed.
"""

import inspect
from typing import Any

import transformers
from transformers import cache_utils

from offload_eval.errors import UpstreamChangedError


def _seam(name: str) -> Any:
    try:
        return getattr(cache_utils, name)
    except AttributeError:
        raise UpstreamChangedError(
            f"transformers {transformers.__version__} has no cache_utils.{name}, which offload-eval builds on; "
            "install a version named by `offload-eval doctor`"
        ) from None


Cache: Any = _seam("Cache")
DynamicCache: Any = _seam("DynamicCache")
DynamicLayer: Any = _seam("DynamicLayer")
StaticCache: Any = _seam("StaticCache")


def require_methods(owner: type, *names: str) -> None:
    """Checks that upstream's class still has the methods we wrap.

    Raises:
        UpstreamChangedError: One is missing; the message names it.
    """
    missing = [name for name in names if not callable(getattr(owner, name, None))]
    if missing:
        raise UpstreamChangedError(
            f"transformers {transformers.__version__}: {owner.__name__} has no {', '.join(missing)}, which "
            "offload-eval wraps"
        )


def quantized_cache(backend: str, config: Any, options: dict[str, int]) -> Any:
    """Builds upstream's QuantizedCache."""
    return _seam("QuantizedCache")(backend=backend, config=config, **options)


def static_refusal(config: Any) -> str | None:
    """Why upstream has no static cache for a model; None where it has."""
    if config.is_encoder_decoder:
        return "a static cache has no cross-attention here: encoder-decoder models are not supported"
    try:
        layers = StaticCache(config=config, max_cache_len=1).layers
    except KeyError as error:
        return f"transformers has no static cache for layers of type {error.args[0]}"
    if layers and not any(hasattr(layer, "get_seq_length") for layer in layers):
        return "the model has no attention layer: it keeps a state and no KV cache"
    return None


def has_fp8_backend() -> bool:
    """Whether this transformers has the fp8 cache (5.21 and later)."""
    return hasattr(cache_utils, "Fp8QuantizedLayer")


def layer_types(config: Any) -> list[str]:
    """The cache layer type of every decoder layer, as upstream's own caches infer them."""
    text = config.get_text_config(decoder=True)
    if hasattr(cache_utils, "get_layer_types_and_kwargs"):
        return list(cache_utils.get_layer_types_and_kwargs(text)[0])
    declared = getattr(text, "layer_types", None)
    return list(declared) if declared else [type(layer).__name__ for layer in DynamicCache(config=text).layers]


def cache_argument(model: Any) -> str:
    """The keyword of forward() and generate() for a cache: `cache` since 5.24, `past_key_values` before.

    Raises:
        UpstreamChangedError: forward() takes neither.
    """
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise UpstreamChangedError(
        f"transformers {transformers.__version__}: {type(model).__name__}.forward takes neither `cache` nor "
        f"`past_key_values`; it takes {', '.join(parameters)}"
    )
