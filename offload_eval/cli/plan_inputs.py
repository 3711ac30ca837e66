"""From what was typed to what is asked: an experiment file, options that replace its values, a grid of lengths."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from offload_eval.bounds.grid import PlanStrategy
from offload_eval.bounds.link_time import COPYING, check_link
from offload_eval.bounds.model_shape import model_shape
from offload_eval.bounds.partition import rank_shapes
from offload_eval.bounds.plan_cells import strategy_kind
from offload_eval.bounds.plan_request import PlanModel, PlanRequest
from offload_eval.cli.option_overrides import has_budget, model_location, read_asked
from offload_eval.cli.option_types import Typed
from offload_eval.cli.plan_lengths import plan_workloads
from offload_eval.cli.plan_options import EXPERIMENT_PLACES
from offload_eval.core.experiment import BITS_PER_VALUE, BudgetSpec, Experiment
from offload_eval.core.hardware import HardwareProfile
from offload_eval.errors import InputError, OffloadEvalError
from offload_eval.store.experiment_file import has_device_budget
from offload_eval.store.hardware_file import load_hardware
from offload_eval.store.model_config import load_model_config
from offload_eval.store.strategy_text import DEFAULT_STRATEGIES, parse_strategies

_BUDGET: Final = ("weights_gib", "runtime_gib", "reserve_gib", "activations_gib", "estimate_activations")


def plan_request(typed: Typed, hardware: str | None = None) -> PlanRequest:
    """Builds the request. A model that was typed also replaces the weights that the experiment states.

    Args:
        typed: Options, and the experiment's file.
        hardware: A hardware profile, by path or by name; None: the experiment's, if it has one.

    Raises:
        InputError: The file, an option, the model's config or the hardware profile is wrong.
        UnknownModelStructureError: The arithmetic does not know the model's structure.
    """
    asked, given = read_asked(typed, EXPERIMENT_PLACES, "plan")
    profile = _hardware(hardware, typed, asked)
    budget_is_hardwares = profile is not None and profile.memory_bytes is not None and not has_device_budget(asked)
    request = PlanRequest(
        model=_read_model(*model_location(typed, asked), asked.model.dtype),
        budget=_budget_of(profile, typed, asked) if budget_is_hardwares else _budget(typed, asked),
        workloads=plan_workloads(typed.counts, asked, given, typed.experiment),
        strategies=_strategies(typed.strategies, asked, given),
        spec=asked.plan,
        hardware=profile,
        budget_is_hardwares=budget_is_hardwares,
    )
    _check_request(request)
    return request


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


def _hardware(location: str | None, typed: Typed, asked: Experiment) -> HardwareProfile | None:
    if location is not None:
        return load_hardware(location)
    if asked.hardware is None:
        return None
    assert typed.experiment is not None, "no option but --hardware states a profile"
    try:
        return load_hardware(asked.hardware, typed.experiment.parent)
    except InputError as error:
        raise InputError(f"{typed.experiment}: hardware: {error}") from error


def _config_dtype(config: Mapping[str, Any]) -> str | None:
    text = config.get("text_config")
    for each in (text if isinstance(text, Mapping) else {}, config):
        stated = each.get("dtype") or each.get("torch_dtype")
        if isinstance(stated, str) and len(stated) < 40:
            return stated
    return None


def _budget(typed: Typed, asked: Experiment) -> BudgetSpec | None:
    """The experiment's, or that of the options."""
    without = "nothing is admitted; the memory of a --hardware profile is one"
    return _with_own_weights(typed, asked.budget) if has_budget(typed, asked, _BUDGET, without) else None


def _budget_of(profile: HardwareProfile | None, typed: Typed, asked: Experiment) -> BudgetSpec:
    """The memory of a profile, with what else is stated of a budget."""
    assert profile is not None
    assert profile.memory_bytes is not None
    taken_bytes = asked.budget.runtime_bytes + asked.budget.reserve_bytes
    if taken_bytes >= profile.memory_bytes.value:
        raise InputError(
            f"hardware {profile.name}: memory_bytes, the device budget where none is stated: "
            f"{profile.memory_bytes.value} leaves nothing for weights and KV cache; allowed: more than runtime_bytes "
            f"+ reserve_bytes = {taken_bytes}"
        )
    return _with_own_weights(typed, replace(asked.budget, device_bytes=profile.memory_bytes.value))


def _with_own_weights(typed: Typed, budget: BudgetSpec) -> BudgetSpec:
    """A model that was typed brings its own weights, unless they were typed too."""
    if typed.model is not None and "weights_gib" not in typed.options:
        return replace(budget, weights_bytes=None)
    return budget


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
    if request.hardware is not None and any(strategy_kind(each) in COPYING for each in request.strategies):
        check_link(request.hardware)
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


def _strategies(typed: Sequence[str], asked: Experiment, given: Collection[str]) -> list[PlanStrategy]:
    """What was typed; else a paged engine, and the experiment's or the default strategies."""
    if typed:
        return parse_strategies(typed, asked.plan.paging)
    return [asked.plan.paging, *(asked.strategies if "strategies" in given else DEFAULT_STRATEGIES)]
