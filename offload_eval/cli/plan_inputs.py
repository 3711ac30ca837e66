"""From what was typed to what is asked: an experiment file, options that replace its values, a grid of lengths."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from offload_eval.bounds.grid import PlanStrategy
from offload_eval.bounds.model_shape import model_shape
from offload_eval.bounds.partition import rank_shapes
from offload_eval.bounds.plan_request import PlanModel, PlanRequest
from offload_eval.cli.option_overrides import COMMAND_LINE, as_overrides
from offload_eval.cli.plan_lengths import plan_workloads
from offload_eval.cli.plan_options import EXPERIMENT_PLACES
from offload_eval.core.experiment import BITS_PER_VALUE, BudgetSpec, Experiment
from offload_eval.errors import InputError, OffloadEvalError
from offload_eval.store.experiment_file import build_for_plan, load_for_plan
from offload_eval.store.model_config import load_model_config
from offload_eval.store.origin import Origin
from offload_eval.store.strategy_text import DEFAULT_STRATEGIES, parse_strategies

_BUDGET: Final = ("weights_gib", "runtime_gib", "reserve_gib", "activations_gib", "estimate_activations")


def plan_request(
    experiment: Path | None,
    model: str | None,
    counts: Mapping[str, str | None],
    strategies: Sequence[str],
    options: Mapping[str, Any],
    overrides: Sequence[str],
) -> PlanRequest:
    """Builds the request.

    Args:
        experiment: An experiment file; of its sections only those that the arithmetic needs are required.
        model: A config.json, a folder or a preset; replaces the experiment's, and the weights that it states.
        counts: `prompt_tokens`, `output_tokens` and `batch_size` as typed; what is None comes from the experiment.
        strategies: As typed; none: the experiment's.
        options: Values of the options in `EXPERIMENT_PLACES`.
        overrides: `key.path=value` each.

    Raises:
        InputError: The file, an option or the model's config is wrong.
        UnknownModelStructureError: The arithmetic does not know the model's structure.
    """
    changes = as_overrides(options, EXPERIMENT_PLACES)
    if model is not None and not model.strip():
        raise InputError("--model: '' is not allowed; allowed: a config.json, a folder or a preset")
    if experiment is None:
        _check_options(model, counts, overrides)
        asked, given = build_for_plan({}, Origin(file=COMMAND_LINE, overrides=changes)), set[str]()
    else:
        asked, given = load_for_plan(experiment, overrides, changes)
    request = PlanRequest(
        model=_find_model(experiment, model, asked, given),
        budget=_budget(model, asked, given, options),
        workloads=plan_workloads(counts, asked, given, experiment),
        strategies=_strategies(strategies, asked, given),
        spec=asked.plan,
    )
    _check_request(request)
    return request


def _find_model(experiment: Path | None, model: str | None, asked: Experiment, given: Collection[str]) -> PlanModel:
    if model is not None:
        return _read_model(model, None, asked.model.dtype)
    if experiment is None or "model" not in given:
        raise InputError(f"{experiment}: model: required, and missing; state it there, or give --model")
    return _read_model(asked.model.location, experiment.parent, asked.model.dtype)


def _read_model(location: str, relative_to: Path | None, dtype: str) -> PlanModel:
    found = load_model_config(location, relative_to, BITS_PER_VALUE[dtype])
    try:
        shape = model_shape(found.config)
    except OffloadEvalError as error:
        raise type(error)(f"{found.origin}: {error}") from error
    return PlanModel(
        name=found.name,
        source=found.source,
        shape=shape,
        weights_bytes=found.weights_bytes,
        weights_source=found.weights_source or "stated",
        dtype=dtype,
        config_dtype=_config_dtype(found.config),
    )


def _config_dtype(config: Mapping[str, Any]) -> str | None:
    text = config.get("text_config")
    for each in (text if isinstance(text, Mapping) else {}, config):
        stated = each.get("dtype") or each.get("torch_dtype")
        if isinstance(stated, str) and len(stated) < 40:
            return stated
    return None


def _budget(
    model: str | None, asked: Experiment, given: Collection[str], options: Mapping[str, Any]
) -> BudgetSpec | None:
    """The experiment's, or that of the options. Weights that a file states are its own model's."""
    if "budget" not in given and "vram_gib" not in options:
        useless = next((name for name in _BUDGET if name in options), None)
        if useless is not None:
            raise InputError(f"--{useless.replace('_', '-')} needs --vram-gib: without a budget nothing is admitted")
        return None
    if model is not None and "weights_gib" not in options:
        return replace(asked.budget, weights_bytes=None)
    return asked.budget


def _check_request(request: PlanRequest) -> None:
    """What can be told of a request only once its model is known.

    Raises:
        InputError: The message names the model and the option.
    """
    model, spec = request.model, request.spec
    if request.budget is not None and request.budget.weights_bytes is None and model.weights_bytes is None:
        raise InputError(
            f"{model.name}: the bytes of its weights are not known from a config.json; give --weights-gib, "
            "budget.weights_bytes in the experiment, or a folder with the weights"
        )
    if spec.estimate_activations and model.shape.gated_mlp_size is None:
        raise InputError(
            f"{model.name}: activations are estimated for dense gated MLPs alone, which {model.shape.model_type!r} is "
            "not known to have; state them with --activations-gib or plan.activations_bytes"
        )
    if spec.encoder_tokens is not None and not any(group.cache == "cross" for group in model.shape.layer_groups):
        raise InputError(f"{model.name}: has no cross-attention; leave --encoder-tokens, or plan.encoder_tokens, out")
    try:
        rank_shapes(model.shape, spec.partition.tensor_parallel, spec.partition.pipeline_parallel)
    except InputError as error:
        raise InputError(f"{model.name}: --pp, or plan.partition.{error}") from error
    labels = [strategy.label for strategy in request.strategies]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise InputError(f"two strategies have the label {twice!r}; give one of them another name")


def _check_options(model: str | None, counts: Mapping[str, str | None], overrides: Sequence[str]) -> None:
    if model is None:
        raise InputError("nothing to plan: give an experiment file, or --model and --prompt-tokens")
    if counts["prompt_tokens"] is None:
        raise InputError("--model needs --prompt-tokens, and takes --output-tokens and --batch-size")
    if overrides:
        raise InputError(f"--set {overrides[0]}: needs an experiment file")


def _strategies(typed: Sequence[str], asked: Experiment, given: Collection[str]) -> list[PlanStrategy]:
    """What was typed; else a paged engine, and the experiment's or the default strategies."""
    if typed:
        return parse_strategies(typed, asked.plan.paging)
    return [asked.plan.paging, *(asked.strategies if "strategies" in given else DEFAULT_STRATEGIES)]
