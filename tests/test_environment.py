"""What is read about machine, process and driver, against other sources and against planted file trees."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest
from planted_root import V1, V2, plant

from offload_eval.errors import UnableError
from offload_eval.instruments import environment, host_memory, nvml
from offload_eval.instruments.host_memory import CgroupMemory, SwapCounters

MIB = 2**20
CARD = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
OTHER_CARD = "GPU-11111111-d72c-4106-c12f-20bd9faed9f6"
INSTANCE = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"


def test_the_machine_agrees_with_other_sources() -> None:
    machine = environment.read_machine(with_accelerator=False)
    assert machine.host_memory_bytes == psutil.virtual_memory().total
    assert machine.swap_bytes == psutil.swap_memory().total
    assert machine.cpu_cores <= len(psutil.Process().cpu_affinity())
    assert machine.python == platform.python_version()
    assert machine.versions["torch"] == metadata.version("torch")
    assert machine.accelerator is None


def test_reading_the_machine_imports_no_framework() -> None:
    script = (
        "import sys; from offload_eval.instruments.environment import read_machine; "
        "read_machine(with_accelerator=True); print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_packages_that_are_not_installed_are_left_out() -> None:
    versions = environment.installed_versions(("msgspec", "no-such-package-here"))
    assert versions == {"msgspec": metadata.version("msgspec")}


def test_the_allocator_configuration_is_the_newer_variable_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert environment.read_machine(with_accelerator=False).allocator_config == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert environment.read_machine(with_accelerator=False).allocator_config == "max_split_size_mb:64"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "13.0"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.1.2'\n", "hip 7.1.2"),
        ("cuda = None\nhip = None\n", None),
    ],
)
def test_the_cuda_version_is_read_from_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, expected: str | None
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    (tmp_path / "torch/version.py").write_text(f"__version__ = '2.13.0'\ndebug = False\n{lines}")
    spec = SimpleNamespace(origin=str(tmp_path / "torch/__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: spec)
    assert environment._cuda_version() == expected


def test_the_commit_is_the_checkouts_own(tmp_path: Path) -> None:
    """A folder inside somebody else's repository, as site-packages can be, has none."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    (tmp_path / "package").mkdir()
    (tmp_path / "file").write_text("one")
    for command in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "first"], ["tag", "v1"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert environment._git_commit(tmp_path) == head
    (tmp_path / "file").write_text("two")
    assert environment._git_commit(tmp_path) == f"{head}-dirty"
    assert environment._git_commit(tmp_path / "package") is None


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param(V2, CgroupMemory(700 * MIB, 400 * MIB), id="v2-parent-is-tightest"),
        pytest.param(
            V2 | {"sys/fs/cgroup/pod/memory.max": "max\n"}, CgroupMemory(900 * MIB, 100 * MIB), id="v2-own-limit"
        ),
        pytest.param(V1, CgroupMemory(512 * MIB, 300 * MIB), id="v1-in-a-container"),
        pytest.param(
            V1 | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
            CgroupMemory(None, 50 * MIB),
            id="v1-unlimited",
        ),
        pytest.param(
            V2 | {"proc/self/cgroup": "0::/../elsewhere\n", "sys/fs/cgroup/memory.max": f"{64 * MIB}\n"},
            CgroupMemory(64 * MIB, None),
            id="v2-group-outside-the-namespace",
        ),
        pytest.param({}, CgroupMemory(None, None), id="no-groups"),
    ],
)
def test_the_memory_limit_is_the_tightest_on_the_way_up(
    tmp_path: Path, files: dict[str, str], expected: CgroupMemory
) -> None:
    assert host_memory.read_cgroup_memory(plant(tmp_path, files)) == expected


def test_folders_outside_the_mount_are_not_looked_at(tmp_path: Path) -> None:
    root = plant(tmp_path, V2 | {"proc/self/cgroup": "0::/../elsewhere\n"})
    assert host_memory.cgroup_folders("memory", root) == [root / "sys/fs/cgroup"]


@pytest.mark.parametrize(
    ("files", "affinity", "expected"),
    [
        (V2, 8, 3),
        (V2, 2, 2),
        (V1, 8, 1),
        (V1 | {"sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n"}, 8, 8),
        ({}, 5, 5),
    ],
)
def test_cores_are_the_affinity_cut_by_the_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], affinity: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(affinity)))
    assert environment.usable_cores(plant(tmp_path, files)) == expected


def test_a_quota_below_one_core_still_leaves_one(tmp_path: Path) -> None:
    root = plant(tmp_path, V2 | {"sys/fs/cgroup/pod/cpu.max": "50000 100000\n"})
    assert environment.usable_cores(root) == 1


def test_host_memory_is_in_bytes_and_tells_used_swap(tmp_path: Path) -> None:
    lines = "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 700 kB\nSwapTotal: 50 kB\nSwapFree: 20 kB\nHuge: 0\n"
    memory = host_memory.read_host_memory(plant(tmp_path, {"proc/meminfo": lines}))
    assert memory == (1_024_000, 716_800, 51_200, 30_720)


def test_a_system_without_proc_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(UnableError, match="Linux"):
        host_memory.read_host_memory(tmp_path)


def test_swap_counters_are_pages_turned_into_bytes(tmp_path: Path) -> None:
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    root = plant(tmp_path, {"proc/vmstat": "pgpgin 9\npswpin 3\npswpout 5\npswpin_other 8\n"})
    assert host_memory.read_swap_counters(root) == SwapCounters(3 * page_bytes, 5 * page_bytes)
    assert host_memory.read_swap_counters(tmp_path / "nowhere") is None


class FakeNvml(ModuleType):
    """The pynvml functions in use, over cards given as uuid -> name; devices are their UUIDs."""

    NVML_DEVICE_MIG_ENABLE = 1

    class NVMLError(Exception):
        """The library's one kind of error."""

    def __init__(self, cards: dict[str, str], unsupported: tuple[str, ...] = (), partitioned: bool = False) -> None:
        super().__init__("pynvml")
        self.cards = list(cards)
        self.partitioned = partitioned
        self.open = 0
        answers = {
            "GetName": lambda device: cards.get(device, "one slice"),
            "GetUUID": lambda device: device,
            "GetMemoryInfo": lambda device: SimpleNamespace(total=len(device) * MIB, used=3 * MIB),
            "GetMaxPcieLinkGeneration": lambda device: self.only_cards(device, 5),
            "GetMaxPcieLinkWidth": lambda device: self.only_cards(device, 16),
            "GetHandleByUUID": self.handle,
            "GetHandleByIndex": lambda index: self.cards[index],
            "GetCount": lambda: len(cards),
            "GetMigMode": lambda _device: (int(partitioned), int(partitioned)),
            "GetMigDeviceHandleByIndex": lambda _device, _index: INSTANCE,
            "IsMigDeviceHandle": lambda device: device == INSTANCE,
            "GetDeviceHandleFromMigDeviceHandle": lambda _device: self.cards[0],
        }
        for name, answer in answers.items():
            setattr(self, f"nvmlDevice{name}", self.refuse if name in unsupported else answer)

    def nvmlInit(self) -> None:  # noqa: N802
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.1"

    def refuse(self, *_args: object) -> None:
        raise self.NVMLError("Not Supported")

    def handle(self, uuid: str) -> str:
        if uuid not in (*self.cards, INSTANCE):
            raise self.NVMLError("Not Found")
        return uuid

    def only_cards(self, device: str, value: int) -> int:
        if device not in self.cards:
            raise self.NVMLError("Invalid Argument")
        return value


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)

    def put(library: FakeNvml, **variables: str) -> FakeNvml:
        monkeypatch.setitem(sys.modules, "pynvml", library)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return library

    return put


MIXED = {OTHER_CARD: "slow", CARD: "fast"}
TWINS = {OTHER_CARD: "fast", CARD: "fast"}


@pytest.mark.parametrize(
    ("cards", "variables", "given", "expected"),
    [
        pytest.param({CARD: "fast"}, {}, None, CARD, id="the-only-card"),
        pytest.param(MIXED, {"CUDA_VISIBLE_DEVICES": CARD}, None, CARD, id="uuid"),
        pytest.param(MIXED, {"CUDA_VISIBLE_DEVICES": f"{CARD},{OTHER_CARD}"}, None, CARD, id="first-uuid"),
        pytest.param(MIXED, {"CUDA_VISIBLE_DEVICES": "GPU-8932"}, None, CARD, id="short-uuid"),
        pytest.param(MIXED, {"CUDA_VISIBLE_DEVICES": "GPU-"}, None, None, id="ambiguous-uuid"),
        pytest.param(MIXED, {}, CARD, CARD, id="told-by-the-caller"),
        pytest.param(MIXED, {"CUDA_VISIBLE_DEVICES": "1"}, None, None, id="index-by-speed-is-not-nvmls"),
        pytest.param(
            MIXED, {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, None, CARD, id="index-by-bus"
        ),
        pytest.param(TWINS, {"CUDA_VISIBLE_DEVICES": "1"}, None, CARD, id="index-among-equals"),
        pytest.param(TWINS, {"CUDA_VISIBLE_DEVICES": ""}, None, None, id="none-visible"),
        pytest.param(TWINS, {"CUDA_VISIBLE_DEVICES": "7"}, None, None, id="index-out-of-range"),
        pytest.param(MIXED, {"CUDA_VISIBLE_DEVICES": INSTANCE}, CARD, INSTANCE, id="mig-before-the-callers"),
    ],
)
def test_the_device_is_the_one_cuda_would_use(install, cards, variables, given, expected) -> None:
    library = install(FakeNvml(cards), **variables)
    accelerator = nvml.read_accelerator(given)
    assert (None if accelerator is None else accelerator.uuid) == expected
    assert library.open == 0, "NVML is shut down"


def test_a_partitioned_card_is_its_first_instance_on_the_cards_own_link(install) -> None:
    install(FakeNvml({CARD: "fast"}, partitioned=True))
    accelerator = nvml.read_accelerator()
    assert (accelerator.uuid, accelerator.name) == (INSTANCE, "one slice")
    assert (accelerator.pcie_generation, accelerator.pcie_width) == (5, 16)
    assert accelerator.memory_bytes == len(INSTANCE) * MIB


def test_what_a_device_does_not_support_is_none(install) -> None:
    """A card without memory of its own is given the host's."""
    library = install(FakeNvml({CARD: "fast"}, unsupported=("GetMemoryInfo", "GetMaxPcieLinkWidth", "GetMigMode")))
    accelerator = nvml.read_accelerator()
    assert (accelerator.pcie_generation, accelerator.pcie_width) == (5, None)
    assert accelerator.memory_bytes == psutil.virtual_memory().total
    assert nvml.read_used_bytes() is None
    assert library.open == 0


def test_used_memory_is_the_devices_own(install) -> None:
    install(FakeNvml({CARD: "fast"}))
    assert nvml.read_used_bytes() == 3 * MIB


def test_without_driver_or_library_there_is_no_accelerator(install, monkeypatch: pytest.MonkeyPatch) -> None:
    library = install(FakeNvml({CARD: "fast"}))
    library.nvmlInit = library.refuse
    assert nvml.read_accelerator() is None
    assert nvml.read_used_bytes() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.read_accelerator() is None
