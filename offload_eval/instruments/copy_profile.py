"""Copies as the device's own profiler records them: what the link's account is checked against.

Format: the trace that torch.profiler exports. A copy is an event of category `gpu_memcpy` with its duration `dur` in
microseconds and its `args.bytes`, named by direction and memories: `Memcpy HtoD (Pinned -> Device)`. Not every
version's Python events carry the bytes, so the exported file is read. Source: torch 2.13, autograd/profiler_util.py
(_EVENT_METADATA_KEYS) and profiler/_chrome_trace_export.py; names as kineto writes them.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import torch

from offload_eval.core.records import Direction, PhaseSample, ProfiledCopies, ProfiledDirection
from offload_eval.errors import UnableError, UpstreamChangedError
from offload_eval.instruments.transfers import TransferLog

_CATEGORY: Final = "gpu_memcpy"
_DIRECTIONS: Final[tuple[tuple[re.Pattern[str], Direction], ...]] = (
    (re.compile(r"HtoD|HostToDevice", re.IGNORECASE), "h2d"),
    (re.compile(r"DtoH|DeviceToHost", re.IGNORECASE), "d2h"),
)
_US: Final = 1e-6


class ProfiledCopy(NamedTuple):
    """One copy between host and device."""

    direction: Direction
    size_bytes: int
    duration_s: float
    is_pageable: bool | None
    """None where the record does not name the host's memory."""


@contextmanager
def profile_device_copies() -> Iterator[list[ProfiledCopy]]:
    """Records every copy between host and device; the list is filled when the context closes.

    Raises:
        UnableError: The records cannot be exported or read; whatever fails inside the block is raised as it is.
    """
    copies: list[ProfiledCopy] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        yield copies
    copies += _exported_copies(profiler)


def _exported_copies(profiler: torch.profiler.profile) -> list[ProfiledCopy]:
    """Through a file: the folder may be full, the profiler may refuse, and what it writes may be no JSON."""
    try:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError) as error:
        raise UnableError(
            f"the profiler's records cannot be read: {type(error).__name__}: {error}; free the folder for temporary "
            "files, or set measurement.transfer_trials: 0 to go without"
        ) from error
    return parse_trace(trace)


def parse_trace(trace: object) -> list[ProfiledCopy]:
    """Picks the copies between host and device out of an exported trace.

    Raises:
        UpstreamChangedError: A copy's event lacks its bytes or its duration, or there are no events.
    """
    found = trace.get("traceEvents") if isinstance(trace, Mapping) else None
    if not isinstance(found, Sequence) or not all(isinstance(event, Mapping) for event in found):
        raise UpstreamChangedError(
            f"torch {torch.__version__}: the profiler's trace has no list of traceEvents, which offload-eval reads; "
            "set measurement.transfer_trials: 0 to go without, and report the version"
        )
    events = (event for event in found if event.get("cat") == _CATEGORY)
    return [copy for event in events if (copy := _copy_of(event)) is not None]


def _copy_of(event: Mapping[str, Any]) -> ProfiledCopy | None:
    """The copy of an event; None for a copy inside a device or between two."""
    name = str(event.get("name", ""))
    direction = next((way for pattern, way in _DIRECTIONS if pattern.search(name)), None)
    if direction is None:
        return None
    try:
        size_bytes, duration_s = int(event["args"]["bytes"]), float(event["dur"]) * _US
    except (KeyError, TypeError, ValueError) as error:
        raise UpstreamChangedError(
            f"torch {torch.__version__}: the profiler's record {name!r} has no {error.args[0]!r}, which offload-eval "
            "reads; set measurement.transfer_trials: 0 to go without, and report the version"
        ) from error
    return ProfiledCopy(direction, size_bytes, duration_s, _is_pageable(name))


def _is_pageable(name: str) -> bool | None:
    words = name.casefold()
    if "pinned" in words:
        return False
    return True if "pageable" in words else None


def compare_with_account(
    copies: Sequence[ProfiledCopy], log: TransferLog, *, output_tokens: int, most_token_bytes: int
) -> ProfiledCopies:
    """Lays what the profiler saw beside the account of the same pass, without judging either.

    generate() sends tokens, masks and scalars of its own over the link. A copy is taken for one of those if the
    account has none of its size and it is no larger than the prompt's tokens; a cache's copies are larger, or of a
    size that the account has.

    Args:
        copies: By the profiler.
        log: The link's account, timed.
        output_tokens: Tokens generated in the pass.
        most_token_bytes: Bytes of the prompt's tokens, of all sessions.
    """
    phases = (log.sample("prefill"), log.sample("decode"))
    h2d, d2h = (_compare_direction(copies, log.sizes, phases, way, most_token_bytes) for way in _WAYS)
    return ProfiledCopies(output_tokens=output_tokens, h2d=h2d, d2h=d2h)


_WAYS: Final[tuple[Direction, Direction]] = ("h2d", "d2h")


def _compare_direction(
    copies: Sequence[ProfiledCopy],
    sizes: Counter[tuple[Direction, int]],
    phases: Sequence[PhaseSample],
    direction: Direction,
    most_token_bytes: int,
) -> ProfiledDirection:
    seen = [copy for copy in copies if copy.direction == direction]
    counted = [copy for copy in seen if (direction, copy.size_bytes) in sizes or copy.size_bytes > most_token_bytes]
    pageable = [copy.is_pageable for copy in counted]
    busy_s = [phase.h2d_busy_s if direction == "h2d" else phase.d2h_busy_s for phase in phases]
    accounted = {size_bytes: count for (way, size_bytes), count in sizes.items() if way == direction}
    return ProfiledDirection(
        bytes=sum(copy.size_bytes for copy in counted),
        num_copies=len(counted),
        num_pageable_copies=None if None in pageable else sum(map(bool, pageable)),
        copy_s=sum(copy.duration_s for copy in counted),
        accounted_bytes=sum(size_bytes * count for size_bytes, count in accounted.items()),
        num_accounted_copies=sum(accounted.values()),
        accounted_busy_s=sum(seconds or 0.0 for seconds in busy_s),
        num_other_copies=len(seen) - len(counted),
    )
