"""`--set key.path=value`: one value of an experiment, replaced from the command line."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from offload_eval.errors import InputError
from offload_eval.store.origin import KeyPath, Origin, Override, format_path
from offload_eval.store.strict_yaml import read_yaml

_KEY_PATH: Final = re.compile(r"[A-Za-z_]\w*(?:\.\w+|\[\d+\])*", re.ASCII)
_STEP: Final = re.compile(r"\w+", re.ASCII)
_FORM: Final = "key.path=value, such as workloads.0.batch_size=4 or budget.device_bytes='24 GiB'"


def parse_override(text: str, file: Path) -> Override:
    """Reads `key.path=value`; the value is YAML, and an index is written `.0` or `[0]`.

    Raises:
        InputError: No `=`, a malformed path, or a value that is not YAML.
    """
    key, equals, value = text.partition("=")
    shown = f"--set {text}"
    if not equals or _KEY_PATH.fullmatch(key.strip()) is None:
        raise InputError(f"{shown}: not an override; allowed: {_FORM}")
    path = tuple(int(step) if step.isdigit() else step for step in _STEP.findall(key))
    origin = Origin(file=file, overrides=(Override(path=path, value=None, origin=shown),))
    return Override(path=path, value=read_yaml(value, origin, path), origin=shown)


def apply_overrides(tree: object, overrides: Sequence[Override]) -> object:
    """Returns the tree with each value replaced, in order; sections the file leaves out are created.

    Raises:
        InputError: A path leads through something that is not a mapping or a list, or past a list's end.
    """
    for override in overrides:
        tree = _replaced(tree, override, depth=0)
    return tree


def _replaced(node: object, override: Override, depth: int) -> object:
    """Copies the containers along the path, so that an aliased section changes in one place only."""
    if depth == len(override.path):
        return override.value
    key = override.path[depth]
    if isinstance(node, list):
        index = _index(node, override, depth)
        return [*node[:index], _replaced(node[index], override, depth + 1), *node[index + 1 :]]
    if node is None and isinstance(key, str):
        node = {}
    if not isinstance(node, dict):
        seen = "nothing" if node is None else f"{node!r}"
        raise _refusal(override, override.path[:depth], f"is {seen}, which has no {key!r} inside")
    # Digits after a mapping are a key like any other: the schema refuses it with the allowed ones.
    return {**node, str(key): _replaced(node.get(str(key)), override, depth + 1)}


def _index(node: list[object], override: Override, depth: int) -> int:
    key, parent = override.path[depth], override.path[:depth]
    if not isinstance(key, int):
        raise _refusal(override, parent, f"is a list; {key!r} is not an index; {_allowed_indices(node)}")
    if key >= len(node):
        raise _refusal(override, parent, f"has {len(node)} items; {key} is past its end; {_allowed_indices(node)}")
    return key


def _allowed_indices(node: list[object]) -> str:
    return f"allowed: 0 to {len(node) - 1}" if node else "the list is empty"


def _refusal(override: Override, path: KeyPath, problem: str) -> InputError:
    return InputError(f"{override.origin}: {format_path(path)} {problem}")
