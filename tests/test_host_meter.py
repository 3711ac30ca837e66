"""What the meters of host memory see: peaks, control groups, swap traffic and page faults."""

import mmap
import os
from pathlib import Path

import psutil
import pytest
from planted_root import MIB, V1, V2, plant

from offload_eval.instruments import host_memory, host_meter
from offload_eval.instruments.host_meter import HostMemoryMeter, HostTrafficMeter, PageFaults

LIMITED_V1 = "sys/fs/cgroup/memory"
LIMITED_V2 = "sys/fs/cgroup/pod"


def touch_memory(size_bytes: int) -> None:
    block = bytearray(size_bytes)
    block[::4096] = b"x" * len(block[::4096])


def test_the_peak_is_the_blocks_own() -> None:
    """A larger peak before the block does not count; one inside it does, after it was freed."""
    touch_memory(256 * MIB)
    resident_bytes = psutil.Process().memory_info().rss
    with HostMemoryMeter() as idle:
        touch_memory(MIB)
    if not host_meter._reset_peak(host_memory.ROOT):
        pytest.skip("this kernel does not let the high-water mark be set back")
    with HostMemoryMeter() as busy:
        touch_memory(128 * MIB)
    assert idle.peak_host_rss_bytes == pytest.approx(resident_bytes, abs=32 * MIB)
    assert busy.peak_host_rss_bytes == pytest.approx(resident_bytes + 128 * MIB, abs=32 * MIB)


@pytest.mark.parametrize(("marks", "expected"), [((400, 500), 500), ((400, 400), None)])
def test_without_a_reset_the_lifetime_peak_counts_only_if_it_rose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marks: tuple[int, int], expected: int | None
) -> None:
    """The planted root has no clear_refs to write to; its high-water mark could be anybody's."""
    root = plant(tmp_path, {"proc/self/status": "VmHWM: 77 kB\n"})
    (root / "proc/self/clear_refs").mkdir()
    readings = iter(marks)
    monkeypatch.setattr(host_meter, "_lifetime_peak_bytes", lambda: next(readings))
    with HostMemoryMeter(root) as meter:
        pass
    assert meter.peak_host_rss_bytes == expected


def test_swap_traffic_is_what_happened_inside_the_block(tmp_path: Path) -> None:
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    plant(tmp_path, {"proc/vmstat": "pswpin 10\npswpout 20\n"})
    with HostTrafficMeter(tmp_path) as meter:
        plant(tmp_path, {"proc/vmstat": "pswpin 14\npswpout 27\n"})
    assert (meter.swap_in_bytes, meter.swap_out_bytes) == (4 * page_bytes, 7 * page_bytes)


def test_a_system_that_counts_nothing_gives_none(tmp_path: Path) -> None:
    with HostTrafficMeter(tmp_path) as traffic, HostMemoryMeter(tmp_path) as meter:
        meter.observe()
    assert (traffic.swap_in_bytes, traffic.swap_out_bytes) == (None, None)
    assert (meter.cgroup.limit_bytes, meter.cgroup.peak_bytes, meter.cgroup.swap_bytes) == (None, None, None)


def test_page_faults_are_those_inside_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([PageFaults(major=7, minor=1000), PageFaults(major=10, minor=1064)])
    monkeypatch.setattr(host_meter, "read_page_faults", lambda: next(readings))
    with HostTrafficMeter() as meter:
        pass
    assert (meter.num_major_faults, meter.num_minor_faults) == (3, 64)


def test_touching_fresh_pages_is_a_minor_fault_each() -> None:
    """64 pages, mapped without huge ones."""
    page_bytes = mmap.PAGESIZE
    with mmap.mmap(-1, 64 * page_bytes) as pages, HostTrafficMeter() as meter:
        pages.madvise(mmap.MADV_NOHUGEPAGE)
        for page in range(64):
            pages[page * page_bytes] = 1
    assert meter.num_minor_faults is not None
    assert 64 <= meter.num_minor_faults < 128


@pytest.mark.parametrize(
    ("files", "folder", "usage", "limit_mib"),
    [
        pytest.param(V2, LIMITED_V2, "memory.current", 700, id="v2"),
        pytest.param(V1, LIMITED_V1, "memory.usage_in_bytes", 512, id="v1"),
    ],
)
def test_use_of_the_group_is_the_highest_seen_at_a_token(
    tmp_path: Path, files: dict[str, str], folder: str, usage: str, limit_mib: int
) -> None:
    """Of the group with the tightest limit: 300 MiB on entry, 420 at a token, 310 on exit."""
    root = plant(tmp_path, files | {f"{folder}/{usage}": f"{300 * MIB}\n"})
    with HostMemoryMeter(root) as meter:
        plant(root, {f"{folder}/{usage}": f"{420 * MIB}\n"})
        meter.observe()
        plant(root, {f"{folder}/{usage}": f"{310 * MIB}\n"})
    assert meter.cgroup.peak_bytes == 420 * MIB
    assert meter.cgroup.limit_bytes == limit_mib * MIB


def test_without_a_limit_the_own_group_is_followed(tmp_path: Path) -> None:
    root = plant(tmp_path, V1 | {f"{LIMITED_V1}/memory.limit_in_bytes": "9223372036854771712\n"})
    with HostMemoryMeter(root) as meter:
        pass
    assert (meter.cgroup.limit_bytes, meter.cgroup.peak_bytes) == (None, 50 * MIB)


def test_a_mark_that_is_set_back_sees_between_the_tokens(tmp_path: Path) -> None:
    """The kernel answers a write through the same open file: here the test does, with 450 MiB."""
    mark = f"{LIMITED_V2}/memory.peak"
    root = plant(tmp_path, V2 | {mark: f"{650 * MIB}\n"})
    with HostMemoryMeter(root) as meter:
        assert (root / mark).read_text().startswith("reset"), "the old mark is gone"
        (root / mark).write_text(f"{450 * MIB}\n")
    assert meter.cgroup.peak_bytes == 450 * MIB


@pytest.mark.parametrize(("after_mib", "expected_mib"), [(600, 300), (640, 640)])
@pytest.mark.parametrize(
    ("files", "folder", "usage", "mark"),
    [
        pytest.param(V2, LIMITED_V2, "memory.current", "memory.peak", id="v2-before-6.12"),
        pytest.param(V1, LIMITED_V1, "memory.usage_in_bytes", "memory.max_usage_in_bytes", id="v1"),
    ],
)
def test_a_mark_that_is_not_set_back_counts_only_if_it_rose(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    folder: str,
    usage: str,
    mark: str,
    after_mib: int,
    expected_mib: int,
) -> None:
    """It stood at 600 MiB before: still there, it says nothing, and what was seen is 300 MiB."""
    monkeypatch.setattr(host_meter, "_open_and_reset", lambda _path: None)
    root = plant(tmp_path, files | {f"{folder}/{usage}": f"{300 * MIB}\n", f"{folder}/{mark}": f"{600 * MIB}\n"})
    with HostMemoryMeter(root) as meter:
        assert (root / folder / mark).read_text() == f"{600 * MIB}\n", "it is everyone's"
        plant(root, {f"{folder}/{mark}": f"{after_mib * MIB}\n"})
    assert meter.cgroup.peak_bytes == expected_mib * MIB


def test_v1s_mark_is_never_written_to(tmp_path: Path) -> None:
    mark = f"{LIMITED_V1}/memory.max_usage_in_bytes"
    root = plant(tmp_path, V1 | {mark: f"{600 * MIB}\n"})
    with HostMemoryMeter(root):
        assert (root / mark).read_text() == f"{600 * MIB}\n"


@pytest.mark.parametrize(
    ("files", "name", "text"),
    [
        pytest.param(V2, f"{LIMITED_V2}/memory.swap.current", "{}\n", id="v2"),
        pytest.param(V1, f"{LIMITED_V1}/memory.stat", "swap 1\ntotal_rss 2\ntotal_swap {}\n", id="v1"),
    ],
)
def test_swap_of_the_group_is_the_most_that_was_seen(
    tmp_path: Path, files: dict[str, str], name: str, text: str
) -> None:
    root = plant(tmp_path, files | {name: text.format(4096)})
    with HostMemoryMeter(root) as meter:
        plant(root, {name: text.format(3 * MIB)})
        meter.observe()
        plant(root, {name: text.format(0)})
    assert meter.cgroup.swap_bytes == 3 * MIB
