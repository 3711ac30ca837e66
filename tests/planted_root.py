"""A file system's root with the files of /proc and /sys that a test wants."""

from pathlib import Path

MIB = 1024**2


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = {
    "proc/self/cgroup": "0::/pod/box/job\n",
    "proc/self/mountinfo": (
        "24 1 0:22 / /proc rw - proc proc rw\n30 23 0:26 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup rw\n"
    ),
    "sys/fs/cgroup/pod/memory.max": f"{700 * MIB}\n",
    "sys/fs/cgroup/pod/memory.current": f"{400 * MIB}\n",
    "sys/fs/cgroup/pod/cpu.max": "350000 100000\n",
    "sys/fs/cgroup/pod/box/memory.max": "max\n",
    "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
    "sys/fs/cgroup/pod/box/job/memory.max": f"{900 * MIB}\n",
    "sys/fs/cgroup/pod/box/job/memory.current": f"{100 * MIB}\n",
}
V1 = {
    "proc/self/cgroup": "9:cpu,cpuacct:/docker/a1\n4:memory:/docker/a1/job\n0::/\n",
    "proc/self/mountinfo": (
        "33 31 0:30 /docker/a1 /sys/fs/cgroup/cpu,cpuacct rw master:2 - cgroup cgroup rw,cpu,cpuacct\n"
        "35 31 0:32 /docker/a1 /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    ),
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{512 * MIB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{300 * MIB}\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{50 * MIB}\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
}
