"""Options that stand for a value of an experiment, as overrides of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from offload_eval.store.origin import Override
from offload_eval.units import GIB

COMMAND_LINE: Final = Path("command line")
"""Stands for the file's name in refusals of options, where there is no file."""


def as_overrides(options: Mapping[str, Any], places: Mapping[str, tuple[str, ...]]) -> list[Override]:
    """Turns options into overrides that name what was typed; those that end in `_gib` into bytes.

    Args:
        options: Values by option, as the command's parameters are called.
        places: Where in an experiment each option belongs.
    """
    return [_override(name, value, places[name]) for name, value in options.items()]


def _override(name: str, value: Any, path: tuple[str, ...]) -> Override:
    option = f"--{name.replace('_', '-')}"
    if not name.endswith("_gib"):
        return Override(path=path, value=value, origin=option if value is True else f"{option} {value}")
    # A size below zero, or none at all, is refused where the experiment's own are.
    size_bytes = round(value * GIB) if abs(value) < 2**33 else value
    return Override(path=path, value=size_bytes, origin=f"{option} {value:g}")
