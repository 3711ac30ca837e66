"""What is asked by a file and options together: options stand for values of an experiment, as overrides of it."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from offload_eval.cli.option_types import Typed
from offload_eval.core.experiment import BudgetSpec, Experiment
from offload_eval.errors import InputError
from offload_eval.store.experiment_file import build_for_plan, has_device_budget, load_for_plan
from offload_eval.store.origin import Origin, Override
from offload_eval.units import GIB

_COMMAND_LINE: Final = Path("command line")
"""Stands for the file's name in refusals of options, where there is no file."""


def read_asked(typed: Typed, places: Mapping[str, tuple[str, ...]], command: str) -> tuple[Experiment, set[str]]:
    """Reads the experiment, or makes one of options alone, of which only what the arithmetic needs is required.

    Args:
        typed: Options replace the file's values; sizes in `_gib` become bytes.
        places: Where in an experiment each option belongs.
        command: The command's name.

    Returns:
        The experiment, and the sections that it was given; the others hold defaults.

    Raises:
        InputError: The file or an option is wrong, or there is no model or no lengths.
    """
    changes = [_override(name, value, places[name]) for name, value in typed.options.items()]
    if typed.model is not None and not typed.model.strip():
        raise InputError("--model: '' is not allowed; allowed: a config.json, a folder or a preset")
    if typed.experiment is not None:
        asked, given = load_for_plan(typed.experiment, typed.overrides, changes)
        if typed.model is None and "model" not in given:
            raise InputError(f"{typed.experiment}: model: required, and missing; state it there, or give --model")
        return asked, given
    if typed.model is None or typed.counts["prompt_tokens"] is None:
        lacking = f"nothing to {command}" if typed.model is None else "--model needs --prompt-tokens"
        raise InputError(f"{lacking}: give an experiment file, or --model and --prompt-tokens")
    if typed.overrides:
        raise InputError(f"--set {typed.overrides[0]}: needs an experiment file")
    return build_for_plan({}, Origin(file=_COMMAND_LINE, overrides=changes)), set()


def model_location(typed: Typed, asked: Experiment) -> tuple[str, Path | None]:
    """Where the model is, and the folder that a relative path starts from; None: the working directory."""
    if typed.model is not None:
        return typed.model, None
    return asked.model.location, None if typed.experiment is None else typed.experiment.parent


def has_budget(typed: Typed, asked: Experiment, needing: Collection[str], otherwise: str) -> bool:
    """Whether a budget is stated.

    Args:
        typed: What was typed.
        asked: The experiment, the options in it.
        needing: Options that say nothing without a budget.
        otherwise: What is not done without one.

    Raises:
        InputError: One of those, or another value of a budget, was given, and no device bytes.
    """
    if has_device_budget(asked):
        return True
    useless = next((name for name in needing if name in typed.options), None)
    if useless is not None:
        raise InputError(f"--{useless.replace('_', '-')} needs --vram-gib: without a budget {otherwise}")
    if asked.budget != BudgetSpec(device_bytes=asked.budget.device_bytes):
        raise InputError(
            f"{typed.experiment}: budget.device_bytes: required where --set states another value of the budget, and "
            f"missing; state it too, or give --vram-gib: without a budget {otherwise}"
        )
    return False


def _override(name: str, value: Any, path: tuple[str, ...]) -> Override:
    option = f"--{name.replace('_', '-')}"
    if not name.endswith("_gib"):
        return Override(path=path, value=value, origin=option if value is True else f"{option} {value}")
    # A size below zero, or none at all, is refused where the experiment's own are.
    size_bytes = round(value * GIB) if abs(value) < 2**33 else value
    return Override(path=path, value=size_bytes, origin=f"{option} {value:g}")
