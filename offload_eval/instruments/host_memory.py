"""Host memory of this process and of its machine: resident set, swap traffic, control-group limits.

Every function takes the file system's root, so that it can be given another one.
"""

import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from offload_eval.errors import UnableError
from offload_eval.units import KIB

ROOT: Final = Path("/")
_UNLIMITED_V1_BYTES: Final = 2**62
"""Control groups v1 say "no limit" as the largest page-aligned 64-bit number."""
_LIMIT_FILES: Final = ("memory.max", "memory.limit_in_bytes")
_USAGE_FILES: Final = ("memory.current", "memory.usage_in_bytes")


class HostMemory(NamedTuple):
    """The machine's memory, whoever uses it."""

    total_bytes: int
    available_bytes: int
    """What can be allocated without swapping, by the kernel's estimate."""
    swap_bytes: int
    swap_used_bytes: int


class CgroupMemory(NamedTuple):
    """The control group that decides when this process is killed for memory."""

    limit_bytes: int | None
    """The tightest limit on the way up to the root; None: there is none."""
    usage_bytes: int | None
    """What the group with that limit uses, page cache included; without a limit, the process's own group."""


class SwapCounters(NamedTuple):
    """Bytes swapped since boot, by the whole machine."""

    in_bytes: int
    out_bytes: int


def read_host_memory(root: Path = ROOT) -> HostMemory:
    """Reads `/proc/meminfo`.

    Raises:
        UnableError: There is no `/proc/meminfo`.
    """
    text = _read(root / "proc/meminfo")
    if text is None:
        raise UnableError("host memory is read from /proc/meminfo, which this system does not have; run on Linux")
    values = {name: int(rest.split()[0]) * KIB for name, _, rest in _fields(text)}
    return HostMemory(
        total_bytes=values["MemTotal"],
        available_bytes=values.get("MemAvailable", values["MemFree"]),
        swap_bytes=values["SwapTotal"],
        swap_used_bytes=values["SwapTotal"] - values["SwapFree"],
    )


def read_swap_counters(root: Path = ROOT) -> SwapCounters | None:
    """Reads the kernel's swap counters; None where it keeps none."""
    lines = (line.split() for line in (_read(root / "proc/vmstat") or "").splitlines())
    pages = {fields[0]: int(fields[1]) for fields in lines if fields[0] in ("pswpin", "pswpout")}
    if len(pages) < 2:
        return None
    page_bytes = resource.getpagesize()
    return SwapCounters(pages["pswpin"] * page_bytes, pages["pswpout"] * page_bytes)


def cgroup_folders(controller: str, root: Path = ROOT) -> list[Path]:
    """Folders of this process's control groups, innermost first, up to the mount point.

    Args:
        controller: `memory` or `cpu`. Where a v1 hierarchy has it, that one is taken, otherwise v2's.
        root: Root of the file system.

    Returns:
        An empty list where no such hierarchy is mounted.
    """
    found = _group_of(controller, root)
    if found is None:
        return []
    (mounted_root, mount), group = found
    inside = group.removeprefix(mounted_root.rstrip("/")) if group.startswith(mounted_root) else ""
    # A group above the mount (a container's namespace) is written with "..": only the mount is visible then.
    parts = [] if ".." in inside else [part for part in inside.split("/") if part]
    folders = [root / mount.lstrip("/")]
    for part in parts:
        folders.append(folders[-1] / part)
    return folders[::-1]


def read_cgroup_memory(root: Path = ROOT) -> CgroupMemory:
    """Reads the tightest memory limit over this process, and how much of it is used."""
    limits = [
        (limit, folder)
        for folder in cgroup_folders("memory", root)
        if (limit := _number(folder, _LIMIT_FILES)) is not None and limit < _UNLIMITED_V1_BYTES
    ]
    if limits:
        limit_bytes, folder = min(limits)
        return CgroupMemory(limit_bytes, _number(folder, _USAGE_FILES))
    usages = (_number(folder, _USAGE_FILES) for folder in cgroup_folders("memory", root))
    return CgroupMemory(None, next((usage for usage in usages if usage is not None), None))


class HostMemoryMeter:
    """This process's peak resident set and the machine's swap traffic, while its context is open.

    The peak is the kernel's high-water mark, set back on entry. Where that is forbidden, the mark over the
    process's life is taken if it rose inside the block, since the peak then was inside; else it is unknown.
    Pinned memory counts as resident once it is touched; memory of other processes does not.
    """

    peak_host_rss_bytes: int | None = None
    """None: the kernel let nobody see it."""
    swap_in_bytes: int | None = None
    """Read back from swap by any process of the machine."""
    swap_out_bytes: int | None = None

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root

    def __enter__(self) -> "HostMemoryMeter":
        self._swap = read_swap_counters(self._root)
        self._lifetime_bytes = _lifetime_peak_bytes()
        self._reset = _reset_peak(self._root)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.peak_host_rss_bytes = self._peak_bytes()
        after = read_swap_counters(self._root)
        if self._swap is not None and after is not None:
            self.swap_in_bytes = after.in_bytes - self._swap.in_bytes
            self.swap_out_bytes = after.out_bytes - self._swap.out_bytes

    def _peak_bytes(self) -> int | None:
        high_water_bytes = _high_water_bytes(self._root)
        if self._reset and high_water_bytes is not None:
            return high_water_bytes
        lifetime_bytes = _lifetime_peak_bytes()
        return lifetime_bytes if lifetime_bytes > self._lifetime_bytes else None


def _reset_peak(root: Path) -> bool:
    try:
        (root / "proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _high_water_bytes(root: Path) -> int | None:
    marks = (rest for name, _, rest in _fields(_read(root / "proc/self/status") or "") if name == "VmHWM")
    return next((int(mark.split()[0]) * KIB for mark in marks), None)


def _lifetime_peak_bytes() -> int:
    unit_bytes = 1 if sys.platform == "darwin" else KIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def _group_of(controller: str, root: Path) -> tuple[tuple[str, str], str] | None:
    """The mount (its root, its folder) and this process's group, in the hierarchy with the controller."""
    mounts = dict(_cgroup_mounts(_read(root / "proc/self/mountinfo") or "", controller))
    unified = None
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        hierarchy, controllers, group = line.split(":", 2)
        if controller in controllers.split(",") and "v1" in mounts:
            return mounts["v1"], group
        if hierarchy == "0" and not controllers and "v2" in mounts:
            unified = mounts["v2"], group
    return unified


def _cgroup_mounts(mountinfo: str, controller: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Mounted root and folder, by version.

    Source: proc(5), mountinfo: fields 4 and 5; type and options follow ` - `.
    """
    for line in mountinfo.splitlines():
        fields, _, tail = line.partition(" - ")
        place = fields.split()[3:5]
        kind, _, options = tail.split(" ", 2)
        if kind == "cgroup2":
            yield "v2", (place[0], place[1])
        elif kind == "cgroup" and controller in options.split(","):
            yield "v1", (place[0], place[1])


def _fields(text: str) -> Iterator[tuple[str, str, str]]:
    return (line.partition(":") for line in text.splitlines())


def _number(folder: Path, names: tuple[str, ...]) -> int | None:
    texts = (_read(folder / name) for name in names)
    text = next((text.strip() for text in texts if text is not None), "max")
    return None if text == "max" else int(text)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
