"""YAML reduced to what JSON can say: no duplicate key, no key that is not text, no infinity, no tag."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import yaml

from offload_eval.errors import InputError
from offload_eval.store.origin import KeyPath, Origin, show_value

INT_MAX: Final = 2**63 - 1
"""Largest integer that a file may hold; records and other tools read it as a signed 64-bit number."""
MAX_VALUES: Final = 100_000
"""Values in one file, aliases expanded: more is a mistake or an alias bomb."""
_TIMESTAMP: Final = "tag:yaml.org,2002:timestamp"
_TAGS: Final = frozenset(
    f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "str", "int", "float", "bool", "null", "merge")
)


class _Loader(yaml.SafeLoader):
    """SafeLoader in which a date is text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - yaml.SafeLoader declares it without an annotation
        first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


def read_yaml(text: str, origin: Origin, at: KeyPath = ()) -> object:
    """Reads one YAML document.

    Args:
        text: The document.
        origin: Named in refusals.
        at: Where in the file the document belongs; empty for a whole file.

    Returns:
        Dictionaries with text keys, lists, text, 64-bit integers, finite floats, booleans and None.

    Raises:
        InputError: The text is not YAML, or says what JSON cannot.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _Check(loader, origin).check(node, at)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise origin.refusal(at, f"not valid YAML: {_describe(error)}") from error
    except RecursionError as error:
        raise origin.refusal(at, "not valid YAML: nested too deeply, or an alias contains itself") from error


def read_yaml_file(path: Path) -> object:
    """Reads a file that holds one YAML document in UTF-8.

    Raises:
        InputError: The file cannot be read, is not YAML, or says what JSON cannot.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"{path}: is not a file; allowed: a file in YAML")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    return read_yaml(text, Origin(file=path))


def dump_yaml(values: object) -> str:
    """Writes plain values as YAML that `read_yaml` reads back equal; keys keep their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that escapes what is not printable: plain, U+0085 and its like would be read as a space."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


class _Check:
    """One walk over a document's nodes, aliases expanded."""

    def __init__(self, loader: _Loader, origin: Origin) -> None:
        self.loader = loader
        self.origin = origin
        self.num_values = 0

    def check(self, node: yaml.Node, path: KeyPath) -> None:
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise self.origin.refusal(path, f"more than {MAX_VALUES} values; a file has far fewer")
        if node.tag not in _TAGS:
            raise self.origin.refusal(path, f"the tag {node.tag} (line {_line(node)}) is not allowed; use plain YAML")
        if isinstance(node, yaml.MappingNode):
            self._check_keys(node, path)
        for key, child in _children(node):
            self.check(child, (*path, key))
        if isinstance(node, yaml.ScalarNode):
            self._check_number(node, path)

    def _check_keys(self, node: yaml.MappingNode, path: KeyPath) -> None:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag.rpartition(":")[2] not in ("str", "merge"):
                shown = show_value(key.value) if isinstance(key, yaml.ScalarNode) else "that is no scalar"
                raise self.origin.refusal(path, f"the key {shown} (line {_line(key)}) is not text; quote it")
            if key.value in lines:
                where = f"lines {lines[key.value]} and {_line(key)}"
                raise self.origin.refusal((*path, key.value), f"the key is given twice ({where}); keep one")
            lines[key.value] = _line(key)

    def _check_number(self, node: yaml.ScalarNode, path: KeyPath) -> None:
        kind = node.tag.rpartition(":")[2]
        if kind not in ("int", "float", "bool"):
            return
        try:
            value = self.loader.construct_object(node)
        except (ValueError, KeyError) as error:
            raise self.origin.refusal(path, f"{show_value(node.value)} is not of type {kind}") from error
        if isinstance(value, float) and not math.isfinite(value):
            raise self.origin.refusal(path, f"{node.value} is not allowed; allowed: a finite number")
        if isinstance(value, int) and abs(value) > INT_MAX:
            raise self.origin.refusal(path, f"{show_value(value)} is too large; allowed: at most {INT_MAX}")


def _children(node: yaml.Node) -> Iterator[tuple[str | int, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        yield from ((key.value, value) for key, value in node.value)
    elif isinstance(node, yaml.SequenceNode):
        yield from enumerate(node.value)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _describe(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return " ".join(str(error).split())
