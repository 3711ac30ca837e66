"""Host memory of the machine and of control groups, as the kernel counts it now.

Every function takes the file system's root, so that it can be given another one.
"""

import resource
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
    text = read_or_none(root / "proc/meminfo")
    if text is None:
        raise UnableError("host memory is read from /proc/meminfo, which this system does not have; run on Linux")
    values = {name: int(rest.split()[0]) * KIB for name, _, rest in status_fields(text)}
    return HostMemory(
        total_bytes=values["MemTotal"],
        available_bytes=values.get("MemAvailable", values["MemFree"]),
        swap_bytes=values["SwapTotal"],
        swap_used_bytes=values["SwapTotal"] - values["SwapFree"],
    )


def read_swap_counters(root: Path = ROOT) -> SwapCounters | None:
    """Reads the kernel's swap counters; None where it keeps none."""
    lines = (line.split() for line in (read_or_none(root / "proc/vmstat") or "").splitlines())
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
    folder, limit_bytes = deciding_cgroup(root)
    return CgroupMemory(limit_bytes, None if folder is None else read_cgroup_usage(folder))


def deciding_cgroup(root: Path = ROOT) -> tuple[Path | None, int | None]:
    """Finds the group with the tightest memory limit over this process, and that limit in bytes.

    Returns:
        Without a limit the process's own group, or the closest one above it that counts its memory; None and None
        where no group does.
    """
    folders = cgroup_folders("memory", root)
    limits = [
        (limit, folder)
        for folder in folders
        if (limit := _number(folder, _LIMIT_FILES)) is not None and limit < _UNLIMITED_V1_BYTES
    ]
    if limits:
        limit_bytes, folder = min(limits)
        return folder, limit_bytes
    return next((folder for folder in folders if read_cgroup_usage(folder) is not None), None), None


def read_cgroup_usage(folder: Path) -> int | None:
    """Bytes that a group's processes use, page cache included."""
    return _number(folder, _USAGE_FILES)


def read_cgroup_swap(folder: Path) -> int | None:
    """Bytes of a group, and of the groups in it, that lie in swap; None where swap is not counted by group.

    Source: Linux, admin-guide/cgroup-v2 (memory.swap.current) and cgroup-v1/memory (memory.stat, total_swap).
    """
    swap_bytes = _number(folder, ("memory.swap.current",))
    if swap_bytes is not None:
        return swap_bytes
    lines = (line.split() for line in (read_or_none(folder / "memory.stat") or "").splitlines())
    return next((int(fields[1]) for fields in lines if fields[0] == "total_swap"), None)


def _group_of(controller: str, root: Path) -> tuple[tuple[str, str], str] | None:
    """The mount (its root, its folder) and this process's group, in the hierarchy with the controller."""
    mounts = dict(_cgroup_mounts(read_or_none(root / "proc/self/mountinfo") or "", controller))
    unified = None
    for line in (read_or_none(root / "proc/self/cgroup") or "").splitlines():
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


def status_fields(text: str) -> Iterator[tuple[str, str, str]]:
    """Name, colon and rest of each line of a file such as `/proc/meminfo`."""
    return (line.partition(":") for line in text.splitlines())


def _number(folder: Path, names: tuple[str, ...]) -> int | None:
    texts = (read_or_none(folder / name) for name in names)
    text = next((text.strip() for text in texts if text is not None), "max")
    return None if text == "max" else int(text)


def read_or_none(path: Path) -> str | None:
    """A file's text; None where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return None
