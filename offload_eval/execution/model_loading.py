"""Loads a model, or only what is known of it, from any of the four kinds of source."""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from offload_eval.bounds.model_shape import model_shape
from offload_eval.core.experiment import ModelSpec
from offload_eval.core.shape import ModelFacts
from offload_eval.errors import InputError, UnknownModelStructureError
from offload_eval.tracing.attention import traceable_attention
from offload_eval.units import MIB

_QUOTED_CHARACTERS = 300
"""Of what upstream says; some of its messages list every model there is."""
_RANDOM_WEIGHTS_SEED = 0
"""Every worker draws the same random weights, so that their logits can be compared."""


def load_config(spec: ModelSpec) -> Any:
    """Loads the model's config, class defaults filled in.

    Raises:
        InputError: The source has no config that transformers can read.
    """
    try:
        if spec.config is not None:
            return AutoConfig.from_pretrained(spec.config, trust_remote_code=spec.trust_remote_code)
        return AutoConfig.from_pretrained(**_pretrained_arguments(spec))
    except Exception as error:  # a config class may check its fields by exceptions of its own
        raise InputError(f"model {spec.location}: no config that transformers can read: {_quoted(error)}") from error


def load_tokenizer(spec: ModelSpec) -> Any:
    """Loads the tokenizer that belongs to a pretrained source.

    Raises:
        InputError: The source has none.
    """
    try:
        return AutoTokenizer.from_pretrained(**_pretrained_arguments(spec))
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"model {spec.location}: no tokenizer: {_quoted(error)}") from error


def load_model(spec: ModelSpec, device: torch.device) -> Any:
    """Loads the model onto the device, ready to generate."""
    arguments = _build_arguments(spec)
    if spec.weights == "random":
        torch.manual_seed(_RANDOM_WEIGHTS_SEED)
        with device:
            model = AutoModelForCausalLM.from_config(load_config(spec), **arguments)
    else:
        if _is_gguf(spec):
            # Without it the weights would stay in GGUF blocks.
            arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(**(_pretrained_arguments(spec) | arguments), device_map=device)
    return model.eval()


def read_model_facts(spec: ModelSpec, config: Any) -> ModelFacts:
    """Learns what is known before any weight is loaded; the model is built without data to count its bytes."""
    model = build_without_data(spec, config)
    tensors = (*model.parameters(), *model.buffers())
    text = config.get_text_config(decoder=True)
    shape, refusal = None, None
    try:
        shape = model_shape(text.to_dict())
        if not shape.in_transformers:
            refusal, shape = f"model_type {shape.model_type!r} caches in its own code, not in transformers'", None
    except (UnknownModelStructureError, InputError) as error:
        refusal = str(error)
    return ModelFacts(
        fingerprint=_fingerprint(spec, config),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        weights_bytes=sum(tensor.nbytes for tensor in tensors),
        shape=shape,
        shape_refusal=refusal,
        context_tokens=getattr(text, "max_position_embeddings", None),
        vocab_size=text.vocab_size,
    )


def build_traceable(spec: ModelSpec, config: Any) -> Any:
    """Builds the model without data for `trace_strategy`; a flash attention package need not be installed.

    A vision-language model that is no causal language model is built whole, and given text alone.

    Raises:
        InputError: transformers has no such model for the config, or not with this attention.
    """
    is_causal = type(config) in AutoModelForCausalLM._model_mapping
    reads_images = not is_causal and type(config) in AutoModelForImageTextToText._model_mapping
    loader = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
    return build_without_data(as_traceable(spec), config, loader).eval()


def as_traceable(spec: ModelSpec) -> ModelSpec:
    """The same model with an attention that can be built without the package that computes it."""
    return msgspec.structs.replace(spec, attn_implementation=traceable_attention(spec.attn_implementation))


def build_without_data(spec: ModelSpec, config: Any, loader: Any = AutoModelForCausalLM) -> Any:
    """Builds the model on the meta device, with real code and no weights.

    Raises:
        InputError: transformers has no model of the loader's kind for the config, or not with this attention.
    """
    if type(config) not in loader._model_mapping and not spec.trust_remote_code:
        raise InputError(f"model {spec.location}: model_type {config.model_type!r} is no causal language model")
    try:
        with torch.device("meta"):
            return loader.from_config(config, **_build_arguments(spec))
    except (ValueError, ImportError) as error:
        if "attn_implementation" in str(error) or "attention" in str(error):
            place = f"model.attn_implementation: {spec.attn_implementation!r} is not supported by this model"
            raise InputError(f"{place}; allowed: eager, or what its implementation has: {_quoted(error)}") from error
        raise InputError(f"model {spec.location}: cannot be built: {_quoted(error)}") from error


def _build_arguments(spec: ModelSpec) -> dict[str, Any]:
    return {
        "dtype": getattr(torch, spec.dtype),
        "attn_implementation": spec.attn_implementation,
        "trust_remote_code": spec.trust_remote_code,
    }


def _pretrained_arguments(spec: ModelSpec) -> dict[str, Any]:
    assert spec.source is not None
    arguments: dict[str, Any] = {"trust_remote_code": spec.trust_remote_code}
    if _is_gguf(spec):
        path = Path(spec.source)
        return arguments | {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if spec.revision is not None:
        arguments["revision"] = spec.revision
    return arguments | {"pretrained_model_name_or_path": spec.source}


def _is_gguf(spec: ModelSpec) -> bool:
    return spec.source is not None and spec.source.endswith(".gguf")


def _fingerprint(spec: ModelSpec, config: Any) -> str:
    """Sixteen hex digits over the config and over local weight files: names, sizes, first and last MiB of each."""
    content = config.to_dict()
    for volatile in ("_name_or_path", "transformers_version"):
        content.pop(volatile, None)
    digest = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode())
    digest.update(f"{spec.weights} {spec.revision} {getattr(config, '_commit_hash', None)}".encode())
    source = Path(spec.source) if spec.source is not None else None
    if source is not None and source.exists():
        for file in [source] if source.is_file() else sorted(source.glob("*.safetensors")):
            digest.update(f"{file.name} {file.stat().st_size}".encode())
            digest.update(_ends(file))
    return digest.hexdigest()[:16]


def _ends(file: Path) -> bytes:
    with file.open("rb") as stream:
        first = stream.read(MIB)
        stream.seek(max(0, file.stat().st_size - MIB))
        return first + stream.read()


def _quoted(error: BaseException) -> str:
    words = " ".join(str(error).split())
    return words[:_QUOTED_CHARACTERS] if words else type(error).__name__
