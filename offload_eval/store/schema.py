"""What a stored type allows at a path, in words."""

from collections.abc import Iterator
from typing import Final

from msgspec import inspect

from offload_eval.core.base import DATE_PATTERN, Strict
from offload_eval.store.origin import KeyPath
from offload_eval.units import SIZE_FORMS

SIZE_SUFFIXES: Final = ("_bytes", "_bytes_per_s")
"""Fields with these endings may be written as a size string such as `24 GiB`; so may their `value`."""


Root = type[Strict]
"""The type that a whole file holds."""


def value_at(tree: object, path: KeyPath) -> object:
    """Follows a path through dictionaries and lists; None where it leads nowhere."""
    for key in path:
        if isinstance(tree, list):
            tree = dict(enumerate(tree))
        if not isinstance(tree, dict) or key not in tree:
            return None
        tree = tree[key]
    return tree


def is_size(path: KeyPath) -> bool:
    """Whether the value at `path` may be a size string, by the name of its field."""
    named = path[:-1] if path[-1:] == ("value",) else path
    return bool(named) and str(named[-1]).endswith(SIZE_SUFFIXES)


def is_number(root: Root, tree: object, path: KeyPath) -> bool:
    """Whether the value at `path` may have a fraction."""
    return isinstance(_declared_at(root, tree, path), inspect.FloatType)


def allowed_keys(root: Root, tree: object, path: KeyPath) -> list[str]:
    """Lists the keys that the mapping at `path` may hold, its `kind` included."""
    found = _type_at(root, tree, path)
    if not isinstance(found, inspect.StructType):
        return []
    tag = [found.tag_field] if found.tag_field else []
    return [*tag, *(field.encode_name for field in found.fields)]


def allowed_words(root: Root, tree: object, path: KeyPath) -> list[str]:
    """Lists the values that the text at `path` may take: an enumeration's, or the tags of a union."""
    found = _type_at(root, tree, path)
    if isinstance(found, inspect.LiteralType):
        return [str(value) for value in found.values]
    if path and path[-1] == "kind":
        return [str(each.tag) for each in _tagged(_declared_at(root, tree, path[:-1]))]
    return []


def describe_allowed(root: Root, tree: object, path: KeyPath) -> str:
    """Says in words what the value at `path` may be."""
    words = allowed_words(root, tree, path)
    if words:
        return ", ".join(words)
    description = _describe(_declared_at(root, tree, path))
    return f"{description}, or {SIZE_FORMS.partition(', or ')[2]}" if is_size(path) else description


def _type_at(root: Root, tree: object, path: KeyPath) -> inspect.Type | None:
    """The type declared at `path`; of a union, the member that the value's tag names."""
    declared = _declared_at(root, tree, path)
    value = value_at(tree, path)
    tag = value.get("kind") if isinstance(value, dict) else None
    members = list(_tagged(declared))
    if members:
        return next((member for member in members if member.tag == tag), None)
    return declared


def _declared_at(root: Root, tree: object, path: KeyPath) -> inspect.Type | None:
    if not path:
        return inspect.type_info(root)
    parent = _type_at(root, tree, path[:-1])
    if isinstance(parent, inspect.VarTupleType):
        return _without_none(parent.item_type)
    if isinstance(parent, inspect.StructType):
        types = {field.encode_name: field.type for field in parent.fields}
        return _without_none(types[str(path[-1])]) if path[-1] in types else None
    return None


def _tagged(declared: inspect.Type | None) -> Iterator[inspect.StructType]:
    members = declared.types if isinstance(declared, inspect.UnionType) else (declared,)
    for member in members:
        if isinstance(member, inspect.StructType) and member.tag_field is not None:
            yield member


def _without_none(declared: inspect.Type) -> inspect.Type:
    if not isinstance(declared, inspect.UnionType):
        return declared
    members = [member for member in declared.types if not isinstance(member, inspect.NoneType)]
    return members[0] if len(members) == 1 else declared


def _describe(declared: inspect.Type | None) -> str:
    match declared:
        case inspect.IntType() | inspect.FloatType():
            return _describe_number(declared)
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType(pattern=None, min_length=shortest):
            return "text that is not empty" if shortest else "text"
        case inspect.StrType(pattern=pattern) if pattern == DATE_PATTERN:
            return "a date as YYYY-MM-DD"
        case inspect.StrType(max_length=longest):
            return f"letters, digits and `._-`, starting with a letter or digit, at most {longest} characters"
        case inspect.VarTupleType(min_length=shortest):
            return f"a list of at least {shortest}" if shortest else "a list"
        case inspect.DictType():
            return "a mapping of text to text"
        case inspect.StructType():
            return f"a mapping with {', '.join(field.encode_name for field in declared.fields)}"
        case _:
            return _describe_union(declared)


def _describe_number(declared: inspect.IntType | inspect.FloatType) -> str:
    name = "an integer" if isinstance(declared, inspect.IntType) else "a number"
    if declared.ge is not None and declared.le is not None:
        return f"{name} from {_show(declared.ge)} to {_show(declared.le)}"
    if declared.ge is not None:
        return f"{name} >= {_show(declared.ge)}"
    return name if declared.gt is None else f"{name} > {_show(declared.gt)}"


def _show(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _describe_union(declared: inspect.Type | None) -> str:
    """A mapping of some kind, or plain values."""
    kinds = ", ".join(str(member.tag) for member in _tagged(declared))
    if kinds or not isinstance(declared, inspect.UnionType):
        return f"a mapping with `kind`, one of {kinds}"
    members = sorted(declared.types, key=lambda member: isinstance(member, inspect.LiteralType))
    plain = (member for member in members if not isinstance(member, inspect.NoneType))
    return " or ".join(
        ", ".join(map(str, each.values)) if isinstance(each, inspect.LiteralType) else _describe(each)
        for each in plain
    )
