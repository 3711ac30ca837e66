"""Nested records as flat columns: `workload.prompt.kind` is `workload_prompt_kind`."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import inspect

from offload_eval.reporting.tables import COUNT, REAL, TEXT

_KINDS: dict[type[inspect.Type], str] = {
    inspect.IntType: COUNT,
    inspect.FloatType: REAL,
    inspect.BoolType: "boolean",
    inspect.StrType: TEXT,
    inspect.LiteralType: TEXT,
}


def flat_columns(struct: type[msgspec.Struct], prefix: str = "") -> dict[str, str]:
    """Names a column for each scalar in a struct, with its nullable type, as the annotations have it.

    A union of structs has the columns of all of them, and one for its tag; one of a number and words is text. Lists
    and mappings have none.

    Args:
        struct: A type of record.
        prefix: Put before each name.
    """
    return dict(_of_type(inspect.type_info(struct), prefix))


def flat_values(value: msgspec.Struct, prefix: str = "") -> dict[str, Any]:
    """Gives a struct's values under the names of `flat_columns`; what has no column may be among them."""
    row: dict[str, Any] = {}
    config = value.__struct_config__
    if config.tag_field is not None:
        row[_joined(prefix, config.tag_field)] = config.tag
    for name in value.__struct_fields__:
        held, column = getattr(value, name), _joined(prefix, name)
        row |= flat_values(held, column) if isinstance(held, msgspec.Struct) else {column: held}
    return row


def fitting(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Keeps what has a column."""
    return {name: value for name, value in row.items() if name in columns}


def _of_type(kind: inspect.Type, prefix: str) -> Iterator[tuple[str, str]]:
    members = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    for member in members:
        if isinstance(member, inspect.StructType):
            yield from _of_struct(member, prefix)
    scalars = {_KINDS[type(member)] for member in map(_bare, members) if type(member) in _KINDS}
    if scalars:
        yield prefix, scalars.pop() if len(scalars) == 1 else TEXT


def _of_struct(struct: inspect.StructType, prefix: str) -> Iterator[tuple[str, str]]:
    if struct.tag_field is not None:
        yield _joined(prefix, struct.tag_field), TEXT
    for field in struct.fields:
        yield from _of_type(field.type, _joined(prefix, field.name))


def _bare(kind: inspect.Type) -> inspect.Type:
    return _bare(kind.type) if isinstance(kind, inspect.Metadata) else kind


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}_{name}" if prefix else name
