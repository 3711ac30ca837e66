"""From what was typed to what is asked: an experiment file, options that replace its values, a grid of lengths."""

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

from msgspec.structs import replace

from offload_eval.bounds.grid import PlanStrategy
from offload_eval.bounds.model_shape import model_shape
from offload_eval.bounds.plan_request import PlanModel, PlanRequest, PlanWorkload
from offload_eval.cli.plan_options import EXPERIMENT_PLACES
from offload_eval.core.experiment import Experiment
from offload_eval.errors import InputError, OffloadEvalError
from offload_eval.store.experiment_file import build_for_plan, load_for_plan
from offload_eval.store.model_config import load_model_config
from offload_eval.store.origin import Origin, Override
from offload_eval.store.strategy_text import DEFAULT_STRATEGIES, parse_strategies
from offload_eval.units import GIB

_RANGE: Final = re.compile(r"(\d+):(\d+):(\d+)")
_LIMITS: Final = {"prompt_tokens": (1, 2**24), "output_tokens": (0, 2**24), "batch_size": (1, 65_536)}
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
    changes = [_override(name, value) for name, value in options.items()]
    if experiment is None:
        _check_options(model, counts, overrides)
        asked = build_for_plan({}, Origin(file=Path("options"), overrides=changes))
        given: Collection[str] = ()
    else:
        asked, given = load_for_plan(experiment, overrides, changes)
    if model is None and "model" not in given:
        raise InputError(f"{experiment}: model: required, and missing; state it there, or give --model")
    found = _model(model or asked.model.location, asked.model.dtype)
    budget = asked.budget if "budget" in given or "vram_gib" in options else None
    useless = next((name for name in _BUDGET if name in options), None)
    if budget is None and useless is not None:
        raise InputError(f"--{useless.replace('_', '-')} needs --vram-gib: without a budget nothing is admitted")
    if budget is not None and model is not None and "weights_gib" not in options:
        budget = replace(budget, weights_bytes=None)
    if budget is not None and budget.weights_bytes is None and found.weights_bytes is None:
        raise InputError(
            f"{found.name}: the bytes of its weights are not known from a config.json; give --weights-gib, "
            "budget.weights_bytes in the experiment, or a folder with the weights"
        )
    if asked.plan.estimate_activations and found.shape.intermediate_size is None:
        raise InputError(
            f"{found.name}: activations cannot be estimated, its config has no dense MLP; state them with "
            "--activations-gib or plan.activations_bytes"
        )
    return PlanRequest(
        model=found,
        budget=budget,
        workloads=_workloads(counts, asked, given, experiment),
        strategies=_strategies(strategies, asked, given),
        spec=asked.plan,
    )


def _override(name: str, value: Any) -> Override:
    option = f"--{name.replace('_', '-')}"
    if not name.endswith("_gib"):
        shown = option if value is True else f"{option} {value}"
        return Override(path=EXPERIMENT_PLACES[name], value=value, origin=shown)
    # A size below zero, or none at all, is refused where the experiment's own are.
    size_bytes = round(value * GIB) if abs(value) < 2**33 else value
    return Override(path=EXPERIMENT_PLACES[name], value=size_bytes, origin=f"{option} {value:g}")


def _check_options(model: str | None, counts: Mapping[str, str | None], overrides: Sequence[str]) -> None:
    if model is None:
        raise InputError("nothing to plan: give an experiment file, or --model and --prompt-tokens")
    if counts["prompt_tokens"] is None:
        raise InputError("--model needs --prompt-tokens, and takes --output-tokens and --batch-size")
    if overrides:
        raise InputError(f"--set {overrides[0]}: needs an experiment file")


def _model(location: str, dtype: str) -> PlanModel:
    found = load_model_config(location)
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
    )


def _workloads(
    counts: Mapping[str, str | None], asked: Experiment, given: Collection[str], file: Path | None
) -> list[PlanWorkload]:
    """The grid of what was typed, else the experiment's workloads, else its population's groups."""
    if any(counts.values()):
        defaults = {"prompt_tokens": None, "output_tokens": 0, "batch_size": 1}
        if "workloads" in given:
            defaults = {name: getattr(asked.workloads[0], name) for name in counts}
        return _grid({name: _read_counts(name, text) if text else [defaults[name]] for name, text in counts.items()})
    if "workloads" in given:
        return [
            PlanWorkload(
                name=workload.label,
                prompt_tokens=workload.prompt_tokens,
                output_tokens=workload.output_tokens,
                batch_size=workload.batch_size,
            )
            for workload in asked.workloads
        ]
    if not asked.plan.population:
        raise InputError(f"{file}: no lengths: state workloads or plan.population, or give --prompt-tokens")
    return [
        PlanWorkload(
            name=group.name,
            prompt_tokens=group.prompt_tokens,
            output_tokens=group.max_new_tokens,
            batch_size=group.sessions * group.beams,
        )
        for group in asked.plan.population
    ]


def _grid(lists: Mapping[str, Sequence[int | None]]) -> list[PlanWorkload]:
    prompts = [prompt for prompt in lists["prompt_tokens"] if prompt is not None]
    if not prompts:
        raise InputError("--output-tokens and --batch-size need --prompt-tokens, or an experiment with workloads")
    return [
        PlanWorkload(
            name=f"b{batch}-p{prompt}-o{output}",
            prompt_tokens=prompt,
            output_tokens=output or 0,
            batch_size=batch or 1,
        )
        for prompt, output, batch in product(prompts, lists["output_tokens"], lists["batch_size"])
    ]


def _read_counts(name: str, text: str) -> list[int]:
    option = f"--{name.replace('_', '-')}"
    low, high = _LIMITS[name]
    form = f"integers from {low:,} to {high:,}: one, a list as in 1024,4096, or START:STOP:STEP, both ends included"
    values: list[int] = []
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece.strip())
        if match is not None and int(match[3]) > 0 and int(match[1]) <= int(match[2]) <= high:
            values += range(int(match[1]), int(match[2]) + 1, int(match[3]))
        elif piece.strip().isascii() and piece.strip().isdecimal() and len(piece.strip()) < 12:
            values.append(int(piece))
        else:
            raise InputError(f"{option} {text}: {piece!r} is not allowed; allowed: {form}")
    wrong = next((value for value in values if not low <= value <= high), None)
    if wrong is not None:
        raise InputError(f"{option} {text}: {wrong} is not allowed; allowed: {form}")
    return values


def _strategies(typed: Sequence[str], asked: Experiment, given: Collection[str]) -> list[PlanStrategy]:
    """What was typed; else a paged engine, and the experiment's or the default strategies."""
    if typed:
        return parse_strategies(typed, asked.plan.paging)
    return [asked.plan.paging, *(asked.strategies if "strategies" in given else DEFAULT_STRATEGIES)]
