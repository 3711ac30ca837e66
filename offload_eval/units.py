"""Units for display and for input. Records hold SI seconds and integer bytes; nothing else does."""

import re
from fractions import Fraction
from typing import Final

KIB: Final = 1024
MIB: Final = 1024**2
GIB: Final = 1024**3

_BINARY = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024**4}
_DECIMAL = {"kB": 1000, "KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)\s*")

SIZE_FORMS: Final = "an integer number of bytes, or a number with B, KiB, MiB, GiB, TiB, kB, MB, GB or TB"


def parse_size_bytes(text: str) -> int:
    """Reads a size such as `24 GiB` as whole bytes.

    Args:
        text: A number and a unit; without a unit, bytes.

    Returns:
        Bytes.

    Raises:
        ValueError: The text is not a size, or names a fraction of a byte.
    """
    match = _SIZE.fullmatch(text)
    scale = (_BINARY | _DECIMAL).get(match["unit"] or "B") if match else None
    if match is None or scale is None:
        raise ValueError(f"{text!r} is not a size; allowed: {SIZE_FORMS}")
    size_bytes = Fraction(match["number"]) * scale
    if size_bytes.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number of bytes")
    return int(size_bytes)


def format_bytes(size_bytes: float | None) -> str:
    """Shows bytes in the largest binary unit that keeps the number at or above one; `-` where absent."""
    if size_bytes is None:
        return "-"
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(size_bytes) >= _BINARY[unit]:
            return f"{size_bytes / _BINARY[unit]:.2f} {unit}"
    return f"{size_bytes:.0f} B"


def format_duration(seconds: float | None) -> str:
    """Shows seconds as ms below one second, `h:mm:ss` past a minute; `-` where absent."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
