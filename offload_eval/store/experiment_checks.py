"""What the types of an experiment cannot say: choices that exclude one another, names that must be unique."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from offload_eval.core.capacity import CapacitySpec
from offload_eval.core.experiment import (
    Experiment,
    JsonlPrompt,
    ModelSpec,
    QuantizedSpec,
    RandomPrompt,
    StrategySpec,
    StreamedSpec,
    TextPrompt,
    Workload,
)
from offload_eval.core.plan import Percentile, PlanSpec, SessionGroup
from offload_eval.store.factor_checks import check_factors
from offload_eval.store.origin import KeyPath, suggest

Problem = tuple[KeyPath, str]
"""Where, and the value seen with what is allowed."""


@dataclass(frozen=True)
class _GroupwiseBackend:
    nbits: tuple[int, ...]
    axes: tuple[int, ...]


_GROUPWISE: Final = {
    "quanto": _GroupwiseBackend(nbits=(2, 4), axes=(0, -1)),
    "hqq": _GroupwiseBackend(nbits=(1, 2, 4, 8), axes=(0, 1)),
}
"""Source: transformers/cache_utils.py, QuantoQuantizedLayer and HQQQuantizedLayer. HQQ's layer also accepts
3 bits, but cannot dequantize them."""


def check_experiment(experiment: Experiment) -> Iterator[Problem]:
    """Yields every contradiction in an experiment, the first to mend first."""
    yield from _check_model(experiment.model)
    yield from check_arithmetic(experiment)
    yield from _check_measurement(experiment)
    yield from _check_capacity(experiment.capacity)
    yield from _check_baseline(experiment)
    for index, workload in enumerate(experiment.workloads):
        yield from _check_prompt(("workloads", index, "prompt"), workload, experiment.model)


def check_arithmetic(experiment: Experiment) -> Iterator[Problem]:
    """Yields the contradictions that matter even if nothing is run."""
    yield from _check_budget(experiment)
    yield from _check_plan(experiment.plan)
    yield from _check_labels("workloads", experiment.workloads)
    yield from _check_labels("strategies", experiment.strategies)
    yield from check_factors(experiment)
    for index, strategy in enumerate(experiment.strategies):
        if isinstance(strategy, QuantizedSpec):
            yield from _check_quantized(("strategies", index), strategy)
        if isinstance(strategy, StreamedSpec) and None not in (strategy.resident_share, strategy.resident_bytes):
            seen = f"{strategy.resident_bytes} is not allowed beside resident_share"
            yield ("strategies", index, "resident_bytes"), f"{seen}; allowed: one of the two"


def _check_model(model: ModelSpec) -> Iterator[Problem]:
    for key in ("source", "config", "revision"):
        if getattr(model, key) == "":
            yield ("model", key), "'' is not allowed; leave the key out, or give it a value"
    if (model.source is None) == (model.config is None):
        seen = "neither is given" if model.source is None else "both are given"
        yield ("model",), f"exactly one of source and config is needed, and {seen}"
    if model.config is not None and model.weights != "random":
        yield (
            ("model", "weights"),
            f"{model.weights!r} needs model.source; with model.config, allowed: random",
        )
    if model.config is None and model.weights == "random":
        yield ("model", "weights"), "'random' needs model.config; with model.source, allowed: pretrained"
    if model.revision is not None and model.source is None:
        yield ("model", "revision"), f"{model.revision!r} needs a hub id in model.source; leave it out"


def _check_budget(experiment: Experiment) -> Iterator[Problem]:
    budget = experiment.budget
    taken_bytes = budget.runtime_bytes + budget.reserve_bytes
    if taken_bytes >= budget.device_bytes:
        yield (
            ("budget", "device_bytes"),
            f"{budget.device_bytes} leaves nothing for weights and KV cache; "
            f"allowed: more than runtime_bytes + reserve_bytes = {taken_bytes}",
        )


def _check_measurement(experiment: Experiment) -> Iterator[Problem]:
    """Memory and transfers ride on the rounds that are timed, and only a memory pass sees an enforced budget bind."""
    plan, enforce = experiment.measurement, experiment.budget.enforce
    if plan.trials == 0:
        yield ("measurement", "trials"), "0 is not allowed; allowed: an integer from 1 to 10000"
    if enforce and plan.memory_trials == 0:
        yield (
            ("measurement", "memory_trials"),
            f"0 with budget.enforce: true is not allowed; allowed: 1 to measurement.trials = {plan.trials}, "
            "or budget.enforce: false",
        )
    for key, least in (("memory_trials", int(enforce)), ("transfer_trials", 0)):
        if getattr(plan, key) > plan.trials:
            yield (
                ("measurement", key),
                f"{getattr(plan, key)} is not allowed; allowed: {least} to measurement.trials = {plan.trials}",
            )


def _check_capacity(capacity: CapacitySpec | None) -> Iterator[Problem]:
    if capacity is not None and capacity.has_objectives and capacity.timing_trials == 0:
        yield (
            ("capacity", "timing_trials"),
            "0 with ttft_limit_s or tpot_limit_s is not allowed: nothing would be timed; allowed: 1 to 10000",
        )


def _check_plan(plan: PlanSpec) -> Iterator[Problem]:
    host = plan.host
    if host.reserve_bytes and host.kv_bytes is None:
        yield (
            ("plan", "host", "reserve_bytes"),
            f"{host.reserve_bytes} needs memory_bytes or limit_bytes; leave it out",
        )
    if plan.estimate_activations and plan.activations_bytes:
        yield (
            ("plan", "activations_bytes"),
            f"{plan.activations_bytes} with estimate_activations: true is not allowed; leave one of them out",
        )
    if plan.percentile is not None and not plan.population:
        yield ("plan", "percentile"), f"{plan.percentile!r} needs plan.population; leave it out"
    for where, problem in check_population(plan.population, plan.percentile):
        yield ("plan", "population", *where), problem


def check_population(groups: Sequence[SessionGroup], percentile: Percentile | None = None) -> Iterator[Problem]:
    """Yields the contradictions in a population, with the place of each in it."""
    name, times = Counter(group.name for group in groups).most_common(1)[0] if groups else ("", 0)
    if times > 1:
        yield (), f"the name {name!r} is used {times} times; give each group its own"
    for index, group in enumerate(groups):
        for key, problem in _check_group(group, percentile):
            yield (index, *key), problem


def _check_group(group: SessionGroup, percentile: Percentile | None) -> Iterator[Problem]:
    if percentile is not None and getattr(group.generated_tokens, percentile) is None:
        yield ("generated_tokens", percentile), "required by plan.percentile, and missing; allowed: an integer >= 1"
    for name in group.generated_tokens.__struct_fields__:
        tokens = getattr(group.generated_tokens, name)
        if tokens is not None and tokens > group.max_new_tokens:
            allowed = f"allowed: at most max_new_tokens = {group.max_new_tokens}"
            yield ("generated_tokens", name), f"{tokens} is not allowed; {allowed}"
    stated = [
        (name, tokens) for name in ("p50", "p90", "p95", "p99") if (tokens := getattr(group.generated_tokens, name))
    ]
    for (lower, fewer), (higher, more) in pairwise(stated):
        if fewer > more:
            yield ("generated_tokens", higher), f"{more} is less than {lower} = {fewer}; allowed: at least that"
    if group.shared_prefix_tokens > group.prompt_tokens:
        allowed = f"allowed: at most prompt_tokens = {group.prompt_tokens}"
        yield ("shared_prefix_tokens",), f"{group.shared_prefix_tokens} is not allowed; {allowed}"


def _check_labels(section: str, items: Sequence[Workload | StrategySpec]) -> Iterator[Problem]:
    label, times = Counter(item.label for item in items).most_common(1)[0]
    if times > 1:
        where = ", ".join(f"{section}[{index}]" for index, item in enumerate(items) if item.label == label)
        yield (section,), f"the label {label!r} is used {times} times ({where}); give each its own `name`"


def _check_baseline(experiment: Experiment) -> Iterator[Problem]:
    labels = [strategy.label for strategy in experiment.strategies]
    if experiment.baseline not in labels:
        near = suggest(experiment.baseline, labels)
        yield (
            ("baseline",),
            f"{experiment.baseline!r} is not the label of a strategy; allowed: {', '.join(labels)}{near}",
        )


def _check_prompt(path: KeyPath, workload: Workload, model: ModelSpec) -> Iterator[Problem]:
    prompt = workload.prompt
    if model.config is not None and not isinstance(prompt, RandomPrompt):
        kind = type(prompt).__struct_config__.tag
        yield (
            path,
            f"kind {kind!r} needs a tokenizer, which model.config does not bring; allowed: kind: random",
        )
    if isinstance(prompt, TextPrompt | JsonlPrompt) and not prompt.path:
        yield (*path, "path"), "'' is not allowed; allowed: the path of a file"


def _check_quantized(path: KeyPath, strategy: QuantizedSpec) -> Iterator[Problem]:
    backend = _GROUPWISE.get(strategy.backend)
    if backend is None:
        for key, value in strategy.options.items():
            yield (
                (*path, key),
                f"{value} is not allowed; backend {strategy.backend} takes no {key}: leave it out",
            )
        return
    allowed = {"nbits": backend.nbits, "axis_key": backend.axes, "axis_value": backend.axes}
    for key, values in allowed.items():
        if key in strategy.options and strategy.options[key] not in values:
            seen, choices = strategy.options[key], ", ".join(map(str, values))
            yield (*path, key), f"{seen} is not allowed; backend {strategy.backend} takes {choices}"
