"""The machine a record was made on."""

from offload_eval.core.base import Strict


class Accelerator(Strict, frozen=True, kw_only=True):
    """One GPU, as NVML names it."""

    name: str
    uuid: str
    memory_bytes: int
    driver: str
    pcie_generation: int | None = None
    pcie_width: int | None = None


class Machine(Strict, frozen=True, kw_only=True):
    """Hardware and software that a result depends on. Absent is None."""

    platform: str
    python: str
    cpu: str
    cpu_cores: int
    """Cores this process may run on."""
    host_memory_bytes: int
    swap_bytes: int
    cgroup_memory_limit_bytes: int | None = None
    accelerator: Accelerator | None = None
    cuda: str | None = None
    versions: dict[str, str]
    """Installed version of each package a result depends on."""
    allocator_config: str | None = None
    git_commit: str | None = None

    def differences(self, other: "Machine") -> list[str]:
        """Names what differs from `other`; the git commit is reported but never counts as a difference."""
        mine, theirs = _flat(self), _flat(other)
        return [
            f"{key}: {theirs.get(key)} -> {mine.get(key)}"
            for key in sorted(mine.keys() | theirs.keys())
            if mine.get(key) != theirs.get(key)
        ]


def _flat(machine: Machine) -> dict[str, object]:
    fields: dict[str, object] = {
        name: getattr(machine, name)
        for name in machine.__struct_fields__
        if name not in ("versions", "git_commit", "accelerator")
    }
    fields |= {f"versions.{name}": version for name, version in machine.versions.items()}
    if machine.accelerator is not None:
        fields |= {
            f"accelerator.{name}": getattr(machine.accelerator, name) for name in machine.accelerator.__struct_fields__
        }
    return fields
