"""Reads and writes hardware profiles: YAML with the fields of `HardwareProfile`.

Every `value` below a field that ends in `_bytes` or `_bytes_per_s` also takes a size string: `value: 3.35 TB`. The
profiles that come with offload-eval are in configs/hardware; see the README there.
"""

import difflib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Final

import msgspec

from offload_eval.core.hardware import HardwareProfile, SourcedBytes, SourcedValue
from offload_eval.errors import InputError
from offload_eval.store.conversion import convert_strict
from offload_eval.store.locations import existing_path, shipped_folder, show_location
from offload_eval.store.origin import KeyPath, Origin
from offload_eval.store.strict_yaml import dump_yaml, read_yaml_file

MAX_BYTES: Final = 1_000_000
"""Of a profile; real ones have some thousand bytes."""
_NEEDED: Final = "a YAML file with a hardware profile, or the name of one"


def load_hardware(location: str | Path, relative_to: Path | None = None) -> HardwareProfile:
    """Reads the profile that a location names.

    Args:
        location: A YAML file, or the name of a profile that comes with offload-eval, in any case. A file that exists
            wins over a name; a `Path` is never a name.
        relative_to: The folder that a relative path starts from; None: the working directory.

    Raises:
        InputError: There is no such thing, or it is no profile: the file, the path inside it, the value and what is
            allowed.
    """
    if not str(location).strip():
        raise InputError(f"the hardware is given as {str(location)!r}; allowed: {_NEEDED}")
    path = existing_path(location, relative_to)
    if path is None and isinstance(location, str):
        path = _shipped(location)
    if path is None:
        raise InputError(f"{show_location(location)}: {_not_found(str(location))}")
    if not path.is_file():
        raise InputError(f"{path}: not a regular file; allowed: {_NEEDED}")
    if path.stat().st_size > MAX_BYTES:
        raise InputError(f"{path}: more than {MAX_BYTES:,} bytes, which no profile has; allowed: {_NEEDED}")
    origin = Origin(file=path)
    profile = convert_strict(read_yaml_file(path), HardwareProfile, origin)
    for where, problem in _problems(profile):
        raise origin.refusal(where, problem)
    return profile


def hardware_names() -> list[str]:
    """The names of all profiles that come with offload-eval, sorted."""
    return sorted(path.stem for path in shipped_folder("hardware").glob("*.yaml"))


def dump_hardware(profile: HardwareProfile) -> str:
    """Writes a profile, without what is absent, as YAML that loads back equal."""
    return dump_yaml(_without_none(msgspec.to_builtins(profile)))


def sourced_values(profile: HardwareProfile) -> Iterator[tuple[KeyPath, SourcedValue | SourcedBytes]]:
    """Lists every figure of a profile with its path in the file."""
    yield from _sourced(profile, ())


def _sourced(struct: msgspec.Struct, path: KeyPath) -> Iterator[tuple[KeyPath, SourcedValue | SourcedBytes]]:
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if isinstance(value, SourcedValue | SourcedBytes):
            yield (*path, name), value
        elif isinstance(value, msgspec.Struct):
            yield from _sourced(value, (*path, name))


def _problems(profile: HardwareProfile) -> Iterator[tuple[KeyPath, str]]:
    if profile.calibrated and profile.machine is None:
        yield ("machine",), "required where calibrated is true, and missing; allowed: text that is not empty"
    if profile.machine is not None and not profile.calibrated:
        yield ("machine",), "stated, but calibrated is false; set calibrated: true, or leave the machine out"
    for path, figure in sourced_values(profile):
        try:
            date.fromisoformat(figure.date)
        except ValueError:
            yield (*path, "date"), f"{figure.date!r} is no day of the calendar; allowed: a date as YYYY-MM-DD"


def _shipped(name: str) -> Path | None:
    by_name = {path.stem.casefold(): path for path in shipped_folder("hardware").glob("*.yaml")}
    return by_name.get(name.casefold())


def _not_found(name: str) -> str:
    known = hardware_names()
    near = difflib.get_close_matches(name.casefold(), known, n=3)
    hint = f"; near: {', '.join(near)}" if near else ""
    return f"no such file, and no profile of that name{hint}; allowed: a YAML file, or one of {', '.join(known)}"


def _without_none(value: object) -> object:
    if not isinstance(value, dict):
        return value
    return {key: _without_none(each) for key, each in value.items() if each is not None}
