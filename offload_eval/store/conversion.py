"""Turns plain values into an Experiment, or says what is wrong with them and what is allowed."""

import re
from typing import Final

import msgspec

from offload_eval.core.experiment import Experiment
from offload_eval.errors import InputError
from offload_eval.store.origin import KeyPath, Origin, show_value, suggest
from offload_eval.store.schema import SIZE_SUFFIXES, allowed_keys, allowed_words, describe_allowed, value_at
from offload_eval.store.strict_yaml import INT_MAX
from offload_eval.units import parse_size_bytes

_LOCATED: Final = re.compile(r"(?P<problem>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_STEP: Final = re.compile(r"\.(?P<key>\w+)|\[(?P<index>\d+)\]")
_UNKNOWN: Final = re.compile(r"Object contains unknown field `(?P<field>.*)`", re.DOTALL)
_MISSING: Final = re.compile(r"Object missing required field `(?P<field>.*)`")


def convert_experiment(tree: object, origin: Origin) -> Experiment:
    """Converts plain values, size strings included.

    Raises:
        InputError: The first value that is unknown, missing, of the wrong type or out of range.
    """
    if not isinstance(tree, dict):
        seen = "empty" if tree is None else show_value(tree)
        raise origin.refusal((), f"is {seen}; allowed: a mapping with {', '.join(allowed_keys({}, ()))}")
    tree = _sizes_in_bytes(tree, (), origin)
    try:
        return msgspec.convert(tree, Experiment, strict=True)
    except msgspec.ValidationError as error:
        raise _explain(str(error), tree, origin) from error


def _sizes_in_bytes(value: object, path: KeyPath, origin: Origin) -> object:
    if isinstance(value, dict):
        return {key: _sizes_in_bytes(each, (*path, key), origin) for key, each in value.items()}
    if isinstance(value, list):
        return [_sizes_in_bytes(each, (*path, index), origin) for index, each in enumerate(value)]
    if not isinstance(value, str) or not path or not str(path[-1]).endswith(SIZE_SUFFIXES):
        return value
    try:
        size_bytes = parse_size_bytes(value)
    except ValueError as error:
        raise origin.refusal(path, str(error)) from error
    if size_bytes > INT_MAX:
        raise origin.refusal(path, f"{value!r} is too large; allowed: at most {INT_MAX} bytes")
    return size_bytes


def _explain(message: str, tree: object, origin: Origin) -> InputError:
    located = _LOCATED.fullmatch(message)
    assert located is not None, "the pattern matches any text"
    problem = located["problem"]
    path: KeyPath = tuple(step["key"] or int(step["index"]) for step in _STEP.finditer(located["path"] or ""))
    if unknown := _UNKNOWN.fullmatch(problem):
        keys = allowed_keys(tree, path)
        hint = f"unknown key; allowed: {', '.join(keys)}{suggest(unknown['field'], keys)}"
        return origin.refusal((*path, unknown["field"]), hint)
    if missing := _MISSING.fullmatch(problem):
        return origin.refusal((*path, missing["field"]), _explain_missing(missing["field"], path, tree))
    return origin.refusal(path, _explain_value(path, tree))


def _explain_missing(field: str, path: KeyPath, tree: object) -> str:
    given = value_at(tree, path)
    keys = [key for key in given if key not in allowed_keys(tree, path)] if isinstance(given, dict) else []
    allowed = describe_allowed(tree, (*path, field))
    near = suggest(field, keys).replace("did you mean", "is it the key")
    return f"required, and missing; allowed: {allowed}{near}"


def _explain_value(path: KeyPath, tree: object) -> str:
    value = value_at(tree, path)
    seen = f"{show_value(value)} ({_TYPE_WORDS.get(type(value), type(value).__name__)})"
    allowed = describe_allowed(tree, path)
    return f"{seen} is not allowed; allowed: {allowed}{suggest(value, allowed_words(tree, path))}"


_TYPE_WORDS: Final[dict[type, str]] = {
    bool: "boolean",
    dict: "mapping",
    float: "decimal number",
    int: "integer",
    list: "list",
    str: "text",
    type(None): "nothing",
}
