"""Numbers as people read them. A missing value is `-`, never 0."""

from collections.abc import Iterable
from math import floor, isfinite, log10
from typing import Final, NamedTuple

from offload_eval.units import GIB, KIB, MIB

MISSING: Final = "-"
_TINY: Final = 1e-4


class ByteScale(NamedTuple):
    """The unit of a column of bytes."""

    unit: str
    bytes: int


_SCALES: Final = (ByteScale("GiB", GIB), ByteScale("MiB", MIB), ByteScale("KiB", KIB), ByteScale("B", 1))


def byte_scale(sizes_bytes: Iterable[float | None]) -> ByteScale:
    """Picks one unit for a column: the largest that its largest value reaches."""
    largest_bytes = max((abs(size) for size in sizes_bytes if size is not None), default=0)
    return next((scale for scale in _SCALES if largest_bytes >= scale.bytes), _SCALES[-1])


def show_bytes(size_bytes: float | None, scale: ByteScale) -> str:
    """Shows bytes in a column's unit, without the unit."""
    return show_number(None if size_bytes is None else size_bytes / scale.bytes)


def show_ms(seconds: float | None, digits: int = 4) -> str:
    """Shows seconds as milliseconds, without the unit."""
    return show_number(None if seconds is None else seconds * 1000, digits)


def show_percent(ratio: float) -> str:
    """Shows a share in percent to one decimal; only a share of 1 is 100 %, and only one of 0 is 0 %."""
    if ratio in (0, 1):
        return f"{ratio:.0%}".replace("%", " %")
    return f"{min(max(round(100 * ratio, 1), 0.1), 99.9):g} %"


def show_count(count: int | None) -> str:
    """Shows a whole number with its thousands apart."""
    return MISSING if count is None else f"{count:,}"


def show_sessions_of(count: int) -> str:
    """Shows a number of sessions with the word."""
    return f"{count:,} session{'' if count == 1 else 's'}"


def show_share(count: int, planned: int) -> str:
    """Shows how many of the plan there are."""
    return f"{count:,} of {planned:,}"


def show_text(text: str | None) -> str:
    """Shows words as they are."""
    return MISSING if text is None else text


def show_yes_no(truth: bool | None) -> str:
    """Shows a truth value."""
    return MISSING if truth is None else "yes" if truth else "no"


def mark_swapped(time: str, swapped: bool | None) -> str:
    """Marks a time that swap was in."""
    return f"{time} (swapped)" if swapped and time != MISSING else time


def show_number(value: float | None, digits: int = 4) -> str:
    """Shows `digits` significant digits, the whole part always in full, and an exponent below 0.0001."""
    if value is None:
        return MISSING
    if value == 0 or not isfinite(value):
        return "0" if value == 0 else str(value)
    if abs(value) < _TINY:
        return f"{value:.{digits - 2}e}"
    decimals = max(0, digits - 1 - floor(log10(abs(value))))
    return f"{value:,.{decimals}f}"


def one_line(text: str, limit: int | None = None) -> str:
    """Puts text of any origin on one line, without control or direction characters.

    Args:
        text: Anything, such as an exception's message.
        limit: Characters at most; what is cut off is shown as an ellipsis.
    """
    line = " ".join("".join(mark if mark.isprintable() else " " for mark in text).split())
    return line if limit is None or len(line) <= limit else line[: limit - 1] + "…"
