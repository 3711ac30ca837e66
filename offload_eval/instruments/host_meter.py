"""What a pass does to host memory: the worker's peaks and its control group's, swap traffic and page faults.

Everything takes the file system's root, so that it can be given another one. Absent is None.
"""

import os
import resource
import sys
from pathlib import Path
from typing import Final, NamedTuple

from offload_eval.instruments.host_memory import (
    ROOT,
    deciding_cgroup,
    read_cgroup_swap,
    read_cgroup_usage,
    read_or_none,
    read_swap_counters,
    status_fields,
)
from offload_eval.units import KIB

_PEAK_FILES: Final = ("memory.peak", "memory.max_usage_in_bytes")


class PageFaults(NamedTuple):
    """Page faults of this process, all its threads together, since it started."""

    major: int
    """Waited for a disk: a page of a file that was not in memory, or one in swap."""
    minor: int


def read_page_faults() -> PageFaults:
    """Reads the kernel's counts for this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return PageFaults(usage.ru_majflt, usage.ru_minflt)


class HostTrafficMeter:
    """Swap traffic of the machine and page faults of this process while its context is open.

    For the timing pass: counters are read on entry and on exit, and nothing is done in between.
    """

    swap_in_bytes: int | None = None
    """Read back from swap by any process of the machine."""
    swap_out_bytes: int | None = None
    num_major_faults: int | None = None
    num_minor_faults: int | None = None

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root

    def __enter__(self) -> "HostTrafficMeter":
        self._swap = read_swap_counters(self._root)
        self._faults = read_page_faults()  # last, so that the reading itself is not counted
        return self

    def __exit__(self, *exc_info: object) -> None:
        faults = read_page_faults()
        self.num_major_faults = faults.major - self._faults.major
        self.num_minor_faults = faults.minor - self._faults.minor
        after = read_swap_counters(self._root)
        if self._swap is not None and after is not None:
            self.swap_in_bytes = after.in_bytes - self._swap.in_bytes
            self.swap_out_bytes = after.out_bytes - self._swap.out_bytes


class HostMemoryMeter:
    """This process's peak resident set, and the use of its control group, while its context is open.

    The peak is the kernel's high-water mark, set back on entry. Where that is forbidden, the mark over the
    process's life is taken if it rose inside the block, since the peak then was inside; else it is unknown.
    Pinned memory counts as resident once it is touched; memory of other processes does not.
    """

    peak_host_rss_bytes: int | None = None
    """None: the kernel let nobody see it."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self.cgroup = CgroupMeter(root)

    def __enter__(self) -> "HostMemoryMeter":
        self._lifetime_bytes = _lifetime_peak_bytes()
        self._reset = _reset_peak(self._root)
        self.cgroup.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.cgroup.finish()
        self.peak_host_rss_bytes = self._peak_bytes()

    def observe(self) -> None:
        """Looks at what has no peak counter of its own; called at every token boundary."""
        self.cgroup.observe()

    def _peak_bytes(self) -> int | None:
        high_water_bytes = _high_water_bytes(self._root)
        if self._reset and high_water_bytes is not None:
            return high_water_bytes
        lifetime_bytes = _lifetime_peak_bytes()
        return lifetime_bytes if lifetime_bytes > self._lifetime_bytes else None


class CgroupMeter:
    """The control group that decides when this process is killed for memory, from `start` to `finish`.

    Its use is seen at each `observe`, and in between by the kernel's high-water mark, where that tells of this span:
    where it can be set back, which v2 does for one open file alone (Linux 6.12), or where it rose. v1's mark is never
    set back: that would be for everyone who watches the group.
    """

    limit_bytes: int | None = None
    """None: there is no limit; the process's own group is followed."""
    peak_bytes: int | None = None
    """Highest use seen, of all processes in the group, page cache included."""
    swap_bytes: int | None = None
    """Most of the group that was seen in swap, whenever it went there."""

    def __init__(self, root: Path = ROOT) -> None:
        self._folder, self.limit_bytes = deciding_cgroup(root)
        self._mark = _HighWaterMark(self._folder)

    def start(self) -> None:
        """Sets the mark back, where that can be done, and looks."""
        self._mark.start()
        self.observe()

    def observe(self) -> None:
        """Looks at what the group uses and at what of it lies in swap."""
        if self._folder is not None:
            self.peak_bytes = _highest(self.peak_bytes, read_cgroup_usage(self._folder))
            self.swap_bytes = _highest(self.swap_bytes, read_cgroup_swap(self._folder))

    def finish(self) -> None:
        """Looks again, and takes the mark where it tells of the time since `start`."""
        self.observe()
        self.peak_bytes = _highest(self.peak_bytes, self._mark.finish())


class _HighWaterMark:
    """The kernel's record of a group's highest use, as far as it tells of the time since `start`."""

    def __init__(self, folder: Path | None) -> None:
        paths = () if folder is None else (folder / name for name in _PEAK_FILES)
        self._path = next((path for path in paths if path.exists()), None)
        self._file: int | None = None
        self._before_bytes: int | None = None

    def start(self) -> None:
        """Sets v2's mark back for one open file; any other is read."""
        if self._path is None:
            return
        if self._path.name == "memory.peak":
            self._file = _open_and_reset(self._path)
        if self._file is None:
            self._before_bytes = _whole_number(read_or_none(self._path))

    def finish(self) -> int | None:
        """The mark; None where it may be older than `start`."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                return _whole_number(os.pread(file, 64, 0).decode())
            finally:
                os.close(file)
        after_bytes = None if self._path is None else _whole_number(read_or_none(self._path))
        if after_bytes is None or self._before_bytes is None:
            return None
        return after_bytes if after_bytes > self._before_bytes else None


def _open_and_reset(path: Path) -> int | None:
    """Opens a mark and sets it back for whoever reads this file; None where the kernel does not let it.

    Source: Linux 6.12, admin-guide/cgroup-v2, memory.peak: any write resets it for reads through the same file.
    """
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        os.write(file, b"reset\n")
    except OSError:
        os.close(file)
        return None
    return file


def _highest(one: int | None, other: int | None) -> int | None:
    return max((size for size in (one, other) if size is not None), default=None)


def _whole_number(text: str | None) -> int | None:
    return int(text) if text is not None and text.strip().isdigit() else None


def _reset_peak(root: Path) -> bool:
    try:
        (root / "proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _high_water_bytes(root: Path) -> int | None:
    marks = (rest for name, _, rest in status_fields(read_or_none(root / "proc/self/status") or "") if name == "VmHWM")
    return next((int(mark.split()[0]) * KIB for mark in marks), None)


def _lifetime_peak_bytes() -> int:
    unit_bytes = 1 if sys.platform == "darwin" else KIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
