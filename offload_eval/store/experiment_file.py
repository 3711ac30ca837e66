"""Reads and writes experiment files.

An experiment file is YAML with the fields of `Experiment`. Every field that ends in `_bytes` or
`_bytes_per_s` also takes a size string: `device_bytes: 24 GiB`. Local paths are relative to the folder
that the file is in.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import msgspec

from offload_eval.core.experiment import Experiment
from offload_eval.store.conversion import convert_strict
from offload_eval.store.experiment_checks import check_arithmetic, check_experiment
from offload_eval.store.experiment_paths import resolve_paths
from offload_eval.store.origin import KeyPath, Origin, Override
from offload_eval.store.overrides import apply_overrides, parse_override
from offload_eval.store.strict_yaml import INT_MAX, dump_yaml, read_yaml_file


def load_experiment(path: Path, overrides: Sequence[str] = (), options: Sequence[Override] = ()) -> Experiment:
    """Reads an experiment file, lays the overrides over it and checks the result.

    Args:
        path: The experiment file.
        overrides: `key.path=value` each, applied in order; the value is YAML.
        options: Values that options of the command line stand for, applied after the overrides.

    Returns:
        The experiment, with every local path absolute and every default filled in.

    Raises:
        InputError: The first thing wrong: the file, the path inside it, the value seen and what is allowed.
    """
    changes = [*(parse_override(text, path) for text in overrides), *options]
    origin = Origin(file=path, overrides=changes)
    tree = read_yaml_file(path)
    if isinstance(tree, dict):
        tree = apply_overrides(tree, changes)
    experiment = convert_strict(tree, Experiment, origin)
    for where, problem in check_experiment(experiment):
        raise origin.refusal(where, problem)
    return resolve_paths(experiment, origin)


def load_for_plan(path: Path, overrides: Sequence[str], options: Sequence[Override]) -> tuple[Experiment, set[str]]:
    """Reads an experiment file for its arithmetic alone: what only a run needs may be left out.

    Args:
        path: The experiment file.
        overrides: As for `load_experiment`.
        options: As for `load_experiment`.

    Returns:
        The experiment, and the sections that the file and the overrides have; the others are fillings.

    Raises:
        InputError: The first thing wrong.
    """
    changes = [parse_override(text, path) for text in overrides]
    origin = Origin(file=path, overrides=[*changes, *options])
    tree = read_yaml_file(path)
    given = {*(tree if isinstance(tree, dict) else ()), *(str(each.path[0]) for each in changes if _states(each.path))}
    experiment = build_for_plan(tree, origin, given)
    return resolve_paths(experiment, origin) if "model" in given else experiment, given


def build_for_plan(tree: object, origin: Origin, given: Collection[str] = ()) -> Experiment:
    """As `load_for_plan`, from plain values; paths are left as they are, and sections that are given are not filled.

    Raises:
        InputError: The first thing wrong.
    """
    if isinstance(tree, dict):
        fillings = {name: filling for name, filling in _FILLINGS.items() if name not in given}
        tree = apply_overrides(fillings | tree, origin.overrides)
    experiment = convert_strict(tree, Experiment, origin)
    for where, problem in check_arithmetic(experiment):
        raise origin.refusal(where, problem)
    return experiment


def has_device_budget(experiment: Experiment) -> bool:
    """Whether the budget of an experiment for `plan` was stated, or is a filling."""
    return experiment.budget.device_bytes != _UNSTATED_BYTES


_UNSTATED_BYTES: Final = INT_MAX
_FILLINGS: Final[dict[str, object]] = {
    "name": "plan",
    "model": {"source": "."},
    "budget": {"device_bytes": _UNSTATED_BYTES},
    "workloads": [{"prompt_tokens": 1, "output_tokens": 2}],
    "strategies": [{"kind": "dynamic"}],
}
"""Sections that a file for `plan` may leave out."""
_DECIDES: Final = {"model": ("source", "config"), "budget": ("device_bytes",)}
"""Values of a section without which the others do not make one."""


def _states(path: KeyPath) -> bool:
    """Whether an override of this path gives a section that the file lacks, so that no filling may stand in it."""
    return len(path) == 1 or path[0] not in _DECIDES or path[1] in _DECIDES[path[0]]


def load_resolved_experiment(path: Path) -> Experiment:
    """Reads an experiment that `dump_experiment` wrote, without looking for the files it names.

    Raises:
        InputError: The file is not an experiment.
    """
    origin = Origin(file=path)
    return convert_strict(read_yaml_file(path), Experiment, origin)


def dump_experiment(experiment: Experiment) -> str:
    """Writes an experiment, defaults included, as YAML that loads back equal."""
    return dump_yaml(msgspec.to_builtins(experiment))
