"""Turns plain values into a stored type, or says what is wrong with them and what is allowed."""

import math
import re
from typing import Final, TypeVar

import msgspec

from offload_eval.core.base import Strict
from offload_eval.errors import InputError
from offload_eval.store.origin import KeyPath, Origin, show_value, suggest
from offload_eval.store.schema import Root, allowed_keys, allowed_words, describe_allowed, is_number, is_size, value_at
from offload_eval.store.strict_yaml import INT_MAX
from offload_eval.units import parse_size_bytes

StrictT = TypeVar("StrictT", bound=Strict)
_SCIENTIFIC: Final = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+")
_LOCATED: Final = re.compile(r"(?P<problem>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_STEP: Final = re.compile(r"\.(?P<key>\w+)|\[(?P<index>\d+)\]")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<field>.*)`", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(?P<field>.*)`")


def convert_strict(tree: object, root: type[StrictT], origin: Origin) -> StrictT:
    """Converts plain values; size strings, and numbers that YAML 1.1 reads as text (`989e12`), included.

    Args:
        tree: Dictionaries, lists and scalars as `read_yaml` returns them.
        root: What the whole tree is.
        origin: Named in refusals.

    Raises:
        InputError: The first value that is unknown, missing, of the wrong type or out of range.
    """
    if not isinstance(tree, dict):
        seen = "empty" if tree is None else show_value(tree)
        raise origin.refusal((), f"is {seen}; allowed: a mapping with {', '.join(allowed_keys(root, {}, ()))}")
    tree = _sizes_in_bytes(tree, (), origin)
    tree = _with_numbers(tree, (), root, tree)
    try:
        return msgspec.convert(tree, root, strict=True)
    except msgspec.ValidationError as error:
        raise _explain(str(error), root, tree, origin) from error


def _sizes_in_bytes(value: object, path: KeyPath, origin: Origin) -> object:
    if isinstance(value, dict):
        return {key: _sizes_in_bytes(each, (*path, key), origin) for key, each in value.items()}
    if isinstance(value, list):
        return [_sizes_in_bytes(each, (*path, index), origin) for index, each in enumerate(value)]
    if not isinstance(value, str) or not is_size(path) or _SCIENTIFIC.fullmatch(value):
        return value
    try:
        size_bytes = parse_size_bytes(value)
    except ValueError as error:
        raise origin.refusal(path, str(error)) from error
    if size_bytes > INT_MAX:
        raise origin.refusal(path, f"{value!r} is too large; allowed: at most {INT_MAX} bytes")
    return size_bytes


def _with_numbers(value: object, path: KeyPath, root: Root, tree: object) -> object:
    if isinstance(value, dict):
        return {key: _with_numbers(each, (*path, key), root, tree) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_numbers(each, (*path, index), root, tree) for index, each in enumerate(value)]
    if isinstance(value, str) and _SCIENTIFIC.fullmatch(value) and is_number(root, tree, path):
        return number if math.isfinite(number := float(value)) else value
    return value


def _explain(message: str, root: Root, tree: object, origin: Origin) -> InputError:
    located = _LOCATED.fullmatch(message)
    assert located is not None, "the pattern matches any text"
    problem = located["problem"]
    path: KeyPath = tuple(step["key"] or int(step["index"]) for step in _STEP.finditer(located["path"] or ""))
    if unknown := _UNKNOWN.fullmatch(problem):
        keys = allowed_keys(root, tree, path)
        hint = f"unknown key; allowed: {', '.join(keys)}{suggest(unknown['field'], keys)}"
        return origin.refusal((*path, unknown["field"]), hint)
    if missing := _MISSING.fullmatch(problem):
        return origin.refusal((*path, missing["field"]), _explain_missing(missing["field"], path, root, tree))
    return origin.refusal(path, _explain_value(path, root, tree))


def _explain_missing(field: str, path: KeyPath, root: Root, tree: object) -> str:
    given = value_at(tree, path)
    keys = [key for key in given if key not in allowed_keys(root, tree, path)] if isinstance(given, dict) else []
    allowed = describe_allowed(root, tree, (*path, field))
    near = suggest(field, keys).replace("did you mean", "is it the key")
    return f"required, and missing; allowed: {allowed}{near}"


def _explain_value(path: KeyPath, root: Root, tree: object) -> str:
    value = value_at(tree, path)
    seen = f"{show_value(value)} ({_TYPE_WORDS.get(type(value), type(value).__name__)})"
    allowed = describe_allowed(root, tree, path)
    return f"{seen} is not allowed; allowed: {allowed}{suggest(value, allowed_words(root, tree, path))}"


_TYPE_WORDS: Final[dict[type, str]] = {
    bool: "boolean",
    dict: "mapping",
    float: "decimal number",
    int: "integer",
    list: "list",
    str: "text",
    type(None): "nothing",
}
