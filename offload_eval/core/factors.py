"""The workloads that are run: each one as written, at every combination of the experiment's factors."""

from itertools import product
from typing import Any, Final

import msgspec

from offload_eval.core.experiment import Experiment, FactorsSpec, Workload

_NO_LENGTHS: Final = ("name", "batch_size", "seed", "prompt")
FACTORS: Final = FactorsSpec.__struct_fields__
"""In the order in which they vary, the last one fastest."""


def expand_workloads(experiment: Experiment) -> tuple[Workload, ...]:
    """Runs every workload through every combination of the factors.

    The model's own attention is None in every workload, however it was written: it has one name and one record. A
    named workload keeps its name where a combination is what it says itself; elsewhere the name says what differs.

    Returns:
        The workloads in the order they are written, each one's combinations together: as many for each.
    """
    return tuple(
        _at(workload, combination, experiment.model.attn_implementation)
        for workload in experiment.workloads
        for combination in _combinations(experiment.factors)
    )


def lengths_alone(experiment: Experiment) -> Experiment:
    """The experiment with each combination of lengths once, at a batch of one: what a search for limits needs."""
    alone: dict[tuple[object, ...], Workload] = {}
    for workload in experiment.workloads:
        same = tuple(getattr(workload, name) for name in workload.__struct_fields__ if name not in _NO_LENGTHS)
        alone.setdefault(same, msgspec.structs.replace(workload, batch_size=1))
    factors = msgspec.structs.replace(experiment.factors, batch_size=())
    return msgspec.structs.replace(experiment, workloads=tuple(alone.values()), factors=factors)


def asked_index(experiment: Experiment, expanded_index: int) -> int:
    """Which workload of the file an expanded one comes from."""
    return expanded_index // len(_combinations(experiment.factors))


def _combinations(factors: FactorsSpec) -> list[dict[str, Any]]:
    stated = {name: values for name in FACTORS if (values := getattr(factors, name))}
    return [dict(zip(stated, values, strict=True)) for values in product(*stated.values())]


def _at(workload: Workload, combination: dict[str, Any], model_attention: str) -> Workload:
    own = _normalized(workload, model_attention)
    changed = _normalized(msgspec.structs.replace(own, **combination), model_attention)
    if own.name is None:
        return changed
    differing = [_word(name, value) for name in FACTORS if (value := getattr(changed, name)) != getattr(own, name)]
    return msgspec.structs.replace(changed, name="-".join([own.name, *differing]))


def _normalized(workload: Workload, model_attention: str) -> Workload:
    if workload.attn_implementation != model_attention:
        return workload
    return msgspec.structs.replace(workload, attn_implementation=None)


def _word(name: str, value: object) -> str:
    """How a label says that a factor has this value."""
    if name == "batch_size":
        return f"b{value}"
    if name == "prefill_chunk_tokens":
        return "whole" if value is None else f"chunk{value}"
    return "model" if value is None else str(value)
