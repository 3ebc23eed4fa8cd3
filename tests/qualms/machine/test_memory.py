"""The memory limit of simulated cgroups and machines."""

import sys
from pathlib import Path

import pytest

from qualms.machine.memory import available_memory

MACHINE = 64 * 2**30
MEMINFO = f"MemFree:  1024 kB\nMemTotal:       {MACHINE // 1024} kB\nMemAvailable: 2048 kB\n"
UNLIMITED_V1 = 0x7FFFFFFFFFFFF000


def write_files(root: Path, files: dict[str, str]) -> Path:
    """Write the files of a simulated /proc and /sys."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(("limit", "memory"), [("max", MACHINE), (str(2**30), 2**30), (str(2**40), MACHINE)])
def test_v2_limit_applies_within_the_machines_memory(tmp_path: Path, limit: str, memory: int) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{limit}\n"}
    assert available_memory(write_files(tmp_path, files)) == memory


def test_v2_smallest_limit_of_the_parent_groups_applies(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/pods/pod/container\n",
        "sys/fs/cgroup/pods/memory.max": f"{3 * 2**30}\n",
        "sys/fs/cgroup/pods/pod/memory.max": f"{2 * 2**30}\n",
        "sys/fs/cgroup/pods/pod/container/memory.max": "max\n",
    }
    assert available_memory(write_files(tmp_path, files)) == 2 * 2**30


def test_v2_limit_of_the_root_group_applies_when_the_groups_path_does_not_exist(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/docker/0123\n", "sys/fs/cgroup/memory.max": f"{2**29}\n"}
    assert available_memory(write_files(tmp_path, files)) == 2**29


@pytest.mark.parametrize(("limit", "memory"), [(UNLIMITED_V1, MACHINE), (2**31, 2**31)])
def test_v1_limit(tmp_path: Path, limit: int, memory: int) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "5:memory:/job\n4:cpu,cpuacct:/other\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{UNLIMITED_V1}\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{limit}\n",
        "sys/fs/cgroup/memory/other/memory.limit_in_bytes": "1\n",
    }
    assert available_memory(write_files(tmp_path, files)) == memory


@pytest.mark.parametrize("limit", ["", "nonsense", "-1", "1.5"])
def test_unreadable_limit_is_ignored(tmp_path: Path, limit: str) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "no such line\n", "sys/fs/cgroup/memory.max": limit}
    assert available_memory(write_files(tmp_path, files)) == MACHINE


@pytest.mark.parametrize("meminfo", [None, "", "MemTotal:\n", "MemTotal: many kB\n", "SwapTotal: 5 kB\n"])
def test_without_any_limit_the_memory_is_unbounded(tmp_path: Path, meminfo: str | None) -> None:
    files = {} if meminfo is None else {"proc/meminfo": meminfo}
    assert available_memory(write_files(tmp_path, files)) == sys.maxsize


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="only Linux has /proc/meminfo")
def test_available_memory_of_this_machine_is_at_most_its_total() -> None:
    total = int(Path("/proc/meminfo").read_text().partition("MemTotal:")[2].split()[0]) * 1024
    assert 2**20 < available_memory() <= total
