"""From what was typed to what is traced: the model's config, workloads, strategies and a budget."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from offload_eval.bounds.model_shape import model_shape
from offload_eval.cli.option_overrides import has_budget, model_location, read_asked
from offload_eval.cli.option_types import Typed
from offload_eval.cli.plan_lengths import plan_workloads
from offload_eval.cli.trace_options import EXPERIMENT_PLACES
from offload_eval.core.experiment import (
    DeviceName,
    Experiment,
    ModelSpec,
    OffloadedStaticSpec,
    StaticSpec,
    StrategySpec,
    Workload,
    is_auto,
)
from offload_eval.core.factors import expand_workloads
from offload_eval.core.plan import PagingSpec, PartitionSpec
from offload_eval.core.shape import ModelShape
from offload_eval.errors import InputError, OffloadEvalError
from offload_eval.store.model_config import load_model_config
from offload_eval.store.strategy_text import DEFAULT_STRATEGIES, parse_strategies

_DEVICES: Final[dict[str, DeviceName]] = {"cuda": "cuda", "cpu": "cpu"}
_ATTENTION: Final = ("sdpa", "eager", "flash_attention_2", "flash_attention_3")
_ONE_DEVICE: Final = "A trace is of one device with the whole model: plan.partition is not applied."
_DEFAULT_OUTPUT_TOKENS: Final = "3"
MOST_TRACES: Final = 500
"""Of one call; each takes about a second."""


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """Everything that is asked."""

    name: str
    model: ModelSpec
    shape: ModelShape | None
    """None where the arithmetic does not know the model's structure; a trace does not need it."""
    workloads: Sequence[Workload]
    strategies: Sequence[StrategySpec]
    available_bytes: int | None
    """Of the device, for weights, cache and activations; None without a budget."""
    host_bytes: int | None
    """Of the host, for the cache; None where the budget states none."""
    device: DeviceName
    attention_is_default: bool
    """Whether nobody has asked for an attention implementation."""
    notes: Sequence[str] = ()
    """What the reader has to know of what was asked."""


def trace_request(typed: Typed, device: str, prefill_chunk_tokens: int | None = None) -> TraceRequest:
    """Builds the request, for the kernels of `device`.

    Args:
        typed: Options, and the experiment's file.
        device: Whose kernels are followed.
        prefill_chunk_tokens: Replaces the chunks of the experiment's workloads; None leaves them as they are.

    Raises:
        InputError: The file, an option or the model's config is wrong.
    """
    options = typed.options
    if options.get("attn", "sdpa") not in _ATTENTION:
        raise InputError(f"--attn: {options['attn']!r} is not allowed; allowed: {', '.join(_ATTENTION)}")
    if device not in _DEVICES:
        raise InputError(f"--device: {device!r} is not allowed; allowed: {', '.join(_DEVICES)}")
    asked, given = read_asked(typed, EXPERIMENT_PLACES, "trace")
    name, spec, shape = _model(typed, asked)
    is_budgeted = has_budget(typed, asked, ("runtime_gib", "reserve_gib"), "no batch is sought")
    budget = asked.budget
    request = TraceRequest(
        name=name,
        model=spec,
        shape=shape,
        workloads=_workloads(typed, asked, given, prefill_chunk_tokens),
        strategies=_strategies(typed.strategies, asked, given),
        available_bytes=budget.available_bytes if is_budgeted else None,
        host_bytes=budget.host_bytes if is_budgeted else None,
        device=_DEVICES[device],
        attention_is_default="attn" not in options and (typed.model is not None or "model" not in given),
        notes=(_ONE_DEVICE,) if asked.plan.partition != PartitionSpec() else (),
    )
    auto = next((each.label for each in request.strategies if is_auto(each)), None)
    if auto is not None and request.available_bytes is None:
        raise InputError(
            f"{auto}: resident_share: 'auto' takes what a budget leaves, and there is none; give --vram-gib, or a "
            "share from 0 to 1"
        )
    num_traces = len(request.workloads) * len(request.strategies)
    if num_traces > MOST_TRACES:
        raise InputError(f"{num_traces:,} traces take too long; allowed: at most {MOST_TRACES}")
    return request


def _model(typed: Typed, asked: Experiment) -> tuple[str, ModelSpec, ModelShape | None]:
    """The name, a spec with random weights, of which none is made, and the layout where it is known."""
    if typed.model is None and asked.model.location.endswith(".gguf"):
        return Path(asked.model.location).stem, asked.model, None
    found = load_model_config(*model_location(typed, asked))
    spec = ModelSpec(
        config=str(found.origin),
        weights="random",
        dtype=asked.model.dtype,
        attn_implementation=asked.model.attn_implementation,
        trust_remote_code=asked.model.trust_remote_code,
    )
    try:
        return found.name, spec, model_shape(found.config)
    except OffloadEvalError:
        return found.name, spec, None


def _workloads(typed: Typed, asked: Experiment, given: Collection[str], chunk_tokens: int | None) -> list[Workload]:
    """The experiment's workloads at all their factors; or the lengths typed, in each of its ways to prefill."""
    if "workloads" in given and all(count is None for count in typed.counts.values()):
        workloads = list(expand_workloads(asked))
    else:
        workloads = _typed_workloads(typed, asked, given)
    if chunk_tokens is None:
        return workloads
    return list(dict.fromkeys(replace(workload, prefill_chunk_tokens=chunk_tokens) for workload in workloads))


def _typed_workloads(typed: Typed, asked: Experiment, given: Collection[str]) -> list[Workload]:
    counts = typed.counts
    if "workloads" not in given and counts["prompt_tokens"] is not None and counts["output_tokens"] is None:
        counts = {**counts, "output_tokens": _DEFAULT_OUTPUT_TOKENS}
    planned = plan_workloads(counts, asked, given, typed.experiment)
    short = next((each for each in planned if each.output_tokens < 2), None)
    if short is not None:
        raise InputError(f"--output-tokens {short.output_tokens}: a trace has a decode step; allowed: at least 2")
    ways = {
        (workload.prefill_chunk_tokens, workload.attn_implementation): workload for workload in expand_workloads(asked)
    }
    return [
        replace(
            way,
            name=each.name if (way.prefill_chunk_tokens, way.attn_implementation) == (None, None) else None,
            batch_size=each.batch_size,
            prompt_tokens=each.prompt_tokens,
            output_tokens=each.output_tokens,
        )
        for each in planned
        for way in ways.values()
    ]


def _strategies(typed: Sequence[str], asked: Experiment, given: Collection[str]) -> list[StrategySpec]:
    if not typed:
        static = (StaticSpec(), OffloadedStaticSpec())
        return list(asked.strategies if "strategies" in given else (*DEFAULT_STRATEGIES, *static))
    parsed = parse_strategies(typed, PagingSpec())
    traceable = [each for each in parsed if not isinstance(each, PagingSpec)]
    if len(traceable) < len(parsed):
        raise InputError("--strategy paged: an engine's cache is no code of transformers, and cannot be traced")
    return traceable
