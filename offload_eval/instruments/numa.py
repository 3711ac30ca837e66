"""NUMA nodes of this process and of a device, where the system says."""

import os
from pathlib import Path

from offload_eval.instruments.host_memory import ROOT


def device_numa_node(pci_address: str | None, root: Path = ROOT) -> int | None:
    """The node a device's slot belongs to; None where the system does not say, as on most machines of one node."""
    if pci_address is None:
        return None
    try:
        node = int((root / "sys/bus/pci/devices" / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def host_numa_nodes(root: Path = ROOT, cores: set[int] | None = None) -> tuple[int, ...]:
    """The nodes that have cores this process may run on, sorted; empty where the system does not say.

    Args:
        root: The file system's root.
        cores: What this process may run on; None: its affinity.
    """
    if cores is None:
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    lists = {path.parent.name: path for path in (root / "sys/devices/system/node").glob("node[0-9]*/cpulist")}
    return tuple(sorted(int(name.removeprefix("node")) for name, path in lists.items() if cores & _numbers(path)))


def _numbers(path: Path) -> set[int]:
    """Reads a list such as `0-3,8`; an empty one is of a node without cores."""
    ranges = (part.partition("-") for part in path.read_text().strip().split(",") if part)
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}
