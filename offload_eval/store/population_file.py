"""Reads a population: the sessions that a policy is held against."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta

from offload_eval.core.base import Strict
from offload_eval.core.plan import SessionGroup
from offload_eval.store.conversion import convert_strict
from offload_eval.store.experiment_checks import check_population
from offload_eval.store.experiment_file import build_for_plan
from offload_eval.store.origin import Origin
from offload_eval.store.strict_yaml import read_yaml_file


class PopulationFile(Strict, frozen=True, kw_only=True):
    """A file with nothing but a population."""

    population: Annotated[tuple[SessionGroup, ...], Meta(min_length=1)]


def load_population(path: Path) -> tuple[SessionGroup, ...]:
    """Reads the groups of a file with a top-level `population`, or of an experiment with `plan.population`.

    Raises:
        InputError: The first thing wrong: the file, the path inside it, the value and what is allowed.
    """
    origin = Origin(file=path)
    tree = read_yaml_file(path)
    if isinstance(tree, dict) and "population" not in tree and tree:
        return _of_experiment(tree, origin)
    groups = convert_strict(tree, PopulationFile, origin).population
    for where, problem in check_population(groups):
        raise origin.refusal(("population", *where), problem)
    return groups


def _of_experiment(tree: dict[str, object], origin: Origin) -> tuple[SessionGroup, ...]:
    plan = tree.get("plan")
    if not isinstance(plan, dict) or not plan.get("population"):
        raise origin.refusal(
            (), "has no population; allowed: a list `population` at the top, or an experiment with plan.population"
        )
    return build_for_plan(tree, origin, given=tree).plan.population
