"""From what was typed to what is traced: the model's config, workloads, strategies and a budget."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from offload_eval.bounds.model_shape import model_shape
from offload_eval.cli.option_overrides import COMMAND_LINE, as_overrides
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
)
from offload_eval.core.plan import PagingSpec, PartitionSpec
from offload_eval.core.shape import ModelShape
from offload_eval.errors import InputError, OffloadEvalError
from offload_eval.store.experiment_file import build_for_plan, load_for_plan
from offload_eval.store.model_config import load_model_config
from offload_eval.store.origin import Origin
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
    device: DeviceName
    attention_is_default: bool
    """Whether nobody has asked for an attention implementation."""
    notes: Sequence[str] = ()
    """What the reader has to know of what was asked."""


def trace_request(
    experiment: Path | None,
    model: str | None,
    counts: Mapping[str, str | None],
    strategies: Sequence[str],
    options: Mapping[str, Any],
    overrides: Sequence[str],
    device: str,
) -> TraceRequest:
    """Builds the request.

    Args:
        experiment: An experiment file; of its sections only those that a trace needs are required.
        model: A config.json, a folder or a preset; replaces the experiment's.
        counts: `prompt_tokens`, `output_tokens` and `batch_size` as typed; what is None comes from the experiment.
        strategies: As typed; none: the experiment's, or the default ones and the static caches.
        options: Values of the options in `EXPERIMENT_PLACES`.
        overrides: `key.path=value` each.
        device: Whose kernels are followed.

    Raises:
        InputError: The file, an option or the model's config is wrong.
    """
    if options.get("attn", "sdpa") not in _ATTENTION:
        raise InputError(f"--attn: {options['attn']!r} is not allowed; allowed: {', '.join(_ATTENTION)}")
    if device not in _DEVICES:
        raise InputError(f"--device: {device!r} is not allowed; allowed: {', '.join(_DEVICES)}")
    changes = as_overrides(options, EXPERIMENT_PLACES)
    if experiment is not None:
        asked, given = load_for_plan(experiment, overrides, changes)
    else:
        if model is None or counts["prompt_tokens"] is None:
            raise InputError("nothing to trace: give an experiment file, or --model and --prompt-tokens")
        if overrides:
            raise InputError(f"--set {overrides[0]}: needs an experiment file")
        asked, given = build_for_plan({}, Origin(file=COMMAND_LINE, overrides=changes)), set[str]()
    if model is None and "model" not in given:
        raise InputError(f"{experiment}: model: required, and missing; state it there, or give --model")
    name, spec, shape = _model(model, asked, None if experiment is None else experiment.parent)
    has_budget = "budget" in given or "vram_gib" in options
    useless = next((name for name in ("runtime_gib", "reserve_gib") if name in options), None)
    if useless is not None and not has_budget:
        raise InputError(f"--{useless.replace('_', '-')} needs --vram-gib: without a budget no batch is sought")
    budget = asked.budget
    request = TraceRequest(
        name=name,
        model=spec,
        shape=shape,
        workloads=_workloads(counts, asked, given, experiment),
        strategies=_strategies(strategies, asked, given),
        available_bytes=budget.device_bytes - budget.runtime_bytes - budget.reserve_bytes if has_budget else None,
        device=_DEVICES[device],
        attention_is_default="attn" not in options and (model is not None or "model" not in given),
        notes=(_ONE_DEVICE,) if asked.plan.partition != PartitionSpec() else (),
    )
    num_traces = len(request.workloads) * len(request.strategies)
    if num_traces > MOST_TRACES:
        raise InputError(f"{num_traces:,} traces take too long; allowed: at most {MOST_TRACES}")
    return request


def _model(model: str | None, asked: Experiment, folder: Path | None) -> tuple[str, ModelSpec, ModelShape | None]:
    """The name, a spec with random weights, of which none is made, and the layout where it is known."""
    if model is None and asked.model.location.endswith(".gguf"):
        return Path(asked.model.location).stem, asked.model, None
    found = load_model_config(asked.model.location if model is None else model, folder if model is None else None)
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


def _workloads(
    counts: Mapping[str, str | None], asked: Experiment, given: Collection[str], file: Path | None
) -> list[Workload]:
    if "workloads" not in given and counts["prompt_tokens"] is not None and counts["output_tokens"] is None:
        counts = {**counts, "output_tokens": _DEFAULT_OUTPUT_TOKENS}
    planned = plan_workloads(counts, asked, given, file)
    short = next((each for each in planned if each.output_tokens < 2), None)
    if short is not None:
        raise InputError(f"--output-tokens {short.output_tokens}: a trace has a decode step; allowed: at least 2")
    return [
        replace(
            asked.workloads[0],
            name=each.name,
            batch_size=each.batch_size,
            prompt_tokens=each.prompt_tokens,
            output_tokens=each.output_tokens,
        )
        for each in planned
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
