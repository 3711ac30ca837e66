"""What a run of a cell was made with, and how that differs from another run's."""

from collections.abc import Mapping
from typing import Any

import msgspec

from offload_eval.core.records import RunRecord
from offload_eval.units import format_bytes

Setting = Mapping[str, object]
_ABSENT = "none"


def machine_kind(record: RunRecord) -> Setting:
    """The rung, and what of the machine decides whether two times may be held against one another.

    On an accelerator its name and memory; on an emulated device the CPU, its cores and threads, and the link's pace.
    """
    accelerator = record.machine.accelerator
    if record.spec.device == "cuda" and accelerator is not None:
        return {
            "rung": record.evidence,
            "accelerator": accelerator.name,
            "accelerator memory": format_bytes(accelerator.memory_bytes),
        }
    pace = record.spec.cpu.link_bytes_per_s
    return {
        "rung": record.evidence,
        "cpu": record.machine.cpu,
        "cpu cores": record.machine.cpu_cores,
        # As asked for: a cell that was refused has no threads, and what none asked for follows from the cores.
        "compute threads": record.spec.cpu.compute_threads,
        "link": None if pace is None else f"{format_bytes(pace)}/s",
    }


def machine_words(record: RunRecord) -> str:
    """The kind of machine for a cell of a table."""
    kind = machine_kind(record)
    if "accelerator" in kind:
        return f"{kind['accelerator']}, {kind['accelerator memory']}"
    link = "" if kind["link"] is None else f", link {kind['link']}"
    return f"{kind['cpu']}, {kind['cpu cores']} cores{link}"


def model_name(record: RunRecord) -> str:
    """The hub id; of a local model its file or folder: where it lies is the machine's matter."""
    location = record.spec.model.location
    return location.rstrip("/").rpartition("/")[2] if location.startswith("/") else location


def setting_of(record: RunRecord) -> Setting:
    """Everything that may differ between two runs of one cell, by name; the git commit is never a difference."""
    spec, machine, model = record.spec, record.machine, record.spec.model
    accelerator = machine.accelerator
    return {
        "model": model_name(record),
        "revision": model.revision,
        "model fingerprint": record.model.fingerprint,
        **{f"model {name}": getattr(model, name) for name in ("dtype", "weights", "attn_implementation")},
        "prompt": spec.prompt_fingerprint or "unknown",
        **_parts("budget", spec.budget),
        **_parts("measurement", spec.measurement),
        **_parts("strategy", spec.strategy),
        "baseline": spec.baseline.label,
        **machine_kind(record),
        "driver": None if accelerator is None else accelerator.driver,
        "PCIe": None
        if accelerator is None
        else f"generation {accelerator.pcie_generation}, width {accelerator.pcie_width}",
        "CUDA": machine.cuda,
        "allocator": machine.allocator_config,
        "platform": machine.platform,
        "python": machine.python,
        "host memory": format_bytes(machine.host_memory_bytes),
        "swap": format_bytes(machine.swap_bytes),
        "cgroup limit": format_bytes(machine.cgroup_memory_limit_bytes),
        **machine.versions,
    }


def changed(before: Setting, now: Setting) -> tuple[str, ...]:
    """Names what differs, as `name: old -> new`; what only one of them has is `none` in the other."""
    names = dict.fromkeys([*before, *now])
    return tuple(
        f"{name}: {_shown(before.get(name))} -> {_shown(now.get(name))}"
        for name in names
        if before.get(name) != now.get(name)
    )


def _parts(prefix: str, value: msgspec.Struct) -> dict[str, Any]:
    return {f"{prefix}.{name}": getattr(value, name) for name in value.__struct_fields__}


def _shown(value: object) -> str:
    return _ABSENT if value is None else str(value)
