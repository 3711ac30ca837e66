"""Where a value came from: every refusal of a file says so in the same form."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offload_eval.errors import InputError

_YAML_WORDS: Final = {True: "true", False: "false", None: "null"}
SHOWN_CHARACTERS: Final = 80
"""Of a refused value; the rest is cut."""
KeyPath = tuple[str | int, ...]
"""Keys and list indices from the top of the file down to a value."""


@dataclass(frozen=True, kw_only=True)
class Override:
    """One value that replaces the file's."""

    path: KeyPath
    value: object
    origin: str
    """What the user typed, option included."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A file and what was laid over it."""

    file: Path
    overrides: Sequence[Override] = ()

    def refusal(self, path: KeyPath, problem: str) -> InputError:
        """Builds the error for the value at `path`, naming the override that set it, if one did.

        Args:
            path: Where the value is; empty for the whole file.
            problem: The value seen and what is allowed.
        """
        culprit = next((f" ({phrase})" for each in self.overrides if (phrase := _blame(each, path))), "")
        where = f" {format_path(path)}{culprit}:" if path else ""
        return InputError(f"{self.file}:{where} {problem}")


def format_path(path: KeyPath) -> str:
    """Writes a path the way `--set` reads it: `workloads[0].batch_size`."""
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    return text.removeprefix(".")


def show_value(value: object) -> str:
    """Shows a refused value on one line, shortened."""
    text = _YAML_WORDS[value] if isinstance(value, bool | None) else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."


def suggest(word: object, allowed: Iterable[str]) -> str:
    """Returns `; did you mean ...?` for a near miss, and nothing otherwise."""
    near = difflib.get_close_matches(word, list(allowed), n=1) if isinstance(word, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


def _blame(override: Override, path: KeyPath) -> str | None:
    shared = min(len(override.path), len(path))
    if override.path[:shared] != path[:shared]:
        return None
    return f"{'set' if shared == len(override.path) else 'changed'} by {override.origin}"
