"""Reads and writes experiment files.

An experiment file is YAML with the fields of `Experiment`. Every field that ends in `_bytes` or
`_bytes_per_s` also takes a size string: `device_bytes: 24 GiB`. Local paths are relative to the folder
that the file is in.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from offload_eval.core.experiment import Experiment
from offload_eval.store.conversion import convert_strict
from offload_eval.store.experiment_checks import check_experiment
from offload_eval.store.experiment_paths import resolve_paths
from offload_eval.store.origin import Origin, Override
from offload_eval.store.overrides import apply_overrides, parse_override
from offload_eval.store.strict_yaml import dump_yaml, read_yaml_file


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
    experiment = build_experiment(read_yaml_file(path), origin)
    return resolve_paths(experiment, origin)


def build_experiment(tree: object, origin: Origin) -> Experiment:
    """Lays an origin's overrides over plain values and checks the result; paths are left as they are.

    Raises:
        InputError: The first thing wrong.
    """
    if isinstance(tree, dict):
        tree = apply_overrides(tree, origin.overrides)
    experiment = convert_strict(tree, Experiment, origin)
    for where, problem in check_experiment(experiment):
        raise origin.refusal(where, problem)
    return experiment


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
