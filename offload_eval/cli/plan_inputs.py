"""From what was typed to what is asked: an experiment file, options that replace its values, a grid of lengths."""

import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

from offload_eval.bounds.grid import PlanStrategy
from offload_eval.bounds.model_shape import model_shape
from offload_eval.bounds.plan_request import PlanModel, PlanRequest, PlanWorkload
from offload_eval.cli.plan_options import EXPERIMENT_PLACES
from offload_eval.core.experiment import Experiment
from offload_eval.errors import InputError, OffloadEvalError
from offload_eval.store.experiment_file import build_experiment, load_experiment
from offload_eval.store.model_config import load_model_config
from offload_eval.store.origin import Origin, Override
from offload_eval.store.strategy_text import DEFAULT_STRATEGIES, parse_strategies
from offload_eval.units import GIB

_RANGE: Final = re.compile(r"(\d+):(\d+):(\d+)")
_LIMITS: Final = {"prompt_tokens": (1, 2**24), "output_tokens": (0, 2**24), "batch_size": (1, 65_536)}
_BUDGET: Final = ("weights_gib", "runtime_gib", "reserve_gib", "activations_gib", "estimate_activations")
_NO_FILE: Final = {
    "name": "plan",
    "model": {"source": "."},
    "budget": {"device_bytes": 2**62},
    "workloads": [{"prompt_tokens": 1, "output_tokens": 2}],
    "strategies": [{"kind": "dynamic"}],
}
"""Stands for an experiment file where there is none; of it only what options replace is used."""


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
        experiment: An experiment file.
        model: A config.json, a folder or a preset; replaces the experiment's.
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
        _check_options(model, counts, options, overrides)
        asked = build_experiment(_NO_FILE, Origin(file=Path("options"), overrides=changes))
    else:
        asked = load_experiment(experiment, overrides, changes)
    plan_model = _model(model or asked.model.location, asked.model.dtype)
    has_budget = experiment is not None or "vram_gib" in options
    if has_budget and asked.budget.weights_bytes is None and plan_model.weights_bytes is None:
        raise InputError(
            f"{plan_model.name}: the bytes of its weights are not known from a config.json; give --weights-gib, "
            "budget.weights_bytes in the experiment, or a folder with the weights"
        )
    if asked.plan.estimate_activations and plan_model.shape.intermediate_size is None:
        raise InputError(
            f"{plan_model.name}: activations cannot be estimated, its config has no dense MLP; state them with "
            "--activations-gib or plan.activations_bytes"
        )
    return PlanRequest(
        model=plan_model,
        budget=asked.budget if has_budget else None,
        workloads=_workloads(counts, None if experiment is None else asked),
        strategies=_strategies(strategies, None if experiment is None else asked, asked),
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


def _check_options(
    model: str | None, counts: Mapping[str, str | None], options: Mapping[str, Any], overrides: Sequence[str]
) -> None:
    if model is None:
        raise InputError("nothing to plan: give an experiment file, or --model and --prompt-tokens")
    if counts["prompt_tokens"] is None:
        raise InputError("--model needs --prompt-tokens, and takes --output-tokens and --batch-size")
    if overrides:
        raise InputError(f"--set {overrides[0]}: needs an experiment file")
    useless = next((name for name in _BUDGET if name in options and "vram_gib" not in options), None)
    if useless is not None:
        raise InputError(f"--{useless.replace('_', '-')} needs --vram-gib: without a budget nothing is admitted")


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


def _workloads(counts: Mapping[str, str | None], asked: Experiment | None) -> list[PlanWorkload]:
    """The experiment's, or the grid of what was typed; a count that was not is its first workload's."""
    if asked is not None and not any(counts.values()):
        return [
            PlanWorkload(
                name=workload.label,
                prompt_tokens=workload.prompt_tokens,
                output_tokens=workload.output_tokens,
                batch_size=workload.batch_size,
            )
            for workload in asked.workloads
        ]
    defaults = {"output_tokens": 0, "batch_size": 1}
    if asked is not None:
        defaults = {name: getattr(asked.workloads[0], name) for name in counts}
    lists = {name: _read_counts(name, text) if text else [defaults[name]] for name, text in counts.items()}
    return [
        PlanWorkload(
            name=f"b{batch}-p{prompt}-o{output}", prompt_tokens=prompt, output_tokens=output, batch_size=batch
        )
        for prompt, output, batch in product(lists["prompt_tokens"], lists["output_tokens"], lists["batch_size"])
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


def _strategies(typed: Sequence[str], file: Experiment | None, asked: Experiment) -> list[PlanStrategy]:
    paging = asked.plan.paging
    if typed:
        return [paging if each is None else each for each in parse_strategies(typed)]
    return [paging, *(DEFAULT_STRATEGIES if file is None else file.strategies)]
